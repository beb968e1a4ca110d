"""Schema: the YAML's vocabulary as typed dataclasses, one file a section."""

from __future__ import annotations

from trireme.config.schema.algorithm import AlgorithmConfig, OptimizerConfig
from trireme.config.schema.buffer import ExperienceBufferConfig, OperatorConfig, ReplayBufferConfig
from trireme.config.schema.config import Config
from trireme.config.schema.data import FormatConfig, TasksetConfig
from trireme.config.schema.explorer import RolloutModelConfig

__all__ = [
    "AlgorithmConfig",
    "Config",
    "ExperienceBufferConfig",
    "FormatConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "ReplayBufferConfig",
    "RolloutModelConfig",
    "TasksetConfig",
]
