"""Tally: gathers, over the micro-batches of a step, what is to be reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Reading = dict[str, dict[str, Any]]
"""Sums, counts and maxima by name, as JSON."""


class Tally:
    """Sums, means over tokens and maxima by name. Values are read once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, Tensor] = {}

    def sum(self, name: str, values: Tensor) -> None:
        """Add all of `values`: of quantities that are weighted already."""
        total = values.detach().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def mean(self, name: str, values: Tensor) -> None:
        """Report the mean over all values given under this name, if there are any."""
        if not values.numel():
            return
        self.sum(name, values)
        self._counts[name] = self._counts.get(name, 0) + values.numel()

    def max(self, name: str, values: Tensor) -> None:
        """Report the largest value given under this name."""
        largest = values.detach().max()
        known = self._maxima.get(name)
        self._maxima[name] = largest if known is None else largest.maximum(known)

    def read(self) -> Reading:
        """Everything gathered, as numbers."""
        return {
            "sums": {name: float(total) for name, total in self._sums.items()},
            "counts": dict(self._counts),
            "maxima": {name: float(value) for name, value in self._maxima.items()},
        }


def metrics_of(readings: Sequence[Reading]) -> dict[str, float]:
    """What the readings of all ranks say together, by name."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for reading in readings:
        for name, total in reading["sums"].items():
            sums[name] = sums.get(name, 0.0) + total
        for name, count in reading["counts"].items():
            counts[name] = counts.get(name, 0) + count
        for name, value in reading["maxima"].items():
            maxima[name] = max(maxima.get(name, value), value)
    return {name: total / counts.get(name, 1) for name, total in sums.items()} | maxima
