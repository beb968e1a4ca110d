"""Buffer section: batch sizes, how long to go on, and where tasks and experiences lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config.schema.data import FormatConfig, TasksetConfig
from trireme.config.schema.number import number


@dataclass(frozen=True)
class ExplorerInputConfig:
    """What the explorer tries."""

    taskset: TasksetConfig | None = None
    """The tasks of training; either this or `tasksets`."""
    tasksets: list[TasksetConfig] = field(default_factory=list)
    """Several sets of tasks, mixed."""
    eval_tasksets: list[TasksetConfig] = field(default_factory=list)
    """Held-out tasks that measure."""
    default_workflow_type: str | None = None
    """Workflow of tasksets that name none."""
    default_eval_workflow_type: str | None = None
    """Workflow of evaluation tasksets that name none."""
    default_reward_fn_type: str | list[Any] | None = None
    """Reward of tasksets that name none: one, or a list."""


@dataclass(frozen=True)
class ReplayBufferConfig:
    """Priority replay: newest experiences first, used again after a rest."""

    enable: bool = False
    """Turns it on."""
    priority_fn: Literal["linear_decay", "decay_limit_randomization"] = "linear_decay"
    """How version and use count become a priority."""
    reuse_cooldown_time: float | None = number(None, above=0)
    """Seconds after which a used experience may come back; not given: never."""
    priority_fn_args: dict[str, Any] = field(default_factory=lambda: {"decay": 2.0})
    """Its options: decay; for decay_limit_randomization also use_count_limit and sigma."""


@dataclass(frozen=True)
class ExperienceBufferConfig:
    """Where the trainer's experiences come from."""

    name: str = "experience_buffer"
    """Name of the store, and of its file where `path` is not given."""
    storage_type: Literal["queue", "sql", "file"] | None = None
    """Not given: queue; for sft, dpo and cpt with a `path`: file."""
    path: str | None = None
    """Data set (file), store (sql), or where a copy of each experience goes (queue)."""
    split: str = "train"
    """Split of a data set (file)."""
    subset_name: str | None = None
    """Configuration of a data set (file)."""
    format: FormatConfig = field(default_factory=FormatConfig)
    """Columns of a data set (file); left as they are, they are inferred."""
    capacity: int = number(10000, at_least=1)
    """Explore steps a queue holds before the explorer waits."""
    max_read_timeout: float = number(1800, above=0)
    """Seconds without a new experience after which the trainer gives up, and says so."""
    lease_time: float = number(60, above=0)
    """Seconds without a word from a reader until what it took returns to the store (sql)."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    """Priority replay (queue, sql)."""
    on_error: Literal["fail", "skip"] = "fail"
    """What a malformed row does: end the run before it begins, or be left out and counted."""
    enable_progress_bar: bool = False
    """Show a bar while rows load."""
    max_retry_times: int = number(3, at_least=0)
    """Further tries to reach an SQL store that is away."""
    max_retry_interval: float = number(1, at_least=0)
    """Seconds between them."""


@dataclass(frozen=True)
class TrainerInputConfig:
    """What the trainer learns from."""

    experience_buffer: ExperienceBufferConfig = field(default_factory=ExperienceBufferConfig)
    """The main store."""
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = field(default_factory=dict)
    """Further stores by name, for algorithms that mix data."""


@dataclass(frozen=True)
class BufferConfig:
    """Batch sizes, duration, and data."""

    batch_size: int = number(1, at_least=1)
    """Tasks of an explore step."""
    train_batch_size: int = number(0, at_least=0)
    """Experiences of a train step; 0: batch_size times `algorithm.repeat_times`."""
    total_epochs: int = number(1, at_least=1)
    """Passes over the tasks."""
    total_steps: int | None = number(None, at_least=1)
    """Explore steps (train steps where a file is read) in place of `total_epochs`."""
    explorer_input: ExplorerInputConfig = field(default_factory=ExplorerInputConfig)
    """Tasks."""
    trainer_input: TrainerInputConfig = field(default_factory=TrainerInputConfig)
    """Experiences."""


@dataclass(frozen=True)
class OperatorConfig:
    """One step between explorer and buffer."""

    name: str = ""
    """Registered name."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its options."""


@dataclass(frozen=True)
class ExperiencePipelineConfig:
    """What happens to experiences before the buffer."""

    operators: list[OperatorConfig] = field(default_factory=list)
    """Filters and reward shapers, in order; own ones by name or path, `file:name`."""
    save_input: bool = True
    """Keep a copy of all that the explorer made."""
    input_save_path: str | None = None
    """Where; not given: `sqlite:///explorer_output.db` in the job's buffer folder."""
    copy_limit_mb: float = number(1000, at_least=0)
    """How large each copy of experiences to look at may become (this one, and a queue's); what the
    trainer has yet to learn from is never touched. 0: no limit."""
    copy_policy: Literal["newest", "sampled"] = "newest"
    """What stays of a copy at its limit: the newest, or an even sample of groups of all steps."""


@dataclass(frozen=True)
class TaskPipelineConfig:
    """What happens to the rows of the training tasksets before the run."""

    operators: list[OperatorConfig] = field(default_factory=list)
    """Functions of rows, in order: by name or path, `file:name`."""
    inputs: list[str] = field(default_factory=list)
    """Other data to read."""
    output: dict[str, Any] | None = None
    """Another place to write to."""
    target_fields: list[str] = field(default_factory=list)
    """Columns to look at."""
    priority_weights: dict[str, float] | None = None
    """Weights of scores that sort the rows."""


@dataclass(frozen=True)
class DataProcessorConfig:
    """Processing of tasks before, and of experiences during the run."""

    experience_pipeline: ExperiencePipelineConfig = field(default_factory=ExperiencePipelineConfig)
    """Of experiences."""
    task_pipeline: TaskPipelineConfig | None = None
    """Of the tasks' rows, once before the run."""
