"""Reward: scores an answer by named parts, which are summed and logged.

Two forms. A function `(task, answer, *, options) -> number | dict[str, number]`, which may be a
coroutine function, or an object or a class whose instances are called like one, and whose keyword
arguments also take columns of the row by name; and a class
`RewardFn(**options)` whose instances are called with what their signature names of `response`,
`truth`, `prompt`, `task`. Either form may also name the sampled ids `response_token`,
`auxiliary_models`, and the `workdir` of a program's rollout. Options are checked against the
signature.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trireme.aio import call_user
from trireme.config.dialect import adapted
from trireme.config.options import accepted, fitting_options, parameters_of
from trireme.log import get_logger
from trireme.registry import REWARDS
from trireme.task import Task
from trireme.usercode import Refused, UserCode, refuse_signature

logger = get_logger("launcher")
_LARGEST = 3.4e38  # of the float32 in which rewards are compared
NOTE = "note/"
"""How the name of a part begins that is a metric and does not count."""
_NAMED = ("response", "truth", "prompt", "task")
_GIVEN = ("response_token", "auxiliary_models", "workdir")
"""The data that are passed by name, and are not options."""
_NEEDS_TRUTH, _EXAMINE, _ALL_TURNS = "needs_truth", "examine_row", "judges_all_turns"
F = TypeVar("F", bound=Callable[..., Any])


class RewardFn(ABC):
    """The class form: options in the constructor, one answer a call."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    @abstractmethod
    def __call__(self, **kwargs: Any) -> dict[str, float]:
        """Parts of the reward; called with `response`, `truth`, `prompt` and `task`."""


def resolve(reward: Any, args: Mapping[str, Any] | None = None) -> Callable[..., Any] | None:
    """The reward that a name, path, function or class stands for, with its options; None for None.

    Raises ValueError for an unknown name, and for an option that it does not have.
    """
    options = dict(args or {})
    function: Any = REWARDS.get(reward) if isinstance(reward, str) else reward
    if function is None:
        if options:
            raise ValueError(f"reward_fn_args are {options}, but no reward is named")
        return None
    if not callable(function):
        raise ValueError(
            f"reward {reward!r} is {type(function).__name__}: expected a function or class"
        )
    name = (
        reward
        if isinstance(reward, str)
        else getattr(function, "__name__", type(function).__name__)
    )
    _refuse_cached(f"reward '{name}'", function)
    if inspect.isclass(function):
        options = fitting_options(f"reward '{name}'", function, options)
        with UserCode(f"reward '{name}'", function):
            made: Any = function(**options)
            if not callable(made):
                raise Refused(f"reward '{name}' ({function.__name__}) has no method `__call__`")
            if not _is_function(made):
                _refuse_arguments(f"reward '{name}'", made)
                return made
        return _with_options(name, made, {})
    if _is_function(function):
        # a rollout asks for the reward that the rollout before it had
        plain = not options and inspect.isfunction(function)
        return _plain(name, function) if plain else _with_options(name, function, options)
    if options:
        raise ValueError(f"reward '{name}' is an instance, so its options cannot be set: {options}")
    with UserCode(f"reward '{name}'", function):
        _refuse_arguments(f"reward '{name}'", function)
    return function


