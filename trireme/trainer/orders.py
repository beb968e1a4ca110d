"""Orders: rank 0 says what all ranks do next, and finds out where one of them does not.

An order is announced in the store, where the others look for it however long rank 0 is idle; the
experiences that belong to it go through the group. Rank 0 does its own part in a thread, so that a
rank which dies or freezes amid a collective is seen by its heartbeat, not by a time-out.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trireme.serialize import encode
from trireme.trainer.backend import Order
from trireme.trainer.heartbeat import GRACE, Heartbeat
from trireme.trainer.ranks import Ranks

T = TypeVar("T")

STOP = "stop"
_LOOK = 0.2  # seconds between looks at the others while a collective runs
_WAIT = timedelta(seconds=2)  # of a follower, before it looks whether rank 0 is alive


class RankLost(RuntimeError):
    """A trainer rank died, froze or failed by itself."""


class Orders:
    """Rank 0's side."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._heartbeat = Heartbeat(ranks.place)
        self._number = 0
        self._busy = False
        self._lost = False
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trainer-rank-0", daemon=True).start()

    def together(self, order: Order, work: Callable[[], T]) -> T:
        """`work()` here and its like on all other ranks. Raises RankLost naming one that is gone.

        Work that gives further orders is inside this one: those are not told.
        """
        if self._busy:
            return work()
        data = encode(order.experiences) if order.experiences else b""
        self._announce(order, len(data))

        def begin() -> T:
            if data:
                self._ranks.broadcast(data, len(data))
            return work()

        return self.guarded(begin, doing=order.what)

    def guarded(self, work: Callable[[], T], *, doing: str = "a collective") -> T:
        """`work()`, which the others have begun. Raises RankLost where one is gone."""
        if self._busy:
            return work()
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def perform() -> None:
            try:
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
                self._lost = True
                with suppress(queue.Empty):  # a thread inside a collective spoils a clean exit
                    outcome.get(timeout=GRACE)
                raise RankLost(f"{lost} during {doing}")
        self._busy = False
        if error is None:
            return result  # pyright: ignore[reportReturnType]
        if is_communication(error):
            self._lost = True
            raise RankLost(f"{self._who()} during {doing}") from error
        raise error

    def close(self) -> None:
        """Send the others home and leave the group. After a failure they end by themselves."""
        self._heartbeat.close()
        if self._lost:
            return
        self._announce(Order(STOP), 0)
        for rank in range(1, self._ranks.world):
            with suppress(dist.DistStoreError):  # it hangs elsewhere, and will miss our heartbeat
                self._ranks.store.wait([f"bye/{rank}"], timedelta(seconds=GRACE))
        self._ranks.close()

    def _announce(self, order: Order, size: int) -> None:
        self._number += 1
        text = json.dumps({"what": order.what, "options": order.options, "size": size})
        self._ranks.store.set(f"order/{self._number}", text)

    def _gone(self) -> str:
        """A sentence on the first rank that failed by itself or does not beat; else nothing."""
        reports = self._reports()
        for rank, report in reports.items():
            if not report["communication"]:
                return f"trainer rank {rank} failed ({report['text']})"
        lost = [rank for rank in self._heartbeat.lost() if rank not in reports]
        host = self._ranks.store.get(f"here/{lost[0]}").decode() if lost else ""
        return f"trainer rank {lost[0]} on {host} died or froze" if lost else ""

    def _who(self) -> str:
        """After a broken collective: whose fault it was, for which its heartbeat is waited for."""
        end = time.monotonic() + self._ranks.place.lost_after + GRACE
        while time.monotonic() < end:
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
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        while True:
            self._work.get()()


def report_failure(ranks: Ranks, error: BaseException) -> None:
    """Tell rank 0 why this rank ends."""
    text = f"{type(error).__name__}: {error}"
    report = {"communication": is_communication(error), "text": text}
    with suppress(dist.DistError):  # rank 0 may be gone itself
        ranks.store.set(f"failed/{ranks.rank}", json.dumps(report))


def await_order(ranks: Ranks, number: int) -> dict[str, Any]:
    """The next order, however long that takes. Raises RankLost where rank 0 is gone."""
    while True:
        try:
            ranks.store.wait([f"order/{number}"], _WAIT)
            return json.loads(ranks.store.get(f"order/{number}"))
        except dist.DistNetworkError as error:
            raise RankLost("trainer rank 0 is gone") from error
        except dist.DistStoreError:
            continue  # nothing to do yet; the heartbeat ends this process with rank 0


def is_communication(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
