"""Scores: computes pass@k and mean@n of rollouts, their intervals, and which of two models is
better.

Tasks are the random sample, so errors are those of means over tasks (arXiv:2411.00640): several
rollouts of one task add little information to one.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Z = 1.959964
"""Of the normal distribution: 95 % is within this many standard deviations."""
DRAWS = 10_000
"""Random signs of a permutation test, if there are too many to try all."""
_MOST_EXACT = 12
"""Tasks up to which all signs are tried."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks, with its interval of 95 % confidence."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """The difference between the second model's mean and the first one's over the same tasks."""

    p: float
    """The probability of so large a difference if the models are equally good."""


def pass_at(k: int, values: Sequence[float], success: float = 1.0) -> float:
    """Return 1 - C(n - c, k) / C(n, k): unbiased for k of n rollouts, c with a value of at least
    `success` (arXiv:2107.03374).
    """
    n, right = len(values), sum(value >= success for value in values)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} rollouts: expected a k from 1 to {n}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per task with its interval: normal, or, if all are between 0 and
    1, Wilson's interval of as many tasks of 0 or 1 as have the same standard error: it stays
    between 0 and 1.
    """
    size, mean, error = len(values), statistics.fmean(values), _standard_error(values)
    if all(0 <= value <= 1 for value in values):
        if 0 < error < math.inf and any(0 < value < 1 for value in values):
            size = mean * (1 - mean) / error**2
        shrink = 1 + Z**2 / size
        middle = (mean + Z**2 / (2 * size)) / shrink
        half = Z * math.sqrt(mean * (1 - mean) / size + (Z / (2 * size)) ** 2) / shrink
        return Estimate(mean, max(middle - half, 0.0), min(middle + half, 1.0))
    return Estimate(mean, mean - Z * error, mean + Z * error)


def difference(first: Sequence[float], second: Sequence[float], *, seed: int = 42) -> Difference:
    """Return the second less the first, task by task; `p` is that of a permutation test of the
    signs. The interval stays between -1 and 1 if all values are between 0 and 1.

    Raises ValueError if they are not of the same tasks.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} tasks: expected the same ones")
    gains = [b - a for a, b in zip(first, second, strict=True)]
    mean, half = statistics.fmean(gains), Z * _standard_error(gains)
    low, high = mean - half, mean + half
    if math.isfinite(half) and all(0 <= value <= 1 for value in (*first, *second)):
        low, high = max(low, -1.0), min(high, 1.0)
    return Difference(mean, low, high, _sign_test(gains, seed))


def _sign_test(gains: Sequence[float], seed: int) -> float:
    """Return the share of random signs under which the sum is at least as far from 0."""
    moved = [gain for gain in gains if gain]
    seen = abs(math.fsum(moved)) - 1e-12
    if len(moved) <= _MOST_EXACT:
        sums = [
            abs(math.fsum(s * gain for s, gain in zip(signs, moved, strict=True)))
            for signs in product((1, -1), repeat=len(moved))
        ]
        return sum(total >= seen for total in sums) / len(sums)
    draw = random.Random(seed)
    far = 0
    for _ in range(DRAWS):
        bits = draw.getrandbits(len(moved))
        far += abs(sum(g if bits >> i & 1 else -g for i, g in enumerate(moved))) >= seen
    return (far + 1) / (DRAWS + 1)


def _standard_error(values: Sequence[float]) -> float:
    size = len(values)
    return statistics.stdev(values) / math.sqrt(size) if size > 1 else math.inf
