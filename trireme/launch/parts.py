"""Parts: the light parts of one stage, which are made to validate it.

A data set, an algorithm, an operator or a workflow is validated by making it, so that a user's own
has the same checks, step counts and sentences as a built-in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trireme.algorithms.recipes import Recipe
from trireme.config import Findings, Problem
from trireme.config.stages import StageFacts
from trireme.data.rows import NoRows, Rows
from trireme.data.tasksets import Mixture, Taskset
from trireme.usercode import fault_of

T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """The light parts of one stage, and all facts that they give."""

    stage: StageFacts
    recipe: Recipe | None
    """None if it cannot be made."""
    training: Taskset | Mixture | None
    evaluation: tuple[Taskset | None, ...]
    """None for a taskset whose rows are not on this machine."""
    rows: tuple[Rows, ...]
    """The rows that were read, so that a run of this process does not read them again."""


def tried(findings: Findings, make: Callable[[], T], key: str = "") -> T | None:
    """Return what `make` returns; None if it fails, which becomes a problem of the key."""
    try:
        return make()
    except Exception as error:
        fault = fault_of(error)
        if fault is None and not isinstance(error, ValueError | ImportError | OSError):
            raise
        if key and isinstance(error, NoRows):
            findings.problem(f"{key}.path", f"({error.path}) {error.reason}")
        else:
            text = str(fault or error)
            findings.problem(key, f"cannot be used: {text}" if key else text)
        return None


def merge_problems(
    stages: Sequence[StageFacts], problems: Sequence[Sequence[Problem]]
) -> list[Problem]:
    """Merge the problems of all stages; a problem that all stages share is reported once, as
    global.
    """
    out: dict[Problem, None] = {}
    times = Counter(problem for one in problems for problem in {*one})
    for stage, one in zip(stages, problems, strict=True):
        for problem in one:
            of_all = times[problem] == len(stages)
            out[problem if of_all else replace(problem, stage=stage.name)] = None
    return list(out)
