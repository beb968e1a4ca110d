"""Measure: a step's arithmetic is what torch's counter counts, and its trace can be read."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.hybrids import make_hybrid
from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, buckets, critic_of, experiences
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten, of_tokens
from trireme.config.schema import AlgorithmConfig
from trireme.engines.torch import linear
from trireme.trainer import measure, step
from trireme.trainer.lora import Lora
from trireme.trainer.measure import Passes, counted, peak_flops
from trireme.trainer.model import hidden_states, load_model
from trireme.trainer.pack import PackedBatch, pack
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.step import train_step

GRPO = get_recipe(AlgorithmConfig(algorithm_type="grpo"))


def _padded_pairs(layout: PackedBatch, layers: int) -> int:
    """What a kernel computes, and torch's counter counts: the rows with all of their padding."""
    return layers * sum(rows.queries.numel() * rows.keys.shape[1] for rows in buckets(layout))


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("lora", [None, Lora(rank=4, target_modules=ATTENTION)])
@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
def test_arithmetic_is_what_torch_counts(arch, lora, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "_suits", lambda *_: False)  # the counter knows torch's own alone
    path = make_model(tmp_path / "model", arch, hidden=64, layers=3, tie=arch == "qwen3")
    backend = backend_of(path, lora=lora)
    if arch == "qwen3_moe":  # the counter does not know the kernel for all experts at once
        backend.module.set_experts_implementation("eager")
    passes = Passes.of(backend.module)
    assert passes is not None
    layout = pack(batch := flatten(experiences()))
    tokens, _, nodes = counted(layout, passes.windows)
    pairs = _padded_pairs(layout, 3)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        backend._logprobs(backend._root, batch)
    expected = passes.flops(tokens, pairs, nodes, backward=False)
    assert float(expected) == pytest.approx(counter.get_total_flops(), rel=0.01)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        hidden_states(backend.module, layout).sum().backward()
    expected = passes.flops(tokens, pairs, 0, backward=True)
    if lora:  # nothing behind the embedding learns: the first layer's base has no input gradient
        assert 0.75 * expected < counter.get_total_flops() < 1.01 * expected
    else:
        assert float(expected) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("window", [0, 3])
def test_pairs_are_the_keys_that_each_query_sees(window):
    batch = flatten(experiences())
    layout = pack(batch)
    paths = {tuple(row[: n + 1].tolist()) for row in batch.tokens for n in range(len(row))}
    computed = {path for path in paths if _is_read(path, batch)}
    tokens, pairs, nodes = counted(layout, [window, 0])
    everything = sum(len(path) for path in computed)
    seen = sum(min(len(path), window or len(path)) for path in computed)
    assert (tokens, float(pairs)) == (len(computed), seen + everything)
    assert int(nodes) == len(layout.predecessors.unique())


def _is_read(path: tuple[int, ...], batch: Any) -> bool:
    """Whether a token predicts an entry, or one behind it does."""
    ends = torch.tensor([0, *batch.counts.tolist()]).cumsum(0).tolist()
    for sample, row in enumerate(batch.tokens):
        last = int(batch.positions[ends[sample + 1] - 1]) if batch.counts[sample] else 0
        if len(path) <= last and tuple(row[: len(path)].tolist()) == path:
            return True
    return False


def test_a_step_says_its_arithmetic_its_phases_and_its_share_of_the_peak(tmp_path):
    path = make_model(tmp_path / "model")
    backend = backend_of(path, reference=True, peak_tflops=0.5)
    first = train_step(backend, GRPO, experiences(), version=0)
    again = train_step(backend, GRPO, experiences(), version=0)
    assert again["perf/train_tflop"] == first["perf/train_tflop"] > 0
    assert first["perf/mfu"] == pytest.approx(first["perf/tflops_per_device"] / 0.5)
    assert {"time/train/prepare", "time/train/gradient", "time/train/optimizer"} <= set(first)
    assert first["perf/peak_memory_gib"] > 0.05
    known = backend_of(path, reference=True)
    assert "perf/mfu" not in train_step(known, GRPO, experiences(), version=0)


def _peak(place: RankSpec, path: Path) -> float:
    step.peak_memory = lambda device: float(1 + place.rank)
    ranks = Ranks(place)
    metrics = train_step(backend_of(path, ranks, reference=True), GRPO, experiences(), version=0)
    ranks.close()
    return metrics["perf/peak_memory_gib"]


def test_the_memory_of_every_rank_counts_also_of_those_that_share_sequences(tmp_path):
    path = make_model(tmp_path / "model")
    assert run(_peak, tmp_path / "ranks", path, sequence=2) == [2.0, 2.0]


