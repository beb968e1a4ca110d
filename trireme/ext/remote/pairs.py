"""Pairs: a trainer's rank makes room and lends weights to the engine on its own device.

Every rank makes the same calls; on rank 0 trainer/led.py forwards them to the others. An error
between one rank and its engine is raised on rank 0 only, and only when all ranks have gone through
the weights: gathering each weight needs all of them.
"""

from __future__ import annotations

import threading
from contextlib import closing

import torch

from trireme.ext.remote.push import HOST
from trireme.ext.remote.weight_group import Meeting, NotTaken, WeightGroup
from trireme.sync.push import Noted
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Part


class EnginePairs:
    """A rank's half of its pair of rank and engine."""

    def __init__(self, backend: Backend, *, part: Part = "merged", parks: bool = False) -> None:
        """`part`: selects among the weights with LoRA. `parks`: the optimizer's state leaves the
        device while engines work.
        """
        self._backend = backend
        self._part: Part = part
        self._parks = parks
        self._group: WeightGroup | None = None
        self._meetings = 0
        self._given_up = threading.Event()

    def meet(self) -> list[int]:
        """Meet the engine of this rank; returns the ports of all ranks."""
        self._meetings += 1
        self._given_up.clear()
        meeting = Meeting(HOST, port=0, world_size=2, rank=0, backend="ipc")
        self._group = WeightGroup(meeting, self._backend.device)
        self._group.connect({1: "the engine on its device"})
        return self._backend.gather(self._group.port, every=True)

    def make_room(self) -> None:
        """Free device memory for the engines: parked optimizer state, cached blocks."""
        if self._parks:
            self._backend.optimizer.park()
        if self._backend.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        self._backend.gather(None, every=True)  # engines wake when all ranks have made room

    def send(self, dtype: str, note: Noted = iter) -> None:
        """Send the weights to this rank's engine. Raises RuntimeError on rank 0, naming the rank
        whose engine took too long.
        """
        assert self._group is not None, "the engines have not met their ranks"
        failure = None
        with closing(self._backend.each_weight(dtype, self._part)) as weights:
            try:
                self._group.send(note(weights), given_up=self._is_given_up)
            except NotTaken as error:
                failure = str(error)
        failures = self._backend.gather(failure, every=True)
        if self._backend.rank == 0:
            for rank, failure in enumerate(failures):
                if failure is not None:
                    raise RuntimeError(f"trainer rank {rank}: {failure}")

    def give_up(self) -> None:
        """End a running `send`; the other ranks poll the store for the sign."""
        self._given_up.set()
        if (ranks := self._backend.ranks) is not None:
            ranks.store.set(self._sign, "")

    @property
    def _sign(self) -> str:
        return f"push_given_up/{self._meetings}"

    def _is_given_up(self) -> bool:
        ranks = self._backend.ranks
        return self._given_up.is_set() or (ranks is not None and ranks.store.check([self._sign]))
