"""Scheduler: decides which task runs next, on which runner, and gathers what a batch came to.

Invariants:
- Order is (explore step, training before evaluation, place in the batch): nothing overtakes.
- A task's repeats may be split over runners; it is complete when all its parts are.
- Every submitted task ends in exactly one Outcome.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from trireme.explorer.runner import Outcome, Runner, batch_order
from trireme.task import Task
from trireme.workflows.workflow import WorkflowSpec, resolve


@dataclass(order=True)
class _Part:
    """Some repeats of a task, waiting for a runner."""

    order: tuple[int, int, str]
    place: int
    task: Task = field(compare=False)
    spec: WorkflowSpec = field(compare=False)
    runs: list[int] = field(compare=False)
    done: asyncio.Future[Outcome] = field(compare=False)


class Scheduler:
    """Runs parts of tasks on a fixed number of runners, one coroutine each."""

    def __init__(self, runners: Sequence[Runner], *, max_repeats_per_runner: int | None) -> None:
        self._runners = list(runners)
        self._max_repeats = max_repeats_per_runner
        self._heap: list[_Part] = []
        self._count = itertools.count()
        self._wake = asyncio.Condition()
        self._workers: list[asyncio.Task[None]] = []
        self._batches: dict[int | str, list[tuple[Task, list[asyncio.Future[Outcome]]]]] = {}

    def start(self) -> None:
        """Begin to take work; once is enough."""
        if self._workers:
            return
        self._workers = [asyncio.create_task(self._work(runner)) for runner in self._runners]

    async def submit(self, batch_id: int | str, tasks: Sequence[Task]) -> None:
        """Queue a batch; does not wait for it."""
        loop = asyncio.get_running_loop()
        batch = self._batches.setdefault(batch_id, [])
        for task in tasks:
            task.batch_id = batch_id
            spec = resolve(task.workflow)
            parts = []
            for runs in split(task.repeat_times, self._max_repeats):
                done: asyncio.Future[Outcome] = loop.create_future()
                part = _Part(batch_order(task), next(self._count), task, spec, runs, done)
                heapq.heappush(self._heap, part)
                parts.append(done)
            batch.append((task, parts))
        async with self._wake:
            self._wake.notify_all()

    async def results(self, batch_id: int | str) -> list[Outcome]:
        """All outcomes of a batch, in the order of its tasks. Each attempt's time-out bounds the
        wait.
        """
        outcomes = []
        for task, parts in self._batches.pop(batch_id):
            outcome = Outcome(task)
            for part in parts:
                outcome.join(await part)
            outcomes.append(outcome)
        return outcomes

    async def close(self) -> None:
        """Cancel what still runs and forget what waits; `start` may follow."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for part in self._heap:
            part.done.cancel()
        self._workers, self._heap, self._batches = [], [], {}

    async def _work(self, runner: Runner) -> None:
        """One runner's life: next part, run it, hand over the outcome."""
        while True:
            async with self._wake:
                while not self._heap:
                    await self._wake.wait()
                part = heapq.heappop(self._heap)
            try:
                outcome = await runner.run(part.task, part.spec, part.runs)
            except asyncio.CancelledError:
                part.done.cancel()
                raise
            except BaseException as error:  # the engine failed: whoever waits for the batch gets it
                if not part.done.done():
                    part.done.set_exception(error)
                    part.done.exception()  # seen: the batch may end by another part's failure
            else:
                if not part.done.done():  # whoever waited may have been cancelled
                    part.done.set_result(outcome)


def split(repeat_times: int, most: int | None) -> list[list[int]]:
    """Run ids 0 .. repeat_times - 1 in parts of at most `most`."""
    size = most or repeat_times
    return [
        list(range(base, min(base + size, repeat_times))) for base in range(0, repeat_times, size)
    ]
