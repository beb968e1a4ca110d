"""Target: the number that was asked for beside the one that was reached; a miss is said and counts.

With `quick` (work of seconds, for a test) figures are printed and not judged: they depend on the
size of the work.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One figure. `reached` None: it was not measured here, which is said and is no miss."""

    name: str
    reached: float | None
    asked: float
    at_most: bool = False

    @property
    def missed(self) -> bool:
        """Whether it was measured and is on the wrong side."""
        if self.reached is None:
            return False
        return self.reached > self.asked if self.at_most else self.reached < self.asked

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "at least"
        asked = f"{self.name}: asked {bound} {self.asked:g}"
        if self.reached is None:
            return f"{asked}, NOT MEASURED"
        return f"{asked}, reached {self.reached:.3g}{': MISSED' if self.missed else ''}"


def judge(*targets: Target, quick: bool = False) -> int:
    """Print every target; the exit code, 1 where one was missed."""
    for target in targets:
        print(target, flush=True)
    if quick:
        print("quick: too little work for these figures to be judged")
        return 0
    return int(any(target.missed for target in targets))
