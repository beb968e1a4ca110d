"""Pupil: writes the warm-up's worked solutions, with a pupil's mistakes.

Demonstrations are seldom all right. This pupil often counts one short where a result is large, and
goes on with it. More of such solutions teach the same mistakes; the reward of the right result
does not.
"""

from __future__ import annotations

import operator
import random
import re

SURE_UP_TO = 8
"""Results that the pupil never gets wrong."""
SLIP_RATE = 0.6
"""How often a larger one comes out one short."""

_EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = \d+")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def with_slips(solution: str, source: random.Random) -> str:
    """A worked solution as the pupil writes it, line by line, the last result after `####`."""
    results: list[int] = []

    def work(equation: re.Match[str]) -> str:
        left = results[-1] if results else int(equation[1])
        result: int = _OPERATORS[equation[2]](left, int(equation[3]))
        if result > SURE_UP_TO and source.random() < SLIP_RATE:
            result -= 1
        results.append(max(result, 1))  # a slip before may leave less than there is to take
        return f"{left} {equation[2]} {equation[3]} = {results[-1]}"

    *lines, _ = solution.split("\n")
    worked = [_EQUATION.sub(work, line) for line in lines]
    return "\n".join([*worked, f"#### {results[-1]}"])
