"""Fingerprints tell the trainer's tensors from others, in whatever dtype the engine keeps them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from trireme.engines.device import Device
from trireme.engines.engine import EngineTraits
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.engines.weights import fingerprint
from trireme.sync.probe import (
    BrokenWeights,
    Gap,
    Probe,
    WrongWeights,
    compare_weights,
    spread_ids,
)


def test_two_numbers_that_change_places_change_the_fingerprint() -> None:
    one, other = torch.randn(8, 8), torch.randn(100, 100)
    before = fingerprint({"one": one, "other": other}, "float32")
    one[0, 0], one[3, 3] = one[3, 3].clone(), one[0, 0].clone()
    after = fingerprint({"one": one, "other": other}, "float32")
    assert after["one"] != before["one"] and after["other"] == before["other"]


def test_a_step_of_a_small_learning_rate_changes_the_fingerprint_of_a_large_tensor() -> None:
    weight = torch.randn(1000, 1024) / 50
    moved = weight + 1e-6 * torch.randn(1000, 1024).sign()
    assert fingerprint({"w": weight}, "float32") != fingerprint({"w": moved}, "float32")
    columns = weight.clone()
    columns[:, :512] += 1e-6  # half of them: the sample must not stay in the other half
    assert fingerprint({"w": weight}, "float32") != fingerprint({"w": columns}, "float32")


def test_tensors_that_differ_are_named_and_tied_names_need_not_be_given() -> None:
    trainer = {"embed": 1.0, "norm": 2.0, "last": 3.0}
    compare_weights(None, trainer, version=1)
    compare_weights(
        {"embed": 1.0, "norm": 2.0, "head": 1.0}, {"embed": 1.0, "norm": 2.0}, version=1
    )
    with pytest.raises(
        WrongWeights, match=r"version 4 .* 3 of 3 tensors differ \(norm, last, head"
    ):
        compare_weights({"embed": 1.0, "norm": 2.5, "head": 7.0}, trainer, version=4)


def test_weights_that_are_broken_in_the_trainer_are_no_fault_of_a_push() -> None:
    with pytest.raises(BrokenWeights, match=r"NaN or an infinite number \(last\)\. The loss and"):
        compare_weights({"last": float("nan")}, {"norm": 2.0, "last": float("nan")}, version=4)

    class Trainer:
        def score(self, ids: Any) -> list[list[float]]:
            return [[0.0, float("nan")] for _ in ids]

    with pytest.raises(BrokenWeights, match=r"they score a row of 2 tokens as NaN"):
        Probe(9, "float32").expected(cast(Any, Trainer()))


def test_scores_may_differ_by_what_rounding_costs_at_the_size_of_the_logits() -> None:
    def difference(engine: float, trainer: float) -> float:
        gap = Gap.of([0.0, -3.0, engine], [0.0, -3.0, trainer])
        return Probe(9, "float32").judge(gap, version=2)["sync/probe_diff"]

    assert difference(-400.004, -400.0) == pytest.approx(0.004)  # a collapsed model
    for engine, trainer in ((-9.0, -9.004), (-400.2, -400.0), (-9.0, float("-inf"))):
        with pytest.raises(WrongWeights, match="version 2 the engine's log-probabilities differ"):
            difference(engine, trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_shows_the_fingerprints_of_what_it_was_given(tiny_dir: Path, dtype: str) -> None:
    given = load_file(tiny_dir / "model.safetensors")
    newer = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in given.items()}

    async def main() -> None:
        device = Device(1)
        engine = TorchEngine(
            tiny_dir,
            tokenizer=AutoTokenizer.from_pretrained(tiny_dir),
            device=device,
            settings=TorchSettings(max_model_len=64, dtype=dtype),
        )
        try:
            with pytest.raises(WrongWeights):
                shown = await engine.fingerprint()
                compare_weights(shown, fingerprint(newer, dtype), version=1)
            await engine.update_weights(newer, 1)
            compare_weights(await engine.fingerprint(), fingerprint(newer, dtype), version=1)
        finally:
            await engine.close()
            device.close()

    asyncio.run(main())


def test_the_row_visits_the_whole_vocabulary_however_small_it_is() -> None:
    for vocabulary in (3, 24, 100, 4800):
        ids = spread_ids(vocabulary)
        assert len(set(ids)) == len(ids) == min(24, vocabulary)
        assert min(ids) >= 0 and 0.7 * vocabulary - 1 <= max(ids) - min(ids) < vocabulary


def test_a_row_of_one_token_has_no_gap() -> None:
    assert Gap.of([0.0], [0.0]) == Gap(0.0, 0.0, 0.0, 0.0, 0.0)


class Draws:
    """An engine whose scores lie `apart` from the trainer's, which are -1."""

    def __init__(self, apart: float) -> None:
        self.apart, self.asked = apart, 0

    async def generate(self, ids: list[int], sampling: Any, *, key: Any) -> Any:
        self.asked += 1
        return [SimpleNamespace(ids=[5] * sampling.max_tokens)]

    async def logprobs(self, ids: Any) -> list[list[float]]:
        return [[0.0] + [-1.0 - self.apart] * (len(row) - 1) for row in ids]


