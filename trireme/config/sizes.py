"""Sizes: decides the lengths of sequences, and the sizes and the number of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trireme.config import Findings
from trireme.config.stages import StageFacts

FEWEST_TOKENS = 1024
"""Of a micro-batch, unless a number is asked for: smaller ones waste time, and split groups,
whose shared prompts are then computed more than once.
"""


@dataclass(frozen=True)
class Lengths:
    """The most and the fewest tokens of what is generated and trained."""

    max_model_len: int
    max_prompt_tokens: int
    max_response_tokens: int
    min_response_tokens: int
    max_token_len: int
    """Tokens of a micro-batch."""


@dataclass(frozen=True)
class Steps:
    """The amount of work: the size of a step, and the number of steps."""

    batch_size: int
    """Tasks of an explore step."""
    repeat_times: int
    """Rollouts of a task."""
    train_batch_size: int
    own_batch: int
    """Experiences of a train step that come from the explorer; the rest is an expert's."""
    whole: bool
    """Whether a train step learns from exactly one explore step, whatever its size."""
    explore: int | None = None
    """Explore steps; None: nothing is explored, or only the loaded data determines it."""
    train: int | None = None
    """Train steps; None: the data or the workflow determines their number."""
    schedule: int | None = None
    """The train steps that a learning-rate schedule spans, assuming one experience per rollout."""
    per_epoch: int | None = None
    passes: int | None = None
    """Epochs over a data set, with which the run ends at the latest; None: steps end it."""
    rows: int | None = None
    """Rows of that data set, tasks or experiences; None: only the run knows."""
    earlier: int = 0
    """Train steps beyond those that these sizes give: a resumed run has made steps of other sizes.
    Negative if these were larger."""

    def after(self, earlier: int) -> Steps:
        """Return these steps with so many beyond those that the sizes give."""
        train = None if self.train is None else self.train + earlier
        schedule = None if self.schedule is None else self.schedule + earlier
        return replace(self, train=train, schedule=schedule, earlier=earlier)

    @property
    def sizes(self) -> list[int]:
        """Return the experiences of an explore step and of a train step."""
        return [self.batch_size * self.repeat_times, self.own_batch]

    @property
    def _compared(self) -> list[int]:
        """Return the sizes of steps, of which equal ones follow one another if a train step learns
        from an explore step.
        """
        return [1, 1] if self.whole else self.sizes

    @property
    def train_given(self) -> int | None:
        """Return the train steps that the explore steps give, with one experience per rollout; None
        if their number is not known.
        """
        if self.explore is None:
            return None
        explored, trained = self._compared
        return math.ceil(self.explore * explored / trained) + self.earlier

    @property
    def explore_needed(self) -> int | None:
        """Return the explore steps of the run: fewer than the tasks give where the train steps need
        fewer. None if their number is not known.
        """
        explored, trained = self._compared
        needed = None
        if self.train is not None:
            needed = math.ceil((self.train - self.earlier) * trained / explored)
        return min(filter(None, (self.explore, needed)), default=None)


def lengths_of(stage: StageFacts) -> tuple[Lengths, Findings]:
    """Decide the lengths that the user did not set: prompt and response share `max_model_len`."""
    findings = Findings()
    model = stage.config.model
    total, shortest = model.max_model_len, model.min_response_tokens
    prompt, response = model.max_prompt_tokens, model.max_response_tokens
    if total is None:
        if prompt is None or response is None:
            findings.problem(
                "model.max_model_len",
                "is not given: expected it, or both max_prompt_tokens and max_response_tokens",
            )
            return _lengths(stage, 2, 1, 1, 0), findings
        total = prompt + response
    for name, part in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if part is not None and part >= total:
            expected = f"less than model.max_model_len ({total})"
            findings.problem(f"model.{name}", f"is {part}: expected {expected}")
            return _lengths(stage, total, total - 1, 1, 0), findings
    if prompt is not None and response is not None and prompt + response > total:
        findings.problem(
            "model.max_prompt_tokens",
            f"({prompt}) and max_response_tokens ({response}) make {prompt + response} tokens: "
            f"expected at most model.max_model_len ({total})",
        )
    if response is None:
        prompt = total // 2 if prompt is None else prompt
        response = total - prompt
    elif prompt is None:
        prompt = total - response
    shortest = min(shortest, max(response - 1, 0))
    return _lengths(stage, total, prompt, response, shortest), findings


def _lengths(stage: StageFacts, total: int, prompt: int, response: int, shortest: int) -> Lengths:
    """Add the tokens of a rank's micro-batch: as requested, or two of the longest sequences, if
    these are not fewer than fill a matrix product.
    """
    trainer = stage.config.trainer
    asked, window = trainer.max_token_len_per_gpu, trainer.ulysses_sequence_parallel_size
    two = max(math.ceil(2 * total / window), FEWEST_TOKENS)
    return Lengths(total, prompt, response, shortest, asked or two)


