"""Monitor, log and service sections: where numbers and lines go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class MonitorConfig:
    """Where metrics go."""

    monitor_type: Literal["tensorboard", "wandb", "mlflow", "swanlab"] = "tensorboard"
    """Which tracker."""
    monitor_args: dict[str, Any] | None = None
    """Options of the tracker."""
    detailed_stats: bool = False
    """Log maximum, minimum and spread of evaluation metrics beside their mean."""
    enable_ray_timeline: bool = False
    """Write Ray's timeline."""


@dataclass(frozen=True)
class LogConfig:
    """What the log files hold."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Least level that is written."""
    group_by_node: bool = False
    """One folder a machine."""


@dataclass(frozen=True)
class DataJuicerConfig:
    """The Data-Juicer service."""

    server_url: str | None = None
    """Address of a running one."""
    auto_start: bool = False
    """Start one."""
    port: int | None = number(None, at_least=1, at_most=65535)
    """Port of the one to start."""


@dataclass(frozen=True)
class ServiceConfig:
    """Services beside the run."""

    data_juicer: DataJuicerConfig = field(default_factory=DataJuicerConfig)
    """Data-Juicer."""
