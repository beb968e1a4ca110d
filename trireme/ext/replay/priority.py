"""Priority: the order in which a replay uses experiences again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

from annotated_types import Ge

from trireme.config import Problem
from trireme.config.options import accepted, fitting_options
from trireme.config.schema_rollout import ReplayBufferConfig

Priority = Callable[[int, int, str], tuple[float, bool]]
"""Maps `(version, use_count, group's id)` to the priority, and whether the group may return after
this use. It depends only on these: a resume computes it again."""

AtLeast0 = Annotated[float, Ge(0)]


def linear_decay(*, decay: AtLeast0 = 2.0) -> Priority:
    """Return version - decay * use_count: the newest first, each use costs as much as `decay`
    versions.
    """
    return lambda version, used, _: (version - decay * used, True)


def decay_limit_randomization(
    *,
    decay: AtLeast0 = 2.0,
    use_count_limit: Annotated[int, Ge(0)] = 3,
    sigma: AtLeast0 = 0.0,
    seed: int = 0,
) -> Priority:
    """Return `linear_decay` plus N(0, sigma); at most `use_count_limit` uses (0: any number)."""

    def priority(version: int, used: int, group: str) -> tuple[float, bool]:
        noise = random.Random(f"{seed}/{group}/{used}").gauss(0.0, sigma) if sigma else 0.0
        return version - decay * used + noise, use_count_limit <= 0 or used < use_count_limit

    return priority


PRIORITIES: Mapping[str, Callable[..., Priority]] = {
    "linear_decay": linear_decay,
    "decay_limit_randomization": decay_limit_randomization,
}


def make_priority(replay: ReplayBufferConfig, seed: int) -> Priority:
    """Return the priority of a replay. Raises ValueError for an option that it does not have."""
    make = PRIORITIES[replay.priority_fn]
    whose = f"priority_fn '{replay.priority_fn}'"
    options = fitting_options(whose, make, replay.priority_fn_args, given=("seed",))
    return make(**options, **accepted(make, {"seed": seed}))


def priority_problems(replay: ReplayBufferConfig, key: str, seed: int) -> Iterable[Problem]:
    """Yield an unknown option of a replay's priority as a problem of the section `key`."""
    try:
        make_priority(replay, seed)
    except ValueError as error:
        yield Problem(f"{key}.replay_buffer", f"cannot be used: {error}")
