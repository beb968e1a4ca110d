"""Schema: the YAML's vocabulary as typed dataclasses, one file a section."""

from __future__ import annotations

from trireme.config.schema.algorithm import AlgorithmConfig, OptimizerConfig
from trireme.config.schema.buffer import (
    BufferConfig,
    DataProcessorConfig,
    ExperienceBufferConfig,
    ExperiencePipelineConfig,
    ExplorerInputConfig,
    OperatorConfig,
    ReplayBufferConfig,
    TrainerInputConfig,
)
from trireme.config.schema.cluster import ClusterConfig
from trireme.config.schema.config import Config, Mode, StageConfig
from trireme.config.schema.data import (
    DataSelectorConfig,
    FormatConfig,
    GenerationConfig,
    TasksetConfig,
)
from trireme.config.schema.explorer import (
    DynamicTimeoutConfig,
    ExplorerConfig,
    OverRolloutConfig,
    RolloutModelConfig,
)
from trireme.config.schema.model import LoraConfig, ModelConfig
from trireme.config.schema.monitor import LogConfig, MonitorConfig, ServiceConfig
from trireme.config.schema.synchronizer import SynchronizerConfig
from trireme.config.schema.trainer import TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "ClusterConfig",
    "Config",
    "DataProcessorConfig",
    "DataSelectorConfig",
    "DynamicTimeoutConfig",
    "ExperienceBufferConfig",
    "ExperiencePipelineConfig",
    "ExplorerConfig",
    "ExplorerInputConfig",
    "FormatConfig",
    "GenerationConfig",
    "LogConfig",
    "LoraConfig",
    "Mode",
    "ModelConfig",
    "MonitorConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "OverRolloutConfig",
    "ReplayBufferConfig",
    "RolloutModelConfig",
    "ServiceConfig",
    "StageConfig",
    "SynchronizerConfig",
    "TasksetConfig",
    "TrainerConfig",
    "TrainerInputConfig",
]
