"""Scheduler: the extension point for conversations of several turns: their end, and their next
turn.

Names, arguments and turn numbers are those of ms-swift's multi-turn training; a plug-in file for it
runs after a change of its import lines. Every method may be plain or `async def`; plain ones run in
the trajectory's own thread, so that a slow tool delays no other trajectory. One scheduler object is
made for each trajectory: its attributes belong to that trajectory alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trireme.model.chat_tokens import NOT_TEXT, Message
from trireme.pictures import IMAGES, images_of


@dataclass
class ChatMessage:
    """One message of a reply."""

    role: str
    content: Any
    tool_calls: list[dict[str, Any]] | None = None


@dataclass
class RolloutInferRequest:
    """The request that the next turn is sampled from."""

    messages: list[dict[str, Any]]
    """The whole conversation; when a scheduler receives it, the model's reply is its last
    message."""
    images: list[Any] = field(default_factory=list)
    """The pictures of the conversation: one for each `<image>` in its messages, in order."""
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    data_dict: dict[str, Any] = field(default_factory=dict)
    """All other columns of the data set's row."""
    uuid: str | None = None
    """Names the trajectory."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutResponseChoice:
    """The result of one turn."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    """`stop`, or `length` if the reply was cut."""
    logprobs: dict[str, Any] | None = None
    """In the form of OpenAI's API, if the task asks for log-probabilities."""
    messages: list[dict[str, Any]] | None = None
    """The whole dialogue, at the end of the last turn only."""
    token_ids: list[int] | None = None
    """The ids that this turn sampled."""


@dataclass
class ChatCompletionResponse:
    """A reply of the `infer_engine` in an overridden `run`."""

    choices: list[RolloutResponseChoice]
    model: str = ""
    usage: dict[str, int] = field(default_factory=dict)


@dataclass
class RolloutOutput:
    """A sample that an overridden `run` returns. Token lists contain one list per turn."""

    response: ChatCompletionResponse
    messages: list[dict[str, Any]] | None = None
    response_token_ids: list[Any] = field(default_factory=list)
    response_loss_mask: list[Any] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    """A `request_id` among them gives this sample its own reward."""
    rollout_logprobs: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for the wire."""
        return asdict(self)


class MultiTurnScheduler:
    """The base of schedulers. Define `step`; the rest has a default."""

    infer_engine: InferEngine | None = None
    """Calls the model, for an overridden `run`."""
    tokenizer: Any = None
    drops_retries: bool = True
    """Whether a reply that `step` removed, to ask for another, is dropped; otherwise it is trained
    as its own sample."""
    calls_in_thinking: bool = False
    """Whether a tool call inside a reply's thinking is one; otherwise only behind it."""

    def __init__(self, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        """`max_turns`: None or 0 means that the scheduler sets no limit."""
        self.max_turns = max_turns

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> Any:
        """Return the next turn's request; or a dict with `infer_request` and optionally the ids of
        this turn's reply as it now is (`response_token_ids`, `response_loss_mask`,
        `rollout_logprobs`), and `rollout_infos`, which are passed to the rewards.

        If the last message is an assistant's, the model continues it; otherwise a new turn begins.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `step(self, infer_request, result, current_turn)`"
        )

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> Any:
        """Return whether the conversation ends with turn `current_turn` (the first is 1)."""
        if result.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Called before the first turn; may change the request in the list."""

    def on_turn_end(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> Any:
        """Called after a reply. A dict with `done` takes precedence over `check_finished`, one with
        `rollout_infos` adds to them.
        """

    def on_trajectory_end(self, infer_request: RolloutInferRequest) -> Any:
        """Called once however the trajectory ends, also by an error: release its resources."""


Ask = Callable[..., Awaitable[RolloutResponseChoice]]


class InferEngine:
    """The model, for schedulers that override `run`: `await infer_async(request, config)`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: Any = None, **_: Any
    ) -> ChatCompletionResponse:
        """Return one reply to the request's messages; `request_config` is a mapping or has
        attributes.
        """
        config = request_config or {}
        options = dict(config) if isinstance(config, Mapping) else vars(config)
        return ChatCompletionResponse([await self._ask(infer_request, **options)])


def request_of(
    row: Mapping[str, Any], messages: Sequence[Message], uuid: str, image_key: str | None = None
) -> Any:
    """Make the first request of a data set's row, which begins with `messages`."""
    known = ("messages", "tools", "objects", "data_dict", *NOT_TEXT, *IMAGES)
    data = row.get("data_dict")
    others = {name: value for name, value in row.items() if name not in known and value is not None}
    return RolloutInferRequest(
        messages=[dict(message) for message in messages],
        images=images_of(row, image_key),
        tools=row.get("tools"),
        objects=row.get("objects") or {},
        data_dict=dict(data) if isinstance(data, Mapping) else others,
        uuid=uuid,
    )
