"""Model: what a workflow holds. It chats with the engine, and remembers every call token for token.

- `chat` goes on with the recorded conversation that its messages begin with: recorded ids plus the
  ids of what is new.
- `experiences` makes of the calls what is trained: one a conversation, or one a call.
- A Model belongs to one rollout. After `revoke` (time-out) every call raises Revoked.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from trireme.engines.engine import Completion, Engine, OnToken, Sampling, with_options
from trireme.experience import Experience
from trireme.model.chat_tokens import ChatTokens, Message, Prompt, plain_messages
from trireme.model.conversation import (
    cut,
    experiences_of,
    inserted,
    kept_tokens,
    of_call,
    with_metrics,
)
from trireme.model.recorder import Call, Recorder

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.model.blocking import BlockingModel
    from trireme.model.openai_client import Address


T = TypeVar("T")
MANY_CHARACTERS = 2**16
"""More than these are encoded in a thread."""
_OVERHEAD = 100
"""What a message costs beside its text, in characters."""


class Revoked(RuntimeError):
    """The rollout is over (timed out, say), and its model takes no more calls."""


class PromptTooLong(ValueError):
    """A prompt leaves no room for a reply, and `model.enable_prompt_truncation` is off."""


@dataclass(frozen=True)
class Reply:
    """What the model said."""

    text: str
    message: dict[str, Any]
    """As the next turn's history wants it: `chat + [reply.message, ...]`."""
    tokens: list[int]
    """The sampled ids, an end token included."""
    logprobs: list[float]
    versions: list[int]
    stop_reason: str
    prompt_tokens: int
    call: Call = field(repr=False)

    @property
    def truncated(self) -> bool:
        """Whether it was cut, or whether the prompt was too long for any reply."""
        return self.stop_reason == "length"


