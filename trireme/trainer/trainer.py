"""Trainer: takes batches from the buffer, learns from them, publishes weights, saves checkpoints.

Invariants:
- What is taken is committed with the checkpoint that learned from it, and not before.
- The trainer catches nothing: the first error ends the run.
- A run that never made a train step has failed.
- A trainer that is told to stop saves what it has learned, and raises Stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from trireme.algorithms.recipes import Recipe
from trireme.algorithms.sample import Sample
from trireme.buffer.buffer import Buffer, Closed
from trireme.engines.device import Device
from trireme.experience import Experience
from trireme.log import get_logger
from trireme.monitor.figures import in_words
from trireme.sync.synchronizer import TrainerSync
from trireme.trainer.backend import Backend
from trireme.trainer.learning import Learning
from trireme.trainer.step import train_step

logger = get_logger("trainer")

NOTHING = (
    "no train step was made: there was nothing to train on (operators or the algorithm left out "
    "everything, or a store at a path of its own holds an earlier run's of the same ids)"
)
Report = Callable[[str, int, dict[str, float]], None]


class Stopped(Exception):
    """The run was told to end; what was learned is in the checkpoint of `step` (0: nothing was)."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Supply(Protocol):
    """What a trainer asks of whoever has the experiences."""

    lets_go: bool
    """Whether the `take` that goes on, if it is cancelled now, has taken nothing."""

    async def take(self, version: int) -> Sample:
        """The next batch, as the recipe samples it, and its metrics; `version` is the engine's.

        Raises what Buffer.take raises.
        """
        ...

    async def commit(self) -> None:
        """A checkpoint holds what was taken so far."""
        ...

    async def close(self) -> None:
        """The trainer takes no more."""
        ...


class Checkpointer(Protocol):
    """Writes whole checkpoints."""

    async def snapshot(self) -> dict[str, Any]:
        """Where explorer, taskset and buffer stand: all at the same moment."""
        ...

    def save(self, step: int, run_state: dict[str, Any], last: bool) -> None:
        """Write everything that belongs to `step`; runs on the device, next to the weights."""
        ...


