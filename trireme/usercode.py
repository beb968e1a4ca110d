"""User code: reports what failed in user code, in which line, and whether a retry makes sense.

A call of a user's workflow, reward, operator, environment or plug-in is inside `with
UserCode("reward 'price'", function):`. Its errors keep their type and propagate; `fault_of` derives
the message for people: one sentence, then file, line and code.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import FrameType, TracebackType
from typing import Any

from trireme.registry import signature_of
from trireme.syntax import source_lines

_MARK = "__trireme_user_code__"
_NOT_THEIRS = (
    str(Path(__file__).resolve().parent),
    *(os.path.realpath(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib")),
)
_LASTING = (
    *(TypeError, LookupError, AttributeError, NameError, ImportError, SyntaxError),
    *(AssertionError, ArithmeticError, NotImplementedError, RecursionError),
)
"""Errors of the code itself: a retry would raise them again."""


EXPECTED = (ValueError, RuntimeError, OSError, ImportError, MemoryError)
"""The errors that a run may end with: their text is a sentence."""


class Refused(ValueError):
    """A value that user code returned cannot be used; the text names the expected one."""

    lasting = True


class Escaped(RuntimeError):
    """User code raised something that is not an Exception (SystemExit, KeyboardInterrupt, a Rust
    panic).
    """


@dataclass(frozen=True)
class Fault:
    """The report of an error for people."""

    what: str
    """The failed code: `reward 'price'`."""
    text: str
    """`KeyError: 'no price for eggs'`."""
    place: str
    """`/home/me/price.py:12: return prices[item]`; empty if no line is the user's own."""
    lasting: bool
    """Whether a retry would fail again."""
    refused: bool = False
    """Whether the text continues a sentence that begins with the code's name: `gave nan: expected
    …`."""

    def __str__(self) -> str:
        """Return the sentence, and below it the place."""
        joint = " " if self.refused else " failed: "
        return with_place(f"{self.what}{joint}{self.text}", self.place)


class UserCode(AbstractContextManager["UserCode"]):
    """Marks errors inside the block with the code that they come from; the innermost mark stays."""

    def __init__(self, what: str, code: Any = None, *, absent: str = "") -> None:
        """`code` is the function, class or object that is called; `absent` explains a value that
        it gets as None, and is added to an error about None.
        """
        self.what = what
        self.code = code
        self.absent = absent

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Mark the error; anything but an Exception would end the event loop, and becomes one.

        What a handler of a signal has raised here is not the code's, and ends the loop.
        """
        if error is None or isinstance(error, asyncio.CancelledError):
            return
        if isinstance(error, Exception):
            self._mark(error)
            return
        if by_handler(error):
            return
        escaped = Escaped(_described(error))
        self._mark(escaped)
        raise escaped from error

    def _mark(self, error: Exception) -> None:
        if not hasattr(error, _MARK):
            with suppress(AttributeError, TypeError):  # a class that allows no attributes
                setattr(error, _MARK, (self.what, _defined(self.code), self.absent))


def fault_of(error: BaseException, what: str = "", code: Any = None) -> Fault | None:
    """Return the fault of an error by its mark; by `what` and `code` if it is not marked, else
    None.
    """
    marked = getattr(_first(error), _MARK, None) or getattr(error, _MARK, None)
    marked = marked or ((what, _defined(code), "") if what else None)
    if marked is None:
        return None
    what, defined, absent = marked
    raised = error.__cause__ if isinstance(error, Escaped) and error.__cause__ else _first(error)
    lasting = getattr(raised, "lasting", isinstance(error, Escaped) or isinstance(raised, _LASTING))
    text = str(error) if isinstance(error, Escaped) else _described(error)
    text, whole = text.removeprefix(f"{what} "), text
    if absent and "None" in text and not isinstance(error, Refused):
        text += f"; {absent}"
    place = _raised_at(raised) or _raised_at(error) or defined
    return Fault(what, text, place, lasting, refused=text != whole)


def by_handler(error: BaseException) -> bool:
    """Return whether a signal's handler of user code or of a library has raised it, as a cluster's
    client installs one for SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    code = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in code for frame, _ in traceback.walk_tb(error.__traceback__))


def sentence_of(error: BaseException) -> str | None:
    """Return the sentence about an error that a run ended with, with its place if that is in user
    code; None for a bug of ours.
    """
    if (fault := fault_of(error)) is not None:
        return str(fault)
    return (str(error) or type(error).__name__) if isinstance(error, EXPECTED) else None


