"""Grouped: sets the rewards of a task's rollouts together, if a YAML asks for that.

It does if the reward is one of whole groups (orm.py), or if there are several: a list in place of
`default_reward_fn_type`'s name (each a name, or a mapping of `name`, `weight` and options), or
`reward_fn_args` with `funcs` and `weights`. Rewards of one answer (reward.py) may be among them;
coroutines are awaited concurrently.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from trireme.aio import call_user, first_failure
from trireme.config.options import accepted, fitting_options, parameters_of
from trireme.experience import Experience, python_number
from trireme.pictures import Picture
from trireme.registry import (
    ORMS,
    REWARDS,
    UnknownName,
    UnknownOption,
    did_you_mean,
    is_path,
    unknown_name,
)
from trireme.rewards.orm import ORM, Unscored, Value
from trireme.rewards.reward import examine_columns, lacks_truth, no_truth, number, score
from trireme.rewards.reward import resolve as resolve_single
from trireme.task import Task
from trireme.usercode import Refused, UserCode

_TOGETHER = ("completions", "completion_ids")
"""An argument of such a name makes a function a reward of whole groups."""
_ENVIRONMENT = "total_reward"
"""The part that an environment provides, under its name in rollouts' infos."""
_CALL = "__call__"  # of a class, `callable` would describe its constructor


@dataclass
class Row:
    """A rollout in the form that rewards see."""

    completion: str
    """The last reply."""
    messages: list[dict[str, Any]]
    is_truncated: bool = False
    infos: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    """All ids that it sampled."""
    request_id: str = ""
    parts: list[Row] = field(default_factory=list)
    """The samples of a trajectory that was split."""
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    """Those that `messages` name, by digest."""
    all_turns: str = ""
    """The text from the first reply to the end of the last, the results of tools included; empty:
    there was one reply."""


@dataclass(frozen=True)
class Function:
    """A reward function, ready to be called."""

    call: Callable[..., Any]
    each: bool = False
    """Whether it judges one answer per call, in the form of rewards/reward.py."""
    takes_messages: bool = False
    """Whether it is a plain function in TRL's form: completions are messages if the prompt is
    messages."""


