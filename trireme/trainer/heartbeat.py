"""Heartbeat: which ranks are alive, told by a counter that each keeps moving in rank 0's store."""

from __future__ import annotations

import logging
import os
import threading
import time

import torch.distributed as dist

from trireme.trainer.ranks import Place, connect

logger = logging.getLogger(__name__)

EVERY = 0.5  # seconds between beats
GRACE = 5.0  # seconds that a rank without a leader gets to end by itself


class Heartbeat:
    """Beats in a thread and listens: rank 0 to all others, the others to rank 0.

    A rank whose leader is gone ends: its process exits where it has not done so by itself.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store = connect(place)
        self._others = range(1, place.world) if place.rank == 0 else range(1)
        now = time.monotonic()
        self._seen: dict[int, tuple[str, float]] = {rank: ("", now) for rank in self._others}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def lost(self) -> list[int]:
        """Ranks that have not beaten for `lost_after` seconds."""
        now = time.monotonic()
        return [r for r, (_, at) in self._seen.items() if now - at > self._place.lost_after]

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()
        self._thread.join(timeout=GRACE)

    def _run(self) -> None:
        count = 0
        while not self._closed.wait(EVERY):
            count += 1
            try:
                self._store.set(f"beat/{self._place.rank}", str(count))
                for rank in self._others:
                    self._listen(rank)
            except dist.DistError:
                self._seen = dict.fromkeys(self._others, ("", float("-inf")))
            if self._place.rank and self.lost():
                self._end()

    def _listen(self, rank: int) -> None:
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return
        beat = self._store.get(key).decode()
        if beat != self._seen[rank][0]:
            self._seen[rank] = (beat, time.monotonic())

    def _end(self) -> None:
        """Rank 0 is gone. A thread inside a collective cannot be woken: the process ends."""
        if not self._closed.wait(GRACE):
            logger.error("trainer rank %d ends: rank 0 is gone", self._place.rank)
            os._exit(1)
