"""Calling a user's code: plain, `async def`, a partial, an object, here or in a thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme import aio
from trireme.aio import (
    CancelledElsewhere,
    LoopWatch,
    OutOfTime,
    OwnThread,
    at_once,
    call_user,
    ended,
    first_failure,
    in_time,
    is_async,
    one_by_one,
    running,
)
from trireme.rewards.reward import score
from trireme.task import Task
from trireme.usercode import UserCode


async def waits(value: int) -> int:
    await asyncio.sleep(0)
    return value


def plain(value: int) -> int:
    return value


class Waiting:
    async def __call__(self, value: int) -> int:
        return await waits(value)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(waits, True), (partial(waits, 1), True), (Waiting(), True), (partial(Waiting()), True),
     (plain, False), (partial(plain, 1), False), (lambda value: waits(value), False),
     (Waiting, False), (None, False)],
)  # fmt: skip
def test_what_gives_a_coroutine_is_known_before_it_is_called(function: Any, expected: bool) -> None:
    assert is_async(function) == expected


@pytest.mark.parametrize("function", [waits, plain, Waiting(), lambda value: waits(value)])
def test_every_form_gives_its_value(function: Any) -> None:
    async def both() -> tuple[int, int]:
        thread = OwnThread("own")
        here, away = await call_user(function, 3), await call_user(function, 3, away=thread.run)
        thread.close()
        return here, away

    assert asyncio.run(both()) == (3, 3)


def test_only_what_is_plain_leaves_the_event_loop() -> None:
    async def where() -> int:
        return threading.get_ident()

    async def both() -> tuple[int, int]:
        thread = OwnThread("own")
        found = await asyncio.gather(
            call_user(threading.get_ident, away=thread.run), call_user(where, away=thread.run)
        )
        thread.close()
        return found[0], found[1]

    away, here = asyncio.run(both())
    assert here == threading.get_ident() != away


def test_a_coroutine_that_waits_for_nothing_needs_no_event_loop() -> None:
    async def steps(function: Any) -> int:
        return await call_user(function, 1) + await call_user(function, 2)

    assert at_once(steps(plain)) == 3
    with pytest.raises(RuntimeError, match="make it `async def`"):
        at_once(steps(waits))


def test_nothing_one_by_one_gives_nothing() -> None:
    """A client sends an empty list to a server for which it has no request."""
    assert asyncio.run(one_by_one([])) == []


def test_what_begins_one_by_one_lets_others_in_between_and_ends_at_the_first_failure() -> None:
    seen: list[str] = []

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    async def work(name: str, wait: float = 0.0) -> str:
        seen.append(name)
        await asyncio.sleep(wait)
        if name == "bad":
            raise ValueError(name)
        return name

    async def main() -> None:
        async with running(other()):
            assert await one_by_one(work(name) for name in "abc") == ["a", "b", "c"]
            begun = [seen.index(name) for name in "abc"]
            assert all("other" in seen[x:y] for x, y in itertools.pairwise(begun))
            tasks = asyncio.all_tasks()
            with pytest.raises(ValueError, match="bad"):
                await one_by_one(work(name, wait) for name, wait in (("d", HANG_S), ("bad", 0.0)))
            assert asyncio.all_tasks() == tasks, "the others were cancelled, and have ended"

    asyncio.run(main())


def test_a_part_that_other_code_cancels_ends_all() -> None:
    """The others were awaited to their ends, of which a run's other side has none without it."""

    async def main() -> None:
        cancelled = asyncio.ensure_future(asyncio.sleep(HANG_S))
        asyncio.get_running_loop().call_later(0.05, cancelled.cancel)
        with pytest.raises(CancelledElsewhere, match="a part of the run was cancelled by other"):
            await first_failure(asyncio.sleep(HANG_S), cancelled)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_ends_with_its_future_and_leaves_result_and_error_in_it(fails: bool) -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("bad")
        return "good"

    async def main() -> None:
        task = asyncio.create_task(work())
        await ended(task, HANG_S)
        assert task.done()
        await ended(task, HANG_S)  # at once
        if fails:
            with pytest.raises(ValueError, match="bad"):
                task.result()
        else:
            assert task.result() == "good"

    asyncio.run(main())


def test_a_wait_that_is_over_or_cancelled_does_not_end_its_future() -> None:
    async def main() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await ended(future, 0.01)
        assert not future.done()
        waiting = asyncio.create_task(ended(future, HANG_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() and not future.done()
        future.set_result(None)  # nobody is woken by it any more
        await asyncio.sleep(0)

    asyncio.run(main())


def test_only_the_end_of_its_time_is_out_of_time() -> None:
    async def late() -> None:
        raise TimeoutError("mine")

    async def inner() -> None:
        await in_time(asyncio.sleep(HANG_S), 0.01)

    async def main() -> None:
        assert await in_time(asyncio.sleep(0, "done"), None) == "done"
        with pytest.raises(TimeoutError, match="mine") as raised:
            await in_time(late(), HANG_S)
        assert not isinstance(raised.value, OutOfTime)
        with pytest.raises(OutOfTime):
            await in_time(inner(), HANG_S)
        with pytest.raises(OutOfTime):
            await in_time(asyncio.sleep(HANG_S), 0.01)

    asyncio.run(main())


def test_short_calls_that_take_half_of_the_event_loops_time_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None of them is long enough to block it, and a step took minutes without a word."""
    monkeypatch.setattr(aio, "LOOK_S", 0.02)
    monkeypatch.setattr(aio, "SHARE_S", 0.4)

    def slow(task: Task, answer: str) -> float:
        time.sleep(float(answer))
        return 1.0

    async def main(busy: float, idle: float, until: Callable[[], Any]) -> None:
        watch, begun = LoopWatch(HANG_S), time.monotonic()
        while not until() and time.monotonic() - begun < HANG_S:
            await score(Task(raw_task={}), f"{busy}", slow)
            await asyncio.sleep(idle)
        watch.stop()

    calls = itertools.count()
    asyncio.run(main(0.001, 0.06, lambda: next(calls) == 20))
    assert not caplog.records
    asyncio.run(main(0.06, 0.001, lambda: caplog.records))
    [text] = [record.getMessage() for record in caplog.records]
    assert text.startswith("reward 'slow' has run on the event loop for half of 0.4 s, and every")
    assert "waits meanwhile: make it `async def`" in text and "time.sleep(float(answer))" in text


WAITS = "`await asyncio.sleep(...)` or `await asyncio.to_thread(...)` there"


@pytest.mark.parametrize(
    ("what", "code", "advice"),
    [
        ("workflow 'slow'", waits, f"use {WAITS}, or make it a plain `def`"),
        ("reward 'slow'", waits, f"use {WAITS}"),
        ("reward 'slow'", plain, f"make it `async def`, and use {WAITS}"),
    ],
)
def test_who_blocks_the_event_loop_reads_what_helps(what: str, code: Any, advice: str) -> None:
    """A plain reward was advised to be plain, and it runs on the event loop as well."""

    async def main() -> str:
        watch = LoopWatch(None)
        watch.stop()
        return watch._blocking(UserCode(what, code), 3)

    assert asyncio.run(main()).endswith(f"rollout waits for it: {advice}")
