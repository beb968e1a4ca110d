"""Feedback: what was solved reaches the selector, and at the same place in every run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.data.made import taskset_of
from tests.explorer.made import Sync, make_explorer, run
from trireme.data.rows import Rows
from trireme.data.tasksets import PassRates, Taskset
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


class Hears:
    """A selector in file order, which counts the pass rates that it is told."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.place, self.heard = rows, 0, 0

    def select(self, count: int) -> list[int]:
        first, self.place = self.place, self.place + count
        return [row % self.rows for row in range(first, self.place)]

    def feedback(self, pass_rates: Mapping[int, float]) -> None:
        self.heard += len(pass_rates)

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "heard": self.heard}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.place, self.heard = state["place"], state["heard"]


def curriculum(selector: str = "difficulty_based", **options: Any) -> Taskset:
    data = [{"prompt": "x", "weak": i / ROWS, "strong": 1.0} for i in range(ROWS)]
    if selector == "difficulty_based":
        options["feature_keys"] = ["weak", "strong"]
        options["selector_args"] = {"tau": 0.1, "target_reward": 0.5}
    return taskset_of(
        Rows("x", data, data[0]),
        name="x",
        batch_size=3,
        repeat_times=2,
        total_steps=9,
        workflow=solves_every_third,
        selector=selector,
        **options,
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


def heard(sync: Sync, spoil: bool = False) -> list[PassRates]:
    """What the selector is told in a run."""
    told: list[PassRates] = []

    async def main() -> None:
        taskset = curriculum()
        made = make_explorer(taskset=taskset, sync=sync, max_pending=2)
        inner, through = taskset.feedback, made.explorer.pipeline.run

        def learns(rates: PassRates) -> None:
            told.append(rates)
            inner(rates)

        taskset.feedback = learns

        async def spoiled(experiences: Any, **options: Any) -> Any:
            for e in experiences:
                e.reward -= 1.0
            return await through(experiences, **options)

        if spoil:
            made.explorer.pipeline.run = spoiled
        await made.explorer.explore()
        await made.explorer.close()

    run(main())
    return told


def test_a_selector_learns_where_the_trainer_pushes_by_itself_too() -> None:
    rates = heard(Sync(pushes_by_itself=True))
    assert {rate for one in rates for rows in one.values() for rate in rows.values()} == {0.0, 1.0}


def test_a_selector_learns_the_workflows_rewards_and_not_what_operators_made_of_them() -> None:
    assert heard(Sync(), spoil=True) == heard(Sync())


def went_on(state: dict[str, Any] | None = None) -> tuple[int, list[dict[str, Any]]]:
    """How many pass rates a run whose trainer pushes by itself has at its end, in the selector or
    on the way there; its states in between.
    """
    states: list[dict[str, Any]] = []

    async def main() -> dict[str, Any]:
        sync = Sync(pushes_by_itself=True)
        made = make_explorer(taskset=curriculum(f"{__name__}:Hears"), sync=sync, max_pending=3)
        explorer, put, submit = made.explorer, made.buffer.put, made.explorer.scheduler.submit
        if state is not None:
            explorer.load_state(json.loads(json.dumps(state)))

        async def keep_after_put(experiences: Any) -> None:
            await put(experiences)
            states.append(explorer.state(putting=True))

        async def keep_after_draw(*args: Any) -> None:
            await submit(*args)
            states.append(explorer.state())

        made.buffer.put, explorer.scheduler.submit = keep_after_put, keep_after_draw
        await explorer.explore()
        await explorer.close()
        return explorer.state()

    end = run(main())
    return end["taskset"]["selector"]["heard"] + len(end["feedback"]["rates"]), states


def test_a_resume_amid_running_steps_loses_no_pass_rate() -> None:
    rates, states = went_on()
    assert rates == 27 and len(states) == 18
    assert {went_on(state)[0] for state in states} == {27}
