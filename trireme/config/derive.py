"""Derive: what follows from one stage of a Config, computed here and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path

from trireme.config.draft import Draft
from trireme.config.lengths import lengths_of
from trireme.config.machine import num_gpus
from trireme.config.plan import Plan, SyncMethod, SyncStyle
from trireme.config.problem import Problem
from trireme.config.schema import Config
from trireme.config.schema.synchronizer import METHODS, STYLES
from trireme.config.stages import Stage, reads_file
from trireme.config.steps import steps_of, whole_steps
from trireme.config.store import store_of
from trireme.config.support import supported
from trireme.config.used import StageFacts, remote


def derive(stage: Stage, facts: StageFacts, root: Path, problems: list[Problem]) -> Plan:
    """The Plan of one stage whose files lie in `root`. Problems found on the way are noted."""
    config = stage.config
    draft = Draft(config, problems)
    draft.notes += supported(config, problems)
    gpus, device = _machine(draft)
    lengths = lengths_of(config.model, problems)
    steps = steps_of(draft, facts)
    style = _style(draft, steps.train_batch_size)
    method = _method(draft)
    lock_step = _lock_step(config, steps.train_batch_size, method)
    _whole_steps(draft)
    if _over_rollout(config) and style == "fixed":
        draft.problem(
            "explorer.over_rollout.ratio",
            f"is {config.explorer.over_rollout.ratio:g}: with synchronizer.sync_style fixed a "
            "step without its slowest tasks leaves the trainer waiting; expected another style",
        )
    if config.deterministic and not lock_step and not reads_file(config):
        draft.problem(
            "deterministic",
            "is true: expected mode both, sync_style fixed, sync_interval 1, sync_offset 0, "
            "sync_method nccl or memory, and a train_batch_size of batch_size x repeat_times",
        )
    job_dir = root / stage.name if stage.name else root
    buffer_type, buffer_path = store_of(draft, job_dir)
    _engine(draft)
    explorer = config.explorer
    interval = config.synchronizer.sync_interval
    window = config.trainer.ulysses_sequence_parallel_size
    return Plan(
        config=config,
        stage_name=stage.name,
        stage_index=stage.index,
        model_from_stage=stage.model_from,
        mode=config.mode,
        job_dir=job_dir,
        seed=config.seed,
        device=device,
        dtype=_dtype(draft, device),
        model_path=config.model.model_path,
        max_model_len=lengths.max_model_len,
        max_prompt_tokens=lengths.max_prompt_tokens,
        max_response_tokens=lengths.max_response_tokens,
        min_response_tokens=lengths.min_response_tokens,
        batch_size=config.buffer.batch_size,
        repeat_times=config.algorithm.repeat_times,
        train_batch_size=steps.train_batch_size,
        least_batch=1 if whole_steps(config) else steps.train_batch_size,
        explore_steps=steps.explore,
        train_steps=steps.train,
        schedule_steps=steps.schedule,
        steps_per_epoch=steps.per_epoch,
        runners=explorer.runner_per_model * explorer.rollout_model.engine_num,
        engine_urls=tuple(explorer.rollout_model.base_urls) if remote(config) else (),
        eval_interval=_eval_interval(explorer.eval_interval, interval),
        max_token_len=config.trainer.max_token_len_per_gpu
        or math.ceil(2 * lengths.max_model_len / window),
        sync_method=method,
        sync_style=style,
        sync_interval=interval,
        sync_offset=config.synchronizer.sync_offset,
        share_tensors=lock_step and not config.model.lora_configs,
        deterministic=(lock_step or reads_file(config)) and config.deterministic is not False,
        buffer_type=buffer_type,
        buffer_path=buffer_path,
        gpus=gpus,
        notes=tuple(draft.notes),
    )


def _machine(draft: Draft) -> tuple[dict[str, int], str]:
    """GPUs of each role and the device; one line where the cluster section asks for others."""
    cluster = draft.config.cluster
    present = num_gpus()
    nodes = max(cluster.node_num, 1)
    asked = nodes * cluster.gpu_per_node
    device = "cuda" if present else "cpu"
    here = "on one GPU, which explorer and trainer share" if present else "on the CPU"
    if asked or cluster.node_num > 1:
        wanted = f"{asked} GPUs" if asked else f"{nodes} nodes"
        draft.notes.append(
            f"cluster asks for {wanted} ({nodes} node{'s' * (nodes > 1)} x {cluster.gpu_per_node}) "
            f"and this machine has {present or 'none'}: the run is local, one process, {here}"
        )
    share = min(present, 1)
    return {"explorer": share, "trainer": share}, device


def _dtype(draft: Draft, device: str) -> str:
    """float32 on a CPU, where smaller formats are slower; else what the user asks of the engine."""
    asked = draft.config.explorer.rollout_model.dtype
    if device != "cpu":
        return "bfloat16" if asked == "auto" else asked
    if asked not in ("bfloat16", "auto", "float32"):
        draft.notes.append(f"explorer.rollout_model.dtype ({asked}): a CPU computes in float32")
    return "float32"


def _engine(draft: Draft) -> None:
    """Lines on what becomes of the engine that was asked for."""
    if draft.config.mode == "train":
        return
    model = draft.config.explorer.rollout_model
    if model.engine_type in ("vllm", "sglang"):
        draft.notes.append(
            f"explorer.rollout_model.engine_type ({model.engine_type}): the embedded torch engine "
            f"generates in its place"
        )
    urls = model.base_urls
    if model.engine_type == "remote" and not urls:
        draft.problem(
            "explorer.rollout_model.base_urls",
            "is empty: engine_type remote needs the address of a server, such as "
            "[http://127.0.0.1:8000] (trireme rollout starts one)",
        )
    if urls and model.engine_type != "remote":
        draft.problem("explorer.rollout_model.engine_type", "is not remote, and base_urls is given")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            draft.problem(
                "explorer.rollout_model.base_urls", f"has {url!r}: expected http://HOST:PORT"
            )
    if model.engine_num > 1:
        draft.notes.append(
            f"explorer.rollout_model.engine_num ({model.engine_num}): one engine generates, and "
            f"runners are {model.engine_num} x {draft.config.explorer.runner_per_model}"
        )


def _style(draft: Draft, train_batch_size: int) -> SyncStyle:
    """The style by its one name; a fixed beat that would stop for ever is a problem."""
    config = draft.config
    style = STYLES[config.synchronizer.sync_style]
    made = config.buffer.batch_size * config.algorithm.repeat_times
    exploring = config.mode in ("both", "explore") and not reads_file(config)
    if style == "fixed" and exploring and made < train_batch_size:
        draft.problem(
            "buffer.train_batch_size",
            f"({train_batch_size}) is more than the {made} rollouts of an explore step (batch_size "
            f"{config.buffer.batch_size} x repeat_times {config.algorithm.repeat_times}): with "
            f"synchronizer.sync_style fixed both sides would wait for ever; expected at most "
            f"{made}, or sync_style dynamic_by_explorer",
        )
    if style == "fully_async" and config.mode in ("explore", "train"):
        draft.notes.append(
            f"synchronizer.sync_style (fully_async): in mode {config.mode} the explorer looks for "
            "new weights every sync_interval steps and waits for none"
        )
        return "explorer_driven"
    return style  # type: ignore[return-value]


def _over_rollout(config: Config) -> bool:
    """Whether steps go on without their slowest tasks."""
    return config.mode in ("both", "explore") and config.explorer.over_rollout.ratio > 0


def _whole_steps(draft: Draft) -> None:
    """A batch that is an explore step has no other size, and needs the queue of one process."""
    config = draft.config
    if not whole_steps(config):
        return
    if config.buffer.train_batch_size:
        draft.problem(
            "buffer.train_batch_size",
            f"is {config.buffer.train_batch_size}: with algorithm.sample_strategy explore_step a "
            "batch is what an explore step left; leave it out",
        )
    buffer = config.buffer.trainer_input.experience_buffer
    if config.mode != "both" or reads_file(config) or buffer.storage_type == "sql":
        draft.problem(
            "algorithm.sample_strategy", "is explore_step: expected mode both and a queue as store"
        )
    elif buffer.replay_buffer.enable:
        draft.problem(
            "algorithm.sample_strategy", "is explore_step: a replay buffer mixes explore steps"
        )


def _method(draft: Draft) -> SyncMethod:
    """How weights travel here: inside the process where both sides live in it, else by files."""
    config = draft.config
    asked = METHODS[config.synchronizer.sync_method]
    if config.mode == "both" and not reads_file(config):
        if asked == "nccl":
            draft.notes.append(
                f"synchronizer.sync_method ({config.synchronizer.sync_method}): explorer and "
                f"trainer share one process, so weights are handed over in memory"
            )
        return "checkpoint" if asked == "checkpoint" else "memory"
    if asked != "checkpoint" and config.mode in ("explore", "train") and not reads_file(config):
        draft.notes.append(
            f"synchronizer.sync_method ({config.synchronizer.sync_method}): in mode {config.mode} "
            f"weights travel by checkpoint files in the job's folder"
        )
    return "checkpoint"


def _lock_step(config: Config, train_batch_size: int, method: SyncMethod) -> bool:
    """Whether engine and trainer can be proved never to work at the same time."""
    sync = config.synchronizer
    return (
        config.mode == "both"
        and not reads_file(config)
        and not remote(config)
        and STYLES[sync.sync_style] == "fixed"
        and sync.sync_interval == 1
        and sync.sync_offset == 0
        and method == "memory"
        and (
            whole_steps(config)
            or train_batch_size == config.buffer.batch_size * config.algorithm.repeat_times
        )
    )


def _eval_interval(asked: int, sync_interval: int) -> int:
    """The largest multiple of the sync interval that is not above what was asked, at least one."""
    return max(asked // sync_interval, 1) * sync_interval
