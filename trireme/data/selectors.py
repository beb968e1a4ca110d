"""Selectors: in which order a taskset hands out its rows.

A selector is a pure function of (number of rows, epoch, seed), so that a position is all the state
that a resume needs: the same epoch has the same order in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from trireme.registry import Registry

Selector = Callable[[int, int, int], Sequence[int]]

SELECTORS = Registry(
    "data_selector",
    {
        "sequential": "trireme.data.selectors.sequential",
        "shuffle": "trireme.data.selectors.shuffle",
        "random": "trireme.data.selectors.uniform",
    },
)


def sequential(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Row after row, the same in each epoch."""
    return range(rows)


def shuffle(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Each row once an epoch, in an order of its own for each epoch."""
    order = list(range(rows))
    random.Random(f"shuffle/{seed}/{epoch}").shuffle(order)
    return order


def uniform(rows: int, epoch: int, seed: int) -> Sequence[int]:
    """Rows drawn with replacement: some come twice in an epoch, some not at all."""
    return random.Random(f"random/{seed}/{epoch}").choices(range(rows), k=rows)


class Order:
    """The endless sequence of row indices that a selector makes, epoch after epoch."""

    def __init__(self, rows: int, *, selector: str = "sequential", seed: int = 42) -> None:
        """Raises ValueError for an unknown selector."""
        self._rows = rows
        self._seed = seed
        self._select: Selector = SELECTORS.get(selector)
        self._epoch = -1
        self._order: Sequence[int] = ()

    def __getitem__(self, position: int) -> int:
        """The row at a position counted from the start of the run."""
        epoch, place = divmod(position, self._rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._select(self._rows, epoch, self._seed)
        return self._order[place]
