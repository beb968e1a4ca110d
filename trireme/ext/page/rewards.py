"""Distribution: counts rewards by step and by value: a mean of 0.5 may be one of 0 and 1 alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MOST_COLUMNS = 240
"""Columns of steps: more of them are thinner than a pixel of a chart."""
FEWEST_ROWS, MOST_ROWS = 5, 24
NEAR = 0.01
"""How far, in rows, a value may be from the middle of its row to count as a value of it alone."""

ROUNDING = 1e-9
"""The difference, as a share of the largest reward, up to which rewards are equal."""


def distribution(
    steps: np.ndarray[Any, Any], rewards: np.ndarray[Any, Any]
) -> dict[str, Any] | None:
    """Return how many rollouts of each step have which reward; None if all rewards are equal, to
    within the rounding of a sum.

    `columns`: the first and the last step of each; `rows`: the lowest and the highest reward in
    each, from below, or null for a row without any; `middles`: the rows' places on an axis;
    `counts`: for each column the number of rollouts in each row.
    """
    finite = np.isfinite(rewards)
    steps, rewards = steps[finite], rewards[finite]
    if not len(rewards) or np.ptp(rewards) <= ROUNDING * np.abs(rewards).max():
        return None
    middles = _middles(rewards)
    row = np.rint((rewards - middles[0]) / (middles[1] - middles[0])).astype(np.int64)
    known, nth = np.unique(steps, return_inverse=True)
    each = math.ceil(len(known) / MOST_COLUMNS)
    column, first = nth // each, np.arange(0, len(known), each)
    last = np.minimum(first + each, len(known)) - 1
    low, high = np.full(len(middles), np.inf), np.full(len(middles), -np.inf)
    np.minimum.at(low, row, rewards)
    np.maximum.at(high, row, rewards)
    counts = np.bincount(column * len(middles) + row, minlength=len(first) * len(middles))
    return {
        "columns": np.stack([known[first], known[last]], 1).tolist(),
        "middles": middles.tolist(),
        "rows": [
            [a, b] if a <= b else None for a, b in zip(low.tolist(), high.tolist(), strict=True)
        ],
        "counts": counts.reshape(len(first), len(middles)).tolist(),
    }


def _middles(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return evenly spaced places of rows, so that few different rewards have a row each, with
    empty ones between them.
    """
    least, most = rewards.min(), rewards.max()
    different = np.unique(rewards)
    if len(different) <= MOST_ROWS:
        gaps = (most - least) / np.diff(different).min()  # between the lowest and the highest
        whole = (different - least) / (most - least) * np.rint(gaps)
        if gaps < MOST_ROWS - 0.5 and np.abs(whole - np.rint(whole)).max() < NEAR:
            between = math.ceil((FEWEST_ROWS - 1) / round(gaps))
            return np.linspace(least, most, round(gaps) * between + 1)
    return np.linspace(least, most, MOST_ROWS)
