"""Feedback: carries pass rates from finished steps to the taskset.

Invariant: a step is drawn with the pass rates of the steps up to the last synchronisation, never
with those that happened to be there: in a run whose styles keep a beat, and in one that goes on
from a checkpoint, the same tasks are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.data.tasksets import PassRates


class Feedback:
    """Keeps what steps came to until the taskset may hear of it."""

    def __init__(self) -> None:
        self._rates: dict[int, PassRates] = {}
        self._upto = 0

    def add(self, step: int, rates: PassRates) -> None:
        """What a finished step came to."""
        self._rates[step] = rates

    def release(self, step: int) -> None:
        """What is drawn from now on may know all steps up to this one."""
        self._upto = step

    def take(self) -> list[PassRates]:
        """What has been released and not yet taken, step after step."""
        return [self._rates.pop(step) for step in sorted(self._rates) if step <= self._upto]

    def state(self) -> dict[str, Any]:
        """As JSON takes it."""
        rates = [
            [step, taskset, row, rate]
            for step, tasksets in self._rates.items()
            for taskset, rows in tasksets.items()
            for row, rate in rows.items()
        ]
        return {"upto": self._upto, "rates": rates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Back to where `state` was taken."""
        self._upto = state["upto"]
        self._rates = {}
        for step, taskset, row, rate in state["rates"]:
            tasksets: Any = self._rates.setdefault(step, {})
            tasksets.setdefault(taskset, {})[row] = rate
