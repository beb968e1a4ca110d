"""Turns: the one loop that plays a conversation by a scheduler, in process and at the server.

Invariants:
- A reply's ids are the sampled ones. Text that a scheduler puts into a reply is encoded and not
  trained; text that it cuts off is dropped.
- `max_turns` ends a conversation even if the scheduler forgets to.
- `on_trajectory_end` is always called.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from trireme.aio import OwnThread, call_user
from trireme.experience import python_number
from trireme.ext.multi_turn.scheduler import (
    ChatMessage,
    InferEngine,
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
)
from trireme.ext.openai.tool_calls import read_reply, sampled_text
from trireme.ext.openai.wire import token_logprobs
from trireme.log import get_logger
from trireme.model.model import Model, Reply
from trireme.model.recorder import Call, Recorder
from trireme.model.tool_calls import hermes, message_of
from trireme.pictures import with_images

logger = get_logger("explorer")
Given = Sequence[tuple[RolloutResponseChoice, Call]]
"""The model's replies, as the scheduler saw them and as they were recorded."""
_STEP_KEYS = (
    *("infer_request", "response_token_ids", "response_loss_mask", "rollout_logprobs"),
    "rollout_infos",
)


@dataclass
class Ended:
    """A dialogue that is a separate sample."""

    messages: list[dict[str, Any]]
    choice: RolloutResponseChoice
    call: Call
    """The one that gave its last reply."""
    earlier: list[Call] = field(default_factory=list)
    """Calls that belong to it, and that the last one does not continue token for token."""
    infos: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make numbers of numpy and torch Python's: the infos are sent and stored as JSON."""
        self.infos = {name: python_number(value) for name, value in self.infos.items()}


def dialogues(name: str, returned: Any, calls: Given, recorder: Recorder) -> list[Ended]:
    """Convert the return value of an overridden `run` of the scheduler `name` to dialogues.

    Raises TypeError for anything but RolloutOutputs with messages and a choice.
    """
    outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not outputs:
        raise TypeError(f"{name}.run returned an empty list: expected RolloutOutputs")
    ended = []
    for output in outputs:
        if not isinstance(output, RolloutOutput):
            raise TypeError(
                f"{name}.run returned {type(output).__name__}: expected a RolloutOutput, or a list "
                "of them"
            )
        if not output.messages or not output.response.choices:
            raise TypeError(
                f"{name}.run returned a RolloutOutput without messages, or without a choice in its "
                "response"
            )
        choice = output.response.choices[0]
        call = _call_of(name, choice, calls)
        infos = {"num_turns": len(outputs), **output.rollout_infos}
        earlier = _earlier(call, recorder)
        ended.append(Ended(output.messages, choice, call, earlier, infos))
    return ended


def _call_of(name: str, choice: RolloutResponseChoice, calls: Given) -> Call:
    """Return the recorded call of a choice. Raises ValueError if the model did not make it."""
    for known, call in calls:
        if known is choice:
            return call
    for known, call in reversed(calls):  # a copy of it
        if choice.token_ids and known.token_ids == choice.token_ids:
            return call
    raise ValueError(
        f"{name}.run returned a reply that the model did not give: {choice.message.content!r:.80}"
    )


def _earlier(last: Call, recorder: Recorder) -> list[Call]:
    """Return the calls whose replies a dialogue that ends in `last` contains, if the template
    rewrote the text before.
    """
    asked = last.messages or []
    known = {len(call.messages or ()) for call in last.path}
    earlier = []
    for index, message in enumerate(asked):
        if message["role"] == "assistant" and index not in known:
            call = recorder.by_messages(asked[: index + 1], last.tools)
            if call is not None and len(call.messages or ()) == index:
                earlier.append(call)
    return earlier


async def play(
    scheduler: MultiTurnScheduler | None,
    request: RolloutInferRequest,
    model: Model,
    *,
    max_turns: int | None = None,
    barrier: TurnBarrier | None = None,
) -> list[Ended]:
    """Play one trajectory; returns its dialogues (one, unless an overridden `run` splits it), the
    model's calls recorded in `model`. Without a scheduler there is one turn.
    """
    trajectory = _Trajectory(scheduler or _OneTurn(1), model, max_turns, barrier)
    try:
        return await trajectory.play(request)
    finally:
        await trajectory.close()


class TurnBarrier:
    """Batch mode: a turn begins when all trajectories of a batch wait for it, or have ended."""

    def __init__(self, members: int) -> None:
        self._live = members
        self._waiting = 0
        self._turn = asyncio.Event()

    async def wait(self) -> None:
        """Wait until all others have arrived."""
        self._waiting += 1
        turn = self._turn
        self._release()
        await turn.wait()

    def leave(self) -> None:
        """Note that one of them has ended."""
        self._live -= 1
        self._release()

    def _release(self) -> None:
        if self._waiting >= self._live:
            self._turn.set()
            self._waiting, self._turn = 0, asyncio.Event()


class _OneTurn(MultiTurnScheduler):
    """No scheduler: the first reply is the last."""


