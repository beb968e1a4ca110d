"""Parts: the light parts of one stage, with what they tell of it and what is wrong with it.

A data set, an algorithm, an operator or a workflow is validated by making it, so that a user's own
has the same checks, step counts and sentences as a built-in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trireme.algorithms.recipes import Recipe
from trireme.config import Findings, Problem
from trireme.config.stages import StageFacts
from trireme.data.rows import NoRows, Rows
from trireme.data.tasksets import Mixture, Taskset
from trireme.launch.prompts import Prompts
from trireme.usercode import fault_of

T = TypeVar("T")


@dataclass
class Parts:
    """The light parts of one stage, with the facts that they give and their problems."""

    stage: StageFacts
    findings: Findings = field(default_factory=Findings)
    file_notes: list[str] = field(default_factory=list)
    """Notes on model and data: these lines are shown last."""
    recipe: Recipe | None = None
    training: Taskset | Mixture | None = None
    evaluation: list[Taskset | None] = field(default_factory=list)
    """None for a taskset whose rows are not on this machine."""
    rows: list[Rows] = field(default_factory=list)
    """The rows that were read, so that a run of this process does not read them again."""
    prompts: list[tuple[str, Prompts]] = field(default_factory=list)
    """The encoded prompts by taskset name; empty if there are problems, or if only the workflow
    knows them."""
    unread: str = ""
    """Why no prompt was encoded."""

    def tried(self, make: Callable[[], T], key: str = "") -> T | None:
        """Return what `make` returns; None if it fails, which becomes a problem of the key."""
        try:
            return make()
        except Exception as error:
            fault = fault_of(error)
            if fault is None and not isinstance(error, ValueError | ImportError | OSError):
                raise
            if key and isinstance(error, NoRows):
                self.findings.problem(f"{key}.path", f"({error.path}) {error.reason}")
            else:
                text = str(fault or error)
                self.findings.problem(key, f"cannot be used: {text}" if key else text)
            return None


def problems_of(stages: Sequence[Parts]) -> list[Problem]:
    """Collect every stage's problems; a problem that all stages share is reported once, as
    global.
    """
    out: dict[Problem, None] = {}
    times = Counter(problem for parts in stages for problem in {*parts.findings.problems})
    for parts in stages:
        for problem in parts.findings.problems:
            of_all = times[problem] == len(stages)
            out[problem if of_all else replace(problem, stage=parts.stage.name)] = None
    return list(out)