def test_a_critic_is_counted_too(tmp_path):
    critic = critic_of(make_model(tmp_path / "model"))
    batch = flatten(experiences())
    critic.values(batch)
    assert critic.arithmetic.take() > 0
    assert critic.arithmetic.take() == 0


def test_the_peak_is_the_devices_or_the_users(monkeypatch):
    names = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA L40S": 362}
    cuda = torch.device("cuda", 0)
    for name, tflops in names.items():
        monkeypatch.setattr(measure.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(cuda, half=True) == tflops * 1e12
        assert peak_flops(cuda, half=False) is None
    for other in ("another", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        monkeypatch.setattr(measure.torch.cuda, "get_device_name", lambda _, name=other: name)
        assert peak_flops(cuda, half=True) is None
    assert peak_flops(cuda, half=False, tflops=7) == 7e12
    assert peak_flops(torch.device("cpu"), half=True) is None


def _profiled(spec: RankSpec, path: Path, stem: str) -> dict[str, float]:
    ranks = Ranks(spec)
    metrics = train_step(
        backend_of(path, ranks, reference=True), GRPO, experiences(), version=0, profile=stem
    )
    ranks.close()
    return {name: value for name, value in metrics.items() if name.startswith("perf/")}


def test_every_rank_leaves_a_trace_and_their_arithmetic_adds_up(tmp_path):
    path = make_model(tmp_path / "model")
    alone = train_step(backend_of(path, reference=True), GRPO, experiences(), version=0)
    stem = str(tmp_path / "profile" / "step_3")
    metrics, other = run(_profiled, tmp_path / "ranks", path, stem)
    assert metrics["perf/train_tflop"] == other["perf/train_tflop"]
    # dealt over ranks a prefix may be computed by both, and a rank without work computes a dummy
    ratio = metrics["perf/train_tflop"] / alone["perf/train_tflop"]
    assert 1 <= ratio < 1.3
    files = sorted(os.listdir(tmp_path / "profile"))
    assert files == ["step_3_rank_0.json", "step_3_rank_1.json"]
    for file in files:
        events = json.loads((tmp_path / "profile" / file).read_text())["traceEvents"]
        assert any("FSDP" in str(event.get("name")) for event in events)
        assert any(str(event.get("name")).startswith("aten::") for event in events)


def test_a_rate_is_a_devices_share_of_what_all_of_them_computed():
    """Four ranks, of which two at a time share a sequence and count the whole of it."""
    counts = [SimpleNamespace(take=lambda: 3e12, known=known) for known in (True, False)]
    backend: Any = SimpleNamespace(
        measures=SimpleNamespace(
            arithmetic=counts[0],
            peak=2e12,
            phases=SimpleNamespace(take=lambda: {"time/train/prepare": 0.1}),
        ),
        device=torch.device("cpu"),
        gather=lambda reading, every: [(1.0, 3e12), (2.0, 3e12), (4.0, 5e12), (3.0, 5e12)],
        ranks=SimpleNamespace(spec=SimpleNamespace(sequence=2)),
        num_ranks=4,
    )
    actor: Any = SimpleNamespace(critic=None)
    assert step._measured(backend, actor, 4.0) == {
        "perf/peak_memory_gib": 4.0,
        "perf/train_tflop": 8.0,
        "perf/tflops_per_device": 0.5,
        "perf/mfu": 0.25,
        "time/train/prepare": 0.1,
    }
    unknown: Any = SimpleNamespace(critic=SimpleNamespace(arithmetic=counts[1]))
    assert step._measured(backend, unknown, 4.0).keys() == {
        "perf/peak_memory_gib",
        "time/train/prepare",
    }


def test_a_query_sees_the_keys_of_its_own_chunk():
    """Ten tokens in chunks of four: 1 + 2 + 3 + 4, twice, without the last two."""
    layout = pack(of_tokens([list(range(5, 16))]))
    assert float(counted(layout, (-4,))[1]) == 10 + 10 + 3


def test_states_are_counted_by_hand(tmp_path):
    """Three layers with 4 heads of 8 x 8, and convolutions of 64 channels over 4 inputs; two with
    convolutions alone, of 32 channels over 3.
    """
    counts = {"qwen3_5_text": (3 * 4 * 64, 3 * 64 * 4), "lfm2": (0, 2 * 32 * 3)}
    for family, (recurrent, convolved) in counts.items():
        model = load_model(make_hybrid(tmp_path / family, family), device="cpu")
        passes = Passes.of(model)
        assert passes is not None and passes.states == 6 * recurrent + 2 * convolved
        without = replace(passes, states=0)
        for backward in (False, True):
            more = passes.flops(10, 0, 0, backward=backward)
            less = without.flops(10, 0, 0, backward=backward)
            assert more - less == 10 * passes.states * (3 if backward else 1)