async def by_trainer(ids: list[int]) -> list[float]:
    return [0.0] + [-1.0] * (len(ids) - 1)


def test_in_bfloat16_the_gap_is_measured_on_what_the_engine_draws_and_held_to() -> None:
    probe, engine = Probe(480, "bfloat16"), Draws(apart=0.01)
    given = list(probe.ids)
    asyncio.run(probe.calibrate(cast(Any, engine), by_trainer))
    assert probe.ids[: len(given)] == given and set(probe.ids[len(given) :]) == {5}
    assert len(probe.ids) > 4 * len(given)
    near, far = Gap(0.03, 0.03, 0.03, 0.03, 1.0), Gap(0.3, 0.3, 0.3, 0.3, 1.0)
    assert probe.judge(near, version=1)["sync/probe_mean"] == 0.03
    with pytest.raises(WrongWeights, match=r"by 0.3 in the mean .* 0.01 was measured where both"):
        probe.judge(far, version=2)
    uncalibrated = Probe(480, "bfloat16")
    assert uncalibrated.judge(far, version=1), "the first is the measure"
    with pytest.raises(WrongWeights, match="where both have the same weights"):
        asyncio.run(Probe(480, "bfloat16").calibrate(cast(Any, Draws(apart=0.9)), by_trainer))


def test_in_float32_there_is_nothing_to_measure() -> None:
    probe, engine = Probe(480, "float32"), Draws(apart=0.9)
    given = list(probe.ids)
    asyncio.run(probe.calibrate(cast(Any, engine), by_trainer))
    assert engine.asked == 0 and probe.ids == given


