"""Outputs: a trajectory as dialogues, each with the recorded calls that belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.model.message import plain_message
from trireme.model.recorder import Call, Recorder
from trireme.workflows.scheduler import RolloutOutput, RolloutResponseChoice

Given = Sequence[tuple[RolloutResponseChoice, Call]]
"""The model's replies, as the scheduler saw them and as they were recorded."""


@dataclass
class Ended:
    """One dialogue that is a sample of its own."""

    messages: list[dict[str, Any]]
    choice: RolloutResponseChoice
    call: Call
    """The one that gave its last reply."""
    earlier: list[Call] = field(default_factory=list)
    """Calls that belong to it, and that the last one does not continue token for token."""
    infos: dict[str, Any] = field(default_factory=dict)


def dialogues(name: str, found: Any, given: Given, recorder: Recorder) -> list[Ended]:
    """What an overridden `run` of the scheduler `name` returned.

    Raises TypeError for anything but RolloutOutputs with messages and a choice.
    """
    outputs = list(found) if isinstance(found, list | tuple) else [found]
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
        call = _call_of(name, choice, given)
        infos = {"num_turns": len(outputs), **output.rollout_infos}
        earlier = _earlier(output.messages, call, recorder)
        ended.append(Ended(output.messages, choice, call, earlier, infos))
    return ended


def _call_of(name: str, choice: RolloutResponseChoice, given: Given) -> Call:
    """The recorded call of a choice. Raises ValueError where the model did not give it."""
    for known, call in given:
        if known is choice:
            return call
    for known, call in reversed(given):  # a copy of it
        if choice.token_ids and known.token_ids == choice.token_ids:
            return call
    raise ValueError(
        f"{name}.run returned a reply that the model did not give: {choice.message.content!r:.80}"
    )


def _earlier(messages: Sequence[Mapping[str, Any]], last: Call, recorder: Recorder) -> list[Call]:
    """Calls whose replies a dialogue holds, where the template rewrote what came before."""
    plain = [plain_message(message) for message in messages]
    known = {len(call.messages or ()) for call in last.path}
    found = []
    for place, message in enumerate(plain[:-1]):
        if message["role"] == "assistant" and place not in known:
            call = recorder.by_messages(plain[: place + 1], last.tools)
            if call is not None and len(call.messages or ()) == place:
                found.append(call)
    return found
