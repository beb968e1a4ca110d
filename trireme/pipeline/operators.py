"""Operators: the built-in steps of the experience pipeline, functions as users write theirs.

Each takes all experiences of an explore step and returns those that stay, with metrics.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.config.options import checked_value
from trireme.experience import Experience, group_by
from trireme.pipeline.operator import Operated

PassRates = dict[int, dict[int, float]]


def reward_filter(experiences: list[Experience], *, threshold: float = 0.0) -> Operated:
    """Keeps experiences with a reward of at least `threshold`."""
    return _keep(experiences, [e for e in experiences if _reward(e) >= threshold])


def invalid_reward_filter(experiences: list[Experience]) -> Operated:
    """Drops experiences without a reward, or whose reward is no finite number."""
    kept = [e for e in experiences if e.reward is not None and math.isfinite(e.reward)]
    return _keep(experiences, kept)


def reward_std_filter(experiences: list[Experience], *, threshold: float = 0.0) -> Operated:
    """Drops groups that teach little: those with a population standard deviation of the rewards of
    at most `threshold`, and those of one experience.
    """
    kept = set()
    for group, members in group_by(experiences, "task").items():
        rewards = [_reward(e) for e in members]
        if len(rewards) > 1 and statistics.pstdev(rewards) > threshold:
            kept.add(group)
    return _keep(experiences, [e for e in experiences if e.eid.tid in kept])


def reward_shaping_mapper(
    experiences: list[Experience], *, reward_shaping_configs: Sequence[Mapping[str, Any]]
) -> Operated:
    """Reward (ADD, SUB, MUL, DIV) weight * info[stats_key], one configuration after the other."""
    for config in reward_shaping_configs:
        key, op = config.get("stats_key"), str(config.get("op_type")).upper()
        if op not in ("ADD", "SUB", "MUL", "DIV"):
            raise ValueError(f"op_type is {op!r}: expected ADD, SUB, MUL or DIV")
        if not isinstance(key, str):
            raise ValueError(f"stats_key is {key!r}: expected the name of a number in `info`")
        weight = checked_value("reward_shaping_configs", "weight", float, config.get("weight", 1.0))
        for experience in experiences:
            experience.reward = _shaped(_reward(experience), op, weight * _stat(experience, key))
    return experiences, {"reward_mean": _mean(experiences)}


def pass_rate_calculator(experiences: list[Experience]) -> Operated:
    """How often each task was solved: what a data selector that learns is told.

    The pipeline asks `pass_rates` for it; experiences stay as they are.
    """
    rates = [rate for rows in pass_rates(experiences).values() for rate in rows.values()]
    return experiences, {"mean": statistics.fmean(rates)} if rates else {}


def pass_rates(experiences: Sequence[Experience]) -> PassRates:
    """Taskset -> row -> the mean reward of its runs' last steps, clipped to 0 to 1."""
    found: dict[tuple[int, int], list[float]] = {}
    for steps in group_by(experiences, "run").values():
        last = max(steps, key=lambda e: e.eid.step)
        index = last.info.get("task_index") or {}
        if last.reward is not None and "taskset_id" in index:
            found.setdefault((index["taskset_id"], index["index"]), []).append(last.reward)
    out: PassRates = {}
    for (taskset, row), rewards in found.items():
        out.setdefault(taskset, {})[row] = min(max(statistics.fmean(rewards), 0.0), 1.0)
    return out


def deduplication(experiences: list[Experience]) -> Operated:
    """Of the runs of a task whose steps have equal tokens and masks, keeps the first."""
    first: dict[tuple[str, bytes], str] = {}
    for run, steps in group_by(experiences, "run").items():
        parts = [part.numpy().tobytes() for e in steps for part in (e.tokens, e.mask)]
        sizes = b"".join(len(part).to_bytes(8, "big") for part in parts)
        first.setdefault((steps[0].eid.tid, sizes + b"".join(parts)), run)
    kept = set(first.values())
    return _keep(experiences, [e for e in experiences if e.eid.rid in kept])


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
        over = int(experience.mask.sum()) - (max_length - cache_length)
        if over > 0:
            penalized += 1
            share = min(over / cache_length, 1.0)
            experience.reward = _reward(experience) - penalty_factor * share
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
    rewards = [e.reward for e in experiences if e.reward is not None]
    return statistics.fmean(rewards) if rewards else 0.0
