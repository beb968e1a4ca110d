"""Runner and Scheduler: what a workflow does wrong is data, counted, and never stops the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trireme.engines.engine import Sampling
from trireme.engines.scripted import ScriptedEngine
from trireme.experience import EID, Experience
from trireme.explorer.runner import Outcome, Runner
from trireme.explorer.scheduler import Scheduler, split
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model, Revoked
from trireme.task import Task


def explore(folder: Path, tasks: list[Task], **options: Any) -> list[Outcome]:
    """Outcomes of a batch on two runners and an engine that says `yes`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = ChatTokens(tokenizer)

    async def main() -> list[Outcome]:
        engine = ScriptedEngine(lambda prompt: "yes", tokenizer=tokenizer)

        def make_model(task: Task, key: Any) -> Model:
            return Model(engine, chat, key=key, sampling=Sampling(), max_model_len=200)

        settings = {"max_timeout": 0.3, "max_retries": 1} | options
        most = settings.pop("max_repeats_per_runner", None)
        runners = [Runner(make_model, engine, index=i, **settings) for i in range(2)]
        scheduler = Scheduler(runners, max_repeats_per_runner=most)
        scheduler.start()
        await scheduler.submit(1, tasks)
        outcomes = await scheduler.results(1)
        await scheduler.close()
        return outcomes

    return asyncio.run(main())


async def good(task: Task, model: Model) -> list[Experience]:
    await model.chat([{"role": "user", "content": "well?"}])
    return model.experiences(reward=1.0)


def make(workflow: Callable[..., Any], place: int = 0, repeat_times: int = 1) -> Task:
    return Task(workflow=workflow, task_id=place, repeat_times=repeat_times)


def test_a_workflow_that_raises_is_retried_counted_and_leaves_the_others_alone(
    tiny_dir: Path,
) -> None:
    tries = []

    async def bad(task: Task, model: Model) -> list[Experience]:
        tries.append(1)
        raise KeyError("oops")

    first, second = explore(tiny_dir, [make(bad), make(good, 1)])
    assert len(tries) == 2 and first.experiences == []
    [failed] = first.failures
    assert failed.kind == "error" and "KeyError: 'oops'" in failed.message
    assert 'raise KeyError("oops")' in failed.trace
    assert [e.reward for e in second.experiences] == [1.0]


def test_one_that_hangs_is_cut_off_whether_it_awaits_or_blocks(tiny_dir: Path) -> None:
    released, late = threading.Event(), []

    async def sleeps(task: Task, model: Model) -> list[Experience]:
        await asyncio.sleep(60)
        return []

    def blocks(task: Task, model: Any) -> list[Experience]:
        released.wait(20)
        try:
            model.chat([{"role": "user", "content": "well?"}])
        except Revoked as error:
            late.append(error)
        return []

    started = time.monotonic()
    tasks = [make(sleeps), make(blocks, 1), make(good, 2)]
    first, second, third = explore(tiny_dir, tasks, max_retries=0)
    assert time.monotonic() - started < 10
    assert [o.failures[0].kind for o in (first, second)] == ["timeout", "timeout"]
    assert "longer than explorer.max_timeout (0.3 s)" in first.failures[0].message
    assert len(third.experiences) == 1
    released.set()


def test_nothing_and_the_wrong_thing_are_told_apart(tiny_dir: Path) -> None:
    async def nothing(task: Task, model: Model) -> list[Experience]:
        return []

    async def wrong(task: Task, model: Model) -> Any:
        return {"reward": 1}

    first, second = explore(tiny_dir, [make(nothing), make(wrong, 1)])
    assert first.failures[0].kind == "empty"
    assert second.failures[0].kind == "error"
    assert "expected a list of Experience" in second.failures[0].message


@pytest.mark.parametrize("most", [None, 2])
def test_n_rollouts_are_n_run_ids_however_they_are_split(tiny_dir: Path, most: int | None) -> None:
    [outcome] = explore(tiny_dir, [make(good, repeat_times=5)], max_repeats_per_runner=most)
    assert [e.eid for e in outcome.experiences] == [EID(1, 0, run) for run in range(5)]


def test_the_steps_of_a_run_are_numbered(tiny_dir: Path) -> None:
    async def steps(task: Task, model: Model) -> list[Experience]:
        for _ in range(3):
            await model.chat([{"role": "user", "content": "again"}])
        return model.experiences(reward=[0.0, 0.5, 1.0])

    [outcome] = explore(tiny_dir, [make(steps, repeat_times=2)])
    found = [(e.eid.run, e.eid.step, e.reward) for e in outcome.experiences]
    assert found == [(r, s, s / 2) for r in range(2) for s in range(3)]


def test_repeats_are_split_into_parts_of_at_most_so_many() -> None:
    assert split(5, 2) == [[0, 1], [2, 3], [4]]
    assert split(3, None) == [[0, 1, 2]]