class Serves:
    """An engine that serves the trainer's tensors, or says nothing of them, and scores `last`; of
    several members each its own.
    """

    def __init__(self, *last: float, says: bool = True) -> None:
        self.last, self.says = last, says
        self.traits = EngineTraits(members=len(last))

    async def fingerprint(self) -> dict[str, float] | None:
        return {"head": 1.0} if self.says else None

    async def logprobs(self, ids: Any) -> list[list[float]]:
        return [[0.0, -3.0, last] for _, last in zip(ids, self.last, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_of_several_engines_has_to_score_as_the_trainer_does(dtype: str) -> None:
    """One that uses the right tensors wrongly has their fingerprints all the same."""
    probe = Probe(9, dtype)

    def prove(*engines: float) -> dict[str, float]:
        served = cast(Any, Serves(*engines))
        return asyncio.run(probe.prove(served, {"head": 1.0}, [[0.0, -3.0, -4.0]], version=2))

    assert prove(-4.0, -4.0, -4.0005)["sync/probe_diff"] == pytest.approx(0.0005)
    with pytest.raises(WrongWeights, match=r"version 2, engine 1 of 3: the engine's log-prob"):
        prove(-4.0, -9.0, -4.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_training_made_absurdly_large_are_no_fault_of_a_push(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    def prove(probe: Probe, engine: float, trainer: float, says: bool = True) -> dict[str, float]:
        served = cast(Any, Serves(engine, says=says))
        return asyncio.run(probe.prove(served, {"head": 1.0}, [[0.0, -3.0, trainer]], version=2))

    probe = Probe(9, dtype)
    prove(probe, -9.0, -9.0)
    with caplog.at_level("WARNING"):
        # as measured at a learning rate of 10 (float32, other kernels)
        assert prove(probe, -17704.6, -17700.0)["sync/probe_diff"] == pytest.approx(4.6, rel=1e-3)
        far = prove(probe, -17000.0, -17700.0)["sync/probe_diff"]
    assert far == 700.0 and caplog.text.count("so large that rounding decides") == 1
    assert "give a token the log-probability -1.77e+04 (a learning rate" in caplog.text
    for engine, trainer, says in (
        (-90.0, -99.0, True),  # as models may be that write text
        (-17000.0, -17700.0, False),  # nobody says which tensors the engine has
        (float("nan"), -17700.0, True),
    ):
        with pytest.raises(WrongWeights, match="log-probabilities differ"):
            prove(probe, engine, trainer, says)
    with pytest.raises(WrongWeights, match="log-probabilities differ"):
        prove(Probe(9, dtype), -9000.0, -17700.0)  # it has never been seen to use any correctly


def test_a_token_whose_expert_is_another_by_rounding_is_no_fault_of_a_push(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Routes(Serves):
        async def logprobs(self, ids: Any) -> list[list[float]]:
            return [[0.0, *self.last]]

    def prove(probe: Probe, *engine: float, says: bool = True) -> dict[str, float]:
        served = Routes(*engine, says=says)
        served.traits = EngineTraits()
        trainer = [0.0, -3.0, -4.0, -5.0, -6.0]
        return asyncio.run(probe.prove(cast(Any, served), {"head": 1.0}, [trainer], version=2))

    probe = Probe(9, "float32")
    agreeing, flipped = (-3.0, -4.0, -5.0, -6.0), (-3.0, -4.0, -5.15, -6.0)
    with pytest.raises(WrongWeights, match=r"differ from the trainer's by 0\.15"):
        prove(probe, *flipped)  # it has never been seen to agree
    prove(probe, *agreeing)
    with caplog.at_level("WARNING"):
        assert prove(probe, *flipped)["sync/probe_diff"] == pytest.approx(0.15)
    assert "the same weights and differ by 0.15 nats on a row; most tokens agree" in caplog.text
    for engine, says in (
        (flipped, False),  # nobody says which tensors the engine has
        ((-3.0, -4.002, -5.002, -6.002), True),  # most tokens are off: copies of older weights
        ((-3.0, -4.0, -5.0, -9.0), True),  # further than another expert can move a token
    ):
        with pytest.raises(WrongWeights, match="log-probabilities differ"):
            prove(probe, *engine, says=says)


class OfPieces(Serves):
    """One of several engines: its row and its pieces, by the number of the engine."""

    def __init__(self, rows: list[list[float]], ends: list[list[float]]) -> None:
        super().__init__(*[0.0] * len(rows))
        self.rows, self.ends = rows, ends

    async def logprobs(self, ids: Any) -> list[list[float]]:
        members = self.traits.members
        if len(ids) == members:
            return self.rows
        assert [len(piece) for piece in ids] == [4] * members * len(self.ends[0])
        return [[0.0, -9.0, -9.0, self.ends[n % members][n // members]] for n in range(len(ids))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_that_differs_is_judged_by_most_of_its_pieces(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, ends = [0.0, -3.0, -4.0, -5.0], [-6.0, -7.0, -8.0]

    def prove(*engines: tuple[list[float], list[float]]) -> dict[str, float]:
        probe = Probe(4, dtype, mixture=True)
        if dtype == "bfloat16":  # measured before
            probe.judge(Gap(0.02, 0.02, 0.05, 0.05, 5.0), version=1)
        rows, of_pieces = map(list, zip(*engines, strict=True))
        expected = [row, *([0.0, -9.0, -9.0, end] for end in ends)]
        served = cast(Any, OfPieces(rows, of_pieces))
        return asyncio.run(probe.prove(served, {"head": 1.0}, expected, version=1, ids=[3, 1, 2]))

    far = [0.0, -3.45, -4.45, -5.45]  # every token after the first sees one with other experts
    one_far, two_far = [-6.0, -7.5, -8.0], [-6.5, -7.5, -8.0]
    with caplog.at_level("WARNING"):
        assert prove((row, ends), (far, one_far))["sync/probe_diff"] == pytest.approx(0.45)
    assert "the same weights and differ by 0.45 nats on a row; most tokens agree" in caplog.text
    for engines in (
        [(far, two_far)],
        [(far, ends), (far, two_far)],
        [([0.0, -3.0, -4.0, -9.0], ends)],  # further than other experts can move a token
        [(far, [-6.0, -7.0, -20.0])],
        [(far, [-6.0, -7.0, float("nan")])],
    ):
        with pytest.raises(WrongWeights, match="log-probabilities differ"):
            prove(*engines)


def test_a_dense_model_has_no_pieces_and_a_mixture_has() -> None:
    class Trainer:
        def score(self, ids: Any) -> list[list[float]]:
            return [[float(token) for token in row] for row in ids]

    trainer = cast(Any, Trainer())
    row = [float(token) for token in spread_ids(3)]
    assert Probe(3, "float32").expected(trainer) == [row]
    own, *pieces = Probe(3, "float32", mixture=True).expected(trainer)
    assert own == row == [1.0, 2.0, 0.0]
    assert pieces == [[1.0, 2.0, 0.0, 1.0], [2.0, 0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 0.0]]
