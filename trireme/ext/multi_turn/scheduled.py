"""Multi-turn scheduler workflow: a conversation led by a MultiTurnScheduler, judged with its group.

`workflow_args`: `scheduler` (a name of `multi_turns`, or a path; none: one turn, or the rollout
server's), `max_turns`, `loss_scale`, and further options of the scheduler's. `reward_fn_args`:
`funcs` and `weights`; without them the taskset's reward judges the last reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import new_class
from typing import Any, Protocol, runtime_checkable

from trireme.config.options import accepted, parameters_of
from trireme.engines.engine import Sampling
from trireme.experience import Experience
from trireme.ext.multi_turn import loss_scale
from trireme.ext.multi_turn.scheduler import MultiTurnScheduler, RolloutInferRequest, request_of
from trireme.ext.multi_turn.turns import Ended, play
from trireme.model.chat_tokens import conversation_of, plain_messages
from trireme.model.conversation import by_temperature, experience_of, untrained
from trireme.model.model import Model
from trireme.model.recorder import Call
from trireme.pictures import as_json_messages, pictures_in
from trireme.registry import MULTI_TURNS, did_you_mean
from trireme.rewards.grouped import Judges, judge_of, reward_group
from trireme.serialize import experience_of_wire
from trireme.task import Task

_OWN = ("scheduler", "max_turns", "loss_scale")


class ScheduledWorkflow:
    """A workflow whose turns a scheduler decides. One object serves all tasks."""

    reward_parts = True

    def __init__(self) -> None:
        self._judges = Judges()

    async def __call__(self, task: Task, model: Model) -> list[Experience]:
        """Run one trajectory; returns one experience per dialogue, without its reward."""
        args = task.workflow_args
        scale = args.get("loss_scale", "default")
        uuid = model.rollout_name
        messages = conversation(task, with_tags=True)
        request = request_of(_row(task), messages, uuid, task.image_key)
        scheduler = make_scheduler(args)
        if scheduler is None and isinstance(model.engine, LeadsTurns):
            await model.engine.connect()
            if model.engine.multi_turn:
                if request.images or pictures_in(request.messages):
                    raise ValueError(
                        "the row shows pictures, which a rollout server's own scheduler does not "
                        "get: expected workflow_args.scheduler, by which this run leads its turns"
                    )
                return await _at_server(
                    model.engine, model, request, args.get("loss_scale", "default")
                )
        ended = await play(scheduler, request, model, max_turns=args.get("max_turns"))
        return samples(model, ended, scale, uuid)

    def examine(self, task: Task) -> None:
        """Raise ValueError for a conversation, scheduler, loss scale or reward that cannot be."""
        conversation(task)
        make_scheduler(task.workflow_args)
        try:
            loss_scale.resolve(task.workflow_args.get("loss_scale", "default"))
        except ValueError as error:
            raise ValueError(f"workflow_args.loss_scale: {error}") from error
        judge_of(task.reward_fn, task.reward_fn_args).examine(task)

    def first_prompt(
        self, task: Task, read: Callable[[Any], Any]
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return the task's conversation and its tools; `read` reads its pictures."""
        return plain_messages(conversation(task), read), task.raw_task.get("tools")

    def has_no_reward(self, task: Task) -> bool:
        """Return whether the task names no source of rewards; a scheduler's environment may provide
        them.
        """
        named = task.reward_fn or task.reward_fn_args or task.workflow_args.get("scheduler")
        return not named

    async def judge(
        self, task: Task, experiences: Sequence[Experience], models: Sequence[Any] = ()
    ) -> None:
        """Set the reward of each rollout of a task; all rollouts are there, in run order.

        Outputs of a `run` that have their own `request_id` are judged separately.
        """
        await reward_group(self._judges.of(task), task, experiences, models)


multi_turn_scheduler = ScheduledWorkflow()


@runtime_checkable
class LeadsTurns(Protocol):
    """An engine that may have its own scheduler: rollout servers."""

    multi_turn: bool

    async def connect(self) -> None:
        """Wait until that is known."""
        ...

    async def infer(
        self,
        request: Mapping[str, Any],
        sampling: Sampling,
        *,
        key: tuple[Any, ...],
        loss_scale: Any,
    ) -> list[dict[str, Any]]:
        """Return a whole trajectory."""
        ...


