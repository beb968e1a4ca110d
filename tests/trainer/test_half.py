"""Half: what bfloat16 changes, on a CPU, and the output head whose gradient it would lose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.hybrids import make_hybrid
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, buckets, critic_of, experiences, gradients_of
from tests.trainer.test_close import large_head
from tests.trainer.test_composites import grpo
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.trainer import head, pack
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.ranks import Ranks, RankSpec

FULL = {
    "algorithm_type": "grpo",
    "kl_loss_fn": "k3",
    "kl_loss_fn_args": {"kl_coef": 0.3},
    "entropy_loss_fn_args": {"entropy_coef": 0.2},
}


class Config(SimpleNamespace):
    """As a model's."""

    def get_text_config(self) -> Config:
        return self


def model_of(linear: nn.Linear, **config: Any) -> Any:
    """What the head needs of a model."""
    shape = Config(vocab_size=linear.weight.shape[0], **config)
    return SimpleNamespace(config=shape, get_output_embeddings=lambda: linear)


def numbers(linear: nn.Linear, hidden: Tensor, **config: Any) -> list[Tensor]:
    """Log-probabilities and entropies of entries of which some share their logits."""
    at = torch.tensor([0, 3, 3, 1, 4, 3, 0])
    targets = torch.tensor([5, 2, 2, 9, 0, 4, 1])
    heat = torch.tensor([1.0, 0.7, 0.7, 1.3, 1.0, 1.0, 1.0])
    model = model_of(linear, **config)
    logprobs, entropies = head.score_entries(model, hidden, at, targets, heat, entropy=True)
    assert entropies is not None
    return [logprobs, entropies[0]]


