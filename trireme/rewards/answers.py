"""Answers: extracts the result from a reply, and decides whether two results are mathematically
equal.

Two plain numbers, or two equal texts, are compared exactly and at once. Only the rest goes to
math-verify, which knows LaTeX and takes milliseconds. It runs without its time-outs, since these
use signals and fail outside the main thread; so slow cases (towers of powers, long texts, large
factorials) are not passed to it and count as different.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

LONGEST = 300
"""Most characters of an answer that is compared as mathematics."""
_TAIL = 4000
"""The number of characters at the end of a reply that are searched for its result."""
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,2})?(?:/\d+)?%?")
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
_ONE_NUMBER = re.compile(_NUMBER_IN_TEXT.pattern + r"(?!\w)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BRACE = re.compile("[{}]")
_SHORT_FRACTION = re.compile(r"\\frac([^{])(?:([^{])|(?=\{))")
_FENCES = (("**", "**"), ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_WITH_UNIT = re.compile(
    rf"({_NUMBER_IN_TEXT.pattern})(?:\s+[A-Za-z]{{2,}}(?:\s*/\s*[A-Za-z]+)?(?:\^[23])?|\s*/\s*[A-Za-z]{{3,}})"
)
"""A number with a unit that has a power or a quotient: `60 km/h`, `12 ft^2`, `15/day`."""
_WORD = re.compile(r"(?=.*(?:[A-Z]{2}|[A-Za-z]{4}))[A-Za-z ]+")
"""A name, and not a product of variables."""
_MINUS = "\u2212"
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_TERM = rf"(?:\\[dt]?frac{_BRACES}{_BRACES}|\\sqrt(?:\[\w+\])?{_BRACES}|\\pi\b|\d[\d.,]*|[a-z])"
_MATH = re.compile(
    r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|\$(?!\d[\d,.]*(?:\s|$))([^$\n]+?)\$"
    rf"|(?<![A-Za-z0-9_\\])(-?(?:\d[\d.]*)?(?=[^\s]*[\\^])(?:{_TERM}(?:\^(?:{_BRACES}|\w))?)+)"
    r"|(?<![\w.])(-?\d+(?:\.\d+)?[eE][-+]?\d+)(?!\w)",
    re.DOTALL,
)
"""Mathematics in a reply: between fences, or in bare LaTeX, or a number with an exponent."""
_MATHEMATICAL = re.compile(r"[\\$^]|\d[eE][-+\d]")
"""What every match of `_MATH` contains."""
_POWER = re.compile(r"\^|\*\*")
_LARGE = re.compile(r"(?:\^|\*\*)\s*[({]*\s*[-+]?\d{4,}|\d{4,}\s*[)}]*\s*!|!\s*[)}]*\s*!")


def final_truth(truth: Any) -> str:
    """Return the result in a data set's answer column: in GSM8K's form, the text after `####`."""
    if truth is None:
        raise ValueError(
            "the task has no right answer to compare with: format.response_key names none of its "
            "columns"
        )
    if isinstance(truth, Mapping):
        raise ValueError(
            f"the task's right answer is a dictionary with {', '.join(map(str, truth))}: expected "
            "text or a number, such as one of its entries (format.response_key: column.entry)"
        )
    text = str(truth)
    return plain(text.rpartition("####")[2] if "####" in text else text)


def final_answer(reply: str) -> str | None:
    """Return the result in a reply: in <answer>, in \\boxed{}, after ####, or its last number."""
    tail = reply[-_TAIL:].replace(_MINUS, "-")
    tagged = _ANSWER_TAG.findall(tail)
    if tagged:
        inside = boxed(tagged[-1])
        return plain(tagged[-1] if inside is None else inside)
    inside = boxed(tail)
    if inside is not None:
        return plain(inside)
    if "####" in tail:
        return plain(tail.rpartition("####")[2].strip().partition("\n")[0])
    if (formula := _last_formula(tail)) is not None:
        return formula
    numbers = _NUMBER_IN_TEXT.findall(tail)
    return plain(numbers[-1]) if numbers else None


def _last_formula(text: str) -> str | None:
    """Return the last mathematics between fences, or a bare result in LaTeX, if no number follows
    it; of an equation its right side.
    """
    if not _MATHEMATICAL.search(text):  # most replies: in a tenth of the time
        return None
    last = None
    for match in _MATH.finditer(text):
        last = match
    if last is None or _NUMBER_IN_TEXT.search(text, last.end()):
        return None
    inside = next(group for group in last.groups() if group is not None)
    return plain(inside.rpartition("=")[2]) or None


def boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{...}, inner braces included; in one pass,
    since a model may write nothing but its beginning.
    """
    is_open: list[int] = []
    last, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            is_open.append(brace.start())
        elif is_open and (begin := is_open.pop()) > last and text.endswith("\\boxed", 0, begin):
            last, end = begin, brace.start()
    return text[last + 1 : end] if end >= 0 else None


def boxed_or_all(reply: str) -> tuple[bool, str]:
    """Return True if the text after the thinking has a \\boxed{}, and the content of that; else the
    whole text.
    """
    answer = reply.rpartition("</think>")[2]
    inside = boxed(answer)
    return inside is not None, answer if inside is None else inside.strip()


def graded(answer: str | None, truth: str) -> tuple[bool, str]:
    """Return True if a result is right, and the result without the text around it."""
    bare = plain(answer or "")
    return same(bare, plain(truth)), bare


def thinks(reply: str) -> bool:
    """Return True if a reply has one <think>, and one </think> after it."""
    once = reply.count("<think>") == reply.count("</think>") == 1
    return once and reply.index("<think>") < reply.index("</think>")


def without_unit(text: str) -> str:
    """Return the text before a unit in LaTeX: `5` of `5\\text{ cm}`."""
    return text.partition("\\text{ ")[0]


def whole_fractions(text: str) -> str:
    """Write LaTeX's fractions with all their braces: `\\frac{1}{2}` for `\\frac12`."""
    return _SHORT_FRACTION.sub(_with_braces, text)


def _with_braces(found: re.Match[str]) -> str:
    above, below = found.groups()
    return f"\\frac{{{above}}}" + (f"{{{below}}}" if below else "")


def plain(text: str) -> str:
    """Strip white space, fences, currency and full stop from both ends."""
    text = text.replace(_MINUS, "-").strip().rstrip(".").strip()
    for left, right in _FENCES:
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    text = text.removeprefix("\\$").removeprefix("$").strip()
    return text.replace("-$", "-", 1) if text.startswith("-$") else text


def same(answer: str | None, truth: str) -> bool:
    """Return True if a result is right."""
    if answer is None or not answer:
        return False
    if _squeezed(answer) == _squeezed(truth):
        return True
    value, wanted = number(answer), number(truth)
    if wanted is not None and value is None and (whole := _WITH_UNIT.fullmatch(answer)):
        value = number(plain(whole[1]))
    elif wanted is not None and value is None and not re.search(r"[\\^*/+<>≠≤≥]|!=", answer):
        there = _ONE_NUMBER.findall(answer)  # `72 clips`, `x = 72`
        value = number(plain(there[0])) if len(there) == 1 else None
    if value is not None and wanted is not None:
        return value == wanted
    if _WORD.fullmatch(answer) and _WORD.fullmatch(truth):  # whose letters have an order
        return _squeezed(answer).casefold() == _squeezed(truth).casefold()
    if _too_hard(answer) or _too_hard(truth):
        return False
    return _verify(answer, truth)


def number(text: str) -> Fraction | None:
    """Return the value of a plain number (`1,200`, `-3.50`, `3/4`, `12%`); None for
    anything else.
    """
    text = text.strip().removesuffix("\\%").removesuffix("%") if "%" in text else text.strip()
    if len(text) > 60 or not any(c.isdigit() for c in text) or not _NUMBER.fullmatch(text):
        return None
    try:
        above, _, below = text.replace(",", "").partition("/")
        return Fraction(above) / Fraction(below or 1)
    except (ValueError, ZeroDivisionError):
        return None


def _squeezed(text: str) -> str:
    return re.sub(r"\s+|\\[,;! ]|\\left|\\right", "", text).replace("\\dfrac", "\\frac")


def _too_hard(text: str) -> bool:
    return (
        len(text) > LONGEST
        or len(_POWER.findall(text)) > 6
        or bool(_LARGE.search(text))
        or (_tower(text))
    )


def _tower(text: str) -> bool:
    """Return True if a power has a power in its exponent."""
    return bool(re.search(r"(?:\^|\*\*)\s*[{(]*[^\s{}()]*[})]*\s*(?:\^|\*\*)", text)) or bool(
        re.search(r"(?:\^|\*\*)\s*[{(][^})]*(?:\^|\*\*)", text)
    )


@lru_cache(maxsize=4096)
def _verify(answer: str, truth: str) -> bool:
    from math_verify import parse, verify

    # it warns once that it runs without time-outs, which is intended
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"${truth}$", parsing_timeout=None)  # type: ignore[arg-type]
    formula = parse(f"${answer}$", parsing_timeout=None)  # type: ignore[arg-type]
    return bool(gold and formula) and verify(gold, formula, timeout_seconds=None)
