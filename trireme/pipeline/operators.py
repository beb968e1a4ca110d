"""Operators: runs users' steps of the experience pipeline; defines the built-in ones.

There are two forms. A function `(experiences, *, options)`, plain or `async`; and a class whose
constructor receives the options and whose `process(experiences)`, plain or `async`, is called for
each explore step, between an optional `prepare()` and `close()`. Either returns `(experiences,
metrics)`, or the experiences alone. No state survives from step to step: a run that resumes from a
checkpoint makes its operators again.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trireme.aio import call_user
from trireme.config.options import checked_value, fitting_options
from trireme.experience import Experience, group_by
from trireme.registry import Registry
from trireme.usercode import UserCode, fault_of, refuse_signature

_BUILT_IN = "trireme.pipeline.operators"
Operated = tuple[list[Experience], dict[str, Any]]
PassRates = dict[int, dict[int, float]]
SELECTOR_METRIC = "selector_metric"
"""The metric with which an operator reports to a data selector: {taskset: {"indices": [rows],
"values": [numbers]}}.
"""


class ExperienceOperator(ABC):
    """An operator in the class form."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> Any:
        """Process all experiences of an explore step; returns those that stay, and metrics."""


class OperatorFailed(RuntimeError):
    """A user's operator raised, or returned experiences that cannot be trained."""


