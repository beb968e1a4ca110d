"""Leader: rank 0 sends commands to all ranks, and detects a lost rank by its heartbeat.

A command is announced in the store, which the others poll however long rank 0 is idle; its
experiences go through the group. Each rank increments a counter in the store, its heartbeat; rank 0
does its own part of a command in a thread, so that a rank which dies or freezes during a collective
is detected by its heartbeat, not by a time-out.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trireme.experience import Experience
from trireme.serialize import decode, encode
from trireme.trainer.ranks import Ranks, RankSpec, connect

logger = logging.getLogger(__name__)

T = TypeVar("T")
Commands = Mapping[str, Callable[..., Any]]
"""The commands that a rank knows, by name."""

STOP = "stop"
EVERY = 0.5  # seconds between beats
GRACE = 5.0  # seconds in which a rank without a leader may end by itself
_LOOK = 0.2  # seconds between checks of the others while a collective runs
_WAIT = timedelta(seconds=2)  # of a follower, before it checks whether rank 0 is alive


@dataclass(frozen=True)
class Command:
    """A command that all ranks carry out now."""

    what: str
    options: dict[str, Any] = field(default_factory=dict)
    """JSON values."""
    experiences: Sequence[Experience] = ()


class RankLost(RuntimeError):
    """A trainer rank died, froze or failed by itself."""


class Leader:
    """Rank 0's side."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._heartbeat = RankHeartbeat(ranks.spec)
        self._number = 0
        self._busy = False
        self._lost = ""
        """The sentence of the RankLost that ended the group."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trainer-rank-0", daemon=True).start()

    def together(self, command: Command, work: Callable[[], T]) -> T:
        """Run `work()` here and its counterpart on all other ranks. Raises RankLost naming the lost
        one.

        Commands that `work` issues are part of this one and are not sent to the others.
        """
        self._stop_if_lost()
        if self._busy:
            return work()
        data = encode(command.experiences) if command.experiences else b""
        self._announce(command, len(data))

        def begin() -> T:
            if data:
                self._ranks.broadcast(data, len(data))
            return work()

        return self.guarded(begin, doing=command.what)

    def guarded(self, work: Callable[[], T], *, doing: str = "a collective") -> T:
        """Run `work()`, which the others have begun. Raises RankLost if one is lost."""
        self._stop_if_lost()
        if self._busy:
            return work()
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        threads = torch.get_num_threads()

        def perform() -> None:
            try:
                if torch.get_num_threads() != threads:  # each thread has a number of its own
                    torch.set_num_threads(threads)
                if self._ranks.device.type == "cuda":  # each thread has its own current device
                    torch.cuda.set_device(self._ranks.device)
                outcome.put((work(), None))
            except BaseException as error:
                outcome.put((None, error))

        self._busy = True
        self._work.put(perform)
        while True:
            with suppress(queue.Empty):
                result, error = outcome.get(timeout=_LOOK)
                break
            if lost := self._gone():
                self._lost = f"{lost} during {doing}"
                with suppress(queue.Empty):  # a thread inside a collective prevents a clean exit
                    _, error = outcome.get(timeout=GRACE)
                    if error is not None and not _is_communication(error):
                        raise error  # of all ranks, and another one was sooner
                raise RankLost(self._lost)
        self._busy = False
        if error is None:
            return result  # pyright: ignore[reportReturnType]
        if _is_communication(error):
            self._lost = f"{self._who()} during {doing}"
            raise RankLost(self._lost) from error
        raise error

    def close(self) -> None:
        """Dismiss the others and leave the group. After a failure they end by themselves."""
        self._heartbeat.close()
        if self._lost:
            return
        self._announce(Command(STOP), 0)
        if byes := [f"bye/{rank}" for rank in range(1, self._ranks.world)]:
            # one that hangs elsewhere will miss our heartbeat, and one that failed never answers
            with suppress(dist.DistStoreError):
                self._ranks.store.wait(byes, timedelta(seconds=GRACE))
        self._ranks.close()

    def _stop_if_lost(self) -> None:
        """Raise if a rank is lost: a collective would wait for it until its time-out."""
        if self._lost:
            raise RankLost(self._lost)

    def _announce(self, command: Command, size: int) -> None:
        self._number += 1
        text = json.dumps({"what": command.what, "options": command.options, "size": size})
        self._ranks.store.set(f"command/{self._number}", text)

    def _gone(self) -> str:
        """Return a sentence on the first rank that failed by itself or has no heartbeat; else
        nothing.
        """
        reports = self._reports()
        for rank, report in reports.items():
            if not report["communication"]:
                return f"trainer rank {rank} failed ({report['text']})"
        lost = [rank for rank in self._heartbeat.lost() if rank not in reports]
        host = self._ranks.store.get(f"here/{lost[0]}").decode() if lost else ""
        return f"trainer rank {lost[0]} on {host} died or froze" if lost else ""

    def _who(self) -> str:
        """Name the rank at fault after a broken collective, once its heartbeat has stopped."""
        end = self._heartbeat.looks + (self._ranks.spec.lost_after + GRACE) / EVERY
        while self._heartbeat.looks < end and self._heartbeat.runs:
            if gone := self._gone():
                return gone
            time.sleep(_LOOK)
        return "the connection between trainer ranks broke, all of which are alive,"

    def _reports(self) -> dict[int, dict[str, Any]]:
        store, reports = self._ranks.store, {}
        for rank in range(1, self._ranks.world):
            if store.check([f"failed/{rank}"]):
                reports[rank] = json.loads(store.get(f"failed/{rank}"))
        return reports

    def _run(self) -> None:
        while True:
            self._work.get()()


def follow(spec: RankSpec, make: Callable[[Ranks], Commands]) -> None:
    """Run as one of the other ranks: carry out rank 0's commands until the last one.

    Reports an error to rank 0 before raising it. The process ends if rank 0 is gone.
    """
    ranks = Ranks(spec)
    heartbeat = RankHeartbeat(spec)
    try:
        commands = make(ranks)
        number = 1
        while (message := _await_command(ranks, number))["what"] != STOP:
            size, command = message["size"], commands[message["what"]]
            experiences = [decode(ranks.broadcast(None, size))] if size else []
            command(*experiences, **message["options"])
            number += 1
        ranks.store.set(f"bye/{ranks.rank}", "")
    except BaseException as error:
        _report_failure(ranks, error)
        raise
    finally:
        heartbeat.close()
        ranks.close()


class RankHeartbeat:
    """Sends heartbeats in a thread and checks others: rank 0 all others, the others rank 0.

    A rank whose leader is gone ends: its process exits unless it has done so by itself. What counts
    is how often this process looked in vain, not the clock: on a suspended machine all were silent.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._store = connect(spec)
        self._others = range(1, spec.world) if spec.rank == 0 else range(1)
        self.looks = 0
        """How often it has looked for the others' beats so far."""
        self._seen: dict[int, tuple[str, float]] = {rank: ("", 0) for rank in self._others}
        """Each rank's last beat, and how often it has been read since."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether it still looks."""
        return self._thread.is_alive()

    def lost(self) -> list[int]:
        """Ranks without a heartbeat for `lost_after` seconds."""
        return [r for r, (_, n) in self._seen.items() if n * EVERY > self._spec.lost_after]

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()
        self._thread.join(timeout=GRACE)

    def _run(self) -> None:
        while not self._closed.wait(EVERY):
            self.looks += 1
            try:
                self._store.set(f"beat/{self._spec.rank}", str(self.looks))
                for rank in self._others:
                    self._listen(rank)
            except dist.DistError:
                self._seen = dict.fromkeys(self._others, ("", float("inf")))
            if self._spec.rank and self.lost():
                self._end()

    def _listen(self, rank: int) -> None:
        key, (last, looks) = f"beat/{rank}", self._seen[rank]
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        self._seen[rank] = (last, looks + 1) if beat == last else (beat, 0)

    def _end(self) -> None:
        """End the process, since rank 0 is gone: a thread inside a collective cannot be woken."""
        if not self._closed.wait(GRACE):
            logger.error("trainer rank %d ends: rank 0 is gone", self._spec.rank)
            os._exit(1)


def _report_failure(ranks: Ranks, error: BaseException) -> None:
    """Report to rank 0 why this rank ends."""
    text = f"{type(error).__name__}: {error}"
    report = {"communication": _is_communication(error), "text": text}
    with suppress(dist.DistError):  # rank 0 may be gone itself
        ranks.store.set(f"failed/{ranks.rank}", json.dumps(report))


def _await_command(ranks: Ranks, number: int) -> dict[str, Any]:
    """Wait for the next command, however long that takes. Raises RankLost if rank 0 is gone."""
    while True:
        try:
            ranks.store.wait([f"command/{number}"], _WAIT)
            return json.loads(ranks.store.get(f"command/{number}"))
        except dist.DistNetworkError as error:
            raise RankLost("trainer rank 0 is gone") from error
        except dist.DistStoreError:
            continue  # nothing to do yet; the heartbeat ends this process with rank 0


def _is_communication(error: BaseException) -> bool:
    """True if an error only says that another rank is gone."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
