"""Sync: decides when weights go to the engine, how they travel, and what takes turns on a device.

In `mode: colocate` a trainer's rank and an engine share each device: in one process that is one
device; in several as many as `cluster.gpu_per_node` says, each with a rank and an engine, which
take turns.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from trireme.config import Findings
from trireme.config.engine_kind import (
    EMBEDDED,
    KEY,
    EnginePlan,
    adapter_rank_of,
    kind_names,
    plain_rank_of,
    sizes_of,
)
from trireme.config.launcher import LOCAL, launchers_named
from trireme.config.placement import Places
from trireme.config.schema import SynchronizerConfig
from trireme.config.sizes import Steps
from trireme.config.stages import StageFacts
from trireme.config.store import is_between_processes, keeps_steps

SyncMethod = Literal["memory", "checkpoint", "nccl"]
SyncStyle = Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"]
_STYLES: dict[str, SyncStyle] = {
    "fixed": "fixed",
    "explorer_driven": "explorer_driven",
    "dynamic_by_explorer": "explorer_driven",
    "trainer_driven": "trainer_driven",
    "dynamic_by_trainer": "trainer_driven",
    "fully_async": "fully_async",
}
_OLDER_METHODS = {"online": "nccl", "offline": "checkpoint"}


@dataclass(frozen=True)
class SyncPlan:
    """When weights go to the engine, how, and whether explorer and trainer work by turns."""

    method: SyncMethod
    style: SyncStyle
    interval: int
    """Steps between synchronisations."""
    offset: int
    """Steps that the explorer runs ahead of the trainer."""
    eval_interval: int
    """Explore steps between evaluations, a multiple of `interval`."""
    lock_step: bool
    """Whether explorer and trainer take turns: neither works while the other does."""
    takes_turns: bool
    """Whether each engine process shares a device with a trainer's rank, and one rests while the
    other works."""
    share_tensors: bool
    """Whether the engine reads the trainer's own tensors: only in lock-step and in float32, since
    an engine in bfloat16 would multiply in float32 with them."""
    adapter_rank: int
    """The largest rank of the LoRA adapter that is pushed alone; 0: all weights are pushed."""
    share_base: bool
    """Whether the engine reads the base of the trainer's LoRA adapter, in any style, since training
    never changes it, and adds the products of an adapter of its own."""


def sync_of(
    stage: StageFacts, places: Places, engine: EnginePlan, steps: Steps, dtype: str
) -> tuple[SyncPlan, Findings]:
    """Decide how a stage's weights go from the trainer to the engine."""
    findings, config, sync = Findings(), stage.config, stage.config.synchronizer
    style: SyncStyle = findings.take(_style_of(stage))
    method: SyncMethod = findings.take(_method_of(stage, places.spread, engine.hosts))
    one_process = not places.spread and not engine.hosts
    in_turns = not stage.reads_file and method == "memory" and (places.paired or one_process)
    lock_step = in_turns and not _against_turns(stage, steps.own_batch)
    takes_turns = findings.take(_takes_turns(stage, places, engine.hosts, lock_step=lock_step))
    shares = lock_step and not places.spread and engine.shares
    rank = adapter_rank_of(stage, method, engine.largest_adapter)
    alone = plain_rank_of(config) if stage.reads_file else rank  # one that evaluates gets it too
    share_base = findings.take(_shares_base(stage, places, engine, dtype, plain=alone > 0))
    return SyncPlan(
        method=method,
        style=style,
        interval=sync.sync_interval,
        offset=sync.sync_offset,
        eval_interval=max(config.explorer.eval_interval // sync.sync_interval, 1)
        * sync.sync_interval,
        lock_step=lock_step,
        takes_turns=takes_turns,
        share_tensors=shares and not config.model.lora_configs and dtype == "float32",
        adapter_rank=alone if share_base else rank,
        share_base=share_base,
    ), findings


def _shares_base(
    stage: StageFacts, places: Places, engine: EnginePlan, dtype: str, *, plain: bool
) -> tuple[bool, Findings]:
    """Decide whether an embedded engine reads the base of the trainer's adapter, and note where it
    is asked for in vain. `plain`: the adapter can be pushed alone.
    """
    findings, config = Findings(), stage.config
    asked = config.explorer.rollout_model.enable_lora
    embedded = engine.kind == EMBEDDED and not stage.remote and not stage.asks_api
    trains = config.mode == "both" or stage.reads_file
    if not config.model.lora_configs or not embedded or not trains:
        return False, findings
    form = (
        "no use_dora, no init_lora_weights that changes the base, target_modules all-linear or "
        "names of layers in blocks"
    )
    conditions = [
        (not places.spread and not engine.hosts, "one process (engine_num 1, no cluster)"),
        (plain, f"an adapter that is pushed alone ({form}, sync_method memory or nccl)"),
        (dtype != "float16", "dtype bfloat16 or float32"),
    ]
    lacking = [expected for holds, expected in conditions if not holds]
    if asked and lacking:
        findings.note(
            f"{KEY}.enable_lora (true): the embedded engine merges the adapter into a copy of the "
            f"base: to share the trainer's it needs {'; '.join(lacking)}"
        )
    by_default = places.present > 0
    return not lacking and (by_default if asked is None else asked), findings


def _style_of(stage: StageFacts) -> tuple[SyncStyle, Findings]:
    """Decide the style, under its one name."""
    findings, config = Findings(), stage.config
    style = _STYLES[config.synchronizer.sync_style]
    if style == "fully_async" and config.mode in ("explore", "train"):
        findings.note(
            f"synchronizer.sync_style (fully_async): in mode {config.mode} the explorer looks for "
            f"new weights every sync_interval steps and waits for none"
        )
        return "explorer_driven", findings
    return style, findings


def _method_of(stage: StageFacts, spread: bool, hosts: int) -> tuple[SyncMethod, Findings]:
    """Decide how weights travel: in memory if both sides are in this process, else by files; to
    engines in other processes as requested, or by HTTP.
    """
    findings = Findings()
    mode, method = stage.config.mode, stage.config.synchronizer.sync_method
    asked = _OLDER_METHODS.get(method, method)
    asked_for = method != SynchronizerConfig().sync_method  # the default is not a request
    if stage.colocated and not stage.reads_file:
        if asked_for and asked != "memory":
            findings.note(
                f"synchronizer.sync_method ({method}): in mode colocate trainer and engine share "
                "each device, so weights are handed over in memory"
            )
        return "memory", findings
    if stage.reads_file or mode == "bench" or asked == "checkpoint":
        return "checkpoint", findings
    if mode == "both" and (hosts or (spread and not stage.remote)):
        return ("nccl" if asked == "nccl" else "memory"), findings
    how = "explorer and trainer share one process, so weights are handed over in memory"
    if stage.remote:
        how = "the trainer sends weights to the servers by HTTP"
    if mode != "both":
        how = f"in mode {mode} weights travel by checkpoint files in the job's folder"
    if asked_for and (mode in ("explore", "train", "serve") or asked == "nccl"):
        findings.note(f"synchronizer.sync_method ({method}): {how}")
    return ("memory" if mode == "both" else "checkpoint"), findings


def _against_turns(stage: StageFacts, train_batch_size: int) -> list[str]:
    """List the conditions for taking turns that do not hold.

    Experiences may not return after a time: a trainer that always gets more never ends its turn.
    Replay may not be stored in a database, which cannot restore dropped rows.
    """
    sync, store = stage.config.synchronizer, stage.config.buffer.trainer_input.experience_buffer
    replay, mode = store.replay_buffer, stage.config.mode
    method = _OLDER_METHODS.get(sync.sync_method, sync.sync_method)
    right_size = stage.whole_steps or train_batch_size == stage.rollouts
    conditions = [
        (mode == "both", f"mode both or colocate, not {mode}"),
        (not stage.remote, "explorer.rollout_model.engine_type torch, not remote"),
        (
            _STYLES[sync.sync_style] == "fixed",
            f"synchronizer.sync_style fixed, not {sync.sync_style}",
        ),
        (sync.sync_interval == 1, f"synchronizer.sync_interval 1, not {sync.sync_interval}"),
        (sync.sync_offset == 0, f"synchronizer.sync_offset 0, not {sync.sync_offset}"),
        (
            stage.colocated or method != "checkpoint",
            f"synchronizer.sync_method nccl or memory, not {sync.sync_method}",
        ),
        (
            mode != "both" or right_size,
            f"a train_batch_size of batch_size x repeat_times ({stage.rollouts}), not "
            f"{train_batch_size}",
        ),
        (
            not replay.enable or not is_between_processes(store),
            "a replay_buffer that is not in a database (storage_type sql)",
        ),
        (
            not replay.enable or replay.reuse_cooldown_time is None,
            "a replay_buffer without a reuse_cooldown_time",
        ),
    ]
    return [expected for holds, expected in conditions if not holds]


def is_deterministic(
    stage: StageFacts, places: Places, engine: EnginePlan, steps: Steps, sync: SyncPlan
) -> tuple[bool, Findings]:
    """Decide whether equal seeds give byte-equal weights; a stage that reads data in one
    process depends on nothing else.
    """
    findings, asked = Findings(), stage.config.deterministic
    inexact = _against_exactness(stage, places, engine, steps)
    if asked and inexact and not stage.reads_file:
        findings.problem("deterministic", f"is true: expected {'; '.join(inexact)}")
    exact = sync.lock_step and not inexact
    reads = stage.reads_file and not places.spread
    return (exact or reads) and asked is not False, findings


def _against_exactness(
    stage: StageFacts, places: Places, engine: EnginePlan, steps: Steps
) -> list[str]:
    """List the conditions that do not hold for the result to depend only on the seed (on no clock,
    and no other program).
    """
    explorer, launcher = stage.config.explorer, places.launcher
    external = [model.base_urls for model in explorer.auxiliary_models if model.base_urls]
    conditions = [
        (
            launcher == LOCAL,
            f"one process (cluster.launcher local), not {launcher.capitalize()}",
        ),
        (
            not engine.hosts,
            "one process (explorer.rollout_model.engine_type torch, engine_num 1), not engines in "
            "processes of their own",
        ),
        (not explorer.dynamic_timeout.enable, "no explorer.dynamic_timeout"),
        (not external, "no models on other servers (base_urls in explorer.auxiliary_models)"),
    ]
    own = [expected for holds, expected in conditions if not holds]
    return own + _against_turns(stage, steps.own_batch)


def _check_whole_steps(stage: StageFacts) -> Findings:
    """Check that a batch that is an explore step has no other size, and uses the queue of one
    process.
    """
    findings = Findings()
    config, key = stage.config, "algorithm.sample_strategy"
    if not stage.whole_steps:
        return findings
    if config.buffer.train_batch_size:
        findings.problem(
            "buffer.train_batch_size",
            f"is {config.buffer.train_batch_size}: with {key} explore_step a batch is what an "
            f"explore step left; leave it out",
        )
    buffer = config.buffer.trainer_input.experience_buffer
    if config.mode != "both" or stage.reads_file or not keeps_steps(buffer):
        findings.problem(key, "is explore_step: expected mode both and a queue as store")
    elif buffer.replay_buffer.enable:
        findings.problem(key, "is explore_step: a replay buffer mixes explore steps")
    return findings


def check_beat(stage: StageFacts, steps: Steps, style: SyncStyle) -> Findings:
    """Check that over-rollout has no fixed interval, and a batch that is an explore step no other
    size; note if no synchronization comes.
    """
    findings = Findings()
    findings.add(_check_whole_steps(stage))
    findings.add(_note_first_weights(stage, steps, style))
    config = stage.config
    ratio = config.explorer.over_rollout.ratio
    if ratio > 0 and config.mode in ("both", "explore") and style == "fixed":
        findings.problem(
            "explorer.over_rollout.ratio",
            f"is {ratio:g}: with synchronizer.sync_style fixed a step without its slowest tasks "
            f"leaves the trainer waiting; expected another style",
        )
    return findings


def _note_first_weights(stage: StageFacts, steps: Steps, style: SyncStyle) -> Findings:
    """Note if the run ends before the first synchronization: it is legal, but the new weights then
    sample nothing that is trained.
    """
    findings = Findings()
    config, sync = stage.config, stage.config.synchronizer
    if config.mode != "both" or stage.reads_file or style not in ("fixed", "explorer_driven"):
        return findings
    per_train = 1 if stage.whole_steps else steps.own_batch / stage.rollouts
    explore, train = steps.explore or math.inf, steps.train or math.inf
    replays = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    needed = math.inf if replays else train * per_train
    if not 1 < min(explore, needed) <= sync.sync_interval + sync.sync_offset:
        return findings
    one_each = stage.whole_steps or stage.one_experience
    which, condition = f"all {math.ceil(min(explore, needed))} explore steps", ""
    if needed < explore:
        which += " that are trained"
        condition = "" if one_each else ", where each rollout leaves an experience"
    keys = f"synchronizer.sync_interval ({sync.sync_interval})"
    if sync.sync_offset:
        keys += f", sync_offset ({sync.sync_offset})"
    # a trainer in the fixed style pushes by itself, even while the explorer works ahead
    trains = min(train, explore / per_train if one_each and not replays else math.inf)
    by_first = style == "explorer_driven" or trains <= sync.sync_interval
    how = "are sampled by the first weights" if by_first else "wait for no new weights"
    findings.note(f"{keys}: {which} {how}{condition}")
    return findings


def _takes_turns(
    stage: StageFacts, places: Places, hosts: int, *, lock_step: bool
) -> tuple[bool, Findings]:
    """Decide whether engine processes take turns with the trainer, and report what cannot work.
    `hosts`: engine processes of a run without a launcher.
    """
    findings, gpus = Findings(), places.present
    takes_turns = stage.colocated and (hosts > 0 or (places.paired and places.num_engines > 0))
    trainer = stage.config.trainer
    if trainer.park_optimizer and (trainer.offload or not takes_turns):
        why = "no engine of another process shares the trainer's device"
        if takes_turns:
            why = "trainer.offload keeps the optimizer in the CPU's memory always"
        findings.note(f"trainer.park_optimizer: without effect, since {why}")
    if not stage.colocated:
        return False, findings
    explorer, model = stage.config.explorer, stage.config.explorer.rollout_model
    ranks = places.total if places.paired else 1
    if gpus > 1 and not places.paired:
        findings.problem(
            "mode",
            f"is colocate, in one process with {gpus} GPUs: expected cluster.gpu_per_node {gpus}, "
            f"which {launchers_named()} starts a rank and an engine for each, or one GPU in "
            "CUDA_VISIBLE_DEVICES",
        )
    if model.engine_num not in (1, ranks):
        each = f"1 or {ranks}, one on each of the {ranks} places," if ranks > 1 else "1"
        findings.problem(
            f"{KEY}.engine_num", f"is {model.engine_num}: expected {each} in mode colocate"
        )
    sizes = {f"{KEY}.{name}": size for name, size in sizes_of(model).items()}
    if not places.paired:
        window = "trainer.ulysses_sequence_parallel_size"
        sizes[window] = trainer.ulysses_sequence_parallel_size
    for name, size in sizes.items():
        if size != 1:
            findings.problem(name, f"is {size}: expected 1 in mode colocate")
    if explorer.auxiliary_models:
        findings.problem("explorer.auxiliary_models", "is given: expected none in mode colocate")
    if stage.remote:
        kinds = " or ".join(kind_names())
        findings.problem(f"{KEY}.engine_type", f"is remote: expected {kinds} in mode colocate")
    if places.paired and not lock_step and not stage.reads_file and not stage.remote:
        findings.problem(
            "mode",
            f"is colocate, on {ranks} places, where ranks and engines take turns: expected "
            "synchronizer.sync_style fixed, sync_interval 1 and sync_offset 0, a train_batch_size "
            f"of batch_size x repeat_times ({stage.rollouts}), and no replay_buffer in a database "
            "or with a reuse_cooldown_time",
        )
    if takes_turns and not gpus and not hasattr(os, "memfd_create"):
        findings.problem(
            "mode",
            "is colocate, with an engine in a process of its own: expected Linux, whose shared "
            "memory it reads, or engine_type torch in one process",
        )
    return takes_turns, findings
