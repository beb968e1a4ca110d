"""ScriptedEngine: an engine with scripted replies; for tests of workflows and rewards.

It implements the Engine contract without a model: ids from a tokenizer, one constant
log-probability, the current weight version on every token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trireme.engines.engine import Completion, EngineTraits, Health, OnToken, Sampling, StopReason
from trireme.text import joined

LOGPROB = math.log(0.5)
"""The log-probability of every token."""


class ScriptedEngine:
    """An engine whose replies come from a list, in the order of the calls, or from a function."""

    traits = EngineTraits()
    servers = None

    def __init__(
        self,
        replies: Iterable[str] | Callable[[str], str],
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int = 4096,
    ) -> None:
        """A function receives the prompt's text and returns the reply's."""
        self._say = replies if callable(replies) else None
        self._replies = iter(()) if callable(replies) else iter(replies)
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._version = 0
        self._generated = self._prefilled = self._given = 0
        self._open = asyncio.Event()
        self._open.set()
        self._closed = False
        self._aborts: dict[asyncio.Future[None], tuple[Any, ...]] = {}

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Return the next replies. Raises RuntimeError when the script has no reply left."""
        self._check()
        room = self._max_model_len - len(ids)
        if not ids or room < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens: expected 1 to {self._max_model_len - 1} "
                f"(max_model_len {self._max_model_len}, and at least one token to generate)"
            )
        if await self._aborted_while_paused(key):
            return [self._completion([], "aborted") for _ in range(sampling.n)]
        self._prefilled += len(ids)
        prompt = str(self._tokenizer.decode(list(ids)))
        return [self._reply(prompt, sampling, room) for _ in range(sampling.n)]

    async def logprobs(
        self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the constant log-probability of each token; 0 for the first of a row."""
        self._check()
        return [[0.0] + [LOGPROB] * (len(row) - 1) for row in ids]

    async def update_weights(self, source: Any, version: int) -> None:
        """Set the version; there are no weights."""
        self._check()
        self._version = version

    async def fingerprint(self) -> dict[str, float] | None:
        """Return None: there are no weights."""
        self._check()
        return None

    async def pause(self, *, weights_follow: bool = False) -> None:
        """Hold new calls until `resume`."""
        self._open.clear()

    async def resume(self) -> None:
        """Let waiting calls continue."""
        self._open.set()

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """Abort the calls that wait during a pause, and return their number."""
        aborted = [
            f
            for f, call_key in self._aborts.items()
            if call_key[: len(key)] == key and not f.done()
        ]
        for future in aborted:
            future.set_result(None)
        return len(aborted)

    def health(self) -> Health:
        """Return the version and the counts of calls and tokens."""
        self._check()
        return Health(
            version=self._version,
            running=0,
            waiting=len(self._aborts),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=0,
            paused=not self._open.is_set(),
        )

    async def close(self) -> None:
        """Abort waiting calls, and fail all later ones."""
        await self.abort()
        self._closed = True

    async def _aborted_while_paused(self, key: tuple[Any, ...]) -> bool:
        if self._open.is_set():
            await asyncio.sleep(0)
            return False
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._aborts[aborted] = key
        resumed = asyncio.ensure_future(self._open.wait())
        try:
            await asyncio.wait({aborted, resumed}, return_when=asyncio.FIRST_COMPLETED)
            return aborted.done()
        finally:
            resumed.cancel()
            del self._aborts[aborted]

    def _reply(self, prompt: str, sampling: Sampling, room: int) -> Completion:
        text = self._say(prompt) if self._say else next(self._replies, None)
        if text is None:
            raise RuntimeError(
                f"the replies are used up ({self._given} given), and the model is called once "
                "more: expected one reply for each call"
            )
        self._given += 1
        encoded = self._tokenizer(joined(text), add_special_tokens=False)["input_ids"]
        assert isinstance(encoded, list)
        end = self._tokenizer.eos_token_id
        assert isinstance(end, int)
        ids, most = [*encoded, end], min(sampling.max_tokens, room)
        self._generated += min(len(ids), most)
        return self._completion(ids[:most], "stop" if len(ids) <= most else "length")

    def _completion(self, ids: list[int], reason: StopReason) -> Completion:
        return Completion(
            ids=ids,
            logprobs=[LOGPROB] * len(ids),
            sampler_logprobs=[LOGPROB] * len(ids),
            versions=[self._version] * len(ids),
            stop_reason=reason,
            text=str(self._tokenizer.decode(ids, skip_special_tokens=True)),
        )

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
