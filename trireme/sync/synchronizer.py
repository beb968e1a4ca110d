"""Synchronizer: says when new weights go from the trainer to the engine, and waits for nobody in
vain.

Styles:
- fixed: after explore step s, with s > offset and (s - offset) divisible by the interval, the
  explorer waits for the weights of train step s - offset.
- explorer_driven: the explorer asks every `interval` steps and gets the newest there are.
- trainer_driven, fully_async: the trainer pushes every `interval` train steps, also while rollouts
  are under way (each token keeps its version); the explorer meets nobody and goes on.

Invariants:
- The version counts pushes. The explorer never waits for a trainer that has stopped, or that waits
  itself for experiences: then it goes on with the weights it has, and that is counted.
- In lock-step (shared tensors) the explorer goes on only when the trainer has nothing left to
  train.
- Every push is followed by a probe; a probe that fails stops the run.
- A push that failed for want of an engine is done again once that is there again, and an engine
  that was started again gets the newest weights by a push of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from trireme.log import get_logger

logger = get_logger("synchronizer")

Push = Callable[[int], Awaitable[dict[str, float]]]
Persist = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""What a push comes to, which it does again where an engine was gone: see engines/servers.py."""


class ExplorerSync(Protocol):
    """What an explorer asks of the synchronizer, in this process or another."""

    @property
    def finished(self) -> bool:
        """Whether the trainer wants no more experiences."""
        ...

    def due(self, step: int) -> bool:
        """Whether the explorer meets the trainer after explore step `step`."""
        ...

    async def pull(self, step: int) -> None:
        """Wait for the weights that explore step `step + 1` is to use, and take them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Version and waits, for the explorer's report."""
        ...


class TrainerSync(Protocol):
    """What a trainer tells the synchronizer, in this process or another."""

    version: int
    """The last that was pushed."""
    trained_step: int
    pushed_step: int
    """The train step whose weights they are."""

    async def trained(self, step: int) -> dict[str, float]:
        """Train step `step` is done: publish if it is time to. Returns metrics."""
        ...

    async def stopped(self, step: int) -> None:
        """No more train steps."""
        ...


def is_due(step: int, interval: int, offset: int) -> bool:
    """Whether explore step `step` is a border: past the offset, a whole number of intervals."""
    return step > offset and (step - offset) % interval == 0


class Synchronizer:
    """Both sides in one process: meets on a condition, pushes by the function it is given."""

    def __init__(
        self,
        push: Push,
        *,
        style: str,
        interval: int,
        offset: int = 0,
        timeout: float = 3600.0,
        lock_step: bool = False,
        short: Callable[[], bool] = lambda: True,
        version: int = 0,
        step: int = 0,
    ) -> None:
        """`push(version)` brings the trainer's weights to the engine and probes them.

        `short()`: the buffer holds less than a train batch, so that a waiting trainer really
        starves.
        """
        self._push = push
        self.style = style
        self.interval = interval
        self.offset = offset
        self.timeout = timeout
        self.lock_step = lock_step
        self.version = version
        self.trained_step = step
        self.pushed_step = step
        self.finished = False
        self.skipped = 0
        self._starved = False
        self._waited = 0.0
        self._short = short
        self._bell = asyncio.Event()
        self._pushing = asyncio.Lock()
        self.persist: Persist = once

    def due(self, step: int) -> bool:
        """See ExplorerSync."""
        return not self.pushes_by_itself and is_due(step, self.interval, self.offset)

    @property
    def pushes_by_itself(self) -> bool:
        """Whether the trainer pushes without meeting the explorer."""
        return self.style in ("trainer_driven", "fully_async")

    async def pull(self, step: int) -> None:
        """See ExplorerSync. Raises TimeoutError naming what did not come."""
        started = time.monotonic()
        await self._wait_for_trainer(step)
        self._waited = time.monotonic() - started
        if self.trained_step > self.pushed_step:
            await self._publish()
        elif not self.finished:
            self.skipped += 1
            logger.info(
                "explore step %d: no new weights, going on with version %d", step, self.version
            )

    async def trained(self, step: int) -> dict[str, float]:
        """See TrainerSync."""
        self.trained_step = step
        self._bell.set()
        metrics: dict[str, float] = {}
        publishes = self.pushes_by_itself or (self.style == "fixed" and not self.lock_step)
        if publishes and step % self.interval == 0:
            metrics = await self._publish()
        return metrics | {"sync/version": self.version}

    def waiting(self, for_experiences: bool) -> None:
        """The trainer begins (True) or ends (False) to wait for a batch that is not there."""
        self._starved = for_experiences
        self._bell.set()

    async def stopped(self, step: int) -> None:
        """See TrainerSync."""
        self.trained_step, self.finished = step, True
        self._bell.set()

    async def final_push(self) -> None:
        """Bring the last weights to the engine, for the evaluation at the end."""
        if self.trained_step > self.pushed_step:
            await self._publish()

    def metrics(self) -> dict[str, float]:
        """See ExplorerSync."""
        return {
            "sync/version": self.version,
            "sync/skipped": self.skipped,
            "time/sync_wait": self._waited,
        }

    async def _wait_for_trainer(self, step: int) -> None:
        wanted = step - self.offset

        def ready() -> bool:
            if self.finished or (self._starved and self._short()):
                return True
            if self.lock_step:
                return False  # the trainer works: it may change the tensors that we read
            return self.style == "explorer_driven" or self.pushed_step >= wanted

        deadline = time.monotonic() + self.timeout
        while not ready():
            self._bell.clear()
            try:
                await asyncio.wait_for(self._bell.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError as error:
                raise TimeoutError(
                    f"explore step {step} waited {self.timeout:g} s "
                    "(synchronizer.sync_timeout) for "
                    f"the weights of train step {wanted}; the trainer is at step "
                    f"{self.trained_step}"
                ) from error

    async def renew(self, lacking: Callable[[], bool]) -> None:
        """Push, unless another push has meanwhile brought what an engine is `lacking`."""
        await self._publish(lacking)

    async def _publish(self, again: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """One push at a time: version + 1, probed. `again`: also of what was pushed before."""
        async with self._pushing:
            if self.trained_step == self.pushed_step and not again():
                return {}
            step = self.trained_step
            metrics = await self.persist(lambda: self._push(self.version + 1))
            self.version += 1
            self.pushed_step = step
            self._bell.set()
            logger.info("version %d: the weights of train step %d", self.version, step)
            return metrics


async def once(push: Callable[[], Awaitable[Any]]) -> Any:
    """Persist, of nothing that could come back."""
    return await push()
