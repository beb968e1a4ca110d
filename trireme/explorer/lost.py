"""Lost: which rollouts failed of which cause, as people are told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trireme.explorer.runner import Failed

Cause = tuple[str, ...]
"""Whose code, the kind of error, and the line. The message may hold what differs each time."""


@dataclass
class Lost:
    """The failed rollouts of a run so far."""

    wanted: int = 0
    causes: Counter[Cause] = field(default_factory=Counter)
    _first: dict[Cause, Failed] = field(default_factory=dict)

    def add(self, wanted: int, causes: Mapping[Cause, Sequence[Failed]]) -> None:
        """Those of `wanted` rollouts more."""
        self.wanted += wanted
        for cause, failures in causes.items():
            self.causes[cause] += len(failures)
            self._first.setdefault(cause, failures[0])

    def __str__(self) -> str:
        """How many of how many, and why."""
        whys = [
            f"{count} x {self._first[cause].fault.what}: {self._first[cause].fault.text}"
            for cause, count in self.causes.most_common(3)
        ]
        more = [f"and {len(self.causes) - 3} other causes"] if len(self.causes) > 3 else []
        lost = f"{self.causes.total()} of {self.wanted} rollouts failed and were left out"
        return f"{lost}: {'; '.join([*whys, *more])}"


def by_cause(failures: Sequence[Failed]) -> dict[Cause, list[Failed]]:
    """Failures of one cause together, in the order in which each first appears."""
    causes: dict[Cause, list[Failed]] = {}
    for failed in failures:
        fault = failed.fault
        kind = fault.text.partition(":")[0] if fault.place else fault.text
        causes.setdefault((fault.what, failed.kind, kind, fault.place), []).append(failed)
    return causes


def told(failures: Sequence[Failed], wanted: int, when: str, more: str = "") -> str:
    """The sentence for failures of one cause, among `wanted` rollouts."""
    fault, count = failures[0].fault, len(failures)
    size = f"all {wanted}" if count == wanted else f"{count} of {wanted}"
    return f"{fault.what} failed in {size} rollouts of {when}{more}: {fault.text}"
