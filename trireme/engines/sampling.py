"""Sampling: draws tokens from logits, each row with its own parameters and random numbers.

A token's random number is a hash of its request's stream and of its position in the reply, and the
token is the point where the distribution's running sum passes that number. So a row's tokens do not
depend on the other rows of the batch, on the engine, or on how often the request was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trireme.engines.engine import Sampling

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_BLOCK = 512
"""Tokens whose probabilities are summed together."""
_DRAWN_AT_ONCE = 2**24
"""Probabilities in float64: 128 MiB."""


@dataclass
class Drawn:
    """One drawn token per row."""

    tokens: Tensor
    """[B]"""
    logprobs: Tensor
    """[B] log-softmax(logits / temperature), without truncation."""
    sampler_logprobs: Tensor
    """[B] of the distribution that was sampled."""
    full: Tensor
    """[B, V] all log-probabilities at the temperature, for alternatives."""


def stream_of(seed: int, key: tuple[Any, ...], sample: int) -> int:
    """Return the random stream of one request, 64 bits as a signed number."""
    digest = hashlib.sha256(repr((seed, key, sample)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64, for each stream [B] and position [B], both int64.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) by its counter. Products and sums of int64 wrap
    around on every device, so that all of them compute the same numbers.
    """
    bits = streams + (positions + 1) * _GAMMA
    bits = (bits ^ _shifted(bits, 30)) * _MIX[0]
    bits = (bits ^ _shifted(bits, 27)) * _MIX[1]
    bits = bits ^ _shifted(bits, 31)
    return _shifted(bits, 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right without sign extension."""
    return (bits >> by) & (2 ** (64 - by) - 1)


@dataclass
class RowParameters:
    """Sampling parameters of the rows of a batch as tensors; None where no row uses one."""

    temperature: Tensor
    even: bool
    """Every temperature is 1."""
    greedy: Tensor
    any_greedy: bool
    all_greedy: bool
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    penalty: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device) -> RowParameters:
        """Stack the parameters of these requests, in their order."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        def used(values: list[float], off: Any) -> Tensor | None:
            return None if all(off(value) for value in values) else column(values)

        heat = [s.temperature for s in rows]
        greedy = [t == 0 for t in heat]
        return cls(
            temperature=column([t or 1.0 for t in heat]),
            even=all(t in (0, 1) for t in heat),
            greedy=torch.tensor(greedy, device=device),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            top_k=used([float(s.top_k) for s in rows], lambda k: k <= 0),
            top_p=used([s.top_p for s in rows], lambda p: p >= 1),
            min_p=used([s.min_p for s in rows], lambda p: p <= 0),
            penalty=used([s.repetition_penalty for s in rows], lambda p: p == 1),
        )

    @property
    def plain(self) -> bool:
        """Return True if no row truncates or changes the distribution."""
        return self.top_k is self.top_p is self.min_p is self.penalty is None


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log softmax of rows of logits [B, V].

    torch's `log_softmax` adds on a CPU in such an order that of a large vocabulary the many small
    probabilities are lost next to the large ones: 1.5e-5 nats a token on a model with 49,152, where
    `logsumexp`, which adds in pairs, differs from float64 by less than 1e-6.
    """
    return logits - logits.logsumexp(-1, keepdim=True)


def draw(
    logits: Tensor,
    rows: RowParameters,
    uniform: Tensor,
    *,
    seen: Tensor | None = None,
    forbidden: Tensor | None = None,
    sample: Callable[[Tensor, Tensor], Tensor] | None = None,
    normalise: Callable[[Tensor], Tensor] = log_probabilities,
) -> Drawn:
    """Draw one token per row from logits [B, V].

    `uniform` [B] are numbers in [0, 1); `seen` [B, V] marks tokens that the repetition penalty
    applies to; `forbidden` [B, V] those that may not be drawn now (an end before `min_tokens`).
    `sample` does what `inverse_cdf` does, `normalise` what `log_probabilities` does.
    """
    logits = logits.float()
    full = normalise(logits if rows.even else logits / rows.temperature)
    if rows.plain and forbidden is None:
        chosen = full
    else:
        bent = logits
        if rows.penalty is not None and seen is not None:
            bent = torch.where(seen, penalised(bent, rows.penalty), bent)
        if forbidden is not None:
            bent = bent.masked_fill(forbidden, -torch.inf)
        chosen = truncated(normalise(bent / rows.temperature), rows)
    tokens = chosen.argmax(-1) if rows.any_greedy else None
    if not rows.all_greedy:
        sampled = (sample or inverse_cdf)(chosen, uniform)
        tokens = sampled if tokens is None else torch.where(rows.greedy, tokens, sampled)
    assert tokens is not None
    at = tokens[:, None]
    logprobs = full.gather(1, at)[:, 0]
    sampler = logprobs if chosen is full else chosen.gather(1, at)[:, 0]
    if rows.any_greedy:
        sampler = sampler.masked_fill(rows.greedy, 0.0)
    return Drawn(tokens, logprobs, sampler, full)


def penalised(logits: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive logits and multiply negative ones by the penalty (CTRL, arXiv:1909.05858)."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def truncated(logprobs: Tensor, rows: RowParameters) -> Tensor:
    """Return log p [B, V] after top-k, top-p and min-p, normalised again; -inf for truncated
    tokens.
    """
    if rows.top_k is rows.top_p is rows.min_p is None:
        return logprobs
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=logprobs.device)[None]
    cut = torch.zeros_like(ordered, dtype=torch.bool)
    if rows.top_k is not None:
        cut |= (rows.top_k > 0) & (rank >= rows.top_k)
        ordered = log_probabilities(ordered.masked_fill(cut, -torch.inf))
    probs = ordered.exp()
    if rows.top_p is not None:
        cut |= (probs.cumsum(-1) - probs >= rows.top_p) & (rank > 0) & (rows.top_p < 1)
    if rows.min_p is not None:
        cut |= probs < rows.min_p * probs[:, :1]
    kept = log_probabilities(ordered.masked_fill(cut, -torch.inf))
    return torch.empty_like(kept).scatter_(1, order, kept)


def inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the running sum of p [B, V] passes `uniform` [B].

    Computed in float64, a few rows at a time, and without waiting for the device.
    """
    size = max(_DRAWN_AT_ONCE // logprobs.shape[1], 1)
    parts = zip(logprobs.split(size), uniform.split(size), strict=True)
    return torch.cat([_drawn(*part) for part in parts])


def _drawn(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Draw for `inverse_cdf`: first the block of tokens, then the token within it."""
    rows, count = logprobs.shape
    blocks = -(-count // _BLOCK)
    p = logprobs.new_full((rows, blocks * _BLOCK), -torch.inf, dtype=torch.float64)
    p[:, :count] = logprobs
    p = p.exp_().view(rows, blocks, _BLOCK)
    sums = p.sum(-1).cumsum(-1)
    block, rest = _passed(sums, uniform[:, None] * sums[:, -1:])
    inside = p.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1)
    token, _ = _passed(inside, rest)
    return (block * _BLOCK + token)[:, 0].clamp_max(count - 1)


def _passed(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, 1] where running sums [B, N] first pass `target` [B, 1], and its distance from the
    sum before. A target that rounding has moved to the last sum, or past it, is set just below:
    entries after the end of the sums have no probability. Sums that are NaN, which nothing passes,
    give the last place: the token's log-probability is NaN too, and its readers report it.
    """
    last = sums[:, -1:]
    target = target.minimum(last.nextafter(torch.zeros_like(last)))
    at = torch.searchsorted(sums, target, right=True).clamp_max(sums.shape[1] - 1)
    before = torch.where(at > 0, sums.gather(1, (at - 1).clamp_min(0)), 0.0)
    return at, target - before
