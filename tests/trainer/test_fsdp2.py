"""Fsdp2: several ranks learn what one process learns, and say so."""

from __future__ import annotations

from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.limits import HANG_S
from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import (
    apart,
    backend_of,
    critic_of,
    experiences,
    first_gradients,
    gap,
)
from trireme.algorithms.recipes import algorithm, get_recipe
from trireme.batch import flatten
from trireme.registry import policy_loss
from trireme.trainer.backend import Backend
from trireme.trainer.learning import TrainState
from trireme.trainer.led import Models
from trireme.trainer.lora import Lora
from trireme.trainer.ranks import NotFinite, Ranks, RankSpec, my_part
from trireme.trainer.step import train_step

FULL = {
    "algorithm_type": "grpo",
    "kl_loss_fn": "k3",
    "kl_loss_fn_args": {"kl_coef": 0.3},
    "entropy_loss_fn_args": {"entropy_coef": 0.2},
    "num_iterations": 2,
}
# By rank: how a layout is spread, and what the backend is given.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "many_micro_batches": ({}, {"max_token_len": 30}),
    "lora": ({}, {"lora": Lora(rank=4)}),
    "dora_of_high_rank": ({}, {"lora": Lora(rank=4, dora=True, rslora=True)}),
    "unshared_checkpointed_offloaded": (
        {},
        {"share_prefix": False, "gradient_checkpointing": True, "offload": True},
    ),
}


def _learned(backend: Backend) -> dict[str, Any]:
    """The first step's gradients, all steps' metrics, the weights, and what they score."""
    recipe = get_recipe(SimpleNamespace(**FULL))
    gradients = first_gradients(backend)
    # A single experience leaves all ranks but one without work.
    batches = [*(experiences(n) for n in range(4)), experiences()[:1]]
    steps = [train_step(backend, recipe, batch, version=0) for batch in batches]
    return {
        "gradients": gradients,
        "metrics": steps,
        "weights": {name: tensor.clone() for name, tensor in backend.each_weight()},
        "reference": backend.logprobs(flatten(experiences(1)), reference=True),
        "scores": backend.scores(flatten(experiences(1))),
        "score": torch.tensor(backend.score([[5, 6, 7, 8], [9, 10, 11, 12]], temperature=0.5)),
    }


def _make(path: Path, given: dict[str, Any], ranks: Ranks | None = None) -> Backend:
    return backend_of(path, ranks, reference=True, **given)


def _learn(place: RankSpec, path: Path, names: list[str]) -> dict[str, Any]:
    ranks = Ranks(place)
    out = {name: _learned(_make(path, LAYOUTS[name][1], ranks)) for name in names}
    ranks.close()
    return out


def _same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert gap(got["gradients"], expected["gradients"]) < 1e-5
    assert apart(got["weights"], expected["weights"]) < 1e-3
    assert torch.allclose(got["reference"], expected["reference"], atol=1e-5)
    assert torch.allclose(got["scores"], expected["scores"], atol=1e-5)
    assert torch.allclose(got["score"], expected["score"], atol=1e-5)
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert set(ours) == set(theirs)
        for name in ("perf/trained_tokens", "perf/experiences", "perf/idle_experiences"):
            assert ours[name] == theirs[name]
        for name in {name for name in ours if not name.startswith(("perf/", "time/"))}:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name


def two_ranks_learn_alike(path: Path, folder: Path) -> None:
    """Two ranks learn what one process learns, with all weights and with an adapter."""
    names = ["plain", "lora"]
    ranks = run(_learn, folder, path, names, world=2)
    for name in names:
        expected = _learned(_make(path, LAYOUTS[name][1]))
        for got in ranks:
            assert gap(got[name]["gradients"], expected["gradients"]) < 1e-5
            assert apart(got[name]["weights"], expected["weights"]) < 1e-3
            assert torch.allclose(got[name]["scores"], expected["scores"], atol=1e-4)


SLICED: dict[int, list[str]] = {2: ["plain", "many_micro_batches", "lora"], 4: ["plain"]}