def make_scheduler(args: dict[str, Any]) -> MultiTurnScheduler | None:
    """Make the scheduler that `workflow_args` name; None if they name none.

    Raises ValueError for an unknown one, and for options that it does not take.
    """
    name, turns = args.get("scheduler"), args.get("max_turns")
    if turns is not None and (not isinstance(turns, int) or turns < 0):
        raise ValueError(
            f"workflow_args.max_turns is {turns!r}: expected a whole number, 0 for no limit"
        )
    if name is None:
        return None
    try:
        scheduler: Any = MULTI_TURNS.get(name) if isinstance(name, str) else name
    except ValueError as error:
        raise ValueError(f"workflow_args.scheduler: {error}") from error
    options = {key: value for key, value in args.items() if key not in _OWN}
    if isinstance(scheduler, type) and (base := getattr(scheduler, "stands_for", "")):
        raise ValueError(
            f"multi-turn scheduler {name!r} extends {base}, which is not available here: "
            "expected one that extends MultiTurnScheduler"
        )
    if not isinstance(scheduler, type):
        raise ValueError(f"multi-turn scheduler {name!r} is {scheduler!r:.60}: expected a class")
    if not _gives(scheduler, "step") and not _gives(scheduler, "run"):
        raise ValueError(
            f"multi-turn scheduler {name!r} has no step: expected a class with "
            "`step(self, infer_request, result, current_turn)`"
        )
    if not issubclass(scheduler, MultiTurnScheduler):  # the base provides what it omits
        scheduler = new_class(scheduler.__name__, (scheduler, MultiTurnScheduler))
    try:
        made: MultiTurnScheduler = scheduler(**accepted(scheduler, {"max_turns": turns}), **options)
    except TypeError as error:
        known = [*parameters_of(scheduler), *_OWN]
        hints = (did_you_mean(option, known) for option in options if option not in known)
        raise ValueError(
            f"multi-turn scheduler {name!r} does not take workflow_args {options}: {error}"
            f"{next(hints, '')}"
        ) from error
    if getattr(made, "max_turns", None) is None:  # its constructor does not set it
        made.max_turns = turns
    return made


def _gives(scheduler: type, method: str) -> bool:
    """Return whether a class has a method that is neither abstract nor inherited from our base."""
    there = getattr(scheduler, method, None)
    abstract = getattr(there, "__isabstractmethod__", False)
    return callable(there) and not abstract and there is not vars(MultiTurnScheduler).get(method)


def samples(model: Model, ended: Sequence[Ended], scale: Any, request_id: str) -> list[Experience]:
    """Make an experience for each dialogue, and for each earlier part of it if the chat template
    rewrote its history or if its turns have several temperatures. The tokens of a call are trained
    in only one of them.
    """
    decode = model.chat_tokens.decode
    last = {dialogue.call for dialogue in ended}
    leaves = {
        call: dialogue
        for dialogue in ended
        for call in (*dialogue.earlier, dialogue.call)
        if call is dialogue.call or call not in last
    }
    done: dict[Call, int] = {}
    out: list[Experience] = []
    for leaf, dialogue in leaves.items():
        path = leaf.path
        if loss_scale.only_last(scale) and leaf is not dialogue.call:
            continue
        # a reply's text has no special tokens, which a model may well sample
        loss_scale.weigh(path, scale, partial(decode, skip_special=True))
        for upto, calls in by_temperature(path, path):
            starts = untrained(calls, done)
            if calls[-1] is not leaf and not any(_is_trained(c, starts[c]) for c in calls):
                continue
            experience = experience_of(upto, starts, decode)
            if calls[-1] is dialogue.call:
                said = dialogue.messages
                if pictures_in(said):  # in a message's parts, in whatever form
                    said = as_json_messages(model.chat_tokens.plain(said))
                experience.messages = said
            experience.info |= {
                "completion": dialogue.choice.message.content,
                "rollout_infos": dialogue.infos,
                "request_id": dialogue.infos.get("request_id", request_id),
            }
            experience.metrics["num_turns"] = float(dialogue.infos.get("num_turns", 1))
            for counted in ("tool_calls", "tool_errors"):  # which a user's scheduler may count, too
                if isinstance(number := dialogue.infos.get(counted), int | float):
                    experience.metrics[counted] = float(number)
            out.append(experience)
    return out


def _is_trained(call: Call, start: int) -> bool:
    return any(call.weights[start:]) if call.weights else start < len(call.completion.ids)


async def _at_server(
    engine: LeadsTurns, model: Model, request: RolloutInferRequest, scale: Any
) -> list[Experience]:
    """Run the trajectory with the rollout server's own scheduler."""
    outputs = await engine.infer(asdict(request), model.sampling, key=model.key, loss_scale=scale)
    experiences = [experience_of_wire(output["experience"]) for output in outputs]
    for experience, output in zip(experiences, outputs, strict=True):
        experience.messages = output["messages"]
    return experiences


def conversation(task: Task, *, with_tags: bool = False) -> list[dict[str, Any]]:
    """Return the row's conversation: its `messages`, else the prompt's column; with the system
    prompt of the YAML if it has none. `with_tags`: see `conversation_of`.
    """
    prompt = task.raw_task.get("messages", task.prompt)
    return conversation_of(task, prompt, task.system_prompt, with_tags=with_tags)


def _row(task: Task) -> dict[str, Any]:
    """Return the row, with its truth also as `solution`, which schedulers use."""
    row = {name: value for name, value in task.raw_task.items() if value is not None}
    return row if task.truth is None else {"solution": task.truth, **row}