@dataclass(frozen=True)
class Judge:
    """Several reward functions with their weights."""

    names: list[str]
    functions: list[Function]
    weights: list[float]

    @classmethod
    def of(cls, funcs: Sequence[Any], weights: Sequence[float] | None = None) -> Judge:
        """Make a judge of `funcs`: each a name, path or class, or a mapping of `name` and options.

        A mapping may also hold its `weight`, where there are no `weights`. Raises ValueError for an
        unknown name or option, and for weights of another number.
        """
        for name, given in (("funcs", funcs), ("weights", weights)):
            optional = given is None and name == "weights"
            if not optional and not isinstance(given, list | tuple):
                raise ValueError(f"reward_fn_args.{name} is {given!r:.60}: expected a list")
        if weights is not None and len(weights) != len(funcs):
            raise ValueError(
                f"reward_fn_args.weights has {len(weights)} numbers: expected {len(funcs)}, one "
                "for each of funcs"
            )
        split = [_options(reward) for reward in funcs]
        names = [f if isinstance(f, str) else getattr(f, "__name__", repr(f)) for f, _ in split]
        own_weights = [
            _number_of(name, options.pop("weight", 1.0))
            for name, (_, options) in zip(names, split, strict=True)
        ]
        used = own_weights if weights is None else [*map(_number_of, names, weights)]
        if used and not any(used):
            raise ValueError(
                f"the weights of the rewards {', '.join(names)} are all 0: expected one that is not"
            )
        short = [_function_name(name) for name in names]
        return cls(_numbered(short), [_item(f, options) for f, options in split], used)

    def refuse_missing_models(self, models: int) -> None:
        """Raise ValueError if a function needs an auxiliary model that is missing."""
        for name, function in zip(self.names, self.functions, strict=True):
            wanted = getattr(function.call, "auxiliary", None)
            if isinstance(wanted, int) and wanted >= models:
                raise ValueError(
                    f"explorer.auxiliary_models has {models} models, and the reward '{name}' asks "
                    "one: add it, or give the reward base_url and model"
                )

    def examine(self, task: Task) -> None:
        """Raise ValueError if a function reports (by its `examine`) that it cannot work, or needs a
        column that a task's row does not have.
        """
        columns = _columns(task, [Row("", [])]) | {"auxiliary_models": []}
        calls = [function.call for function in self.functions]
        # beside others a reward of groups may apply to no row
        if (
            calls
            and all(lacks_truth(task, call) for call in calls)
            and "solution" not in task.raw_task
            and columns["solution"] == [None]
        ):
            raise no_truth(task, self.names[0])
        for name, function in zip(self.names, self.functions, strict=True):
            if (look := getattr(function.call, "examine", None)) is not None:
                look(**accepted(look, columns))
            if not function.each:
                _arguments(name, function.call, columns)
            elif _needs_workdir(function.call):
                raise ValueError(
                    f"reward '{name}' needs 'workdir', which there is not where several rewards "
                    "judge: expected it as the only reward of command_workflow"
                )
            else:
                examine_columns(task, function.call)

    async def rewards(
        self, task: Task, rows: Sequence[Row], models: Sequence[Any] = ()
    ) -> tuple[list[float | None], list[dict[str, float]]]:
        """Return the weighted sum for each rollout of a task, and its parts by name, without
        weights.

        `models` are the auxiliary ones. The parts that a reward of one answer names are included.
        Without functions a rollout has its environment's reward, or None: the algorithm decides
        whether it needs one. Raises ValueError if a function returns anything but a number per
        rollout, or if none of them applies to a rollout.
        """
        columns = _columns(task, rows) | {"auxiliary_models": list(models)}
        per_function = await first_failure(
            *(self._ask(i, task, rows, columns) for i in range(len(self.functions)))
        )
        totals: list[float | None] = []
        parts: list[dict[str, float]] = []
        for index in range(len(rows)):
            given = [numbers[index] for numbers in per_function]
            values = [None if isinstance(value, Unscored) else value for value in given]
            used = [w * v for w, v in zip(self.weights, values, strict=True) if v is not None]
            environment: dict[str, float] = {}
            if _ENVIRONMENT in rows[index].infos:
                earned = python_number(rows[index].infos[_ENVIRONMENT])
                whose = f"rollout {index} of task {task.task_id} has the {_ENVIRONMENT}"
                environment[_ENVIRONMENT] = number(earned, f"{whose} (rollout_infos)")
                used.append(environment[_ENVIRONMENT])
            if not used and self.functions:
                reasons = "".join(f" ({value})" for value in given if isinstance(value, Unscored))
                raise ValueError(
                    f"no reward function applies to rollout {index} of task {task.task_id}: "
                    f"{', '.join(self.names)} gave None{reasons}"
                )
            totals.append(math.fsum(used) if used else None)
            named = [(n, v) for n, v in zip(self.names, values, strict=True) if v is not None]
            more = [m for v in given if isinstance(v, Value | Unscored) for m in v.metrics.items()]
            named += environment.items()
            parts.append(dict(more) | {f"rewards/{n}": float(v) for n, v in named})
        return totals, parts

    async def _ask(
        self, index: int, task: Task, rows: Sequence[Row], columns: Mapping[str, Any]
    ) -> list[float | Unscored | None]:
        function, name = self.functions[index], self.names[index]
        if function.each:
            models = columns["auxiliary_models"]
            notes: list[dict[str, float]] = [{} for _ in rows]
            scored = await first_failure(
                *(
                    score(
                        *(task, row.completion, function.call, row.tokens, models),
                        notes=noted,
                        all_turns=row.all_turns,
                    )
                    for row, noted in zip(rows, notes, strict=True)
                )
            )
            return [
                Value(math.fsum(counted.values()), counted | noted)
                for counted, noted in zip(scored, notes, strict=True)
            ]
        if function.takes_messages and isinstance(task.prompt, list):
            replies = [[{"role": "assistant", "content": row.completion}] for row in rows]
            columns = {**columns, "completions": replies}  # in TRL's calling convention
        args, named = _arguments(name, function.call, columns)
        if getattr(function.call, "takes_task", False):
            named["task"] = task
        with UserCode(f"reward '{name}'", function.call) as _:
            rewards = await call_user(partial(function.call, *args, **named))
            if not isinstance(rewards, list | tuple) or len(rewards) != len(rows):
                several = isinstance(rewards, list | tuple)
                size = f"a list of {len(rewards)}" if several else repr(rewards)[:60]
                raise Refused(
                    f"reward '{name}' gave {size}: expected a list of {len(rows)}, one for each "
                    "completion"
                )
            return [_number(value, name) for value in rewards]