@dataclass(frozen=True)
class Operator:
    """An operator with its options."""

    name: str
    function: Callable[..., Any]
    made: Any = None
    """The instance, if it is a class."""
    changes_reward: bool = False

    async def __call__(self, experiences: Sequence[Experience]) -> Operated:
        """Run the operator on an explore step. Raises OperatorFailed."""
        result = await self._call(self.function, list(experiences))
        kept, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(kept, list) or not all(isinstance(e, Experience) for e in kept):
            raise OperatorFailed(
                f"operator '{self.name}' returned {type(kept).__name__}: expected a list of "
                f"experiences, or (experiences, metrics)"
            )
        self._check_ids(experiences, kept)
        values = {**(metrics or {})}
        rates = values.pop(SELECTOR_METRIC, None)
        numbers: dict[str, Any] = {str(key): float(value) for key, value in values.items()}
        return kept, numbers if rates is None else {**numbers, SELECTOR_METRIC: self._rates(rates)}

    def _rates(self, rates: Any) -> PassRates:
        """The numbers that the operator reports to a selector, by row."""
        try:
            return {
                int(taskset): {
                    int(row): float(value)
                    for row, value in zip(of["indices"], of["values"], strict=True)
                }
                for taskset, of in rates.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OperatorFailed(
                f"operator '{self.name}' returned {rates!r:.80} as {SELECTOR_METRIC}: expected "
                "{taskset_id: {'indices': [...], 'values': [...]}}"
            ) from error

    def refuse_unknown_rows(self, rates: PassRates, sizes: Mapping[int, int]) -> None:
        """Raise OperatorFailed for a row that its taskset does not have; `sizes` are the numbers of
        rows.
        """
        for taskset, rows in rates.items():
            if taskset not in sizes:
                raise OperatorFailed(
                    f"operator '{self.name}' returned the taskset {taskset} in {SELECTOR_METRIC}: "
                    f"expected one of {', '.join(map(str, sizes))} (info['task_index'] of an "
                    "experience has its taskset_id)"
                )
            strange = [row for row in rows if not 0 <= row < sizes[taskset]]
            if strange:
                raise OperatorFailed(
                    f"operator '{self.name}' returned the row {strange[0]} of taskset {taskset} in "
                    f"{SELECTOR_METRIC}: expected rows from 0 to {sizes[taskset] - 1}"
                )

    async def prepare(self) -> None:
        """Prepare once, before the first step."""
        if (function := getattr(self.made, "prepare", None)) is not None:
            await self._call(function)

    async def close(self) -> None:
        """Close once, at the end."""
        if (function := getattr(self.made, "close", None)) is not None:
            await self._call(function)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a user's operator, in a thread if it blocks; its error names the operator."""
        try:
            with UserCode(f"operator '{self.name}'", function):
                return await call_user(function, *args, away=asyncio.to_thread)
        except Exception as error:
            raise OperatorFailed(str(fault_of(error))) from error

    def _check_ids(self, before: Sequence[Experience], after: Sequence[Experience]) -> None:
        """Refuse duplicates, and experiences of other groups."""
        ids = Counter(experience.eid.uid for experience in after)
        twice = [uid for uid, count in ids.items() if count > 1]
        if twice:
            raise OperatorFailed(
                f"operator '{self.name}' returned the experience {twice[0]} twice: a copy needs an "
                f"eid of its own (another suffix, say)"
            )
        strangers = {e.eid.tid for e in after} - {e.eid.tid for e in before}
        if strangers:
            raise OperatorFailed(
                f"operator '{self.name}' returned an experience of the group {min(strangers)}, "
                f"which this explore step does not have"
            )


def make_operator(registry: Registry, name: str, args: Mapping[str, Any], key: str) -> Operator:
    """Make the operator that `name` stands for. Raises ValueError, naming `key`, if that is
    impossible.
    """
    if not name:
        raise ValueError(f"{key}.name is not given: expected an {registry.name}")
    try:
        operator: Any = registry.get(name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if not callable(operator):
        raise ValueError(
            f"{key} '{name}' is {type(operator).__name__}: expected a function or class"
        )
    whose = f"{key} '{name}'"
    if operator is dapo_dynamic_sampling and "std_threshold" in args:
        raise ValueError(
            f"{whose} has no option 'std_threshold': reward_std_filter drops groups by the "
            "standard deviation of their rewards, with the option 'threshold'"
        )
    options = fitting_options(whose, operator, args, first=0 if inspect.isclass(operator) else 1)
    if not inspect.isclass(operator):
        refuse_signature(whose, operator, operator, "(experiences)", **options)
        function = partial(operator, **options) if options else operator
        if operator.__module__ == _BUILT_IN:  # its options are checked first, and nothing else here
            try:
                function([])
            except ValueError as error:
                raise ValueError(f"{whose}: {error}") from error
        return Operator(name, function, None, getattr(operator, "changes_reward", False))
    with UserCode(whose, operator):
        made: Any = operator(**options)
    if not callable(getattr(made, "process", None)):
        raise ValueError(f"{whose}: class {operator.__name__} has no method 'process'")
    refuse_signature(whose, made.process, made.process, "(experiences)")
    return Operator(name, made.process, made)


def changes_reward(function: Any) -> Any:
    """Mark a function that changes rewards, after which an advantage of single rewards is
    impossible.
    """
    function.changes_reward = True
    return function


def reward_filter(experiences: list[Experience], *, threshold: float = 0.0) -> Operated:
    """Keeps experiences with a reward of at least `threshold`."""
    return _keep(experiences, [e for e in experiences if _reward(e) >= threshold])


def invalid_reward_filter(experiences: list[Experience]) -> Operated:
    """Drops experiences without a reward, or whose reward is not finite."""
    kept = [e for e in experiences if e.reward is not None and math.isfinite(e.reward)]
    return _keep(experiences, kept)


def reward_std_filter(experiences: list[Experience], *, threshold: float = 0.0) -> Operated:
    """Drops groups that teach little: those with a population standard deviation of the rewards of
    at most `threshold`, those of one experience, and those with a reward that is not finite.
    """
    kept = set()
    for group, members in group_by(experiences, "task").items():
        rewards = [_reward(e) for e in members]
        finite = all(map(math.isfinite, rewards))
        if len(rewards) > 1 and finite and statistics.pstdev(rewards) > threshold:
            kept.add(group)
    return _keep(experiences, [e for e in experiences if e.eid.tid in kept])


def dapo_dynamic_sampling(
    experiences: list[Experience], *, metric_key: str = "accuracy", correct_threshold: float = 0.0
) -> Operated:
    """Drops groups in which all are right or all are wrong, and those of one experience; the
    trainer waits until others fill its batch (DAPO, arXiv:2503.14476). An experience is right if
    its metric `metric_key`, or its reward where it has none, is above `correct_threshold`.
    Metrics say how many groups of several were all right, and how many all wrong.
    """
    kept = set()
    alike = {True: 0, False: 0}
    for group, members in group_by(experiences, "task").items():
        scores = (e.metrics[metric_key] if metric_key in e.metrics else _reward(e) for e in members)
        verdicts = {score > correct_threshold for score in scores}
        if len(verdicts) == 2:
            kept.add(group)
        elif len(members) > 1:
            alike[verdicts.pop()] += 1
    left, metrics = _keep(experiences, [e for e in experiences if e.eid.tid in kept])
    return left, metrics | {"all_right": float(alike[True]), "all_wrong": float(alike[False])}


def mask_response_truncated(experiences: list[Experience]) -> Operated:
    """Leaves replies that the length cut out of the loss; their rewards still count in the group
    (overlong filtering, arXiv:2503.14476).
    """
    cut = [e for e in experiences if e.truncate_status == "response_truncated"]
    for experience in cut:
        experience.mask = torch.zeros_like(experience.mask)
    return experiences, {"masked": float(len(cut))}


@changes_reward
def reward_shaping_mapper(
    experiences: list[Experience], *, reward_shaping_configs: Sequence[Mapping[str, Any]]
) -> Operated:
    """Reward (ADD, SUB, MUL, DIV) weight * info[stats_key], one configuration after the other."""
    for config in reward_shaping_configs:
        key, op = config.get("stats_key"), str(config.get("op_type", "ADD")).upper()
        if op not in ("ADD", "SUB", "MUL", "DIV"):
            raise ValueError(f"op_type is {op!r}: expected ADD, SUB, MUL or DIV")
        if not isinstance(key, str):
            raise ValueError(f"stats_key is {key!r}: expected the name of a number in `info`")
        weight = checked_value("reward_shaping_configs", "weight", float, config.get("weight", 1.0))
        for experience in experiences:
            _change(experience, _shaped(_reward(experience), op, weight * _stat(experience, key)))
    return experiences, {"reward_mean": _mean(experiences)}


def pass_rate_calculator(experiences: list[Experience]) -> Operated:
    """Report how often each task was solved, for data selectors that learn.

    The pipeline asks `pass_rates` for it; experiences stay as they are.
    """
    rates = [rate for rows in pass_rates(experiences).values() for rate in rows.values()]
    return experiences, {"mean": statistics.fmean(rates)} if rates else {}


def pass_rates(experiences: Sequence[Experience]) -> PassRates:
    """Return taskset -> row -> the mean reward of a task's last steps, clipped to 0 to 1.

    A row of several tasks has their mean; one without a finite reward is left out.
    """
    tried: dict[tuple[int, int], list[float]] = {}
    of_rows = [e for e in experiences if e.info.get("task_index")]
    for members in group_by(of_rows, "task").values():
        runs = group_by(members, "run").values()
        lasts = [max(steps, key=lambda e: e.eid.step) for steps in runs]
        rewards = _finite_rewards(lasts)
        index = members[0].info["task_index"]
        if rewards:
            rate = min(max(statistics.fmean(rewards), 0.0), 1.0)
            tried.setdefault((index["taskset_id"], index["index"]), []).append(rate)
    out: PassRates = {}
    for (taskset, row), rates in tried.items():
        out.setdefault(taskset, {})[row] = statistics.fmean(rates)
    return out


def deduplication(experiences: list[Experience]) -> Operated:
    """Keep the first of the runs of a task whose steps have equal tokens and masks."""
    first: dict[tuple[str, bytes], str] = {}
    for run, steps in group_by(experiences, "run").items():
        parts = [part.numpy().tobytes() for e in steps for part in (e.tokens, e.mask)]
        sizes = b"".join(len(part).to_bytes(8, "big") for part in parts)
        first.setdefault((steps[0].eid.tid, sizes + b"".join(parts)), run)
    kept = set(first.values())
    return _keep(experiences, [e for e in experiences if e.eid.rid in kept])


@changes_reward
def length_penalty(
    experiences: list[Experience],
    *,
    max_length: int,
    cache_length: int,
    penalty_factor: float = 1.0,
) -> Operated:
    """Soft overlong punishment (DAPO, arXiv:2503.14476): 0 up to L - C trained tokens, then
    falling evenly to -penalty_factor at L and beyond (L `max_length`, C `cache_length`).
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length is {cache_length}: expected 1 to max_length ({max_length})")
    penalized = 0
    for experience in experiences:
        over = experience.trained_tokens - (max_length - cache_length)
        if over > 0:
            penalized += 1
            share = min(over / cache_length, 1.0)
            _change(experience, _reward(experience) - penalty_factor * share)
    return experiences, {"penalized": float(penalized)}


def _keep(before: Sequence[Experience], kept: list[Experience]) -> Operated:
    return kept, {"dropped": float(len(before) - len(kept))}


def _reward(experience: Experience) -> float:
    if experience.reward is None:
        raise ValueError(
            f"experience {experience.eid.uid} has no reward: put invalid_reward_filter first, or "
            f"let the workflow set one"
        )
    return experience.reward


def _change(experience: Experience, reward: float) -> None:
    """Set the reward. Where its tokens have rewards, which advantages of tokens take in its place,
    the last trained one changes by as much.
    """
    trained = experience.mask.nonzero()
    if experience.token_rewards is not None and len(trained):
        experience.token_rewards = experience.token_rewards.clone()
        experience.token_rewards[trained[-1]] += reward - _reward(experience)
    experience.reward = reward


def _stat(experience: Experience, key: str) -> float:
    value = experience.info.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        known = sorted(k for k, v in experience.info.items() if isinstance(v, int | float))
        raise ValueError(
            f"experience {experience.eid.uid} has no number '{key}' in its info: "
            f"it has {', '.join(known) or 'none'}"
        )
    return float(value)


def _shaped(reward: float, op: str, value: float) -> float:
    if op == "DIV" and value == 0:
        raise ValueError("a reward would be divided by 0")
    changed = {"ADD": reward + value, "SUB": reward - value, "MUL": reward * value}
    return changed[op] if op in changed else reward / value


def _mean(experiences: Sequence[Experience]) -> float:
    rewards = _finite_rewards(experiences)
    return statistics.fmean(rewards) if rewards else 0.0


def _finite_rewards(experiences: Sequence[Experience]) -> list[float]:
    return [e.reward for e in experiences if e.reward is not None and math.isfinite(e.reward)]