class _Trajectory:
    def __init__(
        self,
        scheduler: MultiTurnScheduler,
        model: Model,
        max_turns: int | None,
        barrier: TurnBarrier | None,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._max_turns = max_turns
        self._barrier = barrier
        self._infos: dict[str, Any] = {}
        self._given: list[tuple[RolloutResponseChoice, Call]] = []
        self._request: RolloutInferRequest | None = None
        self._thread = OwnThread(f"scheduler-{model.key}")
        scheduler.infer_engine = InferEngine(self._ask_beside)
        scheduler.tokenizer = model.chat_tokens.tokenizer

    async def play(self, request: RolloutInferRequest) -> list[Ended]:
        """Play turn after turn until the scheduler finishes."""
        while request.messages and request.messages[-1].get("role") == "assistant":
            request.messages.pop()  # the data set's own answer
        held = [request]
        self._request = request
        await self._call(self._scheduler.on_trajectory_start, held)
        [request] = held
        self._request = request
        if (run := getattr(self._scheduler, "run", None)) is not None:
            outputs = await self._call(run, request, {})
            return dialogues(self._name, outputs, self._given, self._model.recorder)
        turn = 1
        while True:
            self._request = request
            choice = await self._ask(request)
            if await self._finished(request, choice, turn):
                break
            request = await self._next(request, choice, turn)
            turn += 1
        choice.messages = copy.deepcopy(request.messages)
        recorder, last = self._model.recorder, self._given[-1][1]
        gone: set[Call] = set()
        if self._scheduler.drops_retries:
            recorder.drop_branches()
            gone = recorder.orphans()
        ends = [c for c in recorder if not c.extended and c is not last and c not in gone]
        infos = {**self._infos, "num_turns": turn}
        return [Ended(choice.messages, choice, last, ends, infos)]

    async def close(self) -> None:
        if self._barrier is not None:
            self._barrier.leave()
        try:
            if self._request is not None:
                await self._call(self._scheduler.on_trajectory_end, self._request)
        finally:
            self._thread.close()

    async def _ask(self, request: RolloutInferRequest, **options: Any) -> RolloutResponseChoice:
        """Add the model's reply to the request's messages, and return it."""
        messages = request.messages
        if messages and messages[-1].get("role") == "assistant" and not messages[-1].get("content"):
            messages.pop()  # only marks that the reply continues, and there is none yet
        if self._barrier is not None:
            await self._barrier.wait()
        shown = self._with_images(messages, request.images)
        reply = await self._model.chat(shown, request.tools, **options)
        if messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], **reply.message}
        else:
            messages.append(dict(reply.message))
        choice = _choice(reply, self._model, self._scheduler.calls_in_thinking)
        self._given.append((choice, reply.call))
        return choice

    async def _ask_beside(
        self, request: RolloutInferRequest, **options: Any
    ) -> RolloutResponseChoice:
        """Return the model's reply for an overridden `run`, which builds its messages itself."""
        return await self._ask(replace(request, messages=list(request.messages)), **options)

    async def _finished(
        self, request: RolloutInferRequest, choice: RolloutResponseChoice, turn: int
    ) -> bool:
        scheduler = self._scheduler
        if isinstance(scheduler, _OneTurn):
            return True
        verdict = await self._call(scheduler.on_turn_end, request, choice, turn)
        verdict = self._mapping("on_turn_end", verdict or {})
        self._add_infos(verdict.get("rollout_infos"))
        done, method, which = verdict.get("done"), "on_turn_end", " as 'done'"
        if done is None:
            done = await self._call(scheduler.check_finished, request, choice, turn)
            method, which = "check_finished", ""
        done = python_number(done)
        if not isinstance(done, bool | int):
            raise TypeError(
                f"{self._name}.{method} returned {type(done).__name__}{which}: expected True or "
                "False"
            )
        # a reply that had no room cannot be followed by another
        no_room = choice.finish_reason == "length" and not choice.token_ids
        return bool(done) or no_room or bool(self._max_turns and turn >= self._max_turns)

    async def _next(
        self, request: RolloutInferRequest, choice: RolloutResponseChoice, turn: int
    ) -> RolloutInferRequest:
        """Return the next request from `step`; edits of the reply are recorded."""
        before = [dict(message) for message in request.messages]
        returned = await self._call(self._scheduler.step, request, choice, turn)
        if isinstance(returned, RolloutInferRequest):
            returned = {"infer_request": returned}
        changes = self._mapping("step", returned)
        following = changes.get("infer_request")
        if not isinstance(following, RolloutInferRequest):
            raise TypeError(
                f"{self._name}.step returned {type(following).__name__}: expected a "
                "RolloutInferRequest, or a dict with one as 'infer_request'"
            )
        for key in set(changes) - set(_STEP_KEYS):
            raise TypeError(
                f"{self._name}.step returned a dict with '{key}': expected some of "
                f"{', '.join(_STEP_KEYS)}"
            )
        for place, message in enumerate(following.messages):
            if not isinstance(message, Mapping):
                raise TypeError(
                    f"{self._name}.step returned a request whose message {place} is "
                    f"{message!r:.60}: expected a dict with 'role' and 'content'"
                )
        self._add_infos(changes.get("rollout_infos"))
        self._record_edit(before, following.messages, changes)
        return following

    def _record_edit(
        self,
        before: list[dict[str, Any]],
        after: Sequence[Mapping[str, Any]],
        changes: Mapping[str, Any],
    ) -> None:
        """Report to the recorder that `step` changed the reply itself, by its text or by ids."""
        ids, weights = (
            _flat(changes.get("response_token_ids")),
            _flat(changes.get("response_loss_mask")),
        )
        if weights is not None and (ids is None or len(ids) != len(weights)):
            raise ValueError(
                f"{self._name}.step returned a response_loss_mask of {len(weights)} entries for "
                f"{'no' if ids is None else len(ids)} response_token_ids: expected one for each"
            )
        logprobs = _flat(changes.get("rollout_logprobs"))
        trained = None if weights is None else sum(1 for weight in weights if weight)
        if logprobs and trained is not None and len(logprobs) != trained:
            raise ValueError(
                f"{self._name}.step returned {len(logprobs)} rollout_logprobs: expected {trained}, "
                "one for each token whose response_loss_mask is not 0"
            )
        last = len(before) - 1
        if ids is None and list(map(dict, after)) == before and self._given[-1][1].recorded().ended:
            _warn_of_no_message(self._name)
        same = len(after) > last and all(
            dict(a) == b for a, b in zip(after, before[:last], strict=False)
        )
        if not same or after[last].get("role") != "assistant":
            return  # another conversation: its sampled ids stay as they are
        content, old = str(after[last].get("content") or ""), before[last].get("content")
        if ids is not None or (content != old and len(after) > last + 1):
            tools = self._request.tools if self._request else None
            images = self._request.images if self._request else []
            shown = self._with_images(after[:last], images)
            self._model.edit_reply(shown, content, ids, weights, tools)

    def _with_images(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
    ) -> Sequence[Mapping[str, Any]]:
        """Return messages with pictures in their places; a tag that the model wrote is text."""
        if not images:
            return messages
        texts = [text for choice, call in self._given for text in _texts(choice, call)]
        own = [
            message.get("role") == "assistant" and str(message.get("content")).strip() in texts
            for message in messages
        ]
        others = [message for message, is_own in zip(messages, own, strict=True) if not is_own]
        following = iter(with_images(others, images))
        pairs = zip(messages, own, strict=True)
        return [message if is_own else next(following) for message, is_own in pairs]

    def _add_infos(self, infos: Any) -> None:
        if infos:
            self._infos.update(self._mapping("rollout_infos", infos))

    def _mapping(self, what: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{self._name}.{what} returned {type(value).__name__}: expected "
                f"{'a RolloutInferRequest or ' if what == 'step' else ''}a dict"
            )
        return value

    @property
    def _name(self) -> str:
        return type(self._scheduler).__name__

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the scheduler; a plain one of the user's runs in a thread."""
        ours = method.__module__.startswith("trireme.")
        return await call_user(method, *args, away=None if ours else self._thread.run)