def _arguments(
    name: str, call: Callable[..., Any], columns: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call: `completions` by position if the function has another name
    for them.

    Raises Refused if it needs a column that the rows lack.
    """
    parameters, named = parameters_of(call), accepted(call, columns)
    by_name = not parameters.keys().isdisjoint(_TOGETHER)
    args = [] if by_name else [named.pop("completions", columns["completions"])]
    for argument in list(parameters.values())[len(args) :]:
        collects = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if argument.default is argument.empty and not collects and argument.name not in named:
            with UserCode(f"reward '{name}'", call):
                raise Refused(
                    f"reward '{name}' needs '{argument.name}', and the data set has no such "
                    f"column; there are: {', '.join(columns)}"
                )
    return args, named


def _needs_workdir(reward: Callable[..., Any]) -> bool:
    wanted = parameters_of(reward).get("workdir")
    return wanted is not None and wanted.default is wanted.empty


def _options(reward: Any) -> tuple[Any, dict[str, Any]]:
    if reward is None:
        raise ValueError("a reward is empty: expected a name, or a section with a `name`")
    if not isinstance(reward, Mapping):
        return reward, {}
    if "name" not in reward:
        raise ValueError(f"a reward is {dict(reward)}: expected a name, or a section with a `name`")
    if reward["name"] is None:
        raise ValueError(f"the name of a reward is empty ({dict(reward)}): expected a name")
    return reward["name"], {name: value for name, value in reward.items() if name != "name"}


def _numbered(names: Sequence[str]) -> list[str]:
    """Make the names unique: the second `judge` is `judge_2`. The environment's is reserved."""
    found: list[str] = []
    for name in names:
        free, count = name, 1
        while free in found or free == _ENVIRONMENT:
            count += 1
            free = f"{name}_{count}"
        found.append(free)
    return found


def _number_of(name: str, weight: Any) -> float:
    real = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not real or not abs(weight) <= sys.float_info.max:
        raise ValueError(f"the weight of reward '{name}' is {weight!r}: expected a number")
    return float(weight)


def of_groups(reward: Any) -> bool:
    """Return True if a name, path, class or function is a reward of whole groups.

    Raises ValueError for an unknown name.
    """
    if isinstance(reward, str):
        if reward in ORMS:
            return True
        if reward not in REWARDS and not is_path(reward) and not REWARDS.refuses(reward):
            known = [*REWARDS.names(), *ORMS.names()]
            raise UnknownName(unknown_name("reward function", reward, known))
        reward = REWARDS.get(reward)
    if isinstance(reward, ORM) or (inspect.isclass(reward) and issubclass(reward, ORM)):
        return True
    called = reward if inspect.isroutine(reward) else getattr(reward, _CALL, reward)
    try:
        return not parameters_of(called).keys().isdisjoint(_TOGETHER)
    except (TypeError, ValueError):
        return False  # it is not callable, or has no signature: resolving it reports that


def _function_name(name: str) -> str:
    """Return the name of a reward in metrics: of a path (`my_file:right`) only the function."""
    return name if name in REWARDS or name in ORMS else re.split("[:.]", name)[-1] or name


def _item(given: Any, options: dict[str, Any]) -> Function:
    """Make the reward function of an item of a list, which may also have a weight."""
    try:
        return _function(given, options)
    except UnknownOption as error:
        if hint := did_you_mean(error.option, ["weight"]):
            raise ValueError(f"{error}{hint}") from error
        raise


def _function(given: Any, options: dict[str, Any]) -> Function:
    """Make a reward function from a name, path, class, instance or function."""
    if not of_groups(given):
        single = resolve_single(given, options)
        assert single is not None
        return Function(single, each=True)
    found: Any = given
    if isinstance(given, str):  # either decorator may have registered it
        found = (REWARDS if given in REWARDS and given not in ORMS else ORMS).get(given)
    if isinstance(found, type):
        first = next(iter(inspect.signature(found.__call__).parameters), "self")
        if first == "completions":  # the documents' own example omits `self`
            return Function(found.__call__)
        name = given if isinstance(given, str) else found.__name__
        taken = parameters_of(found).get("args")
        try:
            if taken is not None and taken.kind is not taken.VAR_POSITIONAL:
                # the parsed arguments of a command line
                return Function(found(SimpleNamespace(**options), **accepted(found, options)))
            made: Any = found(**fitting_options(f"reward function '{name}'", found, options))
            return Function(made)
        except TypeError as error:
            raise ValueError(
                f"reward function {given!r} does not take the options {options}: {error}"
            ) from error
        except ValueError:  # its own message suffices
            raise
        except Exception as error:  # a user's constructor, which may ask a server or read a file
            raise ValueError(
                f"reward function '{name}' cannot be made: {type(error).__name__}: {error}"
            ) from error
    if not callable(found) or options:
        what = f"has no options, and got {options}" if callable(found) else "cannot be called"
        raise ValueError(f"reward function {given!r} {what}")
    return Function(found, takes_messages=inspect.isfunction(found))


def _columns(task: Task, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the keyword arguments of a reward function: lists, except for the three that are
    shared.
    """
    cells = [_cells(task, row) for row in rows]
    columns: dict[str, Any] = {name: [row[name] for row in cells] for name in cells[0]}
    columns.setdefault("trainer_state", _progress(task))  # the data set may have its own
    columns["completions"] = [row.completion for row in rows]
    columns["completion_ids"] = columns["response_token_ids"]
    columns["prompts"] = [task.prompt] * len(rows)
    columns["trajectory_inputs"] = {
        row.request_id: [
            # a data set may have a column of this name
            {**_cells(task, part), "completion": part.completion}
            for part in row.parts or [row]
        ]
        for row in rows
    }
    return columns


def _progress(task: Task) -> SimpleNamespace:
    """Return how many steps were done before a task, and how many the run has (-1: unknown), by the
    names of transformers' TrainerState.
    """
    step, _, evaluation = str(task.batch_id).partition("/")
    done, most = int(step) if evaluation else max(int(step) - 1, 0), task.num_explore_steps
    return SimpleNamespace(
        global_step=done if most is None else min(done, most),
        max_steps=-1 if most is None else most,
    )


def _cells(task: Task, row: Row) -> dict[str, Any]:
    """Return a rollout, or a sample of it, with all columns of its row of the data set."""
    data = {k: v for k, v in task.raw_task.items() if k != "messages"}
    if isinstance(data.get("data_dict"), Mapping):  # the row itself; otherwise an ordinary column
        data |= data.pop("data_dict")
    return {
        **data,
        "solution": data.get("solution", task.truth),
        "messages": row.messages,
        "message_pictures": row.pictures,
        "is_truncated": row.is_truncated,
        "finish_reason": "length" if row.is_truncated else "stop",
        "rollout_infos": row.infos,
        "response_token_ids": row.tokens,
        "request_id": row.request_id,
    }


def _number(value: Any, name: str) -> float | Unscored | None:
    if value is None or isinstance(value, Unscored):
        return value
    score = number(value, f"reward '{name}' gave")
    return value if isinstance(value, Value) else score


def is_grouped(reward: Any, args: Mapping[str, Any]) -> bool:
    """Return True if a task's reward is set for all its rollouts together."""
    several = isinstance(reward, list | tuple) or "funcs" in args
    return several or (reward is not None and of_groups(reward))


def refuse_reward(reward: Any, args: Mapping[str, Any], models: int) -> None:
    """Raise ValueError if a reward does not exist, or asks one of `models` that does not exist."""
    if is_grouped(reward, args):
        judge_of(reward, args).refuse_missing_models(models)
    elif isinstance(reward, str):
        REWARDS.get(reward)


def judge_of(reward: Any, args: Mapping[str, Any]) -> Judge:
    """Return the reward functions of a task; an environment's own reward needs none.

    Raises ValueError for an unknown reward, option or weight.
    """
    if "funcs" in args:
        unknown = sorted(set(args) - {"funcs", "weights"})
        if unknown:
            raise ValueError(f"reward_fn_args has '{unknown[0]}': expected funcs and weights")
        funcs = [args["funcs"]] if isinstance(args["funcs"], str) else args["funcs"]
        return Judge.of(funcs, args.get("weights"))
    if isinstance(reward, list | tuple):
        if args:
            raise ValueError(
                f"reward_fn_args are {dict(args)}: of several rewards each has its own options in "
                "its entry of default_reward_fn_type"
            )
        return Judge.of(reward)
    return Judge.of([{"name": reward, **args}] if reward else [])


class Judges:
    """Makes each Judge once: its resources (a model's connections) belong to one event loop."""

    def __init__(self) -> None:
        # a loop's id may be that of one that has ended
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Judge]] = (
            WeakKeyDictionary()
        )

    def of(self, task: Task, default: Any = None) -> Judge:
        """Return the judge of a task; `default` is the reward of tasks that name none."""
        reward = task.reward_fn or default
        made = self._made.setdefault(asyncio.get_running_loop(), {})
        key = f"{reward} {task.reward_fn_args}"
        if key not in made:
            made[key] = judge_of(reward, task.reward_fn_args)
        return made[key]


