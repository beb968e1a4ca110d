"""Checkpoint sync: weights by files, between two commands on one job folder or within one process.

The trainer writes the weights and its probe whole, then moves `latest_state_dict_iteration.txt` on.
The explorer reads that file between its steps, loads new weights and compares them with the probe.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from trireme.buffer.buffer import Buffer
from trireme.checkpoint.layout import JobFolder, step_in
from trireme.checkpoint.manifest import Damaged, plain_state
from trireme.checkpoint.save import save_weights
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.weights import fingerprint
from trireme.files import Unreadable, read_json, write_json
from trireme.log import get_logger
from trireme.sync.probe import BrokenWeights, Probe, WeightSource, WrongWeights
from trireme.sync.synchronizer import Persist, is_due, once

logger = get_logger("synchronizer")

POLL_SECONDS = 0.2
NOTED = 15.0
"""Seconds without a sign of any trainer after which a warning names the cause of the wait."""
LOOK = 5.0
"""Seconds from one look at the trainer's heartbeat to the next, while something waits for it."""
TRIES = 2
"""Further attempts to read weights that cannot be read: the full checkpoint of a step replaces the
folder with its weights."""
STATE_FILE = "sync_state.json"
_PROBE = {"fingerprint", "logprobs", "version", "ids"}


@dataclass(eq=False)
class CheckpointPush:
    """The trainer's side: each push writes a folder with weights and probe."""

    backend: WeightSource
    device: Device
    folder: JobFolder
    _: KW_ONLY
    step: Callable[[], int]
    probe: Probe
    dtype: str
    engine: Engine | None = None
    """This process's engine, if the push ends there; None: another process polls."""

    async def push(self, version: int) -> dict[str, float]:
        """Write the weights; load and probe them if the engine is in this process."""
        step, probe = await self.device.run(self._write, version)
        if self.engine is None:
            return {}
        await self._load(self.engine, step, version)
        return await _prove(self.engine, self.probe, probe)

    def announce(self, state: str, step: int) -> None:
        """Report to explorers of other processes that the trainer runs, stopped, or failed, and
        why.
        """
        write_json(self.folder.root / STATE_FILE, {"trainer": state, "step": step})

    async def _load(self, engine: Engine, step: int, version: int) -> None:
        """Load the step's weights; from its checkpoint if that replaces their folder meanwhile."""
        for left in reversed(range(1 + TRIES)):
            before = self._identity(step)
            try:
                return await engine.update_weights(self.folder.weights_dir(step), version)
            except Exception as error:  # whatever it is: see PolledSync.load_latest
                await asyncio.sleep(POLL_SECONDS)  # the replacement may be under way
                if not left or (before is not None and self._identity(step) == before):
                    raise
                logger.info("the weights of train step %d moved while they loaded: %s", step, error)

    def _identity(self, step: int) -> int | None:
        """Return the inode of the step's folder; None while a checkpoint replaces it."""
        try:
            return self.folder.step_dir(step).stat().st_ino
        except FileNotFoundError:
            return None

    def _write(self, version: int) -> tuple[int, dict[str, Any]]:
        """Write the weights' folder; returns its step and the contents of its probe.json."""
        step = self.step()
        weights = self.backend.weights()
        of_row, *of_pieces = self.probe.expected(self.backend)
        probe = {
            "version": version,
            "ids": self.probe.ids,
            "logprobs": of_row,
            "pieces": of_pieces,
            "fingerprint": fingerprint(weights, self.dtype),
        }
        save_weights(
            self.folder,
            step,
            weights=weights,
            extra_files={"probe.json": json.dumps(probe).encode()},
        )
        return step, probe


async def _prove(engine: Engine, probe: Probe, file: Mapping[str, Any]) -> dict[str, float]:
    marks, of_row, version = (file[key] for key in ("fingerprint", "logprobs", "version"))
    expected = [of_row, *file.get("pieces", ())]  # older files have none
    return await probe.prove(engine, marks, expected, version=version, ids=file["ids"])


