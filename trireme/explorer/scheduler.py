"""Scheduler: decides which task runs next, on which runner, and gathers the outcomes of a batch.

Invariants:
- Order is (explore step, training before evaluation, place in the batch): nothing overtakes.
- A task's repeats may be split over runners; it is complete when all its shares are.
- A share whose rollouts have their last replies gives its runner to the next: how long rewards take
  decides nothing, so that they may run while the engine computes (barrier.py).
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
from functools import partial
from typing import Any

from trireme.aio import LoopWatch
from trireme.explorer.runner import BatchOrder, Outcome, Runner, batch_order, judge
from trireme.log import get_logger
from trireme.task import Task
from trireme.workflows.workflow import WorkflowSpec, resolve

logger = get_logger("explorer")
LEAST_BLOCKED_S = 3.0
"""A busy machine may block the event loop for this long."""


@dataclass(order=True)
class _Share:
    """Some repeats of a task, waiting for a runner."""

    order: BatchOrder
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
class _Place:
    """What a runner has taken, and when."""

    share: _Share
    began: float
    free: asyncio.Future[None]
    """Done when the runner may take the next."""


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
        num_explore_steps: int | None = None,
    ) -> None:
        """`report_interval`: seconds between log lines with the state of each runner; 0: none.

        `further` makes the auxiliary models that judge a task's rollouts. `close_last` releases
        what the rollouts used, once none is left. Each task gets `num_explore_steps`.
        """
        self._runners = list(runners)
        self._max_repeats = max_repeats_per_runner
        self._over = over_rollout
        self._report_interval = report_interval
        self._further = further
        self._close_last = close_last
        self._num_steps = num_explore_steps
        self._places: dict[int, _Place] = {}
        """By the runner's number."""
        self._running: set[asyncio.Task[Outcome]] = set()
        """The shares that have not ended; some have left their places."""
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
            task.batch_id, task.num_explore_steps = batch_id, self._num_steps
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
        # decimal fractions: 0.7 of 10 tasks are 7, and not a little less
        wanted = len(batch) - math.floor(round(len(batch) * over.ratio, 9))
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
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._workers, *self._running, return_exceptions=True)
        for runner in self._runners:
            runner.log_noted()
        if self._close_last is not None:
            await self._close_last()
        self._closing = False
        for share in self._heap:
            share.done.cancel()
        self._workers, self._heap, self._batches = [], [], {}

    @property
    def engine_wait(self) -> float | None:
        """Return the seconds so far in which the engine waited for rollouts' own code; None if it
        waits for none.
        """
        return None if self._barrier is None else self._barrier.waited

    def states(self) -> list[str]:
        """Describe what each runner does: its task and for how long, or idle."""
        now, out = time.monotonic(), []
        for number in range(len(self._runners)):
            text = "idle"
            if (place := self._places.get(number)) is not None:
                share = place.share
                text = f"task {share.task.batch_id}/{share.task.task_id}, runs {share.runs}"
                text += f" for {now - place.began:.0f} s"
            out.append(f"runner {number}: {text}")
        if rewarded := len(self._running) - len(self._places):
            out.append(f"{rewarded} tasks, or parts of tasks, wait for their rewards alone")
        return out

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval)
            logger.info("%d tasks wait\n%s", len(self._heap), "\n".join(self.states()))

    async def _work(self, index: int, runner: Runner) -> None:
        while not self._closing:
            async with self._wake:
                while not self._heap:
                    await self._wake.wait()
                share = heapq.heappop(self._heap)
            if share.dropped:
                share.done.cancel()
                continue
            free = asyncio.get_running_loop().create_future()
            self._places[index] = _Place(share, time.monotonic(), free)
            leave = partial(self._leave, index, share)
            share.running = asyncio.ensure_future(
                runner.run(share.task, share.spec, share.runs, leave)
            )
            self._running.add(share.running)
            share.running.add_done_callback(partial(self._ended, index, share))
            await free

    def _leave(self, index: int, share: _Share) -> None:
        """Give a share's place to the next, unless it has left it before."""
        if (place := self._places.get(index)) is not None and place.share is share:
            del self._places[index]
            if not place.free.done():  # the worker may have been cancelled
                place.free.set_result(None)

    def _ended(self, index: int, share: _Share, running: asyncio.Task[Outcome]) -> None:
        self._running.discard(running)
        if running.cancelled():
            share.done.cancel()
        else:  # one that is cancelled while the engine fails raises the engine's error
            error = running.exception()
            if share.done.done():  # its waiter may have been cancelled
                pass
            elif error is not None:  # the engine failed: the batch's waiter raises it
                share.done.set_exception(error)
                share.done.exception()  # read: another share may end the batch
            else:
                share.done.set_result(running.result())
        self._leave(index, share)
        if self._barrier is not None:
            self._barrier.wake()

    def _begins(self) -> bool:
        """Return whether a rollout is about to begin: a runner is free for a share that waits, or
        will be without a further reply of the model, or is between the rollouts of what it has
        taken.
        """
        if self._closing or not self._workers:
            return False
        if self._heap and len(self._places) < len(self._runners):
            return True
        taken = ((self._runners[index], place.share) for index, place in self._places.items())
        if self._heap:
            return not all(runner.is_trying(share.task, share.runs) for runner, share in taken)
        return not all(runner.has_begun(share.task, share.runs) for runner, share in taken)


def split(repeat_times: int, most: int | None) -> list[list[int]]:
    """Split run ids 0 .. repeat_times - 1 into shares of at most `most`."""
    size = most or repeat_times
    return [
        list(range(base, min(base + size, repeat_times))) for base in range(0, repeat_times, size)
    ]
