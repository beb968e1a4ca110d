"""Colocate: the rules of `mode: colocate`, where a trainer's rank and an engine share each device.

In one process that is one device; on Ray as many as `cluster.gpu_per_node` says, each with a rank
and an engine, which take turns.
"""

from __future__ import annotations

import os

from trireme.config.placement import KEY, Places, further_sizes
from trireme.config.stages import StageConfig


def check_colocated(
    stage: StageConfig, places: Places, gpus: int, *, hosts: int, lock_step: bool
) -> bool:
    """Whether engine processes take turns with the trainer. What cannot work is a problem of the
    stage. `hosts`: engine processes of one machine, where the run is not on Ray.
    """
    takes_turns = stage.colocated and (hosts > 0 or (places.paired and places.num_engines > 0))
    trainer = stage.config.trainer
    if trainer.park_optimizer and (trainer.offload or not takes_turns):
        why = "no engine of another process shares the trainer's device"
        if takes_turns:
            why = "trainer.offload keeps the optimizer in the CPU's memory always"
        stage.notes.append(f"trainer.park_optimizer: without effect, since {why}")
    if not stage.colocated:
        return False
    explorer, model = stage.config.explorer, stage.config.explorer.rollout_model
    ranks = places.total if places.paired else 1
    if gpus > 1 and not places.paired:
        stage.problem(
            "mode",
            f"is colocate, in one process with {gpus} GPUs: expected cluster.gpu_per_node {gpus}, "
            "which Ray starts a rank and an engine for each, or one GPU in CUDA_VISIBLE_DEVICES",
        )
    if model.engine_num not in (1, ranks):
        each = f"1 or {ranks}, one on each of the {ranks} places," if ranks > 1 else "1"
        stage.problem(
            f"{KEY}.engine_num", f"is {model.engine_num}: expected {each} in mode colocate"
        )
    further = further_sizes(model) if model.engine_type != "torch" else {}
    sizes = {
        f"{KEY}.tensor_parallel_size": model.tensor_parallel_size,
        **{f"{KEY}.{name}": size for name, size in further.items()},
    }
    if not places.paired:
        window = "trainer.ulysses_sequence_parallel_size"
        sizes[window] = trainer.ulysses_sequence_parallel_size
    for name, size in sizes.items():
        if size != 1:
            stage.problem(name, f"is {size}: expected 1 in mode colocate")
    if explorer.auxiliary_models:
        stage.problem("explorer.auxiliary_models", "is given: expected none in mode colocate")
    if stage.remote:
        stage.problem(f"{KEY}.engine_type", "is remote: expected torch or vllm in mode colocate")
    if places.paired and not lock_step and not stage.reads_file and not stage.remote:
        stage.problem(
            "mode",
            f"is colocate, on {ranks} places, where ranks and engines take turns: expected "
            "synchronizer.sync_style fixed, sync_interval 1 and sync_offset 0, a train_batch_size "
            f"of batch_size x repeat_times ({stage.rollouts}), and no replay_buffer in a database "
            "or with a reuse_cooldown_time",
        )
    if takes_turns and not gpus and not hasattr(os, "memfd_create"):
        stage.problem(
            "mode",
            "is colocate, with an engine in a process of its own: expected Linux, whose shared "
            "memory it reads, or engine_type torch in one process",
        )
    return takes_turns