@lru_cache(maxsize=256)
def _warn_of_no_message(name: str) -> None:
    logger.warning(
        "%s.step returned the conversation as it was, which ends with the model's own reply: the "
        "model goes on with a reply that it has ended. Append a user's or a tool's message, such "
        "as what an environment shows, for a new turn", name,
    )  # fmt: skip


def _texts(choice: RolloutResponseChoice, call: Call) -> tuple[str, str]:
    """Return what a turn sampled, and the whole reply, which may have been begun before it."""
    whole = (call.reply or {}).get("content")
    return str(choice.message.content).strip(), str(whole).strip()


def _tool_calls(reply: Reply, model: Model, in_thinking: bool) -> list[dict[str, Any]] | None:
    """Return the calls of a reply, in forms that a scheduler does not parse itself."""
    form, decode = model.chat_tokens.tool_format, model.chat_tokens.decode
    if form.read is hermes or not reply.call.tools:
        return None
    text = sampled_text(reply.call, form, decode)
    if in_thinking:
        _, calls = form.read(text, reply.call.tools)
    else:
        _, calls = read_reply(reply.call, text, form, decode)
    wire_calls = [message_of(call) for call in calls]
    for wire, call in zip(wire_calls, calls, strict=True):
        wire["error"] = call.error
    return wire_calls or None


def _choice(reply: Reply, model: Model, in_thinking: bool) -> RolloutResponseChoice:
    logprobs = None
    if reply.call.completion.alternatives:
        logprobs = {"content": token_logprobs(reply, model.chat_tokens.decode)}
    return RolloutResponseChoice(
        index=0,
        message=ChatMessage("assistant", reply.text, _tool_calls(reply, model, in_thinking)),
        finish_reason="length" if reply.truncated else "stop",
        logprobs=logprobs,
        token_ids=list(reply.tokens),
    )


def _flat(rows: Any) -> list[Any] | None:
    if rows is None:
        return None
    return [n for row in rows for n in (row if isinstance(row, list | tuple) else [row])]
