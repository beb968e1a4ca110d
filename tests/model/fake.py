"""A fake engine that says what it is told, one id a character, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.tiny import make_tokenizer
from trireme.engines.engine import Completion, EngineTraits, Health, OnToken, Sampling, StopReason
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model

TOKENIZER: Any = make_tokenizer()


@dataclasses.dataclass
class Say:
    """One reply; `end` is the text of the end token, if one is sampled."""

    text: str
    end: str = "<|im_end|>"
    stop_reason: StopReason = "stop"
    stop: str | None = None
    behind: str = ""
    """Sampled after the text: the stop string."""
    versions: tuple[int, ...] = (3,)
    """Of the first tokens; the last one goes on."""


class FakeEngine:
    traits = EngineTraits()
    servers = None

    def __init__(
        self,
        replies: Iterable[str | Say] | Callable[[str], str | Say],
        tokenizer: Any = TOKENIZER,
        wait: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.keys: list[tuple[Any, ...]] = []
        self.wait = wait
        self._replies = replies if callable(replies) else iter(replies)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        self.prompts.append(list(ids))
        self.samplings.append(sampling)
        self.keys.append(key)
        await asyncio.sleep(self.wait)
        return [self._completion(ids, sampling) for _ in range(sampling.n)]

    def _completion(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        if callable(self._replies):
            say = self._replies(self.tokenizer.decode(list(ids)))
        else:
            say = next(self._replies)
        if isinstance(say, str):
            say = Say(say)
        sampled = self.tokenizer.encode(say.text + say.behind, add_special_tokens=False)
        if say.stop_reason == "stop" and say.stop is None:
            sampled += self.tokenizer.encode(say.end, add_special_tokens=False)
        logprobs = [-0.5 - 0.01 * i for i in range(len(sampled))]
        drawn = logprobs if sampling.top_p == 1 else [0.0] * len(sampled)
        versions = [say.versions[min(i, len(say.versions) - 1)] for i in range(len(sampled))]
        return Completion(sampled, logprobs, drawn, versions, say.stop_reason, say.stop, say.text)

    async def logprobs(
        self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        return [[0.0] + [-temperature] * (len(row) - 1) for row in ids]

    async def update_weights(self, source: Any, version: int) -> None: ...
    async def fingerprint(self) -> dict[str, float] | None: ...
    async def pause(self, *, weights_follow: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        return 0

    def health(self) -> Health:
        return Health(3, 0, 0, 0, 0, 0)

    async def close(self) -> None: ...


def make(
    replies: Any, *, template: str | None = None, tokenizer: Any = None, **options: Any
) -> Model:
    """A Model over a fake engine."""
    tokenizer = tokenizer or TOKENIZER
    options.setdefault("max_model_len", 4000)
    wait = options.pop("wait", 0.0)
    thinking = options.pop("enable_thinking", None)
    chat = ChatTokens(tokenizer, chat_template=template, enable_thinking=thinking)
    return Model(FakeEngine(replies, tokenizer, wait), chat, **options)


def engine_of(model: Model) -> FakeEngine:
    assert isinstance(model.engine, FakeEngine)
    return model.engine


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
