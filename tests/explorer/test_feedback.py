"""Feedback: what was solved reaches the selector, and at the same place in every run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.made import taskset_of
from tests.explorer.made import Sync, make_explorer, run
from trireme.data.rows import Rows
from trireme.data.tasksets import Taskset
from trireme.experience import Experience
from trireme.explorer.explorer import explorer_state
from trireme.files import LARGEST
from trireme.model.model import Model
from trireme.task import Task

pytestmark = pytest.mark.extension("curricula")
ROWS = 12


async def solves_every_third(task: Task, model: Model) -> list[Experience]:
    """A workflow that takes its time for some tasks, so that steps end in any order."""
    await model.chat([{"role": "user", "content": "x"}])
    await asyncio.sleep(0.002 * (task.index["index"] % 4))
    return model.experiences(reward=float(task.index["index"] % 3 == 0))


def curriculum() -> Taskset:
    data = [{"prompt": "x", "weak": i / ROWS, "strong": 1.0} for i in range(ROWS)]
    return taskset_of(
        Rows("x", data, data[0]),
        name="x",
        batch_size=3,
        repeat_times=2,
        total_steps=9,
        workflow=solves_every_third,
        selector="difficulty_based",
        feature_keys=["weak", "strong"],
        selector_args={"tau": 0.1, "target_reward": 0.5},
    )


def asked_for(interval: int, state: dict[str, Any] | None = None, stop: int = 9) -> Any:
    """Rows of each step, and the state at every synchronisation and in the middle of windows."""
    states: list[dict[str, Any]] = []
    rows: dict[int, list[int]] = {}

    async def main() -> None:
        sync = Sync(interval=interval)
        made = make_explorer(taskset=curriculum(), sync=sync)
        if state is not None:
            made.explorer.load_state(json.loads(json.dumps(state)))
        inner = made.explorer.scheduler.submit

        async def submit(batch: Any, tasks: Any) -> None:
            rows[batch] = [task.index["index"] for task in tasks]
            await inner(batch, tasks)

        made.explorer.scheduler.submit = submit
        put = made.buffer.put

        async def keep_state(experiences: Any) -> None:
            await put(experiences)
            states.append(made.explorer.state())
            await asyncio.sleep(0)
            states.append(made.explorer.state())
            if experiences[0].eid.batch == stop:
                sync.finished = True

        made.buffer.put = keep_state
        await made.explorer.explore()
        await made.explorer.close()

    run(main())
    return rows, states


def test_a_run_that_goes_on_from_any_moment_asks_for_the_same_tasks() -> None:
    for interval in (1, 3):
        whole, states = asked_for(interval)
        assert len({tuple(rows) for rows in whole.values()}) > 3
        for state in states[:-1:3]:
            resumed, _ = asked_for(interval, state)
            assert resumed == {s: rows for s, rows in whole.items() if s > state["step"]}


def test_what_was_solved_changes_what_is_asked_for() -> None:
    rows, states = asked_for(1)
    alphas = states[-1]["taskset"]["selector"]["alphas"]
    tried = {row for step in list(rows.values())[:-1] for row in step}
    solved = [alphas[row] for row in tried if row % 3 == 0]
    failed = [alphas[row] for row in tried if row % 3]
    assert min(solved) > max(failed)


def test_where_an_explorer_stands_may_be_as_large_as_a_data_set_makes_it(tmp_path: Path) -> None:
    """A selector keeps numbers of each row, and of millions of rows they are what was written."""
    path = tmp_path / "explorer_meta.json"
    state = {"latest_iteration": 3, "taskset_states": [{"current_index": 12}]}
    path.write_text(json.dumps(state) + " " * LARGEST)
    assert explorer_state(path) == {"step": 3, "taskset": {"current_index": 12}}
