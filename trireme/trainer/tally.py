"""Tally: gathers, over the micro-batches of a step, what is to be reported of it."""

from __future__ import annotations

from torch import Tensor


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

    def metrics(self) -> dict[str, float]:
        """Everything gathered, by name."""
        out = {name: float(total) / self._counts.get(name, 1) for name, total in self._sums.items()}
        return out | {name: float(value) for name, value in self._maxima.items()}