async def reward_group(
    judge: Judge, task: Task, experiences: Sequence[Experience], models: Sequence[Any]
) -> None:
    """Set the rewards of all rollouts of a task, and their parts in the metrics."""
    trajectories: dict[Any, list[Experience]] = {}
    for experience in sorted(experiences, key=lambda e: (e.eid.run, e.eid.step)):
        name = experience.eid.run, experience.info.get("request_id")
        trajectories.setdefault(name, []).append(experience)
    rows = [_as_row(trajectory) for trajectory in trajectories.values()]
    rewards, parts = await judge.rewards(task, rows, models)
    weights = dict(zip(judge.names, judge.weights, strict=True)) | {_ENVIRONMENT: 1.0}
    for trajectory, reward, named_parts in zip(trajectories.values(), rewards, parts, strict=True):
        for experience in trajectory:
            # a prompt that was too long keeps its reward of 0
            experience.reward = reward if experience.reward is None else experience.reward
            experience.metrics.update(named_parts)
            experience.info["reward_parts"] = {
                name: (named_parts[f"rewards/{name}"], weight)
                for name, weight in weights.items()
                if f"rewards/{name}" in named_parts
            }


def _as_row(trajectory: Sequence[Experience]) -> Row:
    """Convert a trajectory: its last dialogue, and all its sampled ids."""
    parts = [_as_part(experience) for experience in trajectory]
    return replace(parts[-1], tokens=[t for part in parts for t in part.tokens], parts=parts)


def _as_part(experience: Experience) -> Row:
    text = str(experience.info.get("completion", experience.response_text) or "")
    versions, eid, everything = experience.versions, experience.eid, experience.response_text or ""
    turns = "rollout_infos" in experience.info  # an agent's output is no part of the dialogue
    end = everything.rfind(text) + len(text)  # the template's end of the turn is cut off
    return Row(
        completion=text,
        all_turns=everything[:end] if turns and text in everything else "",
        messages=list(experience.messages or []),
        is_truncated=experience.truncate_status is not None,
        infos=dict(experience.info.get("rollout_infos") or {}),
        tokens=[] if versions is None else experience.tokens[versions >= 0].tolist(),
        pictures={picture.digest: picture for picture in experience.pictures},
        request_id=str(experience.info.get("request_id") or f"{eid.batch}/{eid.task}/{eid.run}"),
    )