@pytest.mark.parametrize("stored", [0, 55], ids=["again", "stored"])
@pytest.mark.parametrize("most", [1, 4, 11, 22, 1100])
@pytest.mark.parametrize("config", [{}, {"logit_scale": 0.5, "final_logit_softcapping": 2.0}])
def test_the_head_has_the_gradient_that_finite_differences_have(
    stored: int, most: int, config: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(head.LOGIT_NUMBERS, "cpu", most)
    monkeypatch.setitem(head.STORED_LOGITS, "cpu", stored)
    torch.manual_seed(0)
    linear = nn.Linear(6, 11).double()
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def scored(states: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        linear.weight, linear.bias = weight, bias  # pyright: ignore[reportAttributeAccessIssue]
        return numbers(linear, states, **config)

    del linear._parameters["weight"], linear._parameters["bias"]
    given = [hidden, torch.randn(11, 6).double(), torch.randn(11).double()]
    assert torch.autograd.gradcheck(scored, [x.detach().requires_grad_() for x in given])


def test_few_logits_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five nodes have logits, in three chunks, and the backward pass has three blocks of the
    vocabulary, each with one product for the hidden states' gradient. Where logits are not stored
    it has six, of four nodes and of one, each with another product for its logits.
    """
    torch.manual_seed(0)
    layer, hidden, results = nn.Linear(6, 11, bias=False), torch.randn(5, 6), []
    monkeypatch.setitem(head.LOGIT_NUMBERS, "cpu", 2 * 11)
    for stored, products in ((55, 3 + 3), (54, 3 + 2 * 6)):
        monkeypatch.setitem(head.STORED_LOGITS, "cpu", stored)
        layer.weight.grad = None
        with patch.object(head, "linear", side_effect=head.linear) as counted:
            states = hidden.clone().requires_grad_()
            sum(rows.sum() for rows in numbers(layer, states)).backward()  # pyright: ignore
        assert counted.call_count == products
        results.append([states.grad, layer.weight.grad])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_any_head_gives_what_a_linear_one_does() -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(6, 11, bias=False), torch.randn(5, 6)
    expected = numbers(linear, hidden)
    own = type("Own", (nn.Linear,), {})(6, 11, bias=False)
    own.weight = linear.weight
    found = numbers(own, hidden)
    gradients = []
    for rows in (expected, found):
        linear.weight.grad = None
        (rows[0] * torch.arange(7) + rows[1]).sum().backward()
        assert linear.weight.grad is not None
        gradients.append(linear.weight.grad)
    for one, other in zip([*expected, gradients[0]], [*found, gradients[1]], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_in_bfloat16_chunks_lose_nothing_of_the_heads_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """149 of them, as many as a step of 16,000 entries had, each added in bfloat16, lost 5 times
    as much as one product is rounded.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(149 * 4, 32), torch.randn(300, 32) / 6
    targets, entries = torch.randint(0, 300, (149 * 4,)), torch.arange(149 * 4)

    def gradient(dtype: torch.dtype, chunk: int) -> Tensor:
        monkeypatch.setitem(head.LOGIT_NUMBERS, "cpu", chunk * 300)
        linear = nn.Linear(32, 300, bias=False, dtype=dtype)
        linear.weight.data.copy_(weight)
        given = hidden.to(dtype), entries, targets, torch.ones(len(entries))
        logprobs, _ = head.score_entries(model_of(linear), *given, entropy=False)
        logprobs.sum().backward()
        assert linear.weight.grad is not None
        return linear.weight.grad.double()

    exact = gradient(torch.float64, 10_000)
    at_once = (gradient(torch.bfloat16, 10_000) - exact).norm()
    in_chunks = (gradient(torch.bfloat16, 4) - exact).norm()
    assert in_chunks < 1.2 * at_once < 0.02 * exact.norm()


@pytest.mark.parametrize("grad", [False, True], ids=["scores", "trains"])
@pytest.mark.parametrize("autocast", [False, True], ids=["shards", "autocast"])
def test_logits_of_bfloat16_factors_are_not_rounded(grad: bool, autocast: bool) -> None:
    """Rounded to bfloat16 they made these scores differ by up to 0.23 nats."""
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    linear = nn.Linear(64, 300, dtype=dtype)
    linear.weight.data.copy_((2 * torch.randn(300, 64)).bfloat16())
    linear.bias.data.copy_(torch.randn(300).bfloat16())
    exact = nn.Linear(64, 300).double()
    exact.load_state_dict({n: t.double() for n, t in linear.state_dict().items()})
    hidden = torch.randn(50, 64).bfloat16()
    at, targets = torch.arange(50), torch.randint(0, 300, (50,))
    given = at, targets, torch.full((50,), 0.7)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = head.score_entries(model_of(linear), hidden, *given, entropy=True)
    with torch.set_grad_enabled(grad):
        expected = head.score_entries(model_of(exact), hidden.double(), *given, entropy=True)
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        assert float((one.detach() - other.detach()).abs().max()) < 1e-4


def gradients(backend: Backend) -> dict[str, Tensor]:
    """Of one batch with all terms of the loss; the step is not taken."""
    return gradients_of(backend, get_recipe(SimpleNamespace(**FULL)), experiences())[0]


def half(folder: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """What is computed in bfloat16: gradients, scores and a critic's values."""
    given: dict[str, Any] = {"reference": True, "dtype": "bfloat16"}
    backend, batch = backend_of(folder, ranks, **given), flatten(experiences(1))
    critic = critic_of(folder, ranks, dtype="bfloat16")
    values = critic.values(batch)
    fields = batch.with_fields(values=values, returns=values + 1)
    return {
        "scores": backend.scores(batch),
        "reference": backend.logprobs(batch, reference=True),
        "gradients": gradients(backend),
        "value_loss": critic.update(fields)["critic/value_loss"],
        "dtypes": [str(p.dtype) for p in backend.module.parameters()],
    }


def _by_rank(place: RankSpec, folder: Path) -> dict[str, Any]:
    ranks = Ranks(place)
    found = half(folder, ranks)
    ranks.close()
    return found


def test_bfloat16_is_float32_rounded_alone_and_over_ranks(tmp_path: Path) -> None:
    folder = large_head(tmp_path / "model")
    plain, batch = backend_of(folder, reference=True), flatten(experiences(1))
    scores, expected = plain.scores(batch), gradients(plain)
    alone = half(folder)
    for found in (alone, *run(_by_rank, tmp_path / "ranks", folder)):
        assert set(found["dtypes"]) == {"torch.float32"}
        difference = (found["scores"] - scores).abs()
        assert (
            0 < float(difference.max()) < 0.25
        )  # measured 0.11, of log-probabilities that span 44 nats
        assert float(difference.mean()) < 0.03  # 0.014
        assert torch.allclose(found["reference"], scores[0], atol=0.25)
        assert found["value_loss"] == pytest.approx(0.5, abs=1e-3)
        for name, gradient in expected.items():
            error = float((found["gradients"][name] - gradient).norm() / gradient.norm())
            assert error < 0.1, (name, error)  # 0.042


def _aligned(place: RankSpec, folder: Path) -> dict[str, Any]:
    """Scores and gradients with rows as a GPU's: some have a mask that kernels know by name."""
    made = pack.pack
    ranks = Ranks(place)
    backend = backend_of(folder, ranks, dtype="bfloat16")
    with patch.object(
        pack, "pack", lambda *given, **options: made(*given, **{**options, "align": True})
    ):
        layout = pack.pack_for(backend.module, backend.device, flatten(experiences(1)))
        found = {
            "named": any(rows.named is not None for rows in buckets(layout)),
            "scores": backend.logprobs(flatten(experiences(1))),
            "gradients": gradients_of(backend, grpo(), experiences())[0],
        }
    ranks.close()
    return found


def test_a_rank_in_bfloat16_attends_with_named_masks(tmp_path: Path) -> None:
    folder = large_head(tmp_path / "model")
    backend = backend_of(folder)
    expected = gradients_of(backend, grpo(), experiences())[0]
    (found,) = run(_aligned, tmp_path / "ranks", folder, world=1)
    assert found["named"]
    assert torch.allclose(found["scores"], backend.logprobs(flatten(experiences(1))), atol=0.25)
    for name, gradient in expected.items():
        assert float((found["gradients"][name] - gradient).norm() / gradient.norm()) < 0.1


def _at_temperature(place: RankSpec, folder: Path) -> Tensor:
    ranks = Ranks(place)
    found = _warm(folder, ranks)
    ranks.close()
    return found


def _warm(folder: Path, ranks: Ranks | None = None) -> Tensor:
    """Scores at temperature 0.7. A base in bfloat16 rounds alike in ranks and in one process."""
    samples = [replace(e, temperature=0.7) for e in experiences(1)]
    return backend_of(folder, ranks, dtype="bfloat16", lora=Lora(rank=4)).logprobs(flatten(samples))


def test_a_rank_in_bfloat16_reads_temperatures_as_one_process_does(tmp_path: Path) -> None:
    """0.7 in bfloat16 is 0.6992: every log-probability would be another distribution's."""
    folder = large_head(tmp_path / "model")
    (found,) = run(_at_temperature, tmp_path / "ranks", folder, world=1)
    assert torch.allclose(found, _warm(folder), atol=1e-3)


def _of_hybrid(place: RankSpec, folder: Path) -> dict[str, Any]:
    ranks = Ranks(place)
    backend = backend_of(folder, ranks, dtype="bfloat16")
    scores = backend.logprobs(flatten(experiences(1)))
    found = {"scores": scores, "gradients": gradients_of(backend, grpo(), experiences())[0]}
    ranks.close()
    return found


@pytest.mark.parametrize("family", ["minimax", "qwen3_5_text"])
def test_a_rank_in_bfloat16_computes_layers_with_a_state(family: str, tmp_path: Path) -> None:
    """MiniMax multiplies float32 factors of its decay by what bfloat16 weights make."""
    folder = make_hybrid(tmp_path / "model", family)
    backend = backend_of(folder)
    expected = backend.logprobs(flatten(experiences(1)))
    (found,) = run(_of_hybrid, tmp_path / "ranks", folder, world=1)
    assert float((found["scores"] - expected).abs().mean()) < 0.05
    assert all(bool(g.isfinite().all()) and g.any() for g in found["gradients"].values())
