"""Trainer: takes batches from the buffer, learns from them, publishes weights, saves checkpoints.

Invariants:
- Taken experiences are committed when the checkpoint that learned from them is whole, and not
  before.
- A checkpoint is written at once, or during the train steps that follow it (`save_behind`); one
  that cannot be written ends the run.
- The trainer catches nothing: the first error ends the run.
- A run that never made a train step has failed, and leaves no checkpoint: one would resume where
  its experiences ended.
- A trainer that is asked to stop saves what it has learned, and raises Stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from trireme.aio import in_thread
from trireme.algorithms.sample import Sample
from trireme.buffer.buffer import Buffer, Closed
from trireme.engines.device import Device
from trireme.experience import Experience
from trireme.log import get_logger
from trireme.monitor.events import Emit, Noted, Saved, StepDone, Trained
from trireme.monitor.figures import in_words
from trireme.sync.probe import BrokenWeights, a_few
from trireme.sync.synchronizer import Synchronizer
from trireme.trainer.led import Models
from trireme.trainer.measure import Profile
from trireme.trainer.ranks import NotFinite
from trireme.trainer.steering import Steering

logger = get_logger("trainer")

NOTHING = (
    "no train step was made: there was nothing to train on (operators or the algorithm left out "
    "everything, or a store at a path of its own holds an earlier run's of the same ids)"
)


class Stopped(Exception):
    """The run was asked to end; its progress is in the checkpoint of `step` (0: none)."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Checkpointer(Protocol):
    """Writes whole checkpoints."""

    async def snapshot(self) -> dict[str, Any]:
        """Return the positions of explorer, taskset and buffer, all at the same moment."""
        ...

    def begin_save(self, step: int, run_state: dict[str, Any], last: bool, behind: bool) -> None:
        """Begin to write everything that belongs to `step`; on the device, next to the weights.

        `behind`: the training continues meanwhile; otherwise it is written when this returns.
        """
        ...

    def await_save(self) -> None:
        """Wait until this process has written its files; in a thread that may wait."""
        ...

    def end_save(self) -> None:
        """Wait until all ranks have written everything; on the device. Raises write errors."""
        ...

    def seal_save(self) -> None:
        """Give the checkpoint its name; in a thread that may wait."""
        ...


@dataclass(frozen=True)
class TrainerSettings:
    """The amount of training, and the steps at which it is saved."""

    batch_size: int
    """Experiences of a train step."""
    total_steps: int | None
    """The step at which the training ends; None: when the experiences end."""
    save_interval: int
    """Train steps from one checkpoint to the next; 0: only the last is saved."""
    save_behind: bool
    """Whether checkpoints are written while the training continues."""
    save_timeout: float
    """Seconds allowed for a checkpoint that is being written when the training fails."""
    profile: Profile | None = None
    """The train steps that are profiled."""


