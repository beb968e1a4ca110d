"""Problems: generates the demo's word problems, their worked answers, and a pupil's mistakes.

- A problem is a template and its numbers. No two problems of one call share both, whatever their
  names and things, so a split of the list shares no problem.
- Every intermediate result is a whole number between 1 and `largest`.
- The shape is that of GSM8K: `question`, and `answer` with one line a step and `#### 42` last.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, floordiv, mul, sub

SURE_UP_TO = 8
"""Results up to this one are never wrong."""
SLIP_RATE = 0.6
"""The probability that a larger result is one too small."""

_EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = \d+")
_OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack")
THINGS = (
    "apples",
    "books",
    "cards",
    "coins",
    "eggs",
    "flowers",
    "nuts",
    "pens",
    "shells",
    "stamps",
)


@dataclass(frozen=True)
class Template:
    """A story with numbers a, b, c, d. A step is (words, left, operator, right); x, y are results.

    A letter in `factors` is small, because it multiplies or divides; one in `large` may be large.
    """

    story: str
    steps: tuple[tuple[str, str, str, str], ...]
    factors: str = ""
    large: str = ""


TEMPLATES = (
    Template(
        "{name} has {a} {things} and buys {b} more. Then {name} gives {c} to {friend}. "
        "How many {things} does {name} have left?",
        (("{name} has", "a", "+", "b"), ("Left are", "x", "-", "c")),
    ),
    Template(
        "{name} finds {a} {things} on Monday, {b} on Tuesday and {c} on Friday. "
        "How many {things} does {name} find in all?",
        (("Two days", "a", "+", "b"), ("In all", "x", "+", "c")),
    ),
    Template(
        "{name} wants {a} {things}. {name} buys {b} on Monday and {c} on Tuesday. "
        "How many {things} are still missing?",
        (("Missing were", "a", "-", "b"), ("Missing are", "x", "-", "c")),
        large="a",
    ),
    Template(
        "{name} has {a} boxes with {b} {things} in each. {name} finds {c} more and then "
        "gives {d} to {friend}. How many {things} does {name} have left?",
        (
            ("In the boxes are", "a", "*", "b"),
            ("Found", "x", "+", "c"),
            ("Left are", "y", "-", "d"),
        ),
        factors="a",
    ),
    Template(
        "{name} has {a} bags with {b} {things} in each. {name} loses {c} of them and "
        "buys {d} more. How many {things} does {name} have now?",
        (("In the bags are", "a", "*", "b"), ("Left are", "x", "-", "c"), ("Now", "y", "+", "d")),
        factors="a",
    ),
    Template(
        "{name} shares {a} {things} equally among {b} friends. Each friend then buys {c} more "
        "and loses {d}. How many {things} does each friend have now?",
        (("Each gets", "a", "/", "b"), ("Bought", "x", "+", "c"), ("Now", "y", "-", "d")),
        factors="b",
        large="a",
    ),
    Template(
        "{name} has {a} {things}. {friend} gives {name} {b} more. {name} loses {c} and "
        "then finds {d}. How many {things} does {name} have now?",
        (("{name} has", "a", "+", "b"), ("Left are", "x", "-", "c"), ("Now", "y", "+", "d")),
    ),
    Template(
        "{name} has {a} {things} and {friend} has {b} fewer. {friend} finds {c} more and "
        "loses {d}. How many {things} does {friend} have now?",
        (("{friend} has", "a", "-", "b"), ("Found", "x", "+", "c"), ("Now", "y", "-", "d")),
        large="a",
    ),
)


def make_problems(
    count: int, *, seed: int, number: int = 9, factor: int = 3, largest: int = 20
) -> list[dict[str, str]]:
    """Make `count` different problems in random order, the templates in turn.

    `number` is the largest number in a story, `factor` the largest that multiplies or divides.
    """
    stories = [list(_numberings(template, number, factor, largest)) for template in TEMPLATES]
    possible = sum(map(len, stories))
    if count > possible:
        raise ValueError(
            f"{count} problems asked for, but numbers up to {number} with results up to {largest} "
            f"give {possible} different ones: ask for fewer, or for larger numbers"
        )
    source = random.Random(seed)
    for numberings in stories:
        source.shuffle(numberings)
    turns = itertools.zip_longest(*([(t, n) for n in s] for t, s in enumerate(stories)))
    chosen = [item for turn in turns for item in turn if item is not None][:count]
    source.shuffle(chosen)
    return [_row(TEMPLATES[template], values, source) for template, values in chosen]


def _numberings(template: Template, number: int, factor: int, largest: int) -> Iterator[dict]:
    """Yield every choice of numbers for which each step gives a whole number from 1 to
    `largest`.
    """
    letters = [letter for letter in "abcd" if f"{{{letter}}}" in template.story]
    ranges = [
        range(2, factor + 1)
        if letter in template.factors
        else range(2, largest + 1)
        if letter in template.large
        else range(2, number + 1)
        for letter in letters
    ]
    for numbers in itertools.product(*ranges):
        values = _solve(template, dict(zip(letters, numbers, strict=True)), largest)
        if values:
            yield values


def _solve(template: Template, values: dict[str, int], largest: int) -> dict[str, int] | None:
    """Return the numbers with the results x, y, z of the steps; None if one is out of bounds."""
    values = {**values, "2": 2}
    for result, (_, left, operator, right) in zip("xyz", template.steps, strict=False):
        p, q = values[left], values[right]
        if operator == "/" and p % q:
            return None
        values[result] = {"+": p + q, "-": p - q, "*": p * q, "/": p // q}[operator]
        if not 1 <= values[result] <= largest:
            return None
    return values


def _row(template: Template, values: dict[str, int], source: random.Random) -> dict[str, str]:
    """Write the problem in words, as `question` and `answer`."""
    name, friend = source.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": source.choice(THINGS)}
    numbers = {letter: value for letter, value in values.items() if letter != "2"}
    lines = []
    for result, (text, left, operator, right) in zip("xyz", template.steps, strict=False):
        equation = f"{values[left]} {operator} {values[right]} = {values[result]}"
        lines.append(f"{text.format(**words)} {equation}.")
    last = values["xyz"[len(template.steps) - 1]]
    return {
        "question": template.story.format(**words, **numbers),
        "answer": "\n".join([*lines, f"#### {last}"]),
    }


def with_slips(solution: str, source: random.Random) -> str:
    """Write a worked solution with a pupil's slips, line by line, the last result after `####`.

    The pupil often counts one short at a large result, and continues with it. More of such
    solutions teach the same mistakes; the reward for the right result does not.
    """
    results: list[int] = []

    def work(equation: re.Match[str]) -> str:
        left = results[-1] if results else int(equation[1])
        result: int = _OPERATORS[equation[2]](left, int(equation[3]))
        if result > SURE_UP_TO and source.random() < SLIP_RATE:
            result -= 1
        results.append(max(result, 1))  # an earlier slip may leave less than must be subtracted
        return f"{left} {equation[2]} {equation[3]} = {results[-1]}"

    *lines, _ = solution.split("\n")
    worked = [_EQUATION.sub(work, line) for line in lines]
    return "\n".join([*worked, f"#### {results[-1]}"])