@pytest.mark.parametrize(
    ("size", "arch"),
    [(2, "qwen3"), (4, "qwen3"), pytest.param(2, "gpt_oss", marks=pytest.mark.large)],
)
def test_ranks_that_share_sequences_learn_what_one_process_learns(size, arch, tmp_path):
    # Two pairs; or one group of four, for which the 2 key-value heads are repeated.
    path = make_model(tmp_path / "model", arch, tie=size == 2)
    names = [n for n in SLICED[size] if arch == "qwen3" or "lora" not in LAYOUTS[n][1]]
    ranks = run(_learn, tmp_path / "ranks", path, names, world=4, sequence=size)
    for name in names:
        expected = _learned(_make(path, LAYOUTS[name][1]))
        for got in ranks:
            _same(got[name], expected)


def test_two_copies_of_two_shards_learn_what_one_process_learns(tmp_path):
    path = make_model(tmp_path / "model", tie=True)
    names = ["plain", "many_micro_batches", "lora"]
    ranks = run(_learn, tmp_path / "ranks", path, names, world=4, shards=2)
    for name in names:
        expected = _learned(_make(path, LAYOUTS[name][1]))
        for got in ranks:
            _same(got[name], expected)


def _sums(place: RankSpec, path: Path) -> list[list[int]]:
    """Micro-batches, and how often gradients travel between copies, policy's and critic's."""
    ranks = Ranks(place)
    found, sums, batch = [], [], flatten(experiences())
    own = dist.all_reduce
    dist.all_reduce = lambda *given, **options: (sums.append(1), own(*given, **options))[1]
    for tokens in (999, 10):
        backend = _make(path, {"max_token_len": tokens}, ranks)
        critic = critic_of(path, ranks, max_token_len=tokens)
        values = critic.values(batch)
        sums.clear()
        backend.forward_backward(batch, lambda part, logprobs, _: -logprobs.sum())
        policy = len(sums)
        critic.optimizer.step = lambda: (0.0, 0.0)
        critic.update(batch.with_fields(values=values, returns=values + 1))
        found.append([backend._micro_batches, policy, len(sums) - policy])
    ranks.close()
    return found


def test_gradients_travel_between_copies_once_a_step(tmp_path):
    path = make_model(tmp_path / "model", tie=True)
    counted = run(_sums, tmp_path / "ranks", path, world=4, shards=2)
    assert max(few[0] for few, _ in counted) == 1 < max(many[0] for _, many in counted)
    for few, many in counted:
        assert few[1:] == many[1:] and min(few[1:]) > 0  # a sum for each block, and the root


def _idle_step(place: RankSpec | None, path: Path) -> list[Tensor]:
    """Scores before and after a step in which no experience has an advantage: momentum alone moves
    the weights. With ranks also whether each root group's weights are shards after scores.
    """
    ranks = Ranks(place) if place else None
    backend = _make(path, {}, ranks)
    recipe = get_recipe(SimpleNamespace(**FULL))
    batch = flatten(experiences(1))
    train_step(backend, recipe, experiences(), version=0)
    before = backend.logprobs(batch)
    idle = flatten(experiences()).select([])
    backend.forward_backward(idle, lambda *_: pytest.fail("there is nothing to compute"))
    backend.step()
    out = [before, backend.logprobs(batch), backend.logprobs(batch, reference=True)]
    if ranks is not None:
        assert backend._reference is not None
        for model in (backend.module, backend._reference.model):
            assert all(isinstance(weight, DTensor) for weight in model.parameters())
        ranks.close()
    return out


def test_scores_are_by_new_weights_after_a_step_without_a_gradient(tmp_path):
    path = make_model(tmp_path / "model", tie=True)
    expected = _idle_step(None, path)
    assert (expected[1] - expected[0]).abs().max() > 1e-3
    for got in run(_idle_step, tmp_path / "ranks", path):
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_ranks_that_each_hold_the_model_whole_learn_what_one_process_learns(tmp_path):
    path = make_model(tmp_path / "model")
    expected = _learned(_make(path, {}))
    for got in run(_learn, tmp_path / "ranks", path, ["plain"], shards=1):
        _same(got["plain"], expected)


def test_shards_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"trainer.fsdp_size is 3: expected a divisor of the 4 "):
        RankSpec(0, 4, "127.0.0.1:1", shards=3, timeout=1, lost_after=1)


def _limits(place: RankSpec) -> list[float]:
    """Seconds that a collective may take in each of a rank's groups."""
    ranks = Ranks(place)
    assert ranks.sequence is not None
    groups = [dist.group.WORLD, ranks.sequence.group, *ranks.mesh.get_all_groups()]
    limits = [g._get_backend(ranks.device).options._timeout.total_seconds() for g in groups]
    ranks.close()
    return limits


