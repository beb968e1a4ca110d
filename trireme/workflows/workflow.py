"""Workflow: adapts a user's workflow, function or class, to one form, and checks what it returns.

At the core a workflow is an async function `(task, model) -> list[Experience]`. A plain function
and the classes of `classes.py` are adapted to it: where their code is synchronous it is `blocking`,
gets a BlockingModel, and the Runner puts it in a thread.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from trireme.aio import is_async
from trireme.config.options import checked_value
from trireme.experience import TOKEN_FIELDS, Experience, python_number, wrong_routing
from trireme.model.blocking import BlockingModel
from trireme.model.conversation import trained_twice
from trireme.model.model import Model
from trireme.registry import WORKFLOWS, refuse_unknown_options
from trireme.rewards.reward import number
from trireme.serialize import JSON_FIELDS, TEXT_FIELDS
from trireme.syntax import source_of
from trireme.task import Task
from trireme.usercode import Refused, refuse_signature
from trireme.workflows.classes import Workflow, run_method

DEEPEST = 100
"""The deepest nesting of lists and objects in the data that an experience carries next to its
tokens.
"""

_PLAYS = {"run", "run_async", "generate_env_inference_samples"}
"""Methods of a class that may do anything with the task's reward."""

logger = logging.getLogger(__name__)


class WrongExperience(Refused):
    """A workflow returned something other than a list of experiences, or one that cannot be
    trained.
    """


class NoExperience(Refused):
    """A workflow returned nothing."""

    lasting = False  # another attempt may return something


@dataclass(frozen=True)
class WorkflowSpec:
    """A workflow in the form that the Runner needs."""

    name: str
    blocking: bool
    """Whether its code may block: it needs its own thread, and a BlockingModel."""
    can_repeat: bool
    """Whether one call returns all n runs; each experience names its run in `eid.run`."""
    call: Callable[[Task, Any, int, int], Any]
    """`(task, model, repeat_times, run_id_base)` -> experiences; awaitable unless blocking."""
    judge: Callable[[Task, list[Experience], Sequence[Any]], Awaitable[None] | None] | None = None
    """Sets the rewards of all rollouts of a task together, when the last has ended; receives the
    auxiliary models. Plain or `async def`."""
    examine: Callable[[Task], None] | None = None
    """Raises ValueError for invalid options of a task; not given: the reward is checked."""
    first_prompt: (
        Callable[[Task, Callable[[Any], Any]], tuple[list[dict[str, Any]], Any] | None] | None
    ) = None
    """`(task, read)` -> the messages and tools of a task's first call, if the workflow knows them
    beforehand; `read` reads pictures."""
    code: Any = None
    """The function or class that the user wrote."""
    one_at_a_time: bool = False
    """Whether a runner begins the repeats of a task one after the other, unless the YAML says
    otherwise."""

    def needs(self, task: Task) -> Mapping[str, str]:
        """Return the extras that a class needs: see `Workflow.needs`. Empty if a subclass of the
        class that declares them makes its own environment.
        """
        says = _class_method(self.code, "needs") if inspect.isclass(self.code) else None
        if says is None:
            return {}
        for cls in self.code.__mro__:
            if "needs" in vars(cls):
                break
            if {"make_env", "open"} & set(vars(cls)):
                return {}
        return says(task)

    @property
    def one_experience(self) -> bool:
        """True if each rollout leaves exactly one: see `Workflow.one_experience`. A function has an
        attribute for it.
        """
        return self._declares("one_experience")

    @property
    def one_call(self) -> bool:
        """True if each rollout asks the model once: see `Workflow.one_call`. A function has an
        attribute for it.
        """
        return self._declares("one_call")

    def _declares(self, name: str) -> bool:
        """Return an attribute of the function, or of the class, where no subclass of the one that
        declares it asks in another way.
        """
        if not inspect.isclass(self.code):
            return bool(getattr(self.code, name, False))
        for cls in self.code.__mro__:
            if name in vars(cls):
                return bool(vars(cls)[name])
            if {"run", "run_async", "ask"} & set(vars(cls)):
                return False
        return False

    @property
    def asks_reward(self) -> bool:
        """False for a function or class that sets its rewards without a look at the task's."""
        if not inspect.isclass(self.code):
            return not inspect.isfunction(self.code) or _names_reward(self.code)
        return any(_names_reward(cls) for cls in self.code.__mro__ if cls not in (Workflow, object))

    @property
    def rewards_itself(self) -> bool:
        """True if it does not use the task's reward: see `Workflow.rewards_itself`."""
        for cls in self.code.__mro__ if inspect.isclass(self.code) else ():
            if "rewards_itself" in vars(cls):
                return bool(vars(cls)["rewards_itself"])
            if _PLAYS & set(vars(cls)) or _names_reward(cls):
                return False
        return False

    @property
    def reads_prompt(self) -> bool:
        """True if rows need the columns of prompt and answer: a user's class with its own `run` may
        read any.
        """
        for cls in self.code.__mro__ if inspect.isclass(self.code) else ():
            if "reads_prompt" in vars(cls):
                return bool(vars(cls)["reads_prompt"])
            if {"run", "run_async"} & set(vars(cls)):
                return cls.__module__.startswith("trireme.")
        return True

    @property
    def reward_parts(self) -> bool | None:
        """True if its rewards come with their parts: see `Workflow.reward_parts`. None: only the
        run knows, as for user code that does not declare it.
        """
        code = self.code
        if not inspect.isclass(code):
            says, by = getattr(code, "reward_parts", None), getattr(code, "__module__", "")
            return False if says is None and by.startswith("trireme.") else says
        for cls in code.__mro__:
            if vars(cls).get("reward_parts") is not None:
                return bool(vars(cls)["reward_parts"])
            if {"run", "run_async"} & set(vars(cls)):
                return False if cls.__module__.startswith("trireme.") else None
        return None

    def refuse_no_parts(self, asked_by: str) -> None:
        """Raise ValueError if its rewards have no parts, for an advantage that compares them."""
        if self.reward_parts is False:
            raise ValueError(
                f"{self.label} gives rewards without parts, and {asked_by} compares the rewards "
                "one by one: expected a workflow of reward functions, such as simple_workflow or "
                "multi_turn_scheduler, or advantage_fn grpo"
            )

    def refuse_unused(self, task: Task) -> None:
        """Raise ValueError for an option of `workflow_args` that a class does not have, and for a
        reward that it does not use: see `Workflow.workflow_options`, `loop_options` and
        `rewards_itself`.
        """
        declared = vars(self.code) if inspect.isclass(self.code) else {}
        if (kinds := declared.get("workflow_options")) is not None:
            refuse_unknown_options(f"{self.label}: workflow_args", task.workflow_args, kinds)
            for name, value in task.workflow_args.items():
                checked_value(f"{self.label}: workflow_args", name, kinds[name], value)
        for name, kind in getattr(self.code, "loop_options", {}).items():
            if name in task.workflow_args:
                options = f"{self.label}: workflow_args"
                checked_value(options, name, kind, task.workflow_args[name])
        if self.rewards_itself and task.reward_fn is not None:
            ours = self.code.__module__.startswith("trireme.")
            uses = "" if ours else "; or set rewards_itself = False in the class if it does use it"
            raise ValueError(
                f"default_reward_fn_type is {task.reward_fn!r}, which {self.label} does not use: "
                "its reward is the environment's. Leave it out, or name it only at the tasksets "
                f"that use it{uses}"
            )

    @property
    def label(self) -> str:
        """The workflow's name in messages."""
        return f"workflow '{self.name}'"


