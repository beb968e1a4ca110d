"""Probe: proves after every push that the engine serves the trainer's weights.

Its tensors must be the trainer's by their fingerprints, exactly; and a fixed row of token ids,
scored by both, must come out alike: right tensors may still be used wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from trireme.engines.engine import Engine

PROBE_LENGTH = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Largest difference of a log-probability, nats, where log-probabilities are as small as -10:
rounding stays far below, a wrong tensor far above. Rounding grows with the logits, and this too.
"""
_ORDINARY = 10.0


class WeightSource(Protocol):
    """The trainer, as far as the synchronizer knows it."""

    def weights(self) -> dict[str, Tensor]:
        """The weights as they are now, by Hugging Face names."""
        ...

    def each_weight(self) -> Generator[tuple[str, Tensor]]:
        """The same, one after the other."""
        ...

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """log p of every token of given rows by these weights; index 0 is 0."""
        ...


class WrongWeights(RuntimeError):
    """The engine does not serve the weights that the trainer pushed."""


def probe_ids(vocabulary: int) -> list[int]:
    """A row that visits the whole vocabulary's range, so that embedding and head rows differ."""
    stride = max(vocabulary // PROBE_LENGTH, 1)
    return [(7 + index * stride) % vocabulary for index in range(min(PROBE_LENGTH, vocabulary))]


def compare(
    engine: Sequence[float], trainer: Sequence[float], *, version: int, dtype: str
) -> dict[str, float]:
    """The largest difference as a metric; raises WrongWeights past the tolerance of the dtype."""
    worst = max((abs(a - b) for a, b in zip(engine[1:], trainer[1:], strict=True)), default=0.0)
    largest = max((-value for value in trainer[1:] if math.isfinite(value)), default=0.0)
    limit = TOLERANCE[dtype] * max(1.0, largest / _ORDINARY)
    if not worst <= limit:  # also when it is NaN
        raise WrongWeights(
            f"after the push of version {version} the engine's log-probabilities differ from the "
            f"trainer's by {worst:.3g} (at most {limit:.3g} allowed for {dtype}): it does not "
            "serve the trainer's weights"
        )
    return {"sync/probe_diff": worst}


def compare_weights(
    engine: Mapping[str, float] | None, trainer: Mapping[str, float], *, version: int
) -> None:
    """Raise WrongWeights naming the tensors whose fingerprints differ. None: it has none to show.

    A name that the trainer does not give is tied to another's tensor.
    """
    if engine is None:
        return
    tied = set(trainer.values())
    wrong = [name for name, value in trainer.items() if engine.get(name) != value]
    wrong += [name for name, value in engine.items() if name not in trainer and value not in tied]
    if wrong:
        more = ", ..." if len(wrong) > 3 else ""
        raise WrongWeights(
            f"after the push of version {version} the engine does not serve the trainer's weights: "
            f"{len(wrong)} of {len(engine)} tensors differ ({', '.join(wrong[:3])}{more})"
        )


async def prove(
    engine: Engine,
    ids: list[int],
    marks: Mapping[str, float],
    expected: Sequence[float],
    *,
    version: int,
    dtype: str,
) -> dict[str, float]:
    """The metric of `compare`; raises WrongWeights unless the engine has tensors with the trainer's
    fingerprints `marks`, and scores the row `ids` as expected.
    """
    compare_weights(await engine.fingerprint(), marks, version=version)
    [scored] = await engine.logprobs([ids])
    return compare(scored, expected, version=version, dtype=dtype)