def test_no_group_of_ranks_waits_longer_than_the_others(tmp_path):
    found = run(_limits, tmp_path / "ranks", world=4, sequence=2, shards=2)
    assert found == [[HANG_S] * 4] * 4  # torch has 1,800 s


@pytest.mark.parametrize(
    "arch",
    [
        "qwen3",
        *(pytest.param(a, marks=pytest.mark.large) for a in ("llama", "gpt_oss")),
        "qwen3_moe",
    ],
)
def test_two_ranks_learn_what_one_process_learns(arch, tmp_path):
    path = make_model(tmp_path / arch, arch, tie=arch != "llama")
    plain = arch in ("qwen3", "llama")
    names = [n for n in LAYOUTS if plain or "lora" not in LAYOUTS[n][1]]
    ranks = run(_learn, tmp_path / "ranks", path, names)
    for name in names:
        given = {k: v for k, v in LAYOUTS[name][1].items() if k != "offload"}
        expected = _learned(_make(path, given))
        for got in ranks:
            _same(got[name], expected)


def _breaks(place: RankSpec, path: Path) -> list[str]:
    """What each rank raises for a loss that is not finite, and for a gradient that is not."""
    ranks = Ranks(place)
    said = []
    for name in ("loss_breaks", "gradient_breaks"):
        policy_loss(name)(globals()[f"_{name}"])
        recipe = algorithm(name, policy_loss=name, advantage=None)
        backend = _make(path, {"max_token_len": 30}, ranks)
        before = {n: t.clone() for n, t in backend.each_weight()}
        samples = experiences()
        samples[7].advantages = torch.full((len(samples[7].tokens),), 1e30)
        with pytest.raises(NotFinite) as caught:
            train_step(backend, recipe, samples, version=0)
        said.append(str(caught.value))
        assert all(torch.equal(t, before[n]) for n, t in backend.each_weight())
    ranks.close()
    return said


def _loss_breaks(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Infinite for the huge advantage."""
    return logprobs * advantages * advantages


def _gradient_breaks(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Finite, with an infinite gradient where the advantage is huge."""
    out, huge = logprobs.clone(), advantages > 1e29
    out[huge] = (logprobs[huge] - logprobs[huge].detach()).abs().sqrt()
    return out


def test_what_is_not_finite_is_named_on_all_ranks_and_moves_nothing(tiny_dir, tmp_path):
    first, second = run(_breaks, tmp_path / "ranks", tiny_dir)
    assert first == second
    assert "the loss of experience 0/2/0/0 is -inf at token 11" in first[0]
    assert "the gradient of experience 0/2/0/0 is not finite" in first[1]


def _with_a_foreign_id(place: RankSpec, path: Path) -> str:
    ranks = Ranks(place)
    backend = _make(path, {}, ranks)
    samples = experiences()
    samples[2].tokens[5] = 10**6
    with pytest.raises(ValueError) as caught:
        train_step(backend, get_recipe(SimpleNamespace(**FULL)), samples, version=0)
    ranks.close()
    return str(caught.value)


def test_an_id_that_the_model_does_not_have_is_named_on_all_ranks(tiny_dir, tmp_path):
    first, second = run(_with_a_foreign_id, tmp_path / "ranks", tiny_dir)
    assert first == second
    assert first.startswith("experience 0/0/2/0 holds the id 1000000 (at 5): expected 0 to 99")


def _with_broken_rows(place: RankSpec, path: Path) -> list[str]:
    ranks = Ranks(place)
    backend = _make(path, {}, ranks)
    if place.rank == 1:
        with torch.no_grad():
            my_part(backend.module.get_parameter("model.layers.0.mlp.up_proj.weight")).fill_(nan)
    recipe = get_recipe(SimpleNamespace(**FULL))
    with pytest.raises(NotFinite) as caught:
        Models(backend, recipe, TrainState(recipe)).train_step(experiences(), version=0)
    ranks.close()
    return list(caught.value.broken)


def test_weights_that_are_broken_on_one_rank_are_named_on_all(tiny_dir, tmp_path):
    found = run(_with_broken_rows, tmp_path / "ranks", tiny_dir)
    assert found == [["model.layers.0.mlp.up_proj.weight"]] * 2
