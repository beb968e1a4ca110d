"""Request: the state of one sample from its prompt to its end: stop strings, end tokens,
lengths.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trireme.engines.engine import COLDEST, HOTTEST, Completion, Sampling, StopReason
from trireme.engines.sampling import stream_of
from trireme.pictures import BEGIN, Picture, Pictures, album, shown

_CUT = "\ufffd"  # a character of which tokens are still to come
_TAIL = 8  # tokens decoded in addition to those of the longest stop string, at one byte each


@dataclass(eq=False)
class Request:
    """One sample. `ids` are the prompt and the tokens sampled so far."""

    prompt: list[int]
    sampling: Sampling
    key: tuple[Any, ...]
    sample: int
    stream: int
    """The random stream of the request: see `uniforms`."""
    max_tokens: int
    ends: frozenset[int]
    pictures: tuple[Picture, ...] = ()
    """The pictures of the prompt."""
    shift: int = 0
    """How much later the rotary positions of new tokens are than their places: see vision.py."""
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[dict[int, float]] = field(default_factory=list)
    on_token: Callable[[int, float, dict[int, float]], object] | None = None
    """Called per token, in the device's thread."""
    cached: int = 0
    """Tokens whose keys and values are computed."""
    shared: int = 0
    """How many of them, from the first, are in a slot that other requests read too."""
    slot: int = 0
    is_last: bool = False
    """Whether no later prompt continues its reply."""
    of_several: bool = False
    """Whether its keys and values are of more than one version of the weights."""
    stop_reason: StopReason | None = None
    error: BaseException | None = None
    """The error that ends this request alone."""
    stop: str | int | None = None
    routed_experts: np.ndarray | None = None
    """See Completion."""

    @property
    def ids(self) -> list[int]:
        """Return all tokens so far."""
        return self.prompt + self.out

    @property
    def room(self) -> int:
        """Return the number of tokens that it may come to."""
        return len(self.prompt) + self.max_tokens

    @property
    def has_ended(self) -> bool:
        """Return whether no further token comes. Its row may be in use until the next advance."""
        return self.stop_reason is not None or self.error is not None

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key by which requests enter in deterministic mode."""
        return (*self.key, self.sample)

    def add(
        self,
        token: int,
        logprob: float,
        sampler_logprob: float,
        version: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> bool:
        """Append a token; returns True if it ends the request."""
        self.out.append(token)
        self.logprobs.append(logprob)
        self.sampler_logprobs.append(sampler_logprob)
        self.versions.append(version)
        return self._ends_with(token, tokenizer)

    def _ends_with(self, token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Note why the request ends, if it does with its last token; returns whether it does."""
        if len(self.out) > self.sampling.min_tokens:
            if token in self.ends:
                self.stop_reason = "stop"
                self.stop = token if token in self.sampling.stop_token_ids else None
                return True
            if self.sampling.stop and (stop := self._stop_string(tokenizer)):
                self.stop_reason, self.stop = "stop", stop
                return True
            if self.sampling.stop and self._is_stop(token, tokenizer):
                self.stop_reason, self.stop = "stop", token
                return True
        if len(self.out) >= self.max_tokens:
            self.stop_reason = "length"
            return True
        return False

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        sampler_logprobs: list[float],
        version: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> bool:
        """Append tokens of which only the last can end the request; returns True if it does."""
        self.out += tokens
        self.logprobs += logprobs
        self.sampler_logprobs += sampler_logprobs
        self.versions += [version] * len(tokens)
        return self._ends_with(tokens[-1], tokenizer)

    def _is_stop(self, token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether a stop string names this special token, which no text contains."""
        return tokenizer.decode([token], skip_special_tokens=False) in self.sampling.stop

    def _stop_string(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """The stop string that the last token completed, if any."""
        longest = max(len(text.encode()) for text in self.sampling.stop)
        last = self.out[-(longest + _TAIL) :]
        tail = _text(last, tokenizer)
        if not (found := [text for text in self.sampling.stop if text in tail]):
            return None
        before = _text(last[:-1], tokenizer)  # one that came before `min_tokens` ends nothing
        return next((text for text in found if tail.count(text) > before.count(text)), None)

    def completion(self, tokenizer: PreTrainedTokenizerBase) -> Completion:
        """Return the completion for the caller."""
        assert self.stop_reason is not None
        n = len(self.versions)  # an aborted row may be in the middle of its next token
        text = _text(self.out[:n], tokenizer)
        if isinstance(self.stop, str):
            # one that was complete before `min_tokens` has ended nothing
            early = len(_text(self.out[: self.sampling.min_tokens], tokenizer).rstrip(_CUT))
            head = text[: max(0, early - len(self.stop) + 1)] if early else ""
            text = head + text[len(head) :].partition(self.stop)[0]
        return Completion(
            ids=self.out[:n],
            logprobs=self.logprobs[:n],
            sampler_logprobs=self.sampler_logprobs[:n],
            versions=self.versions[:n],
            stop_reason=self.stop_reason,
            stop=self.stop,
            text=text,
            alternatives=self.alternatives[:n],
            routed_experts=self.routed_experts,
        )


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def make_requests(
    ids: Sequence[int],
    sampling: Sampling,
    key: tuple[Any, ...],
    *,
    seed: int,
    room: int,
    max_model_len: int,
    vocabulary: int,
    ends: Iterable[int],
    pictures: Sequence[Picture] = (),
) -> list[Request]:
    """Make one request per sample, each with its own random stream.

    `room`: tokens that memory has room for; `ends`: the model's end-of-sequence ids. Raises
    ValueError for a prompt that leaves no room, and for ids that are not among the `vocabulary` ids
    of the model.
    """
    room = min(room, max_model_len) - len(ids)
    if not ids or room < 1:
        raise ValueError(
            f"a prompt of {len(ids)} tokens: expected 1 to {max_model_len - 1} "
            f"(max_model_len {max_model_len}, and at least one token to generate)"
        )
    known = album(pictures)
    ids = checked_ids(ids, vocabulary, "the prompt", pictures=known)
    seen = tuple(shown(ids, known).values()) if known else ()
    if ids[-1] >= BEGIN:
        raise ValueError("the prompt ends in a picture: expected text after it")
    checked_ids(sampling.stop_token_ids, vocabulary, "stop_token_ids")
    ending = set() if sampling.ignore_eos else {end for end in ends if end < vocabulary}
    stops = set(sampling.stop_token_ids) | ending
    stream = (seed, key) if sampling.seed is None else (sampling.seed, ())
    return [
        Request(
            prompt=ids,
            sampling=sampling,
            key=key,
            sample=sample,
            stream=stream_of(*stream, sample),
            max_tokens=min(sampling.max_tokens, room),
            ends=frozenset(stops),
            pictures=seen,
        )
        for sample in range(sampling.n)
    ]


def checked_ids(
    ids: Sequence[int], vocabulary: int, what: str, *, pictures: Pictures | None = None
) -> list[int]:
    """Copy token ids into a list. Raises ValueError for an id that neither the model nor one of the
    `pictures` has.
    """
    try:
        tokens = list(map(operator.index, ids))
    except TypeError as error:
        raise ValueError(f"{what} holds something that is not a token id: {error}") from error
    plain = tokens
    if pictures:
        shown(tokens, pictures)  # raises for one that is missing
        plain = [token for token in tokens if token < BEGIN]
    if plain and not 0 <= min(plain) <= max(plain) < vocabulary:
        bad = next(token for token in plain if not 0 <= token < vocabulary)
        raise ValueError(
            f"{what} holds the id {bad} (at {tokens.index(bad)}): expected 0 to {vocabulary - 1}, "
            f"this model's vocabulary"
        )
    return tokens


def checked_rows(
    rows: Sequence[Sequence[int]],
    temperature: float,
    *,
    vocabulary: int,
    max_model_len: int,
    pictures: Sequence[Picture] = (),
) -> list[list[int]]:
    """Check rows to be scored. Raises ValueError for one that the model cannot score."""
    if not 0 <= temperature <= HOTTEST or 0 < temperature < COLDEST:
        raise ValueError(
            f"temperature is {temperature}: expected 0, or a number from {COLDEST:g} to {HOTTEST}"
        )
    for index, row in enumerate(rows):
        if not 1 <= len(row) <= max_model_len:
            raise ValueError(
                f"row {index} has {len(row)} tokens: expected 1 to {max_model_len} (max_model_len)"
            )
    known = album(pictures)
    return [
        checked_ids(row, vocabulary, f"row {index}", pictures=known)
        for index, row in enumerate(rows)
    ]
