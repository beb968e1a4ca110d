"""Model: a workflow's access to the engine, which records every call token for token.

- `chat` continues the recorded conversation that its messages begin with: recorded ids plus the ids
  of the new text.
- `experiences` turns the calls into training data: one experience per conversation, or per call.
- A Model belongs to one rollout. After `revoke` (time-out) every call raises Revoked.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from trireme.engines.engine import Completion, Engine, OnToken, Sampling, with_options
from trireme.experience import Experience
from trireme.model.chat_tokens import ChatTokens, Message, Prompt
from trireme.model.conversation import experiences_of, of_call, rewarded
from trireme.model.edit import cut_back, replace_reply
from trireme.model.recorder import Call, Recorder
from trireme.pictures import pictures_in
from trireme.registry import CLIENTS

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.model.address import Address
    from trireme.model.blocking import BlockingModel


T = TypeVar("T")
MANY_CHARACTERS = 2**16
"""Texts with more characters are encoded in a thread."""
_OVERHEAD = 100
"""Characters that a message costs besides its text."""


class Revoked(RuntimeError):
    """The rollout is over (by a time-out, for example), and its model accepts no more calls."""


class PromptTooLong(ValueError):
    """A prompt leaves no room for a reply, and `model.enable_prompt_truncation` is off."""


@dataclass(frozen=True)
class Reply:
    """The model's reply."""

    text: str
    message: dict[str, Any]
    """The message as the next turn's history needs it: `chat + [reply.message, ...]`."""
    tokens: list[int]
    """The sampled ids, including an end token."""
    logprobs: list[float]
    versions: list[int]
    stop_reason: str
    prompt_tokens: int
    call: Call = field(repr=False)

    @property
    def truncated(self) -> bool:
        """Return True if the reply was cut, or if the prompt was too long for any reply."""
        return self.stop_reason == "length"


@dataclass
class _Life:
    """What a model and its forks share of the rollout that they belong to."""

    over: bool = False
    """Any thread may read it."""
    seconds: float = 0.0


