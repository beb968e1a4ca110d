"""Config: all that a user may write into the YAML, section by section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.algorithm import AlgorithmConfig
from trireme.config.schema.buffer import BufferConfig, DataProcessorConfig
from trireme.config.schema.cluster import ClusterConfig
from trireme.config.schema.explorer import ExplorerConfig
from trireme.config.schema.model import ModelConfig
from trireme.config.schema.monitor import LogConfig, MonitorConfig, ServiceConfig
from trireme.config.schema.number import number
from trireme.config.schema.synchronizer import SynchronizerConfig
from trireme.config.schema.trainer import TrainerConfig

Mode = Literal["both", "explore", "train", "bench", "serve", "colocate"]


def partial(section: type) -> Any:
    """A field with some keys of `section`: checked like it, kept as the user wrote it."""
    return field(default=None, metadata={"partial": section})


@dataclass(frozen=True)
class StageConfig:
    """One stage: what it names is laid over the global sections, key by key."""

    stage_name: str = ""
    """Name of the stage; its files lie in a folder of that name in the job's."""
    mode: Mode | None = None
    """Not given: the global one."""
    algorithm: dict[str, Any] | None = partial(AlgorithmConfig)
    """A new `algorithm_type` inherits no `*_fn` and no `*_args`."""
    model: dict[str, Any] | None = partial(ModelConfig)
    """A `model_path` here replaces the model of the stage before."""
    buffer: dict[str, Any] | None = partial(BufferConfig)
    """Data with a new `path` inherits neither storage type, format nor replay."""
    data_processor: dict[str, Any] | None = partial(DataProcessorConfig)
    """Laid over the global section."""
    explorer: dict[str, Any] | None = partial(ExplorerConfig)
    """Laid over the global section."""
    synchronizer: dict[str, Any] | None = partial(SynchronizerConfig)
    """Laid over the global section."""
    trainer: dict[str, Any] | None = partial(TrainerConfig)
    """Laid over the global section."""


@dataclass(frozen=True)
class Config:
    """The whole file. What is computed from it is in `Plan`; nothing changes it after loading."""

    project: str = "Trinity-RFT"
    """First folder below `checkpoint_root_dir`."""
    group: str = ""
    """Folder between project and name, if any."""
    name: str = "rft"
    """Last folder: together they are the job's."""
    mode: Mode = "both"
    """Explore and train together, or one of them; measure checkpoints; explore by an OpenAI API."""
    seed: int = number(42, at_least=0)
    """All that is random derives from it."""
    deterministic: bool | None = None
    """Byte-equal runs for equal seeds; not given: where explorer and trainer run in lock-step."""
    plugins: list[str] = field(default_factory=list)
    """Python files or folders of them, loaded first, that register the user's own parts."""
    checkpoint_root_dir: str = ""
    """Root of all jobs' folders; relative to the working directory."""
    continue_from_checkpoint: bool = True
    """Go on where the job's folder ends; false begins anew in one with the time in its name."""
    ray_namespace: str = ""
    """Name of the job in a Ray cluster."""
    ignore_validator_suggestions: bool = False
    """Skip estimates of GPU memory."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """How it learns."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What learns."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where."""
    buffer: BufferConfig = field(default_factory=BufferConfig)
    """From what, and how much."""
    data_processor: DataProcessorConfig = field(default_factory=DataProcessorConfig)
    """What happens to data on the way."""
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    """Who tries tasks."""
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    """When weights travel."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Who learns."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Where numbers go."""
    log: LogConfig = field(default_factory=LogConfig)
    """Where lines go."""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    """Services beside the run."""
    stages: list[StageConfig] = field(default_factory=list)
    """Stages, run one after the other; not given: the file itself is the only one."""
