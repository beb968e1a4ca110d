"""Sizes: how long sequences may be, and how many steps there are before the data is loaded."""

from __future__ import annotations

import math
from typing import NamedTuple

from trireme.config.stages import Stage

ONE_CHAT_WORKFLOWS = {
    f"{kind}{name}_workflow" for kind in ("", "async_") for name in ("simple", "math", "math_boxed")
}
"""Built-in workflows that chat once, and so leave exactly one experience a rollout."""


class Lengths(NamedTuple):
    """All four lengths, in tokens."""

    max_model_len: int
    max_prompt_tokens: int
    max_response_tokens: int
    min_response_tokens: int


class Steps(NamedTuple):
    """How much there is to do; None: only the data or the workflow tells, or there is none."""

    train_batch_size: int
    own_batch: int
    """Of it, what comes from the explorer."""
    explore_steps: int | None = None
    train_steps: int | None = None
    schedule_steps: int | None = None
    steps_per_epoch: int | None = None


def lengths_of(stage: Stage) -> Lengths:
    """What the user gave, and the rest of it: prompt and response share `max_model_len`."""
    model = stage.config.model
    total, shortest = model.max_model_len, model.min_response_tokens
    prompt, response = model.max_prompt_tokens, model.max_response_tokens
    if total is None:
        if prompt is None or response is None:
            stage.problem(
                "model.max_model_len",
                "is not given: expected it, or both max_prompt_tokens and max_response_tokens",
            )
            return Lengths(2, 1, 1, 0)
        total = prompt + response
    for name, part in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if part is not None and part >= total:
            expected = f"less than model.max_model_len ({total})"
            stage.problem(f"model.{name}", f"is {part}: expected {expected}")
            return Lengths(total, total - 1, 1, 0)
    if prompt is not None and response is not None and prompt + response > total:
        stage.problem(
            "model.max_prompt_tokens",
            f"({prompt}) and max_response_tokens ({response}) make {prompt + response} tokens: "
            f"expected at most model.max_model_len ({total})",
        )
    if response is None:
        prompt = total // 2 if prompt is None else prompt
        response = total - prompt
    elif prompt is None:
        prompt = total - response
    return Lengths(total, prompt, response, min(shortest, max(response - 1, 0)))


def steps_of(stage: Stage) -> Steps:
    """Batch sizes and numbers of steps, as far as they are known before the data is loaded."""
    config, buffer = stage.config, stage.config.buffer
    wanted = buffer.train_batch_size or stage.rollouts
    own = max(wanted - math.ceil((stage.expert_ratio or 0) * wanted), 1)
    if stage.reads_file or config.mode == "train":
        if stage.reads_file and not buffer.train_batch_size:
            stage.problem(
                "buffer.train_batch_size",
                "is not given: expected the number of experiences of a train step, since "
                f"{config.algorithm.algorithm_type} reads data",
            )
        rows = stage.train_rows
        given = config.trainer.total_steps or buffer.total_steps
        path = buffer.trainer_input.experience_buffer.path or ""
        steps = given or _epochs(stage, "buffer.train_batch_size", wanted, rows, path)
        return Steps(wanted, own, None, steps, steps, None if rows is None else rows // wanted)
    if config.mode in ("bench", "serve"):
        return Steps(wanted, own)
    rows, size = stage.task_rows, buffer.batch_size
    path = ", ".join(stage.task_paths)
    explore = buffer.total_steps or _epochs(stage, "buffer.batch_size", size, rows, path)
    expected = None if explore is None else math.ceil(explore * stage.rollouts / own)
    schedule = config.trainer.total_steps or expected
    train = None if config.mode == "explore" else config.trainer.total_steps
    one_each = stage.workflows <= ONE_CHAT_WORKFLOWS
    if train is None and config.mode == "both" and (stage.whole_steps or one_each):
        train = expected
    return Steps(wanted, own, explore, train, schedule, None if rows is None else rows // size)


def _epochs(stage: Stage, key: str, size: int, rows: int | None, path: str) -> int | None:
    """Batches of `size` in all epochs; a problem where there is none."""
    if rows is None:
        return None
    epochs = stage.config.buffer.total_epochs
    if rows * epochs < size:
        stage.problem(
            key,
            f"({size}) gives no step: {path} has {rows} rows and total_epochs is {epochs}; "
            f"expected at most {rows * epochs}, or total_steps",
        )
    return rows * epochs // size
