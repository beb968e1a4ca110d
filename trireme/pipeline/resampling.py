"""Resampling: counts the explore steps that a train batch takes, and says when they are enough."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trireme.log import get_logger

logger = get_logger("explorer_experience_pipeline")


class Resampling:
    """An explore step of which the algorithm leaves groups out is followed by further ones, until
    a train batch is full; at most `max_resample_times` of them.
    """

    def __init__(self, most: int, *, batch_size: int, rollouts: int) -> None:
        """`batch_size` experiences make a train step, `rollouts` an explore step."""
        self._most = most
        self._batch_size = batch_size
        self._planned = math.ceil(batch_size / rollouts)
        self._steps = self._collected = 0
        self._before = self._after = (0, 0)
        self._warned = False

    @property
    def times(self) -> int:
        """Further explore steps that the batch has taken, with the present one."""
        return max(self._steps + 1 - self._planned, 0)

    @property
    def missing(self) -> int:
        """Experiences that the present explore step has to give, whatever their rewards."""
        return self._batch_size - self._collected if self.times >= self._most else 0

    def add(self, kept: int, refilled: int) -> dict[str, float]:
        """What the present explore step gives, `refilled` of it in spite of its rewards; metrics.

        It counts once `put` is called.
        """
        times = self.times
        if refilled:
            learns = self._collected + kept - refilled
            say = logger.info if self._warned else logger.warning
            say(
                "a train batch has %d experiences of groups whose rewards differ after %d further "
                "explore steps (algorithm.advantage_fn_args.max_resample_times): expected %d; %d "
                "of groups with equal rewards are trained beside them, with advantage 0",
                *(learns, times, self._batch_size, refilled),
            )
            self._warned = True
        total = self._collected + kept
        full = total >= self._batch_size
        self._after = (0, total % self._batch_size) if full else (self._steps + 1, total)
        return {"resample_times": float(times)}

    def put(self) -> None:
        """What was added is in the buffer."""
        self._before = self._after
        self._steps, self._collected = self._after

    def state(self, *, putting: bool = False) -> dict[str, int]:
        """What a resume needs; `putting`: as it will be once what was added is in the buffer."""
        steps, collected = self._after if putting else self._before
        return {"steps": steps, "collected": collected}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Back to where `state` was taken."""
        self._after = state["steps"], state["collected"]
        self.put()
