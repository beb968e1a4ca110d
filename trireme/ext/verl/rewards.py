"""verl rewards: makes a reward of a function in verl's form, `compute_score(data_source,
solution_str, ground_truth, extra_info)`. In a conversation `solution_str` is the text of all turns.

A function of verl's batches, `(data_sources, solution_strs, ground_truths, extra_infos)`, is called
with a batch of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from trireme.registry import signature_of
from trireme.rewards.reward import NOTE, judges_all_turns
from trireme.task import Task
from trireme.usercode import Refused

_NEEDED = ("solution_str", "ground_truth")
_GIVEN = ("data_source", *_NEEDED, "extra_info")
_GIVEN_BATCH = tuple(f"{name}s" for name in _GIVEN)


def as_reward(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a reward that calls a function of verl's form; None if it has another form. Arguments
    beyond verl's are options.
    """
    parameters = signature_of(function).parameters
    batch = {f"{name}s" for name in _NEEDED} <= set(parameters)
    if not batch and not set(_NEEDED) <= set(parameters):
        return None
    names = _GIVEN_BATCH if batch else _GIVEN
    collects = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def arguments(task: Task, answer: str) -> dict[str, Any]:
        row = task.raw_task
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else task.truth
        values = (row.get("data_source"), answer, truth, _extra(row.get("extra_info")))
        given = dict(zip(names, ([v] for v in values) if batch else values, strict=True))
        return {name: value for name, value in given.items() if collects or name in parameters}

    def parts(scored: Any) -> Any:
        return _parts(_only(scored, function) if batch else scored)

    if inspect.iscoroutinefunction(function):

        async def waiting(task: Task, answer: str, **options: Any) -> Any:
            return parts(await function(**arguments(task, answer), **options))

        return _described(waiting, function)

    def plain(task: Task, answer: str, **options: Any) -> Any:
        return parts(function(**arguments(task, answer), **options))

    return _described(plain, function)


class _ExtraInfo(dict[str, Any]):
    """A row's `extra_info`, without what verl adds."""

    def __missing__(self, key: str) -> Any:
        _refuse_turns(key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, else `default`."""
        if key not in self:
            _refuse_turns(key)
        return super().get(key, default)


def _extra(info: Any) -> Any:
    return _ExtraInfo(info or {}) if isinstance(info, Mapping | None) else info


def _refuse_turns(key: str) -> None:
    """Raise Refused for the count that verl puts into `extra_info`."""
    if key == "num_turns":
        raise Refused(
            "extra_info has no 'num_turns' here: expected a reward of the form (completions, "
            "rollout_infos, **rest), whose rollout_infos have the model's num_turns with "
            "multi_turn_scheduler (docs/migrate/verl.md)"
        )


def _only(scored: Any, function: Callable[..., Any]) -> Any:
    """Return what a function of batches gave its only answer: in a list, an array or a tensor."""
    try:
        (one,) = [] if isinstance(scored, Mapping | str) else scored
    except (TypeError, ValueError) as error:  # not one, or nothing that has items
        text = f"reward '{function.__name__}' gave {scored!r:.60}: expected a list of 1"
        raise Refused(text) from error
    return one


def _parts(scored: Any) -> Any:
    """Return a number as it is, and of a dictionary its score; its other numbers are metrics."""
    if not isinstance(scored, Mapping) or "score" not in scored:
        return scored
    others = {
        f"{NOTE}{name}": value
        for name, value in scored.items()
        if name != "score" and isinstance(value, int | float)
    }
    return {"score": scored["score"], **others}


def _described(reward: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a reward the name and the place of the user's function, and its options as arguments."""
    own = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("task", "answer")]
    options = [
        one if one.kind is one.VAR_KEYWORD else one.replace(kind=one.KEYWORD_ONLY)
        for one in signature_of(function).parameters.values()
        if one.name not in _GIVEN + _GIVEN_BATCH and one.kind is not one.VAR_POSITIONAL
    ]
    facts = {
        "__name__": function.__name__,
        "__wrapped__": function,  # errors name its line
        "__signature__": Signature([*own, *options]),
    }
    for name, value in facts.items():
        setattr(reward, name, value)
    return judges_all_turns(reward)
