"""Blocking model: the Model for class workflows, which call it from another thread.

`chat` and `generate` wait for the engine's event loop and return a list of n experiences, one per
reply, with `response_text`, `tokens`, `logprobs` and `prompt_length`. Their `*_async` twins can be
awaited from any event loop. Waiting on the engine's own loop would never end: that raises.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from trireme.aio import running_loop
from trireme.experience import TOKEN_FIELDS, Experience, cut_to
from trireme.model.chat_tokens import Message
from trireme.model.conversation import experience_of, with_metrics
from trireme.pictures import album, as_json_messages, pictures_in, shown

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from trireme.model.address import Address
    from trireme.model.model import Model, Reply

T = TypeVar("T")
WAIT_S = 3600.0
"""Seconds that a blocking call waits for its answer at most."""


def wait_for(
    loop: asyncio.AbstractEventLoop,
    call: Coroutine[Any, Any, T],
    what: str,
    timeout: float = WAIT_S,
) -> T:
    """Run `call` on `loop` from another thread and wait. Raises TimeoutError, which names
    `what`.
    """
    if running_loop() is loop:
        call.close()
        raise RuntimeError(
            f"{what} would block the event loop that has to answer it: "
            "await its asynchronous form there, or call it in a thread"
        )
    try:
        future = asyncio.run_coroutine_threadsafe(call, loop)
    except RuntimeError:  # the run and its loop have ended
        call.close()
        raise
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise  # raised by the call itself
        future.cancel()
        raise TimeoutError(f"{what} got no answer from the engine in {timeout:g} s") from None


async def on_loop(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
    """Await `call` on `loop`, from that loop or another."""
    if asyncio.get_running_loop() is loop:
        return await call
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))


class Replies(list[Experience]):
    """Replies as experiences. Attributes of a Reply (`text`, `message` …) are those of the first
    one.
    """

    def __init__(self, experiences: Sequence[Experience], first: Reply | None) -> None:
        super().__init__(experiences)
        self.first = first

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the first reply."""
        if name == "first" or name.startswith("__") or not hasattr(self.first, name):
            raise AttributeError(f"a list of replies has no '{name}'")
        return getattr(self.first, name)


