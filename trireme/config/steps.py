"""Steps: how many explore and train steps there are, as far as known before the data is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trireme.config.draft import Draft
from trireme.config.schema import Config
from trireme.config.stages import reads_file
from trireme.config.used import StageFacts

ONE_EXPERIENCE_WORKFLOWS = ("simple_workflow", "math_workflow", "math_boxed_workflow")
"""Built-in workflows that leave exactly one experience a rollout (their async names as well)."""


@dataclass(frozen=True)
class Steps:
    """How much there is to do."""

    train_batch_size: int
    explore: int | None
    train: int | None
    schedule: int | None
    per_epoch: int | None


def steps_of(draft: Draft, facts: StageFacts) -> Steps:
    """Batch sizes and numbers of steps, as far as they are known before the data is loaded."""
    config = draft.config
    buffer = config.buffer
    made = buffer.batch_size * config.algorithm.repeat_times
    from_file = reads_file(config)
    wanted = buffer.train_batch_size or made
    if not buffer.train_batch_size and (config.mode == "train" or from_file):
        draft.problem(
            "buffer.train_batch_size",
            "is not given: expected the number of experiences of a train step, since "
            + (f"{config.algorithm.algorithm_type} reads data" if from_file else "mode is train"),
        )
    if from_file or config.mode == "train":
        rows = facts.train_rows if from_file else None
        epochs = None if rows is None else rows * buffer.total_epochs // wanted
        steps = config.trainer.total_steps or buffer.total_steps or epochs
        if steps == 0:
            _no_step(draft, "buffer.train_batch_size", wanted, rows, facts.train_path)
        return Steps(wanted, None, steps, steps, None if rows is None else rows // wanted)
    if config.mode == "bench":
        return Steps(wanted, None, None, None, None)
    rows = facts.task_rows
    epochs = None if rows is None else rows * buffer.total_epochs // buffer.batch_size
    explore = buffer.total_steps or epochs
    if explore == 0:
        _no_step(draft, "buffer.batch_size", buffer.batch_size, rows, facts.task_path)
    expected = None if explore is None else math.ceil(explore * made / wanted)
    schedule = config.trainer.total_steps or expected
    train = None if config.mode == "explore" else config.trainer.total_steps
    known = whole_steps(config) or facts.workflows <= _one_experience_names()
    if train is None and config.mode == "both" and known:
        train = expected
    per_epoch = None if rows is None else rows // buffer.batch_size
    return Steps(wanted, explore, train, schedule, per_epoch)


def whole_steps(config: Config) -> bool:
    """Whether a train step learns from one whole explore step, however many experiences it left."""
    return config.algorithm.sample_strategy == "explore_step"


def _one_experience_names() -> set[str]:
    return {name for w in ONE_EXPERIENCE_WORKFLOWS for name in (w, f"async_{w}")}


def _no_step(draft: Draft, key: str, size: int, rows: int | None, path: str) -> None:
    epochs = draft.config.buffer.total_epochs
    draft.problem(
        key,
        f"({size}) gives no step: {path} has {rows} rows and total_epochs is {epochs}; expected at "
        f"most {(rows or 0) * epochs}, or total_steps",
    )