def resolve(workflow: Any) -> WorkflowSpec:
    """Find the workflow of a name, path, function or class. Raises ValueError for others."""
    if workflow is None:
        raise ValueError(
            "a task names no workflow: set default_workflow_type of its taskset "
            f"(known: {', '.join(WORKFLOWS.names())})"
        )
    workflow_object = WORKFLOWS.get(workflow) if isinstance(workflow, str) else workflow
    name = (
        workflow
        if isinstance(workflow, str)
        else getattr(workflow_object, "__name__", repr(workflow_object))
    )
    if inspect.isclass(workflow_object):
        return _of_class(name, workflow_object)
    if not callable(workflow_object):
        raise ValueError(
            f"workflow '{name}' is {type(workflow_object).__name__}: expected a function or a class"
        )
    return _of_function(name, workflow_object)


def check_experiences(
    returned: Any, name: str, runs: Sequence[int] | None = None
) -> list[Experience]:
    """Check a workflow's return value and return it; `runs` if it repeats by itself."""
    if inspect.iscoroutine(returned):
        returned.close()
        raise WrongExperience(
            f"workflow '{name}' returned a coroutine: a method that awaits nothing has called one "
            "that is `async def`; make it `async def` too, and await it"
        )
    if not isinstance(returned, list | tuple):
        shown = repr(returned) if returned is None or isinstance(returned, int | float) else ""
        raise WrongExperience(
            f"workflow '{name}' returned {shown or type(returned).__name__}: expected a list of "
            "Experience; end with `return model.experiences(reward=...)`"
        )
    places: dict[int, int] = {}
    for index, experience in enumerate(returned):
        if (first := places.setdefault(id(experience), index)) != index:
            raise WrongExperience(
                f"workflow '{name}' returned the same experience twice (places {first} and "
                f"{index}): expected each once"
            )
        if not isinstance(experience, Experience):
            raise WrongExperience(
                f"workflow '{name}' returned a list with {type(experience).__name__} "
                f"at place {index}: expected Experience"
            )
        whose = f"workflow '{name}' returned an experience (place {index})"
        _check_numbers(experience, whose)
        _check_json(experience, whose)
    if (twice := trained_twice(returned)) is not None:
        raise WrongExperience(
            f"workflow '{name}' returned one reply of the model in two experiences (places "
            f"{twice[0]} and {twice[1]}), which would train it twice: expected each reply once; "
            "`model.experiences()` returns all replies so far: call it once, at the end"
        )
    if not returned:
        raise NoExperience(
            f"workflow '{name}' returned no experience: expected one at least; a call of the model "
            "that was not awaited is not recorded"
        )
    if runs is not None and len(returned) == len(runs) and not any(e.eid.run for e in returned):
        for e, run in zip(returned, runs, strict=True):  # none names its run: assign them in order
            e.eid = dataclasses.replace(e.eid, run=run)
    if runs is not None and {e.eid.run for e in returned} != set(runs):
        raise WrongExperience(
            f"workflow '{name}' can repeat and returned the runs "
            f"{sorted({e.eid.run for e in returned})}: expected {list(runs)}, one for each rollout "
            "(eid=EID(run=run_id_base + i))"
        )
    return list(returned)