class Trainer:
    """Buffer.take ▸ train_step ▸ Synchronizer.trained, until steps or experiences run out."""

    def __init__(
        self,
        *,
        models: Models,
        buffer: Buffer,
        settings: TrainerSettings,
        auxiliary: Mapping[str, Buffer] | None = None,
        turn: Callable[[], Awaitable[None]] | None = None,
        device: Device,
        sync: Synchronizer | None,
        checkpointer: Checkpointer,
        emit: Emit,
        steering: Sequence[Steering] = (),
    ) -> None:
        """A part of each batch is from `auxiliary` if the models' recipe mixes data.

        `turn()` returns when the trainer may work on the batch that it has taken. Without `sync` no
        engine follows the weights. `emit` receives each step, its experiences, and checkpoints.
        """
        self.models = models
        self.recipe = models.recipe
        self.buffer = buffer
        self.settings = settings
        self.auxiliary = auxiliary or {}
        self.turn = turn
        self.device = device
        self.sync = sync
        self.checkpointer = checkpointer
        self.emit = emit
        self.steering = steering
        self.step = 0
        self.seconds = 0.0
        self.ended_by = ""
        """The callback that ended the training, as a sentence; empty if none did."""
        self.doing = ""
        """The current activity, as a noun; empty before `train` and after it."""
        self._saved = 0
        """The step of the newest checkpoint, which may still be written."""
        self._saving: asyncio.Task[None] | None = None
        self._looked = (0.0, 0.0)
        """The time of the last reading of the device's work, and the amount of work then."""
        self._save_seconds = 0.0
        """Seconds for which the last checkpoint delayed the training, until they are reported."""
        self._stopping = False
        self._taking: asyncio.Task[Any] | None = None
        """The task that waits for experiences, while it can be cancelled and loses none."""

    async def train(self) -> None:
        """Run the loop. Ends with a checkpoint of the last step."""
        async with self._finishing_saves():
            self._saved = self.step
            self._looked = time.monotonic(), self.device.busy
            for event in ("on_init_end", "on_train_begin"):
                await self._notify(event)
            while not self._enough():
                began = time.monotonic()
                try:
                    sample = await self._take()
                except Closed as end:
                    self._note_end(end)
                    break
                if sample is not None:
                    await self._train_on(*sample, waited=time.monotonic() - began)
                if self._saving is not None and self._saving.done():
                    await self._end_save()
                if self._stopping:
                    await self._stop_here()
                interval = self.settings.save_interval
                due = interval and self.step % interval == 0
                asked = any(one.saves for one in self.steering)
                if (due or asked) and not self._enough():
                    await self._save(last=False)
            self.ended_by = self._ended_by()
            if self.step:
                await self._save(last=True)
            self.doing = ""
            await self._notify("on_train_end")
            if self.sync is not None:
                await self.sync.stopped(self.step)
            await self.buffer.close()
            if self.step == 0:
                ended = f"no train step was made: {self.ended_by}"
                raise RuntimeError(ended if self.ended_by else NOTHING)

    def stop(self) -> bool:
        """Save and end at the next safe point: now, if it waits for experiences. False if it is not
        training, so that there is nothing to save.
        """
        self._stopping = bool(self.doing)
        if self._taking is not None:
            self._taking.cancel()
        return self._stopping

    async def _take(self) -> Sample | None:
        """The next batch; None if the trainer was asked to stop while it waited for one."""
        self.doing = f"the experiences of train step {self.step + 1}"
        self._taking = asyncio.current_task() if self.recipe.takes_once else None
        try:
            batch, metrics = await self.recipe.take(
                self.buffer,
                self.settings.batch_size,
                self._version,
                self.auxiliary,
                self.step + 1,
            )
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            return None
        finally:
            self._taking = None
        if self.turn is not None:
            await self.turn()
        return batch, metrics | self.buffer.metrics()

    def _note_end(self, end: Closed) -> None:
        """Report what the algorithm says of experiences that no train step learns from."""
        for note in getattr(end, "__notes__", ()):
            logger.info(note)
            self.emit(Noted(note))

    async def _stop_here(self) -> None:
        if self.step > self._saved:
            await self._save(last=False)
        await self._end_save()
        raise Stopped(self.step)

    @property
    def _version(self) -> int:
        return self.sync.version if self.sync is not None else 0

    def _enough(self) -> bool:
        total = self.settings.total_steps
        return (total is not None and self.step >= total) or bool(self._ended_by())

    def _ended_by(self) -> str:
        return next((one.ended_by for one in self.steering if one.ended_by), "")

    async def _notify(self, event: str, step: int | None = None, **facts: Any) -> None:
        for one in self.steering:
            await one.notify(event, self.step if step is None else step, **facts)

    async def _train_on(
        self, experiences: list[Experience], sampled: dict[str, float], waited: float
    ) -> None:
        self.doing = f"train step {self.step + 1}"
        await self._notify("on_step_begin")
        started = time.monotonic()
        follow = self.sync is not None and self.sync.lock_step
        metrics = await self.device.run(self._step, experiences, weights_follow=follow)
        elapsed = time.monotonic() - started
        self.seconds += elapsed
        tokens = sum(map(_tokens_of, experiences))
        rate = tokens / max(elapsed, 1e-9)
        metrics |= sampled | {
            "time/train": elapsed,
            "time/wait": waited,
            "perf/train_tokens_per_s": rate,
            "perf/train_tokens_per_s_per_device": rate / self.models.backend.num_ranks,
        }
        if (profile := self.settings.profile) is not None and (stem := profile.stem(self.step)):
            self.emit(Noted(f"profile of train step {self.step}: {stem}_rank_*.json"))
        if self.sync is not None:
            trained = time.monotonic()
            metrics |= await self.sync.trained(self.step)
            metrics["time/sync"] = time.monotonic() - trained
        if self._save_seconds:
            metrics["time/save"], self._save_seconds = self._save_seconds, 0.0
        metrics["perf/device_idle"] = self._idle()
        shown = in_words(metrics, "training")
        count = len(experiences)
        logger.info("step %d: %d experiences in %.2f s  %s", self.step, count, elapsed, shown)
        self.emit(StepDone("trainer", self.step, metrics))
        await self._notify("on_step_end")
        await self._notify("on_log", logs=dict(metrics))

    def _idle(self) -> float:
        """Return the share of the time since the last step in which the device was idle."""
        (since, busy), now = self._looked, (time.monotonic(), self.device.busy)
        self._looked = now
        return max(0.0, 1 - (now[1] - busy) / max(now[0] - since, 1e-9))

    def _step(self, experiences: list[Experience]) -> dict[str, Any]:
        sync, profile = self.sync, self.settings.profile
        try:
            metrics = self.models.train_step(
                experiences,
                version=self._version,
                moved=sync is not None and sync.trained_step > sync.pushed_step,
                profile=profile and profile.stem(self.step + 1),
            )
        except NotFinite as error:
            if not error.broken:
                raise
            since = f" before train step {self.step + 1}"
            raise BrokenWeights(a_few(error.broken), since) from error
        if self.models.train_state.tokens is not None:
            self.models.train_state.tokens.end(self.step + 1)
        self.emit(Trained(self.step + 1, experiences))
        self.step += 1  # on the device: the next push finds matching weights and step there
        return metrics

    async def _save(self, *, last: bool) -> None:
        self.doing = f"the checkpoint of step {self.step}"
        for one in self.steering:
            one.saves = False
        begun = time.monotonic()
        await self._end_save()  # one at a time
        state = await self.checkpointer.snapshot()
        behind = self.settings.save_behind and not last and not self._stopping
        begin = asyncio.ensure_future(self.device.run(self._begin_save, state, last, behind))
        self._saving = asyncio.create_task(self._write(self.step, begin, behind))
        self._saved = self.step
        await asyncio.wait({begin})
        if not behind or begin.exception() is not None:
            await self._end_save()
        self._save_seconds = time.monotonic() - begun

    def _begin_save(self, state: dict[str, Any], last: bool, behind: bool) -> None:
        self.checkpointer.begin_save(self.step, state, last, behind)
        if not behind:
            self.checkpointer.end_save()

    async def _write(self, step: int, begin: Awaitable[None], behind: bool) -> None:
        await begin
        if behind:
            await in_thread(self.checkpointer.await_save, name="checkpoint")
            await self.device.run(self.checkpointer.end_save)
        await in_thread(self.checkpointer.seal_save, name="checkpoint")
        self.buffer.commit()
        logger.info("checkpoint of step %d saved", step)
        self.emit(Saved(step))
        await self._notify("on_save", step)

    async def _end_save(self) -> None:
        """Wait until the checkpoint that is being written is whole, and commit it. Raises its
        errors.
        """
        if self._saving is not None:
            await asyncio.wait({self._saving})  # cancelling this does not cancel the writing
            saving, self._saving = self._saving, None
            saving.result()

    @asynccontextmanager
    async def _finishing_saves(self) -> AsyncIterator[None]:
        """Finish the save of a training that fails, for at most `save_timeout`, so that earlier
        progress is not lost. The failure is raised; the fate of the checkpoint is logged.
        """
        try:
            yield
        except (Exception, asyncio.CancelledError):  # cancelled if the explorer has failed
            if (saving := self._saving) is None:
                raise
            deadline = time.monotonic() + self.settings.save_timeout
            while not saving.done() and (left := deadline - time.monotonic()) > 0:
                # one that has failed may be cancelled too, when the explorer's error arrives
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({saving}, timeout=left)
            if not saving.done():
                saving.cancel()
                text = "the checkpoint of step %d was not written in %g s (cluster.stop_timeout)"
                logger.error(text, self._saved, self.settings.save_timeout)
            elif not saving.cancelled() and (error := saving.exception()) is not None:
                logger.error("the checkpoint of step %d failed too: %s", self._saved, error)
            raise


def _tokens_of(experience: Experience) -> int:
    """Count the tokens of its sequence, or of both of a pair, each with the prompt."""
    if experience.chosen is None or experience.rejected is None:
        return len(experience.tokens)
    return 2 * len(experience.tokens) + len(experience.chosen) + len(experience.rejected)
