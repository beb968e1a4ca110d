"""Scheduler: decides which task runs next, on which runner, and gathers the outcomes of a batch.

Invariants:
- Order is (explore step, training before evaluation, place in the batch): nothing overtakes.
- A task's repeats may be split over runners; it is complete when all its shares are.
- Every submitted task ends in exactly one Outcome, or is counted as dropped: with over-rollout a
  batch does not wait for its slowest tasks, whose rollouts are cancelled.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.aio import LoopWatch
from trireme.explorer.runner import Outcome, Runner, batch_order, judge
from trireme.log import get_logger
from trireme.task import Task
from trireme.workflows.workflow import WorkflowSpec, resolve

logger = get_logger("explorer")
LEAST_BLOCKED_S = 3.0
"""A busy machine may block the event loop for this long."""


@dataclass(order=True)
class _Share:
    """Some repeats of a task, waiting for a runner."""

    order: tuple[int, int, str]
    number: int
    task: Task = field(compare=False)
    spec: WorkflowSpec = field(compare=False)
    runs: list[int] = field(compare=False)
    done: asyncio.Future[Outcome] = field(compare=False)
    running: asyncio.Task[Outcome] | None = field(default=None, compare=False)
    dropped: bool = field(default=False, compare=False)

    def drop(self) -> None:
        """Drop the share: its result is no longer awaited."""
        self.dropped = True
        if self.running is not None:
            self.running.cancel()


@dataclass(frozen=True)
class OverRollout:
    """How a batch ends without waiting for its slowest tasks."""

    ratio: float
    """Share of the tasks that need not be waited for."""
    wait_after_min: float
    """Seconds that the remaining tasks get once all others have ended."""
    keep_partial: bool = False
    """Keep the finished rollouts of an unfinished task."""


class Scheduler:
    """Runs shares of tasks on a fixed number of runners, one coroutine each."""

    def __init__(
        self,
        runners: Sequence[Runner],
        *,
        max_repeats_per_runner: int | None,
        over_rollout: OverRollout | None = None,
        report_interval: float = 0.0,
        further: Callable[[Task], Sequence[Any]] | None = None,
        close_last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`report_interval`: seconds between log lines with the state of each runner; 0: none.

        `further` makes the auxiliary models that judge a task's rollouts. `close_last` releases
        what the rollouts used, once none is left.
        """
        self._runners = list(runners)
        self._max_repeats = max_repeats_per_runner
        self._over = over_rollout
        self._report_interval = report_interval
        self._further = further
        self._close_last = close_last
        self._running: dict[int, tuple[_Share, float]] = {}
        """What each runner has taken, and when."""
        self._barrier = self._runners[0].barrier if self._runners else None
        if self._barrier is not None:
            self._barrier.wait_while(self._begins)
        self.dropped_tasks = 0
        self._closing = False
        self._watch: LoopWatch | None = None
        self._heap: list[_Share] = []
        self._count = itertools.count()
        self._wake = asyncio.Condition()
        self._workers: list[asyncio.Task[None]] = []
        self._batches: dict[int | str, list[tuple[Task, list[_Share]]]] = {}

    def start(self) -> None:
        """Start to take work; further calls do nothing."""
        if self._workers:
            return
        self._watch = LoopWatch(max(self._runners[0].limit.most, LEAST_BLOCKED_S))
        numbered = enumerate(self._runners)
        self._workers = [asyncio.create_task(self._work(i, runner)) for i, runner in numbered]
        if self._report_interval:
            self._workers.append(asyncio.create_task(self._report()))

    async def submit(self, batch_id: int | str, tasks: Sequence[Task]) -> None:
        """Queue a batch without waiting for it."""
        loop = asyncio.get_running_loop()
        batch = self._batches.setdefault(batch_id, [])
        for task in tasks:
            task.batch_id = batch_id
            spec = resolve(task.workflow)
            shares = []
            for runs in split(task.repeat_times, self._max_repeats):
                done: asyncio.Future[Outcome] = loop.create_future()
                share = _Share(batch_order(task), next(self._count), task, spec, runs, done)
                heapq.heappush(self._heap, share)
                shares.append(share)
            batch.append((task, shares))
        async with self._wake:
            self._wake.notify(len(self._heap))

    async def results(self, batch_id: int | str) -> list[Outcome]:
        """Return all outcomes of a batch, in the order of its tasks. Each attempt's time-out bounds
        the wait. With over-rollout the slowest tasks of a training batch may be missing.
        """
        batch = self._batches.pop(batch_id)
        if self._over is not None and not isinstance(batch_id, str):
            await self._enough(batch, self._over)
        outcomes, judging = [], []
        for task, shares in batch:
            ended = [share for share in shares if not share.dropped]
            unfinished = len(ended) < len(shares)
            self.dropped_tasks += unfinished
            if unfinished and not (ended and self._over and self._over.keep_partial):
                continue
            outcome = Outcome(task)
            for share in ended:
                outcome.join(await share.done)
            outcomes.append(outcome)
            if shares and shares[0].spec.judge is not None:
                limit = self._runners[0].limit.most
                models = self._further(task) if self._further else ()
                verdict = judge(outcome, shares[0].spec, limit, models)
                judging.append(asyncio.ensure_future(verdict))
        await asyncio.gather(*judging)
        return outcomes

    async def _enough(self, batch: list[tuple[Task, list[_Share]]], over: OverRollout) -> None:
        """Wait until all tasks have ended, or enough of them and the time of the rest is up; drop
        the rest.
        """
        wanted = math.ceil(len(batch) * (1 - over.ratio))
        tasks = [asyncio.gather(*(p.done for p in shares)) for _, shares in batch if shares]
        for task in tasks:  # a dropped task ends cancelled: its error is not read
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
        waiting = set(tasks)
        while waiting and len(tasks) - len(waiting) < wanted:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises if the engine failed: no task was slow
        if waiting:
            await asyncio.wait(waiting, timeout=over.wait_after_min)
        for _, shares in batch:
            for share in shares:
                if not share.done.done():
                    share.drop()

    async def close(self) -> None:
        """Cancel the running tasks and drop the queue; `start` may follow."""
        self._closing = True
        if self._watch is not None:
            self._watch.stop()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for runner in self._runners:
            runner.log_noted()
        if self._close_last is not None:
            await self._close_last()
        self._closing = False
        for share in self._heap:
            share.done.cancel()
        self._workers, self._heap, self._batches = [], [], {}

    def states(self) -> list[str]:
        """Describe what each runner does: its task and for how long, or idle."""
        now, out = time.monotonic(), []
        for number in range(len(self._runners)):
            text = "idle"
            if (taken := self._running.get(number)) is not None:
                share, began = taken
                text = f"task {share.task.batch_id}/{share.task.task_id}, runs {share.runs}"
                text += f" for {now - began:.0f} s"
            out.append(f"runner {number}: {text}")
        return out

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval)
            logger.info("%d tasks wait\n%s", len(self._heap), "\n".join(self.states()))

    async def _work(self, index: int, runner: Runner) -> None:
        # a rollout that is cancelled while the engine fails raises the engine's error
        while not self._closing:
            async with self._wake:
                while not self._heap:
                    await self._wake.wait()
                share = heapq.heappop(self._heap)
            if share.dropped:
                share.done.cancel()
                continue
            share.running = asyncio.ensure_future(runner.run(share.task, share.spec, share.runs))
            self._running[index] = share, time.monotonic()
            try:
                outcome = await share.running
            except asyncio.CancelledError:
                share.done.cancel()
                if share.dropped and not self._closing:
                    continue
                share.running.cancel()
                raise
            except BaseException as error:  # the engine failed: the batch's waiter raises it
                if not share.done.done():
                    share.done.set_exception(error)
                    share.done.exception()  # read: another share may end the batch
            else:
                if not share.done.done():  # its waiter may have been cancelled
                    share.done.set_result(outcome)
            finally:
                self._running.pop(index, None)
                if self._barrier is not None:
                    self._barrier.wake()

    def _begins(self) -> bool:
        """Return whether a rollout is about to begin: a runner is free for a share that waits, or
        will be without a further reply of the model, or is between the rollouts of what it has
        taken.
        """
        if self._closing or not self._workers:
            return False
        if self._heap and len(self._running) < len(self._runners):
            return True
        taken = ((self._runners[index], share) for index, (share, _) in self._running.items())
        if self._heap:
            return not all(runner.is_trying(share.task, share.runs) for runner, share in taken)
        return not all(runner.has_begun(share.task, share.runs) for runner, share in taken)


def split(repeat_times: int, most: int | None) -> list[list[int]]:
    """Split run ids 0 .. repeat_times - 1 into shares of at most `most`."""
    size = most or repeat_times
    return [
        list(range(base, min(base + size, repeat_times))) for base in range(0, repeat_times, size)
    ]