def ending(error: BaseException) -> str:
    """Return the same for a record, of a bug as well: without a place in user code, with the
    innermost line that the error passed through.
    """
    text = sentence_of(error) or _described(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or "\n" in text:  # which names a place itself
        return text
    return with_place(text, f"{frames[-1].filename}:{frames[-1].lineno}")


def refuse_signature(what: str, code: Any, call: Any, expected: str, **named: Any) -> None:
    """Raise Refused if `call` does not take the arguments in `expected`, such as `(task, answer)`,
    besides the `named` ones, or takes them in another order. `code` is the user's object.
    """
    signature = signature_of(call)
    wanted = expected.strip("()").split(", ")
    taken = [name for name in signature.parameters if name in wanted]
    try:
        signature.bind(*wanted, **named)
        swapped = len(taken) == len(wanted) and taken != wanted
    except TypeError:
        swapped = True
    if swapped:
        with UserCode(what, code):
            raise Refused(f"{what} takes {signature}: expected {expected}")


def with_place(sentence: str, line: str) -> str:
    """Return a sentence, followed by a line with the place in user code."""
    return f"{sentence}\n  {line}" if line else sentence


def innermost(frame: FrameType | None) -> tuple[UserCode | None, str]:
    """Find the `UserCode` around a running stack, and the user's deepest line in it."""
    return _innermost(() if frame is None else (f for f, _ in traceback.walk_stack(frame)))


def awaiting(coroutine: Any) -> tuple[UserCode | None, str]:
    """Find the same for a waiting coroutine, as far as it awaits other coroutines, a list or set of
    tasks, or code in a thread.
    """
    frames: list[FrameType] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None and frame not in frames:
        frames.append(frame)
        following = coroutine.cr_await
        coroutine = following if hasattr(following, "cr_frame") else _unfinished(frame)
    for thread in frames[-1].f_locals.values() if frames else ():
        ident = thread.ident if isinstance(thread, Thread) else None
        if ident is not None and (running := sys._current_frames().get(ident)) is not None:
            frames += [frame for frame, _ in traceback.walk_stack(running)][::-1]
    return _innermost(reversed(frames))


def _unfinished(frame: FrameType) -> Any:
    """Return the coroutine of an unfinished task in a list or set of a frame; None without one."""
    lists = (value for value in frame.f_locals.values() if isinstance(value, list | set))
    tasks = (task for one in lists for task in one if isinstance(task, asyncio.Task))
    return next((task.get_coro() for task in tasks if not task.done()), None)


def _innermost(frames: Iterable[FrameType]) -> tuple[UserCode | None, str]:
    line = ""
    for frame in frames:
        if not line and _is_theirs(frame.f_code.co_filename):
            line = _line(frame.f_code.co_filename, frame.f_lineno)
        for value in frame.f_locals.values() if not _is_theirs(frame.f_code.co_filename) else ():
            if isinstance(value, UserCode):
                return value, line
    return None, line


def _described(error: BaseException) -> str:
    """Return kind and message in one line, with a hint where Python's own words mislead."""
    first = _first(error)
    if first is not error:
        return f"{_described(first)} (the first error of a group: {_text(error)})"
    lines = _text(error).strip().splitlines() or [""]
    text = f"{lines[0]} …" if len(lines) > 1 else lines[0]
    if isinstance(error, Refused):
        return text
    if re.search(r"'coroutine' object|of type 'coroutine'|coroutine object", text):
        text += ": an `await` is missing, as in `reply = await model.chat(...)` of an `async def`"
        # Python would report it again, when it destroys the coroutine, elsewhere
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    elif "is bound to a different event loop" in text:
        text += (
            ": each stage of a run, and each call of `train`, has a loop of its own; make the lock "
            "where it is first used, one for each `asyncio.get_running_loop()`"
        )
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    """Return the text of an error, whose class may be the user's."""
    try:
        return str(error)
    except Exception as raised:
        return f"its __str__ raised {type(raised).__name__}"


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group, as `asyncio.TaskGroup` raises it; another one itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _raised_at(error: BaseException) -> str:
    """Return the deepest line of the user's code that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename and _is_theirs(error.filename):
        return _line(error.filename, error.lineno or 1)
    frames = traceback.walk_tb(error.__traceback__)
    theirs = [(f.f_code.co_filename, n) for f, n in frames if _is_theirs(f.f_code.co_filename)]
    return _line(*theirs[-1]) if theirs else ""


def _defined(code: Any) -> str:
    for thing in _unwrapped(code):
        try:
            file = inspect.getsourcefile(thing)
            lines, first = source_lines(thing)
        except (TypeError, OSError):
            continue
        if file is None or not _is_theirs(file):
            return ""
        heads = [n for n, line in enumerate(lines) if re.match(r"\s*(async def|def|class)\b", line)]
        return _line(file, first + (heads[0] if heads else 0))
    return ""


def _unwrapped(code: Any) -> Iterator[Any]:
    """Yield the code itself, the function of a `partial`, and the class of an object."""
    if code is not None:
        code = inspect.unwrap(getattr(code, "func", code))
        yield code
        yield type(code)


def _line(file: str, number: int) -> str:
    linecache.checkcache(file)
    code = linecache.getline(file, number).strip()
    return f"{file}:{number}: {code}" if code else f"{file}:{number}"


def _is_theirs(file: str) -> bool:
    """Return whether a file is neither ours nor a library's."""
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    libraries = {"site-packages", "dist-packages"} & set(Path(path).parts)
    return not libraries and not path.startswith(tuple(f"{p}{os.sep}" for p in _NOT_THEIRS))