def _check_json(experience: Experience, whose: str) -> None:
    """Raise WrongExperience, with the key, for a value that no store can hold. Numbers of numpy and
    torch become Python's.
    """
    for field in TEXT_FIELDS:
        if not isinstance(text := getattr(experience, field), str | None):
            raise WrongExperience(f"{whose} whose {field} is {type(text).__name__}: expected text")
    if _no_json([getattr(experience, field) for field in JSON_FIELDS]) is None:
        return  # the usual case: one pass over all fields takes less time
    for field in JSON_FIELDS:
        values = getattr(experience, field)
        if _no_json(values) is None:
            continue
        with suppress(TypeError, ValueError, RecursionError):
            values = json.loads(json.dumps(values, default=_as_python_number))
            setattr(experience, field, values)
        if (reason := _no_json(values)) is None:
            continue
        items = values.items() if isinstance(values, dict) else enumerate(values or ())
        wrong = ((f"[{key!r}]", text) for key, inner in items if (text := _no_json({key: inner})))
        key, reason = next(wrong, ("", reason))
        raise WrongExperience(f"{whose} whose {field}{key} is not plain JSON: {reason}")


def _as_python_number(value: Any) -> Any:
    plain = python_number(value)
    if plain is value:
        raise TypeError(f"{type(value).__name__} is not a number")
    return plain


def _no_json(value: Any) -> str | None:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    # code that stores it may have less of the stack left
    lists = text.count("[") + text.count("{")
    return "it is nested too deeply" if lists > DEEPEST and _is_deep(value, DEEPEST) else None


def _is_deep(value: Any, most: int) -> bool:
    """True if lists and objects are nested more than `most` deep."""
    if not isinstance(value, dict | list | tuple):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not most or any(_is_deep(inner, most - 1) for inner in inside)


def _check_numbers(experience: Experience, whose: str) -> None:
    """Raise WrongExperience for fields that do not fit its tokens, and for values that are not
    numbers.

    Code that has changed an experience may have left it in a state that its constructor refuses.
    """
    if not isinstance(experience.tokens, Tensor) or experience.tokens.dim() != 1:
        raise WrongExperience(f"{whose} whose tokens are not a tensor of ids [T]")
    if why := wrong_routing(experience):
        raise WrongExperience(f"{whose} whose routed_experts is {why}")
    size = experience.tokens.shape[0]
    for field in TOKEN_FIELDS:
        values = getattr(experience, field)
        if values is None:
            continue
        if not isinstance(values, Tensor) or values.shape != (size,):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise WrongExperience(
                f"{whose} whose {field} is {shape}: expected [{size}], its tokens'"
            )
        if values.dtype.is_floating_point and not _is_finite(values):
            first = int((~values.isfinite()).nonzero()[0])
            value = float(values[first])
            raise WrongExperience(
                f"{whose} whose {field}[{first}] is {value}: expected a finite number"
            )
    if experience.reward is not None:
        experience.reward = number(experience.reward, f"{whose} with the reward", WrongExperience)
    if not isinstance(experience.metrics, dict):
        kind = type(experience.metrics).__name__
        raise WrongExperience(f"{whose} whose metrics are {kind}: expected a dict of numbers")
    for key, value in experience.metrics.items():
        what = f"{whose} with the metric {key!r}"
        experience.metrics[key] = number(value, what, WrongExperience)