class BlockingModel:
    """A Model whose methods block, with the names that classes of workflows use."""

    enable_history = True

    def __init__(self, model: Model) -> None:
        self.model = model
        self._loop = model.loop

    @property
    def model_path(self) -> str:
        """Return the folder or id of the original model."""
        return self.model.model_path

    @property
    def model_name(self) -> str:
        """Return the last part of the path."""
        return PurePath(self.model_path).name

    @property
    def model_version(self) -> int:
        """Return the version of the weights that the engine has now."""
        return self.model.engine.health().version

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a prompt with its reply."""
        return self.model.max_model_len

    @property
    def address(self) -> Address:
        """Return the address for programs of other processes: see `Model.address`."""

        async def ask() -> Address:
            return self.model.address

        if running_loop() is self._loop:
            return self.model.address
        return wait_for(self._loop, ask(), "the model's address")

    @property
    def base_url(self) -> str:
        """Return the address for OpenAI's clients."""
        return self.address.base_url

    @property
    def api_key(self) -> str:
        """Return the key that clients send to the address."""
        return self.address.api_key

    @property
    def auxiliary(self) -> list[Any]:
        """Return `explorer.auxiliary_models`, in this form."""
        return [model.blocking(self._loop) for model in self.model.auxiliary]

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.model.chat_tokens.tokenizer

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> list[Experience]:
        """Return n replies to a conversation, each as an experience."""
        return wait_for(self._loop, self._chat(messages, tools, sampling), "chat")

    async def chat_async(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> list[Experience]:
        """Await `chat`."""
        return await on_loop(self._loop, self._chat(messages, tools, sampling))

    def generate(self, prompts: str | Sequence[Any], **sampling: Any) -> list[Experience]:
        """Return n continuations of each prompt (a text or ids), in the order of the prompts."""
        return wait_for(self._loop, self._generate(prompts, sampling), "generate")

    async def generate_async(
        self, prompts: str | Sequence[Any], **sampling: Any
    ) -> list[Experience]:
        """Await `generate`."""
        return await on_loop(self._loop, self._generate(prompts, sampling))

    def logprobs(
        self, tokens: Sequence[int], temperature: float = 1.0, pictures: Sequence[Any] = ()
    ) -> Tensor:
        """Return log p(token t | earlier) [T] of given ids; index 0 is 0. `pictures` are those of
        the ids: an experience's.
        """
        call = self.model.logprobs(tokens, temperature, pictures)
        return torch.tensor(wait_for(self._loop, call, "logprobs"), dtype=torch.float32)

    async def logprobs_async(
        self, tokens: Sequence[int], temperature: float = 1.0, pictures: Sequence[Any] = ()
    ) -> Tensor:
        """Await `logprobs`."""
        call = self.model.logprobs(tokens, temperature, pictures)
        return torch.tensor(await on_loop(self._loop, call), dtype=torch.float32)

    def convert_messages_to_experience(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Make one experience of a whole dialogue, with the ids of the recorded calls.

        A reply that no call of this rollout sampled (edited, or written by someone else) is encoded
        and not trained, as are earlier turns that the template has rewritten; the metric
        `conversation/unmatched` counts the former. `temperature` is taken from the calls if there
        are any.
        """
        recorder, chat = self.model.recorder, self.model.chat_tokens
        conversation = chat.plain(messages)
        call = recorder.by_messages(conversation, tools)
        tail: list[int] | None = []
        if call is not None and len(conversation) > len(call.conversation):
            tail = chat.tail(conversation, tools, call.recorded())
        if call is None or tail is None:
            ids = chat.ids_of(conversation, tools)
            # nothing of it is trained, next to others that are: a batch has numbers of all or none
            none = {"logprobs": [0.0] * len(ids), "versions": [-1] * len(ids)}
            experience = Experience(ids, mask=[False] * len(ids), prompt_length=0, **none)
            experience.temperature = (
                self.model.sampling.temperature if temperature is None else temperature
            )
            matched = 0
        else:
            path = call.path
            trained = {c: 0 for c in path if c.temperature == call.temperature}
            experience = _lengthened(experience_of(path, trained, chat.decode), tail)
            matched = len(path)
        experience.messages = as_json_messages(conversation)
        known = album(pictures_in(conversation))
        experience.pictures = tuple(shown(experience.tokens.tolist(), known).values())
        replies = sum(message["role"] == "assistant" for message in conversation)
        with_metrics([experience], {"conversation/unmatched": replies - matched})
        return cut_to(experience, self.model.max_model_len)

    async def convert_messages_to_experience_async(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Run `convert_messages_to_experience`, which needs no waiting."""
        return self.convert_messages_to_experience(messages, tools, temperature)

    def experiences(
        self, reward: float | Sequence[float] | None = None, **options: Any
    ) -> list[Experience]:
        """Return the recorded experiences: see `Model.experiences`."""
        return self.model.experiences(reward, **options)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return one experience per reply since the history was last cleared here."""
        experiences = self.model.experiences(per_call=True)
        if clear_history:
            self.model.recorder.take()
        return experiences

    def get_openai_client(self) -> OpenAI:
        """Return a blocking OpenAI client whose requests this model answers."""
        return self.model.get_openai_client()

    def get_openai_async_client(self) -> AsyncOpenAI:
        """Return an asynchronous OpenAI client whose requests this model answers."""
        return self.model.get_openai_async_client()

    def get_message_token_len(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a conversation as a prompt."""
        conversation = self.model.chat_tokens.plain(messages)
        return len(self.model.chat_tokens.prompt(conversation).ids)

    def clone_with_isolated_history(self) -> BlockingModel:
        """Return the same model with a separate record."""
        return self.model.fork().blocking(self._loop)

    async def _chat(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, sampling: dict[str, Any]
    ) -> list[Experience]:
        return self._as_experiences(await self.model.chat_samples(messages, tools, **sampling))

    async def _generate(
        self, prompts: str | Sequence[Any], sampling: dict[str, Any]
    ) -> list[Experience]:
        given: Any = prompts
        several = given.tolist() if hasattr(given, "tolist") else given  # ids of numpy or torch
        one = isinstance(several, str) or (len(several) > 0 and isinstance(several[0], int))
        each = [several] if one else several
        # awaited in order, so that requests are numbered in order
        tasks = [
            asyncio.ensure_future(self.model.generate_samples(prompt, **sampling))
            for prompt in each
        ]
        several = [self._as_experiences(replies) for replies in await asyncio.gather(*tasks)]
        return Replies(
            [e for part in several for e in part],
            several[0].first if several else None,
        )

    def _as_experiences(self, replies: Sequence[Reply]) -> Replies:
        """Assign sample i of n to the i-th run of a repeatable workflow."""
        first = self.model.key[2] if len(self.model.key) > 2 else 0
        made = [self.model.experience(reply.call, run=first + i) for i, reply in enumerate(replies)]
        return Replies(made, replies[0] if replies else None)


def _lengthened(experience: Experience, ids: Sequence[int]) -> Experience:
    """Append ids that are not trained."""
    experience.tokens = torch.cat([experience.tokens, torch.tensor(ids, dtype=torch.int64)])
    for name in TOKEN_FIELDS:
        if (row := getattr(experience, name)) is not None:
            more = row.new_full((len(ids),), -1 if name == "versions" else 0)
            setattr(experience, name, torch.cat([row, more]))
    if (routing := experience.routed_experts) is not None:
        unknown = routing.new_full((len(ids), *routing.shape[1:]), torch.iinfo(routing.dtype).max)
        experience.routed_experts = torch.cat([routing, unknown])
    return experience
