"""Probe: verifies after every push that the engine serves the trainer's weights.

The fingerprints of its tensors must equal the trainer's exactly: that decides. In addition, a row
of token ids, scored by both, must give the same scores: correct tensors may still be used wrongly.
In float32 the two agree to a fixed bound. In bfloat16 they never do, and their gap depends on the
model: so it is measured while both have the same weights, and a later gap may be a few times as
large. Rounding is without a bound in two cases: weights that a training has made absurdly large,
and a choice between things that are equal to within rounding, such as a mixture's experts, which
moves single tokens. Where the fingerprints are equal and an earlier push was proved, such a gap is
a warning. A token whose experts are others moves those that see it, too. So a mixture's trainer
also scores short pieces of the row, each of which has few tokens to be moved by: if most of them
agree, the gap is a warning, at the first push too. Wrong weights move every piece.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from torch import Tensor

from trireme.engines.engine import Engine, Sampling
from trireme.log import get_logger

logger = get_logger("synchronizer")

SPREAD = 24
"""Ids that are spread over the vocabulary."""
SAMPLED = 104
"""Ids that the engine samples after them: text like that of rollouts."""
PIECE = 4
"""Ids of a piece of the row, whose last one is judged: it sees enough others to show a wrong
attention."""
TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32, nats, if log-probabilities are as small as
-10: rounding stays far below, a wrong tensor far above. Rounding grows with the logits, and so does
this limit."""
_ORDINARY = 10.0
TIMES = 4.0
"""Multiples of the measured gap that still count as rounding: the gap changes with the weights by a
factor below 2."""
LEAST = {"bfloat16": (0.02, 0.1), "float16": (0.0025, 0.0125)}
"""The smallest mean and 95th percentile that count as measured: a row whose tokens were almost
certain has hardly a gap, until training makes them less certain."""
LARGE = 100.0
"""A log-probability, nats without its sign, that no model which writes text gives a token of the
row: its weights have grown beyond all sense, and attention that is all but tied between two tokens
turns the last bit of a sum into whole nats."""
_ONLY_EXPERTS = (
    "most tokens agree, and single ones do not: a choice such as a router's, between experts that "
    "are equal to within rounding"
)
AT_START = 0.5
"""A mean gap, nats, that cannot be rounding: one wrong layer exceeds it."""