def _with_options(
    name: str, function: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """A function form with its options. Raises ValueError for one that it does not have."""
    if list(parameters_of(function))[:2] != ["task", "answer"]:
        function = adapted("reward", name, function)
    columns = [key for key in column_names(function) if key not in options]
    names = [*_GIVEN, *columns]
    for key, argument in list(parameters_of(function).items())[2:]:
        collects = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if argument.default is argument.empty and not collects and key not in {*names, *options}:
            with UserCode(f"reward '{name}'", function):
                raise Refused(
                    f"reward '{name}' needs the option '{key}': expected reward_fn_args.{key}, or "
                    f"`*` before '{key}' in its signature, for a column of that name"
                )
    options = fitting_options(f"reward '{name}'", function, options, first=2, given=names)
    more = {key: None for key in names if key in parameters_of(function)}
    refuse_signature(f"reward '{name}'", function, function, "(task, answer)", **more, **options)
    return functools.partial(function, **options) if options else function


@functools.lru_cache(maxsize=256)
def _plain(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function form without options, examined once."""
    return _with_options(name, function, {})


async def score(
    task: Task,
    answer: str,
    reward: Callable[..., Any],
    tokens: Sequence[int] = (),
    models: Sequence[Any] = (),
    workdir: str | None = None,
    notes: dict[str, float] | None = None,
    named: Mapping[str, Any] | None = None,
    all_turns: str = "",
) -> dict[str, float]:
    """The parts that `reward` gives an answer. Raises Refused for what is not finite numbers.

    A part `note/NAME` does not count: it goes into `notes`, as NAME.

    `all_turns` is the text of a conversation, the answer of a reward of `judges_all_turns`.
    `tokens` are the ids that were sampled, `models` the auxiliary ones, `workdir` the folder that a
    program had for its rollout. A class form is also given what it names of `named`, which goes
    before the task's.
    """
    name = _name(reward)
    if all_turns and getattr(_inner(reward), _ALL_TURNS, False):
        answer = all_turns
    more = {"response_token": tokens, "auxiliary_models": models, "workdir": workdir}
    absent = ""
    if task.truth is None:
        absent = (
            f"task.truth is None, since no column of the row is '{task.truth_key}' "
            f"(format.response_key): expected one of {', '.join(task.raw_task)}"
        )
    with UserCode(f"reward '{name}'", reward, absent=absent) as _:
        scored = await _asked(task, answer, reward, more, named or {})
        parts = scored if isinstance(scored, Mapping) else {name: scored}
        whose = f"reward '{name}' gave"
        if not parts:
            raise Refused(f"{whose} {{}}: expected a number, or one for each part")
        numbers = {
            str(part): number(value, f"{whose} for '{part}'" if parts is scored else whose)
            for part, value in parts.items()
        }
    noted = [part for part in numbers if part.startswith(NOTE)]
    values = {part.removeprefix(NOTE): numbers.pop(part) for part in noted}
    if notes is not None:
        notes.update(values)
    return numbers


def number(value: Any, whose: str, refused: type[Refused] = Refused) -> float:
    """A finite number: Python's (a bool is 0 or 1), numpy's, or a tensor of one; never text.

    Raises `refused`, with `whose` in front, for anything else.
    """
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        as_number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise refused(f"{whose} {value!r:.60}: expected a number") from error
    if not abs(as_number) <= _LARGEST:
        raise refused(f"{whose} {as_number!r}: expected a finite number")
    return as_number


async def _asked(
    task: Task,
    answer: str,
    reward: Callable[..., Any],
    more: dict[str, Any],
    others: Mapping[str, Any],
) -> Any:
    """The return value of `reward`, called as its form wants; `more`: see `_GIVEN`, `others`: see
    `score`.
    """
    if _is_function(reward):
        known = parameters_of(_inner(reward))
        named = {k: v for k, v in more.items() if k in known} | columns_for(task, reward)
        return await call_user(functools.partial(reward, task, answer, **named))
    there = {"response": answer, "truth": task.truth, "prompt": task.prompt, "task": task}
    there |= others
    return await call_user(functools.partial(reward, **_wanted(there, more, reward)))


def _refuse_cached(what: str, function: Any) -> None:
    """Raise Refused for a function of a task that functools caches: it would hash the task."""
    called = function if inspect.isclass(function) else _inner(function)
    method = called.__call__ if inspect.isclass(called) else type(called).__call__
    cached = any(isinstance(one, functools._lru_cache_wrapper) for one in (called, method))
    if cached and "task" in parameters_of(method if inspect.isclass(called) else called):
        with UserCode(what, called):
            raise Refused(
                f"{what} is cached by functools and has an argument 'task', which cannot be "
                "hashed: expected a cached function of texts that the reward calls"
            )


def _refuse_arguments(what: str, made: Any) -> None:
    for name, argument in parameters_of(made).items():
        collects = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if argument.default is argument.empty and not collects and name not in _NAMED + _GIVEN:
            raise Refused(
                f"{what} has an argument '{name}': expected (task, answer), or names among "
                f"{', '.join(_NAMED + _GIVEN)}"
            )


def needs_truth(reward: F) -> F:
    """Decorator: a reward that compares with `task.truth`, so that data without it are refused
    before the run.
    """
    setattr(reward, _NEEDS_TRUTH, True)
    return reward


def judges_all_turns(reward: F) -> F:
    """Decorator: a reward function whose answer is the text of all turns, and not the last reply
    alone.
    """
    setattr(reward, _ALL_TURNS, True)
    return reward


def examined_by(look: Callable[[Task], Any]) -> Callable[[F], F]:
    """Decorator: a reward function that reads a row by `look(task)`, whose ValueError is raised
    before the run too.
    """

    def mark(reward: F) -> F:
        setattr(reward, _EXAMINE, look)
        return reward

    return mark


def examine_columns(task: Task, reward: Callable[..., Any]) -> None:
    """Raise Refused where a reward needs a column that a task's row does not have. Warn where an
    option has its default and the name of a column.
    """
    inner, set_here = _inner(reward), getattr(reward, "keywords", {})
    if lacks_truth(task, reward):
        name = task.reward_fn if isinstance(task.reward_fn, str) else _name(reward)
        raise no_truth(task, name)
    if (look := getattr(inner, _EXAMINE, None)) is not None:
        look(task)
    if not _is_function(reward):
        return
    with UserCode(f"reward '{_name(reward)}'", inner):
        columns_for(task, reward)
    for name, argument in list(parameters_of(inner).items())[2:]:
        by_place = argument.kind is argument.POSITIONAL_OR_KEYWORD
        if by_place and name in task.raw_task and name not in {*set_here, *_GIVEN}:
            _warn_of_column(_name(reward), name, repr(argument.default)[:60])


def lacks_truth(task: Task, reward: Callable[..., Any]) -> bool:
    """Return whether a reward compares with the right answer, and the rows have no column of it."""
    needs = getattr(_inner(reward), _NEEDS_TRUTH, False)
    return needs and task.truth is None and task.truth_key not in task.raw_task


def no_truth(task: Task, name: str) -> Refused:
    """Return the error of a reward that compares with what the rows lack."""
    return Refused(
        f"reward '{name}' needs the right answer, and the data set has no column "
        f"'{task.truth_key}' (format.response_key): expected one of {', '.join(task.raw_task)}"
    )


@functools.lru_cache(maxsize=256)
def _warn_of_column(reward: str, name: str, default: str) -> None:
    logger.warning(
        "reward '%s' gets %s=%s, the default of an option, and not the column '%s' of the data: "
        "for the column, write `*` before '%s' in its signature; to keep the default, set "
        "reward_fn_args.%s", reward, name, default, name, name, name,
    )  # fmt: skip


def column_names(reward: Callable[..., Any]) -> list[str]:
    """The keyword arguments of a function form that only a column or an option can give."""
    return [
        name
        for name, argument in list(parameters_of(reward).items())[2:]
        if argument.kind is argument.KEYWORD_ONLY
        and argument.default is argument.empty
        and name not in _GIVEN
    ]


def columns_for(task: Task, reward: Callable[..., Any]) -> dict[str, Any]:
    """The columns of the row that a function form names, unless an option has its name.

    Raises Refused where it needs one that the row lacks.
    """
    inner, set_here = _inner(reward), getattr(reward, "keywords", {})
    named = [
        name
        for name, argument in list(parameters_of(inner).items())[2:]
        if argument.kind is argument.KEYWORD_ONLY and name not in {*set_here, *_GIVEN}
    ]
    if not named:
        return {}
    missing = [name for name in column_names(inner) if name in named and name not in task.raw_task]
    if missing:
        raise Refused(
            f"reward '{_name(reward)}' needs '{missing[0]}': expected a column of that name, or "
            f"reward_fn_args.{missing[0]}; the columns are {', '.join(task.raw_task)}"
        )
    return {name: task.raw_task[name] for name in named if name in task.raw_task}


def option_names(reward: Any) -> list[str]:
    """The options of a function form."""
    return [name for name in list(parameters_of(reward))[2:] if name not in _GIVEN]


def _wanted(
    there: dict[str, Any], more: dict[str, Any], reward: Callable[..., Any]
) -> dict[str, Any]:
    """The available arguments that a class form names; those of `more` only if it names them."""
    named = parameters_of(reward)
    return accepted(reward, there) | {k: v for k, v in more.items() if k in named}


def _is_function(reward: Any) -> bool:
    """True for the function form, whose two arguments are passed by place."""
    inner = _inner(reward)
    names = list(parameters_of(inner))
    plain = inspect.isfunction(inner) or inspect.ismethod(inner)
    return "response" not in names and (plain or names[:2] == ["task", "answer"])


def _inner(reward: Any) -> Any:
    return reward.func if isinstance(reward, functools.partial) else reward


def _name(reward: Any) -> str:
    inner = _inner(reward)
    return getattr(inner, "__name__", type(inner).__name__)
