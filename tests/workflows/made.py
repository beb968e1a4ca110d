"""A taskset of a few rows, examined as before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.data.rows import Rows
from trireme.task import Task
from trireme.workflows.examine import examine_taskset


def examine_rows(
    workflow: str, rows: Sequence[Mapping[str, Any]], args: Mapping[str, Any] | None = None
) -> None:
    """What `trireme check` raises for them."""
    examine_tasks(
        [Task(dict(row), workflow=workflow, workflow_args=dict(args or {})) for row in rows]
    )


def examine_tasks(tasks: Sequence[Task]) -> None:
    """The same for tasks, which are all of the first one's kind."""
    rows = Rows("dataset 'x'", [one.raw_task for one in tasks], ["prompt"])
    taskset: Any = SimpleNamespace(kinds=lambda: [tasks[0]], all=lambda: tasks, rows=rows)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(explorer=SimpleNamespace(auxiliary_models=[]))
    )
    examine_taskset(taskset, plan, get_recipe(AlgorithmConfig()))