def _is_finite(values: Tensor) -> bool:
    # a sum is checked first, in a fraction of the time; one that overflows proves nothing. torch
    # gives up Python's lock even for a row as short as this, and numpy does not
    row = values if values.element_size() >= 4 else values.float()  # numpy has no bfloat16
    return math.isfinite(row.numpy(force=True).sum()) or bool(values.isfinite().all())


def _of_function(name: str, function: Callable[..., Any]) -> WorkflowSpec:
    """Return the spec of a function `(task, model)`, or of a callable object."""
    refuse_signature(f"workflow '{name}'", function, function, "(task, model)")

    async def call(task: Task, model: Model, repeat_times: int, run_id_base: int) -> Any:
        return check_experiences(await function(task, model), name)

    def blocking(task: Task, model: BlockingModel, repeat_times: int, run_id_base: int) -> Any:
        return check_experiences(function(task, model), name)

    waits = not is_async(function)
    return WorkflowSpec(
        name,
        waits,
        can_repeat=False,
        call=blocking if waits else call,
        judge=getattr(function, "judge", None),
        examine=getattr(function, "examine", None),
        first_prompt=getattr(function, "first_prompt", None),
        code=function,
        one_at_a_time=waits or bool(getattr(function, "one_at_a_time", False)),
    )


def _of_class(name: str, cls: type) -> WorkflowSpec:
    """Return the spec of a class with `run`. A new object is made for every call."""
    method, is_async = run_method(cls)
    if method is None:
        raise ValueError(f"workflow '{name}' ({cls.__name__}) has no method `run`")
    _warn_of_unused(name, cls, method)
    can_repeat = bool(getattr(cls, "can_repeat", False))

    def make(task: Task, model: BlockingModel, repeat_times: int, run_id_base: int) -> Any:
        # code that loops over the task's or its own repeat_times loops over this call's
        single = copy.copy(task)  # whose sections are this rollout's own: see `for_rollout`
        single.repeat_times = repeat_times
        if can_repeat and isinstance(args := single.rollout_args, dict):
            single.rollout_args = copy.copy(args)  # for chat(messages, **self.rollout_args)
            single.rollout_args["n"] = repeat_times
        instance = cls(task=single, model=model, auxiliary_models=model.auxiliary or None)
        if can_repeat:
            instance.set_repeat_times(repeat_times, run_id_base)
        return instance

    def runs(repeat_times: int, run_id_base: int) -> Sequence[int] | None:
        return range(run_id_base, run_id_base + repeat_times) if can_repeat else None

    async def call(task: Task, model: Model, repeat_times: int, run_id_base: int) -> Any:
        times = repeat_times if can_repeat else 1
        instance = make(task, model.blocking(), times, run_id_base)
        experiences = await getattr(instance, method)()
        return check_experiences(experiences, name, runs(repeat_times, run_id_base))

    def blocking(task: Task, model: BlockingModel, repeat_times: int, run_id_base: int) -> Any:
        times = repeat_times if can_repeat else 1
        experiences = getattr(make(task, model, times, run_id_base), method)()
        return check_experiences(experiences, name, runs(repeat_times, run_id_base))

    return WorkflowSpec(
        name,
        not is_async,
        can_repeat,
        call=call if is_async else blocking,
        judge=_class_method(cls, "judge"),
        examine=_class_method(cls, "examine"),
        first_prompt=_class_method(cls, "first_prompt"),
        code=cls,
        one_at_a_time=not is_async or bool(getattr(cls, "one_at_a_time", False)),
    )


_SEAMS = ("generate_env_inference_samples", "step", "step_async", "reward", "reward_async")


@lru_cache(maxsize=256)
def _warn_of_unused(name: str, cls: type, method: str) -> None:
    """Warn if a class defines a method that its base does not use."""
    owner = next(base for base in cls.__mro__ if method in vars(base))
    played = getattr(owner, method).__module__.startswith("trireme.")
    defined = [seam for seam in _SEAMS if seam in vars(cls)]
    called = getattr(cls, "calls", ())
    if played and defined and not set(defined) & set(called):
        takes = f", which calls {', '.join(called)}" if called else ""
        logger.warning(
            "workflow '%s': %s.%s is never called: `%s` is that of %s%s; give `run`, or take "
            "another base class",
            *(name, cls.__name__, defined[0], method, cls.__bases__[0].__name__, takes),
        )


def _names_reward(code: Any) -> bool:
    """Return whether the text of a function or class has the task's reward in it; True if the text
    is not there.
    """
    try:
        return "reward_fn" in source_of(code)
    except (OSError, TypeError):
        return True


def _class_method(cls: type, name: str) -> Any:
    """Return a class method of this name; a user's plain method of that name is something else."""
    attribute = getattr(cls, name, None)
    return attribute if inspect.ismethod(attribute) else None
