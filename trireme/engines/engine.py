"""Engine: what generates tokens. Every kind (torch, scripted, others later) keeps this contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

StopReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Sampling:
    """How to sample one request. Defaults sample from the model's own distribution."""

    max_tokens: int = 128
    """At most this many new tokens; cut to what the model's length leaves."""
    min_tokens: int = 0
    """No end-of-sequence and no stop before this many tokens."""
    n: int = 1
    """Independent samples of the same prompt; they share one prefill."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: off."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest one."""
    repetition_penalty: float = 1.0
    """Divides positive logits (multiplies negative ones) of tokens seen in prompt or reply (CTRL).
    """
    stop: tuple[str, ...] = ()
    """Stop strings. The tokens that complete one stay in the ids; `Completion.text` is cut before
    it.
    """
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """Random stream of this request; None: derived from the engine's seed and the request's key."""
    logprobs: int = 0
    """How many likeliest alternatives to report per token beside the sampled one."""


@dataclass
class Completion:
    """One sample. All lists have one entry per sampled token, an end token included."""

    ids: list[int]
    logprobs: list[float]
    """log-softmax(logits / temperature), no truncation, no penalty. Greedy: temperature 1."""
    sampler_logprobs: list[float]
    """Of the distribution really drawn from: penalties, top-k, top-p and min-p applied. Greedy: 0.
    """
    versions: list[int]
    """The weight version that sampled each token."""
    stop_reason: StopReason
    stop: str | int | None = None
    """The stop string or token id that ended it; None at the end-of-sequence token or a cut."""
    text: str = ""
    """The ids decoded, without special tokens, cut before a stop string."""
    alternatives: list[dict[int, float]] = field(default_factory=list)
    """Per token the `Sampling.logprobs` likeliest ids with their log-probabilities, if asked for.
    """


OnToken = Callable[[int, int, float, dict[int, float]], None]
"""Told a token: which sample it is of, its id, its log-probability, and the alternatives."""


@dataclass(frozen=True)
class Health:
    """A snapshot for progress displays and watchdogs."""

    version: int
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    paused: bool = False


class Engine(Protocol):
    """Generates from token ids. All methods are safe to call from the event loop that owns it."""

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """`sampling.n` completions of one prompt.

        `key` is (batch, task, run, call): in deterministic mode requests enter in its order, and it
        seeds the random stream. `on_token` is called on the event loop for each token as it comes;
        an engine that cannot tell leaves it. Cancelling the call aborts its rows. Raises ValueError
        for a prompt that leaves no room, RuntimeError when the engine has failed or is closed.
        """
        ...

    async def logprobs(
        self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> list[list[float]]:
        """log p(token t | earlier) of given sequences, one number a token; index 0 is 0."""
        ...

    async def update_weights(self, source: Any, version: int) -> None:
        """Take new weights between two decode steps; tokens sampled from now on carry `version`.

        `source`: None (tensors are shared: only the version changes), a state dict name -> tensor,
        or a folder with safetensors.
        """
        ...

    async def fingerprint(self) -> dict[str, float] | None:
        """See engines/fingerprint.py: a number for each tensor, in the engine's dtype; None where
        it has none to show.
        """
        ...

    async def pause(self) -> None:
        """Stop decoding after the step under way; requests wait."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def abort(self, key: tuple[Any, ...] = ()) -> int:
        """End requests whose key begins with `key` (all for ()); they return as `aborted`. How
        many.
        """
        ...

    def health(self) -> Health:
        """Counts as of now; raises RuntimeError with the first cause if the engine has failed."""
        ...

    async def close(self) -> None:
        """Abort everything and free memory."""
        ...
