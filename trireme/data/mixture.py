"""Mixture: several tasksets as one, every row of each once an epoch.

Which taskset the next task comes from is a shuffled list with one entry a row, anew each epoch;
which of its rows is the taskset's selector's choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.data.tasksets import Exhausted, PassRates, Taskset, count_steps
from trireme.task import Task


class Mixture:
    """Tasksets, a mixed batch at a time. Named and asked like a Taskset."""

    def __init__(
        self,
        tasksets: Sequence[Taskset],
        *,
        batch_size: int,
        total_epochs: int = 1,
        total_steps: int | None = None,
    ) -> None:
        """Raises ValueError where all rows together give not a single step."""
        self.tasksets = list(tasksets)
        self.name = "+".join(taskset.name for taskset in tasksets)
        self.batch_size = batch_size
        self._size = sum(len(taskset) for taskset in tasksets)
        source = f"the tasksets {self.name} have {self._size} rows"
        self.total_steps = count_steps(source, self._size, batch_size, total_epochs, total_steps)
        self._step = 0
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        """Number of rows."""
        return self._size

    def next(self) -> list[Task]:
        """The tasks of the next explore step. Raises Exhausted after the last."""
        if self._step >= self.total_steps:
            raise Exhausted(f"tasksets '{self.name}' have no more than {self.total_steps} steps")
        first = self._step * self.batch_size
        chosen = [self._taskset_at(first + place) for place in range(self.batch_size)]
        drawn = {i: iter(self.tasksets[i].draw(n)) for i, n in Counter(chosen).items()}
        self._step += 1
        return [
            self.tasksets[i].task(self._step, place, next(drawn[i]))
            for place, i in enumerate(chosen)
        ]

    def all(self) -> list[Task]:
        """Every row of each taskset once; moves nothing on."""
        return [task for taskset in self.tasksets for task in taskset.all()]

    @property
    def learns(self) -> bool:
        """Whether what one of them hands out depends on `feedback`."""
        return any(taskset.learns for taskset in self.tasksets)

    def feedback(self, rates: PassRates) -> None:
        """How often rows were solved, to the tasksets that they are of."""
        for taskset in self.tasksets:
            taskset.feedback(rates)

    def state(self) -> dict[str, Any]:
        """Where it stands: steps, and each taskset."""
        return {"step": self._step, "tasksets": [taskset.state() for taskset in self.tasksets]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Back to where `state` was taken. Raises ValueError for another number of tasksets."""
        found = state.get("tasksets", [state])
        if len(found) != len(self.tasksets):
            raise ValueError(
                f"buffer.explorer_input.tasksets are {len(self.tasksets)} and the checkpoint has "
                f"the state of {len(found)}: a resumed run needs the same"
            )
        self._step = int(state["step"])
        for taskset, own in zip(self.tasksets, found, strict=True):
            taskset.load_state(own)

    def _taskset_at(self, position: int) -> int:
        """The taskset at a position counted from the start of the run."""
        import numpy as np

        epoch, place = divmod(position, self._size)
        if epoch != self._epoch:
            order = np.repeat(np.arange(len(self.tasksets)), [len(t) for t in self.tasksets])
            np.random.default_rng(epoch).shuffle(order)
            self._epoch, self._order = epoch, order.tolist()
        return self._order[place]