def steps_of(stage: StageFacts) -> tuple[Steps, Findings]:
    """Decide batch sizes and numbers of steps, if they are known before the data is loaded."""
    findings = Findings()
    config, buffer = stage.config, stage.config.buffer
    wanted = buffer.train_batch_size or stage.rollouts
    own = max(wanted - math.ceil((stage.expert_ratio or 0) * wanted), 1)
    sizes = Steps(
        buffer.batch_size, config.algorithm.repeat_times, wanted, own, whole=stage.whole_steps
    )
    if stage.reads_file:
        if not buffer.train_batch_size:
            findings.problem(
                "buffer.train_batch_size",
                "is not given: expected the number of experiences of a train step, since "
                f"{config.algorithm.algorithm_type} reads data",
            )
        rows = stage.train_rows
        path = buffer.trainer_input.experience_buffer.path or ""
        steps = config.trainer.total_steps or buffer.total_steps
        passes = None if steps else buffer.total_epochs
        if not steps and rows is not None:
            steps = findings.take(_epochs(stage, wanted, rows, path))
        an_epoch = None if rows is None else rows // wanted
        sizes = replace(sizes, train=steps, schedule=steps, per_epoch=an_epoch)
        return replace(sizes, passes=passes, rows=rows), findings
    if config.mode in ("bench", "serve"):
        return sizes, findings
    explore = buffer.total_steps or stage.task_steps
    expected = None if explore is None else math.ceil(explore * stage.rollouts / own)
    schedule = config.trainer.total_steps or expected
    train = None if config.mode == "explore" else config.trainer.total_steps
    if config.mode == "train":  # it ends with the explorers, of which there may be several
        if not (buffer.explorer_input.taskset or buffer.explorer_input.tasksets):
            train = schedule = train or buffer.total_steps  # beside a server, without their steps
        return replace(sizes, train=train, schedule=schedule), findings
    one_each = stage.whole_steps or stage.one_experience
    store = buffer.trainer_input.experience_buffer
    replay, fits = store.replay_buffer, store.capacity * config.algorithm.repeat_times
    replays = replay.enable
    if replays and stage.one_experience and fits < own:
        findings.problem(
            "buffer.trainer_input.experience_buffer.capacity",
            f"({store.capacity}) counts groups where replay_buffer.enable is true, and as many "
            f"have {fits} experiences, too few for a train batch ({own}): expected at least "
            f"{math.ceil(own / config.algorithm.repeat_times)}",
        )
    again = replays and replay.reuse_cooldown_time is not None  # as often as time allows
    if train is None and config.mode == "both" and one_each and not again:
        train = expected
    if config.mode == "both" and not replays and (train or 0) > (expected or math.inf):
        condition = "" if one_each else " where each rollout is one experience"
        findings.note(
            f"trainer.total_steps ({train}): the tasks give {expected}{condition}, and the run "
            "ends there; buffer.total_steps or total_epochs says how often they are repeated"
        )
    if config.mode == "both" and stage.one_experience and not (replays or stage.whole_steps):
        findings.notes += _uneven(own, wanted, stage.rollouts)
    rows = stage.task_rows
    if rows is not None and rows < buffer.batch_size:
        findings.note(
            f"buffer.batch_size ({buffer.batch_size}): there are {rows} tasks, so that a step asks "
            f"some of them more than once; with at most {rows} it does not"
        )
    an_epoch = None if rows is None else rows // buffer.batch_size
    steps = replace(sizes, explore=explore, train=train, schedule=schedule, per_epoch=an_epoch)
    passes = None if buffer.total_steps else buffer.total_epochs
    return replace(steps, passes=passes, rows=rows), findings


def _uneven(own: int, wanted: int, explored: int) -> list[str]:
    """Note a train batch that neither divides what a step explores, nor is a multiple of it."""
    if explored % own == 0 or own % explored == 0:
        return []
    if own > explored:
        fitting = [own // explored * explored, -(-own // explored) * explored]
    else:
        divisors = [size for size in range(1, explored + 1) if explored % size == 0]
        fitting = [max(d for d in divisors if d < own), min(d for d in divisors if d > own)]
    more = wanted - own
    which = f"{wanted}, {more} of them an expert's" if more else f"{wanted}"
    sizes = " or ".join(f"{size + more}" for size in fitting if size > 1 or own < 4)
    return [
        f"buffer.train_batch_size ({which}): a step explores {explored} experiences, so that some "
        f"batches mix those of two steps, sampled by different weights; with {sizes} none does"
    ]


def _epochs(stage: StageFacts, size: int, rows: int, path: str) -> tuple[int, Findings]:
    """Return the train steps in all epochs of a data set; a problem if there are none."""
    findings = Findings()
    epochs = stage.config.buffer.total_epochs
    if rows * epochs < size:
        findings.problem(
            "buffer.train_batch_size",
            f"({size}) gives no step: {path} has {rows} rows and total_epochs is {epochs}; "
            f"expected at most {rows * epochs}, or total_steps",
        )
    return rows * epochs // size, findings
