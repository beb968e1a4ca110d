"""Synchronizer: decides when new weights go from trainer to engine, and never waits for nothing.

Styles:
- fixed: after explore step s, with s > offset and (s - offset) divisible by the interval, the
  explorer waits for the weights of train step s - offset.
- explorer_driven: the explorer asks every `interval` steps and gets the newest weights.
- trainer_driven, fully_async: the trainer pushes every `interval` train steps, also during rollouts
  (each token records its version); the explorer never waits.

Invariants:
- The version counts pushes. The explorer never waits for a trainer that has stopped, or that is
  waiting for experiences: then it continues with its current weights, and that is counted.
- In lock-step explorer and trainer take turns, and neither begins before the other's turn has
  ended: the explorer ends its turn in `pull` and gets the next one when the trainer has nothing
  left to train; a batch that the trainer gets during the explorer's turn waits in `trainers_turn`.
- Every push is followed by a probe; a probe that fails stops the run.
- A push that failed because an engine was down is repeated once it is up again, and a restarted
  engine gets the newest weights by a separate push.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from trireme.buffer.buffer import Condition, Demand, WallClock
from trireme.log import get_logger
from trireme.sync.probe import BrokenWeights

logger = get_logger("synchronizer")

Push = Callable[[int], Awaitable[dict[str, float]]]
Persist = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""A function that returns the result of a push, and repeats it if an engine was gone: see
ext/remote/servers.py."""


class ExplorerSync(Protocol):
    """The synchronizer in the form that an explorer uses, in this process or another."""

    @property
    def finished(self) -> bool:
        """True if the trainer wants no more experiences."""
        ...

    @property
    def pushes_by_itself(self) -> bool:
        """True if weights come without the explorer's waiting for them: no step is `due`."""
        ...

    def due(self, step: int) -> bool:
        """True if the explorer synchronizes with the trainer after explore step `step`."""
        ...

    async def pull(self, step: int) -> None:
        """Wait for the weights of explore step `step + 1`, and load them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return version and waits, for the explorer's report."""
        ...


def is_due(step: int, interval: int, offset: int) -> bool:
    """True if explore step `step` is a synchronization point: past the offset, a whole number of
    intervals.
    """
    return step > offset and (step - offset) % interval == 0


class Synchronizer:
    """Both sides in one process: they wait on a condition, and it pushes by the given function."""

    def __init__(
        self,
        push: Push,
        *,
        style: str,
        interval: int,
        offset: int = 0,
        timeout: float = 3600.0,
        lock_step: bool = False,
        demand: Demand | None = None,
        version: int = 0,
        step: int = 0,
        pushed_step: int | None = None,
    ) -> None:
        """`push(version)` brings the trainer's weights to the engine and probes them.

        `demand` is the buffer's: whether the trainer starves. `step` has been trained already, and
        the engine has the weights of `pushed_step`, which defaults to `step`.
        """
        self._push = push
        self.style = style
        self.interval = interval
        self.offset = offset
        self.timeout = timeout
        self.lock_step = lock_step
        self.version = version
        """The last pushed version."""
        self.trained_step = step
        self.pushed_step = step if pushed_step is None else pushed_step
        """The train step of the pushed weights."""
        self.finished = False
        self.skipped = 0
        self._waited = 0.0
        self._explorers_turn = lock_step
        self._changed = Condition(WallClock())
        self._demand = demand or Demand()
        self._demand.changed = self._changed.notify_all
        self._pushing = asyncio.Lock()
        self.persist: Persist = once

    def due(self, step: int) -> bool:
        """True at a synchronization point, unless the trainer pushes by itself."""
        return not self.pushes_by_itself and is_due(step, self.interval, self.offset)

    @property
    def pushes_by_itself(self) -> bool:
        """True if the trainer pushes without waiting for the explorer."""
        return self.style in ("trainer_driven", "fully_async")

    async def pull(self, step: int) -> None:
        """Hand the turn to the trainer, then load its newest weights. Raises TimeoutError naming
        what is missing.
        """
        started = time.monotonic()
        self.explored()
        await self._wait_for_trainer(step)
        self._waited = time.monotonic() - started
        if self.trained_step > self.pushed_step:
            await self._publish()
        elif not self.finished:
            self.skipped += 1
            logger.info(
                "explore step %d: no new weights, going on with version %d", step, self.version
            )
        self._explorers_turn = self.lock_step

    def explored(self) -> None:
        """Note that the explorer generates no more: until its next turn, or at all if it
        has ended.
        """
        self._explorers_turn = False
        self._changed.notify_all()

    async def trainers_turn(self) -> None:
        """Wait until the explorer's turn is over. Raises TimeoutError if it does not end."""
        begun = time.monotonic()
        await self._changed.until(
            lambda: not self._explorers_turn,
            timeout=self.timeout,
            since=lambda: begun,
            waited_for=lambda: (
                f"the trainer waited {self.timeout:g} s (synchronizer.sync_timeout) with the batch "
                f"of train step {self.trained_step + 1} for the explorer to end its step"
            ),
        )

    async def trained(self, step: int) -> dict[str, float]:
        """Record that train step `step` is done, and push if it is time to. Returns metrics."""
        self.trained_step = step
        metrics: dict[str, float] = {}
        publishes = self.pushes_by_itself or (self.style == "fixed" and not self.lock_step)
        if publishes and step % self.interval == 0:
            metrics = await self._publish()
        return metrics | {"sync/version": self.version}

    async def stopped(self, step: int) -> None:
        """Record that `step` was the trainer's last step."""
        self.trained_step, self.finished = step, True
        self._changed.notify_all()

    async def final_push(self) -> None:
        """Push the last weights to the engine, for the evaluation at the end."""
        if self.trained_step > self.pushed_step:
            await self._publish()

    def metrics(self) -> dict[str, float]:
        """Return the version, skipped synchronizations and the seconds waited."""
        return {
            "sync/version": self.version,
            "sync/skipped": self.skipped,
            "time/sync_wait": self._waited,
        }

    async def _wait_for_trainer(self, step: int) -> None:
        wanted = step - self.offset

        def ready() -> bool:
            if self.finished or self._demand.unmet:
                return True
            if self.lock_step:
                return False  # the trainer is working: it may change the tensors that we read
            return self.style == "explorer_driven" or self.pushed_step >= wanted

        begun = time.monotonic()
        await self._changed.until(
            ready,
            timeout=self.timeout,
            since=lambda: begun,
            waited_for=lambda: (
                f"explore step {step} waited {self.timeout:g} s (synchronizer.sync_timeout) for "
                f"the weights of train step {wanted}; the trainer is at step {self.trained_step}"
            ),
        )

    async def renew(self, lacking: Callable[[], bool]) -> None:
        """Push, unless another push has meanwhile supplied the `lacking` weights."""
        await self._publish(lacking)

    async def _publish(self, again: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Push version + 1 and probe it, one push at a time. `again`: even if nothing is new."""
        async with self._pushing:
            if self.trained_step == self.pushed_step and not again():
                return {}
            step = self.trained_step
            try:
                metrics = await self.persist(lambda: self._push(self.version + 1))
            except BrokenWeights as error:
                since = f" since train step {self.pushed_step + 1}"
                if step > self.pushed_step + 1:
                    since += f", or one up to {step}"
                raise BrokenWeights(error.how, since) from None
            self.version += 1
            self.pushed_step = step
            self._changed.notify_all()
            logger.info("version %d: the weights of train step %d", self.version, step)
            return metrics


async def once(push: Callable[[], Awaitable[Any]]) -> Any:
    """Push once, without retries."""
    return await push()