class Trainer:
    """Supply.take ▸ train_step ▸ Synchronizer.trained, until steps or experiences run out."""

    def __init__(
        self,
        *,
        backend: Backend,
        recipe: Recipe,
        supply: Supply,
        device: Device,
        sync: TrainerSync | None,
        learning: Learning | None = None,
        total_steps: int | None,
        save_interval: int,
        checkpointer: Checkpointer,
        report: Report,
        version: Callable[[], int] = lambda: 0,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        """`version()` is the last pushed; `moved()`: the weights have been trained since."""
        self.backend = backend
        self.recipe = recipe
        self.supply = supply
        self.device = device
        self.sync = sync
        self.learning = learning or Learning(recipe)
        self.total_steps = total_steps
        self.save_interval = save_interval
        self.checkpointer = checkpointer
        self.report = report
        self.version = version
        self.moved = moved
        self.step = 0
        self.seconds = 0.0
        self.doing = ""
        """What it is at, as a noun; nothing before `train` and after it."""
        self._saved = 0
        self._looked = (0.0, 0.0)
        """When the device's work was last looked at, and how much it was then."""
        self._stopping = False
        self._taking: asyncio.Task[Any] | None = None

    async def train(self) -> None:
        """The loop. Always ends with a checkpoint of the last step."""
        self._saved = self.step
        self._looked = time.monotonic(), self.device.busy
        while not self._enough():
            began = time.monotonic()
            try:
                sample = await self._take()
            except Closed:
                break
            if sample is not None:
                await self._train_on(*sample, waited=time.monotonic() - began)
            if self._stopping:
                await self._stop_here()
            if self.save_interval and self.step % self.save_interval == 0 and not self._enough():
                await self._save(last=False)
        await self._save(last=True)
        if self.sync is not None:
            await self.sync.stopped(self.step)
        await self.supply.close()
        if self.step == 0:
            raise RuntimeError(NOTHING)

    def stop(self) -> bool:
        """Save and end at the next safe point: now, where it waits for experiences. False where it
        does not train, so that there is nothing to save.
        """
        self._stopping = bool(self.doing)
        if self._taking is not None and self.supply.lets_go:
            self._taking.cancel()
        return self._stopping

    async def _take(self) -> Sample | None:
        """The next batch; None where the trainer was told to stop while it waited for one."""
        self.doing = f"the experiences of train step {self.step + 1}"
        self._taking = asyncio.current_task()
        try:
            return await self.supply.take(self.version())
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            return None
        finally:
            self._taking = None

    async def _stop_here(self) -> None:
        if self.step > self._saved:
            await self._save(last=False)
        raise Stopped(self.step)

    def _enough(self) -> bool:
        return self.total_steps is not None and self.step >= self.total_steps

    async def _train_on(
        self, experiences: list[Experience], sampled: dict[str, float], waited: float
    ) -> None:
        self.doing = f"train step {self.step + 1}"
        started = time.monotonic()
        metrics = await self.device.run(self._step, experiences)
        elapsed = time.monotonic() - started
        self.seconds += elapsed
        tokens = sum(len(e.tokens) for e in experiences)
        metrics |= sampled | {
            "time/train": elapsed,
            "time/wait": waited,
            "perf/train_tokens_per_s": tokens / max(elapsed, 1e-9),
        }
        if self.sync is not None:
            trained = time.monotonic()
            metrics |= await self.sync.trained(self.step)
            metrics["time/sync"] = time.monotonic() - trained
        metrics["perf/device_idle"] = self._idle()
        shown = in_words(metrics, "training")
        count = len(experiences)
        logger.info("step %d: %d experiences in %.2f s  %s", self.step, count, elapsed, shown)
        self.report("trainer", self.step, metrics)

    def _idle(self) -> float:
        """The share of the time since the last step in which the device did nothing."""
        (since, busy), now = self._looked, (time.monotonic(), self.device.busy)
        self._looked = now
        return max(0.0, 1 - (now[1] - busy) / max(now[0] - since, 1e-9))

    def _step(self, experiences: list[Experience]) -> dict[str, Any]:
        metrics = train_step(
            self.backend,
            self.recipe,
            experiences,
            version=self.version(),
            moved=self.moved(),
            learning=self.learning,
        )
        if self.learning.tokens is not None:
            self.learning.tokens.end(self.step + 1)
        self.step += 1  # on the device: who pushes next there finds weights and step together
        return metrics

    async def _save(self, *, last: bool) -> None:
        self.doing = f"the checkpoint of step {self.step}"
        state = await self.checkpointer.snapshot()
        await self.device.run(self.checkpointer.save, self.step, state, last)
        await self.supply.commit()
        self._saved = self.step
        if last:
            self.doing = ""
        logger.info("checkpoint of step %d saved", self.step)


class BufferSupply:
    """Batches of a buffer in this process."""

    def __init__(
        self,
        buffer: Buffer,
        recipe: Recipe,
        batch_size: int,
        *,
        auxiliary: Mapping[str, Buffer] | None = None,
        turn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Batches of `batch_size`, some of it from `auxiliary` where the recipe mixes.

        `turn()` returns when the trainer may work on what it has got.
        """
        self.buffer = buffer
        self._recipe = recipe
        self._batch_size = batch_size
        self._auxiliary = auxiliary or {}
        self._turn = turn
        self.lets_go = False

    async def take(self, version: int) -> Sample:
        """See Supply."""
        self.lets_go = self._recipe.takes_once
        try:
            batch, metrics = await self._recipe.take(
                self.buffer, self._batch_size, version, self._auxiliary
            )
        finally:
            self.lets_go = False
        if self._turn is not None:
            await self._turn()
        return batch, metrics | self.buffer.metrics()

    async def commit(self) -> None:
        """See Supply."""
        self.buffer.commit()

    async def close(self) -> None:
        """See Supply."""
        await self.buffer.close()
