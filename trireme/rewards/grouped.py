"""Grouped: gives the rollouts of a task their rewards together, where a YAML asks for that.

It does where the reward is one of whole groups, and where there are several: a list in place of
`default_reward_fn_type`'s name (each a name, or a mapping of `name`, `weight` and options), or
`reward_fn_args` with `funcs` and `weights`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.experience import Experience
from trireme.rewards.orm import Judge, Row, of_groups
from trireme.task import Task


def is_grouped(reward: Any, args: Mapping[str, Any]) -> bool:
    """Whether a task's reward is given to all its rollouts together."""
    several = isinstance(reward, list | tuple) or "funcs" in args
    return several or (reward is not None and of_groups(reward))


def judge_of(reward: Any, args: Mapping[str, Any]) -> Judge:
    """The reward functions of a task; an environment's own reward needs none.

    Raises ValueError for an unknown reward, option or weight.
    """
    if "funcs" in args:
        unknown = sorted(set(args) - {"funcs", "weights"})
        if unknown:
            raise ValueError(f"reward_fn_args has '{unknown[0]}': expected funcs and weights")
        funcs = [args["funcs"]] if isinstance(args["funcs"], str) else args["funcs"]
        return Judge.of(funcs, args.get("weights"))
    if isinstance(reward, list | tuple):
        if args:
            raise ValueError(
                f"reward_fn_args are {dict(args)}: of several rewards each has its own options in "
                "its entry of default_reward_fn_type"
            )
        return Judge.of(reward)
    return Judge.of([{"name": reward, **args}] if reward else [])


class Judges:
    """Makes each Judge once: what it holds open (a model's connections) is one event loop's."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Judge] = {}

    def of(self, task: Task, default: Any = None) -> Judge:
        """That of a task; `default` is the reward of tasks that name none."""
        reward = task.reward_fn or default
        key = id(asyncio.get_running_loop()), f"{reward} {task.reward_fn_args}"
        if key not in self._made:
            self._made[key] = judge_of(reward, task.reward_fn_args)
        return self._made[key]


async def reward_group(
    judge: Judge, task: Task, experiences: Sequence[Experience], models: Sequence[Any]
) -> None:
    """Set the rewards of all rollouts of a task, and their parts in the metrics."""
    trajectories: dict[Any, list[Experience]] = {}
    for experience in sorted(experiences, key=lambda e: (e.eid.run, e.eid.step)):
        name = experience.eid.run, experience.info.get("request_id")
        trajectories.setdefault(name, []).append(experience)
    rows = [_as_row(own) for own in trajectories.values()]
    rewards, parts = await judge.rewards(task, rows, models)
    for own, reward, found in zip(trajectories.values(), rewards, parts, strict=True):
        for experience in own:
            # a prompt that was too long keeps its reward of 0
            experience.reward = reward if experience.reward is None else experience.reward
            experience.metrics.update(found)


def _as_row(own: Sequence[Experience]) -> Row:
    """A trajectory as the rewards see it: its last dialogue, and all that it sampled."""
    last = own[-1]
    sampled = [
        token for e in own if e.versions is not None for token in e.tokens[e.versions >= 0].tolist()
    ]
    said = last.info.get("completion", last.response_text)
    return Row(
        completion=str(said or ""),
        messages=list(last.messages or []),
        is_truncated=last.truncate_status is not None,
        infos=dict(last.info.get("rollout_infos") or {}),
        tokens=sampled,
        request_id=str(last.info.get("request_id", "")),
        parts=[{"messages": e.messages, "completion": e.info.get("completion")} for e in own],
    )