class WeightSource(Protocol):
    """The trainer as the synchronizer sees it."""

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights, by Hugging Face names."""
        ...

    def each_weight(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield the weights one after the other, cast to a dtype."""
        ...

    def unmoved(self, dtype: str) -> dict[str, float]:
        """Return the fingerprints of weights that engines have, and that no push sends: an
        adapter's base, a composite's towers.
        """
        ...

    def score(self, ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Return log p of every token of given rows by these weights; index 0 is 0."""
        ...


class WrongWeights(RuntimeError):
    """The engine does not serve the weights that the trainer pushed."""


class BrokenWeights(RuntimeError):
    """The trainer's own weights hold NaN or an infinite number: no push is to blame."""

    def __init__(self, how: str, since: str = "") -> None:
        """`how` is the symptom, and `since` its time."""
        super().__init__(how, since)
        self.how, self.since = how, since

    def __str__(self) -> str:
        return (
            f"the trained weights hold NaN or an infinite number{self.since} ({self.how}). The "
            "loss and the gradient of each train step were finite, or the step had said so: it was "
            "the optimizer's step (a learning rate that is too large), or code that changes "
            "weights (a callback)"
        )


@dataclass(frozen=True)
class Gap:
    """The distance between engine's and trainer's log-probabilities of one row, in nats."""

    mean: float
    median: float
    p95: float
    largest: float
    depth: float
    """The trainer's smallest log-probability, without its sign."""

    @classmethod
    def of(cls, engine: Sequence[float], trainer: Sequence[float]) -> Gap:
        """Compute the gap; infinite if a number is not finite."""
        pairs = list(zip(engine[1:], trainer[1:], strict=True))
        apart = sorted(abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs)
        if not apart:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        depth = max((-b for _, b in pairs if math.isfinite(b)), default=0.0)
        median, p95 = (apart[math.ceil(part * len(apart)) - 1] for part in (0.5, 0.95))
        return cls(sum(apart) / len(apart), median, p95, apart[-1], depth)

    @classmethod
    def of_ends(cls, engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> Gap:
        """Compute the gap of the last tokens of several rows."""
        ends = ([0.0, *(row[-1] for row in rows)] for rows in (engine, trainer))
        return cls.of(*ends)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a push."""
        return {"sync/probe_diff": self.largest, "sync/probe_mean": self.mean}


class Probe:
    """The probe row of an engine and a trainer, and the gap between them that counts as
    rounding.
    """

    def __init__(self, vocabulary: int, dtype: str, *, mixture: bool = False) -> None:
        """`dtype` is the engine's. `mixture`: whether the model has experts."""
        self.ids = spread_ids(vocabulary)
        self._mixture = mixture
        self._dtype = dtype
        self._measured: Gap | None = None
        self._agreed = self._warned = False

    def expected(self, trainer: WeightSource) -> list[list[float]]:
        """Return log-probabilities by the trainer's weights: those of the row, and, for a mixture,
        of its pieces. Raises BrokenWeights if any is not finite.
        """
        scored = trainer.score([self.ids, *(pieces_of(self.ids) if self._mixture else ())])
        if not all(map(math.isfinite, chain.from_iterable(scored))):
            raise BrokenWeights(f"they score a row of {len(scored[0])} tokens as NaN")
        return scored

    async def calibrate(
        self, engine: Engine, score: Callable[[list[int]], Awaitable[Sequence[float]]]
    ) -> None:
        """Extend the row by tokens that the engine samples, and measure the gap. `score` is the
        trainer's.

        Both have the same weights now. Raises WrongWeights if rounding cannot explain the gap. In
        float32 there is nothing to measure.
        """
        if self._dtype == "float32":
            return
        drawn = Sampling(max_tokens=SAMPLED, ignore_eos=True, seed=0)
        [reply] = await engine.generate(self.ids, drawn, key=((-1, -1), -1, -1, -1))
        row = [*self.ids, *reply.ids]
        [scored] = await engine.logprobs([row])
        self._measure(Gap.of(scored, await score(row)), "before the first push")
        self.ids = row  # set last: this is repeated if an engine was lost

    async def prove(
        self,
        engine: Engine,
        marks: Mapping[str, float],
        expected: Sequence[Sequence[float]],
        *,
        version: int,
        ids: list[int] | None = None,
    ) -> dict[str, float]:
        """Return metrics; raises WrongWeights unless the engine's tensors have the trainer's
        fingerprints `marks`, and each of its members scores the row (or `ids`) as expected.
        """
        served, members = await engine.fingerprint(), engine.traits.members
        compare_weights(served, marks, version=version)
        row, (of_row, *of_pieces) = self.ids if ids is None else ids, expected
        gaps = []
        for number, scored in enumerate(await engine.logprobs([row] * members)):
            gaps.append(gap := Gap.of(scored, of_row))
            try:
                self.judge(gap, version=version, member=f"{number} of {members}" * (members > 1))
            except WrongWeights:
                if served is None:
                    raise
                why = self._why_only_rounding(gap)
                if not why and of_pieces:
                    pieces = [piece for piece in pieces_of(row) for _ in range(members)]
                    own = (await engine.logprobs(pieces))[number::members]
                    why = self._why_only_experts(gap, Gap.of_ends(own, of_pieces))
                if not why:
                    raise
                self._warn(gap, version, why)
        return max(gaps, key=lambda gap: gap.largest).metrics()

    def judge(self, gap: Gap, *, version: int, member: str = "") -> dict[str, float]:
        """Return the gap after a push as metrics; raises WrongWeights if it is too large for
        rounding. `member` names the engine among several.

        The first gap becomes the measure if nothing was measured before.
        """
        when = f"after the push of version {version}" + f", engine {member}:" * bool(member)
        if self._dtype == "float32":
            if not gap.largest <= (limit := _limit(gap)):
                raise _wrong(when, f"by {gap.largest:.3g} (at most {limit:.3g} allowed in float32)")
        elif self._measured is None:
            self._measure(gap, when)
        else:
            self._compare(gap, self._measured, when)
        self._agreed = True
        return gap.metrics()

    def _why_only_rounding(self, gap: Gap) -> str:
        """Return why a gap that is too large may be rounding all the same; empty if it cannot."""
        if not self._agreed or not math.isfinite(gap.largest):
            return ""
        if gap.depth > LARGE:
            return (
                f"the trained weights are so large that rounding decides: they give a token the "
                f"log-probability {-gap.depth:.4g} (a learning rate that is too large)"
            )
        if self._dtype == "float32" and gap.median <= _limit(gap) and gap.mean <= AT_START:
            return _ONLY_EXPERTS
        return ""

    def _why_only_experts(self, gap: Gap, pieces: Gap) -> str:
        """Return why a mixture's gap that is too large may be rounding all the same, by that of the
        row's pieces; empty if it cannot.
        """
        limit = _limit(pieces)
        if self._dtype != "float32":
            if self._measured is None:
                return ""
            limit = TIMES * max(self._measured.median, LEAST[self._dtype][0])
        small = max(gap.mean, pieces.mean) <= AT_START and pieces.median <= limit
        return _ONLY_EXPERTS if small else ""

    def _warn(self, gap: Gap, version: int, why: str) -> None:
        if not self._warned:
            logger.warning(
                "version %d: engine and trainer have the same weights and differ by %.3g nats on a "
                "row; %s",
                version,
                gap.largest,
                why,
            )
        self._warned = True

    def _measure(self, gap: Gap, when: str) -> None:
        limit = AT_START * max(1.0, gap.depth / _ORDINARY / 10)
        if not gap.mean <= limit:
            raise _wrong(
                when,
                f"by {gap.mean:.3g} in the mean (at most {limit:.3g} "
                f"allowed in {self._dtype}, where both have the same weights)",
            )
        self._measured = gap
        self._agreed = True
        logger.info(
            "probe: engine and trainer differ by %.3g nats in the mean, 95%% of tokens by at most "
            "%.3g, %s",
            gap.mean,
            gap.p95,
            when,
        )

    def _compare(self, gap: Gap, measured: Gap, when: str) -> None:
        grown = max(1.0, gap.depth / max(measured.depth, _ORDINARY))
        least_mean, least_p95 = LEAST[self._dtype]
        for what, value, before, least in (
            ("in the mean", gap.mean, measured.mean, least_mean),
            ("at the 95th percentile", gap.p95, measured.p95, least_p95),
        ):
            limit = TIMES * max(before, least) * grown
            if not value <= limit:
                raise _wrong(
                    when,
                    f"by {value:.3g} {what} (at most {limit:.3g} allowed in {self._dtype}; "
                    f"{before:.3g} was measured where both had the same weights)",
                )


def _limit(gap: Gap) -> float:
    """Return the largest difference in float32 that counts as rounding."""
    return TOLERANCE * max(1.0, gap.depth / _ORDINARY)


def spread_ids(vocabulary: int) -> list[int]:
    """Return a row of ids over the whole vocabulary, so that embedding and head rows differ."""
    stride = max(vocabulary // SPREAD, 1)
    return [(7 + index * stride) % vocabulary for index in range(min(SPREAD, vocabulary))]


def pieces_of(row: Sequence[int]) -> list[list[int]]:
    """Return the pieces of a probe's row: one that begins at each of its first ids."""
    ids = row[:SPREAD]
    return [[ids[(start + n) % len(ids)] for n in range(PIECE)] for start in range(len(ids))]


def _wrong(when: str, how: str) -> WrongWeights:
    return WrongWeights(
        f"{when} the engine's log-probabilities differ from the trainer's {how}: it does not serve "
        "the trainer's weights"
    )


def compare_weights(
    engine: Mapping[str, float] | None, trainer: Mapping[str, float], *, version: int
) -> None:
    """Raise WrongWeights naming the tensors whose fingerprints differ. None: the engine has none to
    report.

    A name that the trainer does not report is tied to another tensor. Raises BrokenWeights if the
    trainer's own have none.
    """
    if broken := [name for name, value in trainer.items() if not math.isfinite(value)]:
        raise BrokenWeights(a_few(broken))
    if engine is None:
        return
    tied = set(trainer.values())
    wrong = [name for name, value in trainer.items() if engine.get(name) != value]
    wrong += [name for name, value in engine.items() if name not in trainer and value not in tied]
    if wrong:
        raise WrongWeights(
            f"after the push of version {version} the engine does not serve the trainer's weights: "
            f"{len(wrong)} of {len(engine)} tensors differ ({a_few(wrong)})"
        )


def a_few(names: Sequence[str]) -> str:
    """Return the first three of some names."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
