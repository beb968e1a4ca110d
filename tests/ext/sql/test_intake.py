"""Intake: a commit's experiences are in the store when it is answered, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme.checkpoint.layout import JobFolder
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import EID, Experience
from trireme.ext.http.serving import Intake
from trireme.ext.sql.buffer import SqlBuffer
from trireme.monitor.events import Event, StepDone
from trireme.pipeline.pipeline import Pipeline
from trireme.registry import ALGORITHMS


def group(task: str, rewards: Sequence[float]) -> list[Experience]:
    return [
        Experience(
            [1, 2, 3],
            prompt_length=1,
            logprobs=[-0.5, -0.5],
            versions=[0, 0],
            reward=reward,
            eid=EID(task=task, run=run),
        )
        for run, reward in enumerate(rewards)
    ]


def store(folder: Path, role: Any = "explore") -> SqlBuffer:
    section = ExperienceBufferConfig(max_read_timeout=HANG_S)
    return SqlBuffer("shared", f"sqlite:///{folder}/shared.db", section, role=role)


def intake(folder: Path, buffer: Any, reports: list[Any] | None = None) -> Intake:
    sync: Any = SimpleNamespace(metrics=lambda: {"sync/version": 3})
    told = [] if reports is None else reports

    def emit(event: Event) -> None:
        assert isinstance(event, StepDone)
        told.append((event.part, event.step, event.metrics))

    return Intake(
        pipeline=Pipeline(ALGORITHMS.get("grpo")),
        buffer=buffer,
        sync=sync,
        folder=JobFolder(folder),
        emit=emit,
        dropped=lambda: 2,
    )


def test_a_commit_is_stored_with_advantages_under_a_number_that_goes_on(tmp_path: Path) -> None:
    async def main() -> list[Experience]:
        for _ in range(2):  # the second is a server that was started again
            buffer = store(tmp_path)
            await intake(tmp_path, buffer, reports).ship(group("a", [0, 1]) + group("b", [1, 1]))
            assert len(buffer) == 4 * (1 + len(reports) // 2)
        return await store(tmp_path, "train").take(8)

    reports: list[Any] = []
    taken = asyncio.run(main())
    assert [e.eid.uid for e in taken] == [
        f"{commit}/{task}/{run}/0" for commit in (1, 2) for task in "ab" for run in range(2)
    ]
    signs = [float(e.advantages[-1]) for e in taken if e.advantages is not None]
    assert signs[0] < 0 < signs[1] and signs[2:4] == [0, 0]
    part, step, metrics = reports[-1]
    assert (part, step, metrics["rollout/reward/mean"]) == ("explorer", 2, 0.75)
    assert (metrics["rollout/tasks"], metrics["rollout/experiences"]) == (2, 4)
    assert (metrics["rollout/dropped_sessions"], metrics["sync/version"]) == (2, 3)


class Failing:
    """A store that fails first, and then is as it should be."""

    def __init__(self, inner: SqlBuffer) -> None:
        self.inner = inner
        self.gate = asyncio.Event()
        self.fails = True

    async def put(self, experiences: list[Experience]) -> None:
        await self.gate.wait()
        if self.fails:
            self.fails = False
            raise TimeoutError("full")
        await self.inner.put(experiences)


def test_what_could_not_be_stored_is_stored_by_the_next_commit(tmp_path: Path) -> None:
    async def main() -> None:
        buffer = Failing(store(tmp_path))
        buffer.gate.set()
        server = intake(tmp_path, buffer)
        with pytest.raises(TimeoutError):
            await server.ship(group("a", [0, 1]))
        assert server.unstored == 2
        await server.ship([])
        assert (len(buffer.inner), server.unstored) == (2, 0)

    asyncio.run(main())


class Once:
    """An operator that fails in the middle of its first run."""

    name = "once"
    runs = 0

    async def prepare(self) -> None: ...
    async def __call__(
        self, experiences: list[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        for e in experiences:
            e.reward = (e.reward or 0.0) + 1.0
            e.info["seen"] = e.info.get("seen", 0) + 1
            self.runs += 1
            if self.runs == 1:
                raise ConnectionError("the judge does not answer")
        return experiences, {}


def test_what_the_pipeline_failed_on_goes_through_it_again_at_the_next_commit(
    tmp_path: Path,
) -> None:
    async def main() -> list[Experience]:
        buffer: Any = store(tmp_path)
        server, once = intake(tmp_path, buffer), Once()
        server.pipeline.operators = (once,)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ConnectionError):
            await server.ship(group("a", [0, 1]))
        assert (len(buffer), server.unstored) == (0, 2)
        await server.ship(group("b", [0, 1]))
        assert (len(buffer), server.unstored) == (4, 0)
        return await store(tmp_path, "train").take(4)

    taken = asyncio.run(main())
    assert [(e.eid.uid, e.reward, e.info["seen"]) for e in taken] == [
        (f"{commit}/{commit_task}/{run}/0", run + 1.0, 1)
        for commit, commit_task in ((1, "a"), (2, "b"))
        for run in range(2)
    ]


def test_a_repeated_commit_waits_for_the_first_and_a_caller_that_goes_loses_nothing(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        buffer = Failing(store(tmp_path))
        buffer.fails = False
        server = intake(tmp_path, buffer)
        first = asyncio.ensure_future(server.ship(group("a", [0, 1])))
        await asyncio.sleep(0.01)
        first.cancel()
        again = asyncio.ensure_future(server.ship([]))
        await asyncio.sleep(0.01)
        assert not again.done()
        buffer.gate.set()
        await again
        assert len(buffer.inner) == 2

    asyncio.run(main())


def test_a_commit_after_the_trainers_end_is_refused_in_a_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        buffer = store(tmp_path)
        await store(tmp_path, "train").close()
        with pytest.raises(RuntimeError, match="trainer has ended: the 2 experiences of commit 1"):
            await intake(tmp_path, buffer).ship(group("a", [0, 1]))

    asyncio.run(main())