class Model:
    """An engine, a tokenizer and the record of one rollout."""

    @classmethod
    def attune(cls, chat: ChatTokens) -> None:
        """Set how conversations are read, once for all models of this class that share this `chat`:
        here, by the engine's tokenizer.
        """

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokens,
        *,
        key: tuple[Any, ...] = (0, 0, 0),
        sampling: Sampling | None = None,
        max_model_len: int,
        max_prompt_tokens: int | None = None,
        enable_prompt_truncation: bool = True,
        model_path: str = "",
        auxiliary: Sequence[Any] = (),
        gateway: Callable[[Model], Address] | None = None,
    ) -> None:
        """`key` is (batch, task, run); `sampling` applies to calls that override nothing.

        `auxiliary` are further models of the run: Models, or clients of other servers.
        `gateway` makes the address.
        """
        self.engine = engine
        self.chat_tokens = chat
        self.key = key
        self.sampling = sampling or Sampling()
        self.max_model_len = max_model_len
        self.max_prompt_tokens = min(max_prompt_tokens or max_model_len - 1, max_model_len - 1)
        self.enable_prompt_truncation = enable_prompt_truncation
        self.model_path = model_path
        self.auxiliary = list(auxiliary)
        self.recorder = Recorder()
        self._counter = itertools.count()
        self.keeps_sampling = False
        """Whether clients get the rollout's own temperature and the like, whatever they request."""
        self._gateway = gateway
        self._address: Address | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life = _Life()  # shared with forks
        self._addresses: list[Address] = []  # shared with forks

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> Reply:
        """Return the reply to a conversation. If the last message is the assistant's, the model
        continues it.

        `sampling` overrides the task's options: temperature, max_tokens, stop and the other fields
        of `Sampling`. Raises ValueError for an unknown one, PromptTooLong, and Revoked.
        """
        replies = await self.chat_samples(messages, tools, **sampling)
        return _only(replies, "chat_samples")

    async def chat_samples(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        begin: str = "",
        on_token: OnToken | None = None,
        on_prompt: Callable[[Sequence[int]], None] = lambda _: None,
        **sampling: Any,
    ) -> list[Reply]:
        """Return `n` independent replies to one conversation, each beginning with `begin`, which is
        not sampled. `on_token`: see Engine; `on_prompt` receives the prompt's new ids before them.
        """
        options = with_options(self.sampling, sampling)
        conversation = await self._plain(messages)
        if not conversation:
            raise ValueError("chat needs at least one message")
        goes_on = conversation[-1]["role"] == "assistant"
        if goes_on and begin:
            raise ValueError(
                "tool_choice: the last message is the assistant's, which is gone on with"
            )
        prefix = self.chat_tokens.begun_reply(conversation.pop()) if goes_on else begin
        known = (
            cut_back(self.recorder, self.chat_tokens, conversation, prefix, tools)
            if goes_on
            else None
        )
        if known is not None:
            parent, prompt, begun = known[0], Prompt(known[1], extends=True), True
        else:
            asked = (
                [*conversation, {"role": "assistant", "content": prefix}]
                if goes_on or begin
                else conversation
            )
            parent, prompt, begun = await _off_loop(
                lambda: self._prompt(asked, tools), _size(conversation, prefix, tools)
            )
        # its own replies are not prompt: only its beginning counts towards the prompt's limit
        limit = self.max_model_len - 1 if begun else self.max_prompt_tokens
        on_prompt(prompt.ids)
        if seen := tuple(pictures_in(conversation)):
            prompt = replace(prompt, pictures=seen)
        calls = await self._sample(parent, prompt, options, limit, on_token)
        for call in calls:
            call.messages = conversation
            call.reply = {"role": "assistant", "content": prefix + call.completion.text}
            call.tools = list(tools) if tools else None
            call.tools_dropped = bool(tools) and self.chat_tokens.drops_tools
        return self._record(calls)

    async def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Continue plain text, or ids."""
        return _only(await self.generate_samples(prompt, **sampling), "generate_samples")

    async def generate_samples(
        self, prompt: str | Sequence[int], *, on_token: OnToken | None = None, **sampling: Any
    ) -> list[Reply]:
        """Return `n` independent continuations of plain text, or of ids, which may show pictures of
        earlier calls.
        """
        options = with_options(self.sampling, sampling)
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            encode = partial(self.chat_tokens.encode, most=self.max_model_len, special=True)
            ids = await _off_loop(lambda: encode(prompt), len(prompt))
        else:
            ids = [int(token) for token in prompt]  # numpy's and torch's, too
        if not ids:
            raise ValueError("generate needs a prompt of at least one token")
        parent, size = self.recorder.by_ids(ids)
        limit = self.max_prompt_tokens if parent is None else self.max_model_len - 1
        asked = Prompt(ids[size:], text=text, pictures=self.recorder.pictures_of(ids))
        return self._record(await self._sample(parent, asked, options, limit, on_token))

    async def prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> int:
        """Count the tokens of the prompt of a conversation that has not begun."""
        conversation = await self._plain(messages)
        tokens = self.chat_tokens
        prompt = await _off_loop(
            lambda: tokens.prompt(conversation, tools), _size(conversation, "", tools)
        )
        return len(prompt.ids)

    async def logprobs(
        self, tokens: Sequence[int], temperature: float = 1.0, pictures: Sequence[Any] = ()
    ) -> list[float]:
        """Return log p(token t | earlier) of given ids under the current weights; index 0 is 0.
        `pictures` are those of the ids, whose own tokens get 0.
        """
        self._check_live()
        more = self._shown(pictures)
        return (await self.engine.logprobs([list(tokens)], temperature=temperature, **more))[0]

    def experiences(
        self,
        reward: float | Sequence[float] | None = None,
        *,
        per_call: bool = False,
        **metrics: float,
    ) -> list[Experience]:
        """Return the recorded calls as experiences, one per conversation.

        With `per_call`, or a list of rewards (one per reply, in order), one per reply. A prompt
        that was too long keeps its reward of 0 in a list, and if it was the rollout's only one.
        `metrics` are logged as they are.
        """
        orphans, counts = self.recorder.orphans(), dict[str, Any]()
        several: Any = reward
        one_each = _is_several(reward)
        calls = [call for call in self.recorder.fresh() if one_each or call not in orphans]
        if per_call or one_each:
            experiences = [self.experience(call) for call in calls]
        else:
            experiences = experiences_of(calls, orphans, self.chat_tokens.decode)
        if len(self.recorder) > 1:
            counts["conversation/splits"] = self.recorder.splits
            counts["conversation/orphans"] = len(orphans)
        whole = None if reward is None else [reward] * len(experiences)
        if whole and not one_each and any(e.reward is None for e in experiences):
            for e in experiences:  # else one of 0 would count as the rollout's, or in its group
                e.reward = None
        return rewarded(experiences, several if one_each else whole, metrics | counts)

    def experience(self, call: Call, *, run: int = 0) -> Experience:
        """Return the experience of one call."""
        return of_call(call, self.chat_tokens.decode, run=run)

    def revoke(self) -> None:
        """Make every further call raise Revoked, and its address answer no request."""
        self._life.over = True
        while self._addresses:
            self._addresses.pop().close()
        for model in self.auxiliary:
            if isinstance(model, Model):
                model.revoke()

    def fork(self) -> Model:
        """Return the same model with a separate record; both are revoked together."""
        twin = Model(
            self.engine,
            self.chat_tokens,
            key=self.key,
            sampling=self.sampling,
            max_model_len=self.max_model_len,
            max_prompt_tokens=self.max_prompt_tokens,
            enable_prompt_truncation=self.enable_prompt_truncation,
            model_path=self.model_path,
            auxiliary=self.auxiliary,
            gateway=self._gateway,
        )
        twin._counter, twin._loop, twin._life = self._counter, self._loop, self._life
        twin._addresses = self._addresses
        return twin

    def blocking(self, loop: asyncio.AbstractEventLoop | None = None) -> BlockingModel:
        """Return the form for class workflows; `loop` is the engine's."""
        from trireme.model.blocking import BlockingModel

        self._loop = loop or self.loop
        return BlockingModel(self)

    @property
    def rollout_name(self) -> str:
        """Return its name in messages: batch/task/run, and the attempt after the first."""
        return "/".join(map(str, self.key))

    @property
    def seconds(self) -> float:
        """Return the seconds that its calls, and those of its forks, have waited for the engine;
        overlapping calls count separately.
        """
        return self._life.seconds

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the engine's event loop: the one that runs at the first access."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    @property
    def address(self) -> Address:
        """Return the address where programs of this machine reach this model; calls are recorded
        like `chat`.

        Raises RuntimeError for a model without one (an auxiliary one), and Revoked.
        """
        self._check_live()
        if self._address is None:
            if self._gateway is None:
                raise RuntimeError("this model has no address: only that of a rollout has one")
            self._address = self._gateway(self)
            self._addresses.append(self._address)
        return self._address

    @property
    def base_url(self) -> str:
        """Return the address for OpenAI's clients, `http://127.0.0.1:<port>/s/<rollout>/v1`."""
        return self.address.base_url

    @property
    def api_key(self) -> str:
        """Return the key that clients send to the address."""
        return self.address.api_key

    @property
    def openai(self) -> AsyncOpenAI:
        """Return an OpenAI client whose requests this model answers."""
        return self.get_openai_async_client()

    def get_openai_async_client(self) -> AsyncOpenAI:
        """Return an asynchronous OpenAI client whose requests this model answers;
        `client.model_path` is set.
        """
        return CLIENTS.get("openai_async")(self)

    def get_openai_client(self) -> OpenAI:
        """Return a blocking OpenAI client whose requests this model answers, for code in another
        thread.
        """
        return CLIENTS.get("openai")(self)

    def edit_reply(
        self,
        messages: Sequence[Message],
        content: str,
        ids: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        """Replace the last reply to `messages` by `content`: cut back and extended.

        `ids` are the last call's sampled ids followed by the added ones, `weights` their loss
        weights; without ids they are derived from the text. Raises ValueError if ids that were not
        sampled have a weight.
        """
        conversation = self.chat_tokens.plain(messages)
        replace_reply(self.recorder, self.chat_tokens, conversation, content, ids, weights, tools)

    def _shown(self, pictures: Sequence[Any]) -> dict[str, Any]:
        """Return the engine's option for pictures. Raises ValueError if it sees nothing."""
        if pictures and not self.engine.traits.sees:
            raise ValueError(
                "a message shows a picture, and the engine reads text alone: expected Trireme's "
                "own engine, and a model that it sees with"
            )
        return {"pictures": pictures} if pictures else {}

    async def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the plain form of messages; pictures are read in a thread."""
        shows = any(isinstance(m, Mapping) and _shows_more(m.get("content")) for m in messages)
        if not shows:
            return self.chat_tokens.plain(messages)
        return await asyncio.to_thread(self.chat_tokens.plain, messages)

    def _prompt(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[Call | None, Prompt, bool]:
        """Return the recorded call that a conversation continues, if any, the ids after it, and
        whether its beginning is known, even if the template has rewritten it since.
        """
        known = self.recorder.by_messages(messages, tools)
        prompt = self.chat_tokens.prompt(
            messages, tools, known.recorded() if known else None, most=self.max_model_len
        )
        if prompt.extends:
            return known, prompt, True
        parent, size = self.recorder.by_ids(prompt.ids)
        self.recorder.splits += known is not None and parent is not known
        return parent, Prompt(prompt.ids[size:], text=prompt.text), known is not None

    async def _sample(
        self,
        parent: Call | None,
        prompt: Prompt,
        options: Sampling,
        limit: int,
        on_token: OnToken | None,
    ) -> list[Call]:
        """Request samples from the engine. A prompt of more than `limit` tokens gives empty
        replies, or an error.
        """
        self._check_live()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        assert loop is self._loop, "a Model is called on its engine's event loop"
        index = next(self._counter)
        ids = [*(parent.ids if parent else []), *prompt.ids]
        if len(ids) > limit:
            return self._too_long(parent, ids, options, limit, index, prompt)
        more: Any = {} if on_token is None else {"on_token": on_token}
        more |= self._shown(prompt.pictures)
        asked = time.monotonic()
        completions = await self.engine.generate(ids, options, key=(*self.key, index), **more)
        self._life.seconds += time.monotonic() - asked
        self._check_live()
        if any(c.stop_reason == "aborted" for c in completions):
            raise RuntimeError(f"the engine aborted request {index} of rollout {self.rollout_name}")
        about: dict[str, Any] = {"prompt_text": prompt.text, "pictures": prompt.pictures}
        return [
            Call(parent, prompt.ids, c, options.temperature, index, **about) for c in completions
        ]

    def _too_long(
        self,
        parent: Call | None,
        ids: list[int],
        options: Sampling,
        limit: int,
        index: int,
        prompt: Prompt,
    ) -> list[Call]:
        """Make calls without sampled tokens. Without a parent they keep the prompt's beginning."""
        if not self.enable_prompt_truncation:
            # "context length" lets OpenAI's clients in agent programs recognize this 400
            raise PromptTooLong(
                f"a prompt has {len(ids)} tokens, over the context length: expected at most "
                f"{limit} (model.max_prompt_tokens, and for later turns model.max_model_len)"
            )
        kept = [] if parent else ids[: limit + 1]
        nothing = Completion([], [], [], [], "length")
        about: dict[str, Any] = {"truncated": True, "pictures": prompt.pictures}
        return [
            Call(parent, kept, nothing, options.temperature, index, **about)
            for _ in range(options.n)
        ]

    def _record(self, calls: Sequence[Call]) -> list[Reply]:
        replies = []
        for call in calls:
            self.recorder.add(call)
            c = call.completion
            message = dict(call.reply or {"role": "assistant", "content": c.text})
            size = call.prompt_tokens
            replies.append(
                Reply(c.text, message, c.ids, c.logprobs, c.versions, c.stop_reason, size, call)
            )
        return replies

    def _check_live(self) -> None:
        if self._life.over:
            raise Revoked(f"rollout {self.rollout_name} is over: its model takes no more calls")


def _shows_more(content: Any) -> bool:
    """Return whether a message's content has parts other than text."""
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _size(messages: Sequence[Message], prefix: str, tools: Sequence[Any] | None) -> int:
    """Estimate the number of characters that a template gets."""
    texts = sum(len(message["content"]) + _OVERHEAD for message in messages) + len(prefix)
    return texts + sum(len(str(tool)) for tool in tools or ())


async def _off_loop(function: Callable[[], T], characters: int) -> T:
    """Return `function()`, run in a thread if this much text would block others."""
    return function() if characters < MANY_CHARACTERS else await asyncio.to_thread(function)


def _only(replies: list[Reply], many: str) -> Reply:
    if len(replies) != 1:
        raise ValueError(f"n={len(replies)} gives several replies: call {many}")
    return replies[0]


def _is_several(reward: Any) -> bool:
    """Return whether a reward is a sequence or an array of rewards; a text is neither."""
    if isinstance(reward, str | bytes | bytearray):
        return False
    return isinstance(reward, Sequence) or bool(getattr(reward, "shape", ()))
