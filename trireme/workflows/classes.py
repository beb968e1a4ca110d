"""Classes: the base class of workflows that users write as a class.

A class defines `run`, as a plain method or as `async def run` (`run_async` is another name for it).
Its `model` is a BlockingModel: `chat` in a plain method, `await chat_async` in a coroutine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from trireme.aio import is_async
from trireme.model.blocking import BlockingModel
from trireme.task import Task

_OF_TASK = (
    *("task_desc", "truth", "raw_task", "format_args", "rollout_args", "workflow_args"),
    *("reward_fn_args", "system_prompt", "reply_prefix", "is_eval"),
)


class Workflow:
    """The base of class workflows. Define `run`; all else has a default.

    n rollouts are n objects, each run once, with `repeat_times` 1. A class that sets `can_repeat`
    is run once for all of them: it then has `repeat_times` n, and returns experiences with the run
    ids `run_id_base` to `run_id_base + n - 1`.
    """

    can_reset: bool = False
    can_repeat: bool = False
    is_async: bool = False
    one_at_a_time: bool = False
    """True if a runner is to begin the repeats of a task one after the other, as it does where
    `run` blocks: each takes much of the machine.
    """
    one_experience: bool = False
    """True if each rollout leaves exactly one experience, so that the number of train steps is
    known beforehand. A subclass with another `run` or `ask` sets it again."""
    one_call: bool = False
    """True if each rollout asks the trained model once: in deterministic mode the engine goes on
    while the rollout computes its reward, and the runner takes the next task. A subclass with
    another `run` or `ask` sets it again."""
    reward_parts: bool | None = None
    """True if `run` leaves the number of each reward function in `info["reward_parts"]`, which
    `gdpo` compares; None: only the run knows. A subclass with another `run` sets it again.
    """
    calls: tuple[str, ...] = ()
    """Methods that `run` calls besides those of every workflow: a subclass may define them."""
    workflow_options: Mapping[str, Any] | None = None
    """The options of `workflow_args` with their types: any other option, and a value of another
    type, is refused before the run. None: all are accepted. It holds for the class that sets it
    alone, since a subclass may read further ones."""
    examines_rows: bool = False
    """True if `examine` is cheap and sees every row before the run; otherwise it sees the first of
    a taskset."""
    loop_options: Mapping[str, Any] = {}
    """The options of `workflow_args` that a base class's loop reads, with their types: a value of
    another type is refused before the run, for subclasses too."""
    rewards_itself: bool = False
    """True if it does not use the task's reward, so that a YAML that names one is refused before
    the run. It holds for subclasses too, unless one has another `run` or names `reward_fn`."""

    task_desc: Any
    truth: Any
    raw_task: dict[str, Any]
    format_args: Any
    rollout_args: Any
    workflow_args: Mapping[str, Any]
    reward_fn_args: Mapping[str, Any]
    system_prompt: str | None
    reply_prefix: str | None
    is_eval: bool

    def __init__(
        self,
        *,
        task: Task,
        model: BlockingModel,
        auxiliary_models: Sequence[Any] | None = None,
    ) -> None:
        self.model = model
        self.auxiliary_model_wrappers = list(auxiliary_models or [])
        self.repeat_times = 1
        self.run_id_base = 0
        self.logger = logging.getLogger(type(self).__module__)
        self.bind(task)

    @cached_property
    def auxiliary_models(self) -> list[Any]:
        """OpenAI clients of the models besides the trained one."""
        return [self._client(model) for model in self.auxiliary_model_wrappers]

    @classmethod
    def needs(cls, task: Task) -> Mapping[str, str]:
        """Return the optional modules that it needs, each with the name of the feature (see
        `extra`).
        """
        return {}

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task; a class may define properties
        instead.
        """
        self.task = task
        for name in _bound(type(self)):
            setattr(self, name, getattr(task, name))

    def reset(self, task: Task) -> None:
        """Switch to another task."""
        self.bind(task)

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of runs that one call of `run` returns, and the id of the first."""
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    def _client(self, model: Any) -> Any:
        return model.get_openai_async_client() if self.is_async else model.get_openai_client()


@lru_cache(maxsize=256)
def _bound(cls: type) -> list[str]:
    """Return the attributes that an object gets from its task: those without a property of its
    class.
    """
    return [name for name in _OF_TASK if not isinstance(getattr(cls, name, None), property)]


def run_method(cls: type) -> tuple[str | None, bool]:
    """Return the name of the method to call, `run` or `run_async`, and whether to await it.

    It is the one that the most derived class defines; if that defines both, `is_async` decides.
    """
    names = ("run_async", "run") if getattr(cls, "is_async", False) else ("run", "run_async")
    for owner in cls.__mro__:
        for name in names:
            if name in vars(owner):
                return name, is_async(getattr(cls, name))
    return None, False