class Model:
    """An engine, a tokenizer and the record of one rollout."""

    @classmethod
    def attune(cls, chat: ChatTokens) -> None:
        """Set how conversations are read, once for all models of this class that have this `chat`:
        here, as the engine's tokenizer says.
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
        """`key` is (batch, task, run); `sampling` holds for calls that say nothing else.

        `auxiliary` are further models of the run: other Models, and Endpoints. `gateway` makes the
        address.
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
        self.seconds = 0.0
        """What its calls waited for the engine; calls that overlap count each."""
        self.keeps_sampling = False
        """Whether clients get the rollout's own temperature and the like, whatever they ask for."""
        self._gateway = gateway
        self._address: Address | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._revoked = threading.Event()  # shared with forks
        self._addresses: list[Address] = []  # shared with forks

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> Reply:
        """The reply to a conversation. A last message of the assistant's is gone on with.

        `sampling` goes over the task's options: temperature, max_tokens, stop and the other fields
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
        """`n` independent replies to one conversation, each with `begin` as its beginning, which is
        not sampled; `on_token`: see Engine; `on_prompt`: told the prompt's new ids before them.
        """
        options = with_options(self.sampling, sampling)
        conversation = plain_messages(messages)
        if not conversation:
            raise ValueError("chat needs at least one message")
        goes_on = conversation[-1]["role"] == "assistant"
        if goes_on and begin:
            raise ValueError(
                "tool_choice: the last message is the assistant's, which is gone on with"
            )
        prefix = conversation.pop()["content"] if goes_on else begin
        known = self._cut_back(conversation, prefix, tools) if goes_on else None
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
        # a conversation's own replies are no prompt: its beginning is held to the prompt's limit
        limit = self.max_model_len - 1 if begun else self.max_prompt_tokens
        on_prompt(prompt.ids)
        calls = await self._sample(parent, prompt, options, limit, on_token)
        for call in calls:
            call.messages = conversation
            call.reply = {"role": "assistant", "content": prefix + call.completion.text}
            call.tools = list(tools) if tools else None
            call.tools_dropped = bool(tools) and self.chat_tokens.drops_tools
        return self._record(calls)

    async def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """What follows plain text, or ids."""
        return _only(await self.generate_samples(prompt, **sampling), "generate_samples")

    async def generate_samples(
        self, prompt: str | Sequence[int], *, on_token: OnToken | None = None, **sampling: Any
    ) -> list[Reply]:
        """`n` independent continuations of plain text, or of ids."""
        options = with_options(self.sampling, sampling)
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            encode = partial(self.chat_tokens.encode, most=self.max_model_len, special=True)
            ids = await _off_loop(lambda: encode(prompt), len(prompt))
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("generate needs a prompt of at least one token")
        parent, size = self.recorder.by_ids(ids)
        limit = self.max_prompt_tokens if parent is None else self.max_model_len - 1
        return self._record(
            await self._sample(parent, Prompt(ids[size:], text=text), options, limit, on_token)
        )

    async def prompt_tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> int:
        """The prompt's length in tokens of a conversation that has not begun."""
        conversation = plain_messages(messages)
        tokens = self.chat_tokens
        prompt = await _off_loop(
            lambda: tokens.prompt(conversation, tools), _size(conversation, "", tools)
        )
        return len(prompt.ids)

    async def logprobs(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """log p(token t | earlier) of given ids under the present weights; index 0 is 0."""
        self._check_live()
        return (await self.engine.logprobs([list(tokens)], temperature=temperature))[0]

    def experiences(
        self,
        reward: float | Sequence[float] | None = None,
        *,
        per_call: bool = False,
        **metrics: float,
    ) -> list[Experience]:
        """What was lived through, as experiences: one a conversation.

        With `per_call`, or a list of rewards (one for each reply, in order), one a reply. A prompt
        that was too long keeps its reward of 0. `metrics` are logged as they are.
        """
        if isinstance(reward, str):  # text is a sequence too
            raise ValueError(f"experiences(reward={reward!r:.60}): expected a number")
        orphans = self.recorder.orphans()
        several: Any = reward
        if isinstance(reward, Sequence) or getattr(reward, "shape", ()):  # an array's
            calls = self.recorder.fresh()
            rewards = [float(value) for value in several]
            if len(rewards) != len(calls):
                raise ValueError(
                    f"experiences(reward=...) has {len(rewards)} numbers: expected {len(calls)}, "
                    "one for each reply of the model"
                )
        else:
            calls = [call for call in self.recorder.fresh() if call not in orphans]
            rewards = None
        if per_call or rewards is not None:
            experiences = [self.experience(call) for call in calls]
        else:
            experiences = experiences_of(calls, orphans, self.chat_tokens.decode)
        for index, experience in enumerate(experiences):
            if experience.reward is None:
                experience.reward = rewards[index] if rewards is not None else _number(reward)
        with_metrics(experiences, metrics)
        if len(self.recorder) > 1:
            counts = {"splits": self.recorder.splits, "orphans": len(orphans)}
            with_metrics(experiences, {f"conversation/{name}": n for name, n in counts.items()})
        return experiences

    def experience(self, call: Call, *, run: int = 0) -> Experience:
        """One call alone."""
        return of_call(call, self.chat_tokens.decode, run=run)

    def revoke(self) -> None:
        """From now on every call raises Revoked, and its address answers no request."""
        self._revoked.set()
        while self._addresses:
            self._addresses.pop().close()
        for model in self.auxiliary:
            if isinstance(model, Model):
                model.revoke()

    def fork(self) -> Model:
        """The same model with a record of its own; revoked together."""
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
        twin._counter, twin._loop, twin._revoked = self._counter, self._loop, self._revoked
        twin._addresses = self._addresses
        return twin

    def blocking(self, loop: asyncio.AbstractEventLoop | None = None) -> BlockingModel:
        """The form that class workflows hold; `loop` is the engine's."""
        from trireme.model.blocking import BlockingModel

        self._loop = loop or self.loop
        return BlockingModel(self)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the engine: the one that runs when this is first asked."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    @property
    def address(self) -> Address:
        """Where programs of this machine find this model, each call recorded like `chat`.

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
        """The address for OpenAI's clients, `http://127.0.0.1:<port>/s/<rollout>/v1`."""
        return self.address.base_url

    @property
    def api_key(self) -> str:
        """What clients must show there."""
        return self.address.api_key

    @property
    def openai(self) -> AsyncOpenAI:
        """An OpenAI client whose requests come here."""
        return self.get_openai_async_client()

    def get_openai_async_client(self) -> AsyncOpenAI:
        """An asynchronous OpenAI client whose requests come here; `client.model_path` is set."""
        from trireme.model.openai_client import async_client

        return async_client(self)

    def get_openai_client(self) -> OpenAI:
        """A blocking OpenAI client whose requests come here, for code in a thread of its own."""
        from trireme.model.openai_client import sync_client

        return sync_client(self)

    def edit_reply(
        self,
        messages: Sequence[Message],
        content: str,
        ids: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        """The last reply to `messages` is now `content`: cut back and added to.

        `ids` are those of what the last call sampled and of what was added, `weights` theirs in the
        loss; without ids they are found. Raises ValueError where ids that were not sampled have a
        weight.
        """
        conversation = plain_messages(messages)
        [last, *_] = self.recorder.of_turn(conversation, tools) or [None]
        if last is None:
            raise ValueError("edit_reply: no call of this rollout has replied to these messages")
        if ids is None:
            cut = self._cut_back(conversation, content, tools)
            assert cut is not None
            parent, rest = cut
        else:
            sampled = last.completion.ids
            pairs = enumerate(zip(sampled, ids, strict=False))
            count = next((n for n, (a, b) in pairs if a != b), min(len(sampled), len(ids)))
            if weights is not None and any(weights[count:]):
                raise ValueError(
                    f"edit_reply: token {count} of {len(ids)} was not sampled (or not with this "
                    "id), and has a weight in the loss: expected 0"
                )
            parent, rest = self._cut(last, count), list(ids[count:])
            if weights is not None:
                parent.weights = [float(weight) for weight in weights[:count]]
        newest = self.recorder.calls[-1].index
        self.recorder.add(inserted(parent, rest, content, index=newest))

    def _prompt(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[Call | None, Prompt, bool]:
        """The recorded call that a conversation continues, if any, the ids behind it, and whether
        its beginning is known, be it that the template has rewritten it since.
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

    def _cut_back(
        self, messages: list[dict[str, Any]], content: str, tools: Sequence[Any] | None
    ) -> tuple[Call, list[int]] | None:
        """The recorded reply to `messages` that begins like `content`, cut where they part, and the
        ids of the rest; None where there is no such reply.
        """
        decode = self.chat_tokens.decode
        best: tuple[int, int, Call] | None = None
        for call in self.recorder.of_turn(messages, tools):
            kept = kept_tokens(call, content, decode)
            if kept is not None and (best is None or kept[1] > best[0]):
                best = (kept[1], kept[0], call)
        if best is None:
            return None
        at, count, call = best
        return self._cut(call, count), self.chat_tokens.encode(content[at:])

    def _cut(self, call: Call, count: int) -> Call:
        """The call with its first `count` tokens; recorded when it is continued."""
        if count == len(call.completion.ids):
            return call
        return cut(call, count, self.chat_tokens.decode)

    async def _sample(
        self,
        parent: Call | None,
        prompt: Prompt,
        options: Sampling,
        limit: int,
        on_token: OnToken | None,
    ) -> list[Call]:
        """Ask the engine. A prompt of more than `limit` tokens gives empty replies, or an error."""
        self._check_live()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        assert loop is self._loop, "a Model is called on its engine's event loop"
        index = next(self._counter)
        ids = [*(parent.ids if parent else []), *prompt.ids]
        if len(ids) > limit:
            return self._too_long(parent, ids, options, limit, index)
        listening: Any = {} if on_token is None else {"on_token": on_token}
        asked = time.monotonic()
        completions = await self.engine.generate(ids, options, key=(*self.key, index), **listening)
        self.seconds += time.monotonic() - asked
        self._check_live()
        if any(c.stop_reason == "aborted" for c in completions):
            raise RuntimeError(f"the engine aborted request {(*self.key, index)}")
        return [
            Call(parent, prompt.ids, c, options.temperature, index, prompt_text=prompt.text)
            for c in completions
        ]

    def _too_long(
        self, parent: Call | None, ids: list[int], options: Sampling, limit: int, index: int
    ) -> list[Call]:
        """Calls in which nothing is sampled. Without a parent they keep the prompt's beginning."""
        if not self.enable_prompt_truncation:
            # "context length" tells OpenAI's clients of agent programs which 400 this is
            raise PromptTooLong(
                f"a prompt has {len(ids)} tokens, over the context length: expected at most "
                f"{limit} (model.max_prompt_tokens, and for later turns model.max_model_len)"
            )
        kept = [] if parent else ids[: limit + 1]
        nothing = Completion([], [], [], [], "length")
        return [
            Call(parent, kept, nothing, options.temperature, index, truncated=True)
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
        if self._revoked.is_set():
            raise Revoked(
                f"rollout {'/'.join(str(part) for part in self.key)} is over: its model takes no "
                "more calls"
            )


def _size(messages: Sequence[Message], prefix: str, tools: Sequence[Any] | None) -> int:
    """About how many characters a template gets."""
    texts = sum(len(message["content"]) + _OVERHEAD for message in messages) + len(prefix)
    return texts + sum(len(str(tool)) for tool in tools or ())


async def _off_loop(function: Callable[[], T], characters: int) -> T:
    """`function()`, in a thread where so much text would keep others waiting."""
    return function() if characters < MANY_CHARACTERS else await asyncio.to_thread(function)


def _only(replies: list[Reply], many: str) -> Reply:
    if len(replies) != 1:
        raise ValueError(f"n={len(replies)} gives several replies: call {many}")
    return replies[0]


def _number(reward: Any) -> float | None:
    return None if reward is None else float(reward)