def last_report(folder: JobFolder) -> int | None:
    """Return when a trainer last reported its state, in nanoseconds; None if none has."""
    path = folder.root / STATE_FILE
    return path.stat().st_mtime_ns if path.exists() else None


class PolledSync:
    """The explorer's side in a separate process: ExplorerSync over the job folder."""

    def __init__(
        self,
        engine: Engine,
        folder: JobFolder,
        *,
        style: str,
        interval: int,
        offset: int,
        timeout: float,
        dtype: str,
        old_report: int | None = None,
        store: Callable[[], Buffer] | None = None,
    ) -> None:
        """The styles are those of Synchronizer; here only `fixed` waits. An end that was reported
        at `old_report`, before this process began, is that of the last attempt's trainer, and is
        ignored.

        `store()` knows whether the trainer waits for more experiences than there are, and whether
        it still sends heartbeats.
        """
        self._engine = engine
        self._folder = folder
        self._style = style
        self._interval = interval
        self._offset = offset
        self._timeout = timeout
        self._probe = Probe(0, dtype)  # its rows come from the trainer's files
        self._loaded_step = 0
        self._waited = 0.0
        self._old_report = old_report
        self._store = store
        self._next_look = 0.0
        self._skipped = 0
        self._loading = asyncio.Lock()
        self.persist: Persist = once
        self.version = 0

    @property
    def finished(self) -> bool:
        """True once the trainer has reported that it stopped. Raises RuntimeError if it failed."""
        state = self._said()
        if state.startswith("failed"):
            raise RuntimeError(f"the trainer of {self._folder.root} has {state}")
        return state == "stopped"

    def _said(self) -> str:
        """Return the trainer's last report of its state; empty if none has begun."""
        reported = last_report(self._folder)
        if reported is None:
            return ""
        path = self._folder.root / STATE_FILE
        said = read_json(path).get("trainer")
        if not isinstance(said, str):
            raise Unreadable(f"{path} does not say what the trainer does")
        ended = said == "stopped" or said.startswith("failed")
        return "" if ended and reported == self._old_report else said

    @property
    def pushes_by_itself(self) -> bool:
        """Return False: the explorer looks for new weights."""
        return False

    def due(self, step: int) -> bool:
        """True after every `interval` steps past the offset; if the trainer drives, after every
        step.
        """
        return self._style == "trainer_driven" or is_due(step, self._interval, self._offset)

    async def pull(self, step: int) -> None:
        """Load the newest weights; `fixed` waits for those of train step `step - offset`, unless
        the trainer waits for experiences: fewer than planned may have come.
        """
        started = time.monotonic()
        wanted = step - self._offset if self._style == "fixed" else 0
        noted, waits = False, f"explore step {step} waits for the weights of train step {wanted}"
        finished = starves = False
        while True:
            if (
                await self._latest() >= wanted
                or (finished := self.finished)
                or (starves := self._store is not None and await self._store().starves())
            ):
                self._waited = time.monotonic() - started
                await self.load_latest()
                if finished or self._loaded_step >= wanted:
                    break  # if not, their checkpoint was replacing them
                if starves:
                    self._skipped += 1
                    logger.info(
                        "explore step %d: the trainer waits for experiences, going on with the "
                        "weights of train step %d",
                        step, self._loaded_step,
                    )  # fmt: skip
                    break
            waited = time.monotonic() - started
            noted = noted or await self._note_absence(waits, waited)
            if waited > self._timeout:
                gone = self._store is not None and await self._store().without_reader()
                raise TimeoutError(
                    f"explore step {step} waited {self._timeout:g} s "
                    "(synchronizer.sync_timeout) for the weights of train step "
                    f"{wanted} in {self._folder.root}{gone or ': is the trainer running?'}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def pull_last(self) -> None:
        """Load the trainer's last weights, once it has ended; the newest if none has begun, or if
        it has not ended after `timeout` seconds.
        """
        started, noted, absent = time.monotonic(), False, False
        waits = "the last evaluation waits for the last weights"
        while self._said() and not self.finished:
            waited = time.monotonic() - started
            if waited > self._timeout:
                logger.warning(
                    "the trainer of %s has not ended after %g s (synchronizer.sync_timeout): the "
                    "last evaluation measures the newest of its weights, not the last",
                    self._folder.root, self._timeout,
                )  # fmt: skip
                break
            if not noted and waited > NOTED:
                noted = True
                logger.warning("%s: for the trainer of %s to end", waits, self._folder.root)
            absent = absent or await self._note_absence(waits, waited)
            await asyncio.sleep(POLL_SECONDS)
        await self.load_latest()

    async def _note_absence(self, waits: str, waited: float) -> bool:
        """Warn, and return True, if no trainer can end a wait that has lasted `waited` seconds."""
        if not self._said():
            if waited > NOTED:
                logger.warning(
                    "%s, and no command with mode: train is on %s", waits, self._folder.root
                )
            return waited > NOTED
        if self._store is None or (now := time.monotonic()) < self._next_look:
            return False
        self._next_look = now + LOOK
        if not (gone := await self._store().without_reader()):
            return False
        logger.warning(
            "%s%s: if it was killed, start it again; the wait ends after %g s "
            "(synchronizer.sync_timeout)",
            waits, gone, self._timeout,
        )  # fmt: skip
        return True

    async def load_latest(self) -> None:
        """Load the newest weights if they are not ours, and compare the probe. They may be of an
        earlier step: those of a trainer that was started again from an older checkpoint.
        """
        failures = 0
        async with self._loading:
            while (step := await self._latest()) not in (0, self._loaded_step):
                try:
                    await self.persist(lambda step=step: self._load(step))
                except (BrokenWeights, WrongWeights):
                    raise
                except Exception as error:
                    # whatever the error: a file that goes between its opening and its mapping is a
                    # RuntimeError of torch, and an engine of another process answers with one too
                    if await self._latest() == step:
                        failures += 1
                        if failures > TRIES:
                            raise
                        await asyncio.sleep(POLL_SECONDS)  # its checkpoint may replace it
                        continue
                    logger.info(
                        "the weights of train step %d made way for newer ones: %s", step, error
                    )

    async def renew(self, lacking: Callable[[], bool]) -> None:
        """Load the newest weights, newer or not, if an engine is still `lacking` them."""
        async with self._loading:
            if lacking():
                self._loaded_step = 0
        await self.load_latest()

    async def _load(self, step: int) -> None:
        weights = self._folder.weights_dir(step)
        path = self._folder.step_dir(step) / "probe.json"
        probe = read_json(path) if os.path.lexists(path) else None
        if probe is not None and not probe.keys() >= _PROBE:
            raise Unreadable(f"{path} is not a probe of weights")
        version = probe["version"] if probe else self._unproved(step)
        await self._engine.update_weights(weights, version)
        if probe:
            await _prove(self._engine, self._probe, probe)
        self.version, self._loaded_step = version, step
        logger.info("version %d: the weights of train step %d", version, step)

    def _unproved(self, step: int) -> int:
        """Return the version of weights without a probe: by their checkpoint, if it is one that was
        saved again at the run's end, after the push that had written the probe.
        """
        if self._folder.is_full(step):
            with suppress(Damaged):
                state = plain_state(self._folder.step_dir(step))
                pushed = state.get("pushed_step", step) >= step
                if version := state.get("version"):
                    return version if pushed else version + 1
        return self.version + 1

    def metrics(self) -> dict[str, float]:
        """Return the version, skipped synchronizations and the seconds waited."""
        return {
            "sync/version": self.version,
            "sync/skipped": self._skipped,
            "time/sync_wait": self._waited,
        }

    async def _latest(self) -> int:
        """Return the newest published train step; 0 before the first. While a checkpoint replaces
        the newest weights only older ones are there: these are not taken for the newest at once.
        """
        for _ in range(TRIES):
            step = self._folder.latest_weights_step()
            if step == step_in(self._folder.latest_weights):
                return step or 0
            await asyncio.sleep(POLL_SECONDS)
        return self._folder.latest_weights_step() or 0
