"""Sync: how the weights of a plan travel from its trainer to its engines."""

from __future__ import annotations

from collections.abc import Callable

from trireme.buffer.waiting import Demand
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.sync.checkpoint import CheckpointPush, PolledSync
from trireme.sync.memory import MemorySync
from trireme.sync.process_group import GroupSync
from trireme.sync.synchronizer import Push, Synchronizer
from trireme.trainer.backend import TorchBackend
from trireme.trainer.fsdp2 import Fsdp2Backend


def make_synchronizer(
    plan: Plan,
    push: Push,
    *,
    demand: Demand,
    version: int,
    step: int,
    pushed_step: int | None,
) -> Synchronizer:
    """Both sides in this process, or the trainer's side for explorers elsewhere; begins at
    `version`, `step` and `pushed_step`.
    """
    return Synchronizer(
        push,
        style="trainer_driven" if plan.mode == "train" else plan.sync_style,
        interval=plan.sync_interval,
        offset=plan.sync_offset,
        timeout=plan.config.synchronizer.sync_timeout,
        lock_step=plan.lock_step,
        demand=demand,
        version=version,
        step=step,
        pushed_step=pushed_step,
    )


def make_polled_sync(plan: Plan, engine: Engine, folder: JobFolder) -> PolledSync:
    """The explorer's side, for a trainer of another process."""
    return PolledSync(
        engine,
        folder,
        style=plan.sync_style,
        interval=plan.sync_interval,
        offset=plan.sync_offset,
        timeout=plan.config.synchronizer.sync_timeout,
        dtype=plan.dtype,
    )


def make_checkpoint_push(
    plan: Plan,
    backend: TorchBackend | Fsdp2Backend,
    engine: Engine | None,
    device: Device,
    folder: JobFolder,
    step: Callable[[], int],
) -> CheckpointPush:
    """Through files of the job folder; without an engine explorers elsewhere read them."""
    return CheckpointPush(
        backend,
        device,
        folder,
        step=step,
        vocabulary=backend.module.config.vocab_size,
        dtype=plan.dtype,
        engine=engine,
    )


def make_push(
    plan: Plan,
    backend: TorchBackend | Fsdp2Backend,
    engine: Engine,
    device: Device,
    host: str,
) -> Push:
    """From this process to its engine, through memory or a process group that meets at `host`."""
    vocabulary = backend.module.config.vocab_size
    if plan.sync_method == "nccl":
        assert isinstance(engine, RemoteEngine)
        return GroupSync(
            backend,
            engine,
            device,
            dtype=plan.dtype,
            vocabulary=vocabulary,
            transport="nccl" if plan.device == "cuda" else "gloo",
            host=host,
        ).push
    return MemorySync(
        backend,
        engine,
        device,
        shared=plan.share_tensors,
        dtype=plan.dtype,
        vocabulary=vocabulary,
    ).push
