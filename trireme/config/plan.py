"""Plan: all that is computed from one stage of a Config before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trireme.config.places import Launcher
from trireme.config.schema import Config

SyncMethod = Literal["memory", "checkpoint", "nccl"]
SyncStyle = Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"]
EngineKind = Literal["torch", "vllm"]
BufferType = Literal["queue", "sql", "file"]


@dataclass(frozen=True)
class Plan:
    """One stage, ready to run. Every length, size, path and choice that the parts need is here."""

    config: Config
    """The stage's whole configuration: the global one with the stage's keys laid over it."""
    stage_name: str | None
    """None where the file has no stages."""
    stage_index: int
    model_from_stage: int | None
    """The stage whose last checkpoint is this one's model; None: `model_path`."""
    mode: str
    colocated: bool
    """The file says `mode: colocate`; `mode` says what runs."""
    job_dir: Path
    """Where everything of this stage lies; stages lie side by side in the job's folder."""
    seed: int
    device: str
    dtype: str
    model_path: str
    max_model_len: int
    max_prompt_tokens: int
    max_response_tokens: int
    min_response_tokens: int
    batch_size: int
    repeat_times: int
    train_batch_size: int
    own_batch: int
    """Experiences of a train step that the explorer makes; the rest is an expert's."""
    whole_steps: bool
    """A train step learns from one explore step, whatever that left."""
    explore_steps: int | None
    """None: there is no exploring, or only the loaded data tells."""
    train_steps: int | None
    """None: the data or the workflow decides how many train steps there are."""
    schedule_steps: int | None
    """The train steps that a learning-rate schedule spans: one experience a rollout is assumed."""
    steps_per_epoch: int | None
    runners: int
    engine_urls: tuple[str, ...]
    """Rollout servers that generate; none: the embedded engine does."""
    engine_key: str | None
    """What they ask for."""
    eval_interval: int
    """Explore steps between evaluations, a multiple of `sync_interval`."""
    max_token_len: int
    """Tokens of a micro-batch."""
    sync_method: SyncMethod
    sync_style: SyncStyle
    sync_interval: int
    sync_offset: int
    lock_step: bool
    """Explorer and trainer take turns: neither works while the other does."""
    share_tensors: bool
    """The engine reads the trainer's own tensors: only in lock-step."""
    deterministic: bool
    """Equal seeds give byte-equal weights."""
    buffer_type: BufferType
    buffer_path: str
    """A store's URL, a queue's copy (URL or .jsonl), or a data set's path."""
    listen_address: str
    """Where `mode: serve` listens."""
    launcher: Launcher
    """Who starts the parts: one process, or Ray's actors."""
    nodes: int
    places_per_node: int
    """Devices that a run takes of each machine: GPUs, or CPU processes where there are none."""
    num_engines: int
    engine_size: int
    """Places of one engine."""
    engine_kind: EngineKind
    engine_python: str
    """The interpreter of engine processes."""
    engine_hosts: int
    """Engine processes that the local launcher starts; 0: the engine is embedded, or remote."""
    takes_turns: bool
    """The engine's process and the trainer have one device, and one rests while the other works."""
    trainer_ranks: int
    gpus: dict[str, int]
    """GPUs of each role."""
    notes: tuple[str, ...]
    """What was mapped onto this machine, and what has no effect on it."""

    @property
    def explorer_name(self) -> str:
        """Of one of several explorers: in its ids, and where its logs and figures lie; else ''."""
        name = self.config.explorer.name
        return name if self.mode == "explore" and name != "explorer" else ""
