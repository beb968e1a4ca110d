"""Teacher: a divergence from a teacher's log-probabilities as one more term of any loss."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from tests.trainer.samples import backend_of, experiences, gradients_of, of_groups
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.batch import Columns
from trireme.experience import Experience
from trireme.trainer.learning import TrainState
from trireme.trainer.step import train_step


def _recipe(**given) -> Recipe:
    options = {"algorithm_type": "grpo", "kl_loss_fn": "none", "teacher_kl_fn": "k2"}
    return get_recipe(SimpleNamespace(**options | given))


def _scored() -> list[Experience]:
    """Samples with holes in their masks that a teacher has scored; some have no advantage."""
    rng = torch.Generator().manual_seed(3)
    samples = of_groups()
    for e in samples:
        e.teacher_logprobs = -4.5 + torch.randn(len(e.tokens), generator=rng) * 0.3
    return samples


def _estimate(name: str, logprob: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """By the definitions; `old` is not used."""
    d = teacher - logprob
    return {"k2": d**2 / 2, "k3": d.exp() - 1 - d}[name]


@pytest.mark.parametrize(
    ("name", "coefficient", "mode"),
    [("k2", 1.0, "token-mean"), ("k2", 0.3, "seq-mean-token-mean"), ("k3", 0.5, "token-mean")],
)
def test_the_gradient_is_that_of_a_plain_float64_loop(name, coefficient, mode, tmp_path):
    path = make_model(tmp_path / "model")
    backend = backend_of(path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    samples = _scored()
    total, divergences, gaps = torch.zeros((), dtype=torch.float64), [], []
    num_tokens = sum(int(e.mask.sum()) for e in samples)
    for e in samples:
        assert e.advantages is not None and e.logprobs is not None
        assert e.teacher_logprobs is not None
        trained = e.mask.nonzero().squeeze(1).tolist()
        weight = 1 / num_tokens if mode == "token-mean" else 1 / (len(samples) * len(trained))
        for t in trained:
            logits = plain(e.tokens[None, :t]).logits[0, -1] / (e.temperature or 1.0)
            logprob = logits.log_softmax(-1)[e.tokens[t]]
            a, ratio = e.advantages[t].double(), (logprob - e.logprobs[t].double()).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            loss = torch.minimum(loss, -a * 3.0) if a < 0 else loss
            teacher = e.teacher_logprobs[t].double()
            divergence = _estimate(name, logprob, teacher)
            total = total + weight * (loss + coefficient * divergence)
            divergences.append(divergence.item() * weight)
            gaps.append((logprob - teacher).item())
    total.backward()
    recipe = _recipe(
        teacher_kl_fn=name, teacher_kl_fn_args={"kl_coef": coefficient}, loss_agg_mode=mode
    )
    kept, metrics = gradients_of(backend, recipe, samples)
    assert metrics["perf/idle_experiences"] == 0  # a sample without an advantage learns of it too
    assert metrics["actor/loss"] == pytest.approx(total.item(), abs=1e-5)
    assert metrics["actor/teacher_kl_loss"] == pytest.approx(math.fsum(divergences), abs=1e-5)
    assert metrics["actor/teacher_kl"] == pytest.approx(math.fsum(gaps) / num_tokens, abs=1e-5)
    assert metrics["actor/teacher_kl_coef"] == coefficient
    for n, p in plain.named_parameters():
        assert p.grad is not None
        assert torch.allclose(kept[n].double(), p.grad, atol=1e-5, rtol=1e-4), n


def test_k2_worked_by_hand():
    """p = 1/2, q = 1/4: the difference of the logarithms is log 2."""
    part = _recipe().teacher
    assert part is not None and part.coefficient == 1.0
    data = {"logprobs": torch.tensor([0.5]).log(), "ref_logprobs": torch.tensor([0.25]).log()}
    data["logprobs"].requires_grad_()
    value = part(Columns(data))
    assert float(value.detach()) == pytest.approx(math.log(2) ** 2 / 2)
    value.sum().backward()
    assert data["logprobs"].grad is not None
    assert float(data["logprobs"].grad) == pytest.approx(math.log(2))


def test_it_stands_beside_a_reference_and_each_has_its_own_coefficient(tiny_dir):
    recipe = _recipe(
        kl_loss_fn="k3",
        kl_loss_fn_args={"kl_coef": 0.1},
        teacher_kl_fn_args={"kl_coef": 0.5, "adaptive": True, "target_kl": 1e-3, "horizon": 10},
    )
    state = TrainState(recipe)
    metrics = train_step(
        backend_of(tiny_dir, reference=True), recipe, _scored(), version=0, train_state=state
    )
    samples = len(experiences())
    assert metrics["actor/kl_coef"] == 0.1 and metrics["actor/teacher_kl_coef"] == 0.5
    assert metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # the first step is the reference
    # far above the target: the factor is clipped at 1 + 0.2 n / horizon
    after = state.coefficients["teacher_kl_fn"]
    assert after == pytest.approx(0.5 * (1 + 0.2 * samples / 10))
    resumed = TrainState(recipe)
    resumed.load_state(state.state())
    assert resumed.coefficients == state.coefficients


def test_what_the_teacher_has_not_scored_is_named(tiny_dir):
    samples = _scored()
    samples[2].teacher_logprobs = None
    with pytest.raises(ValueError, match=r"teacher_kl_fn 'k2'.*teacher_logprobs") as caught:
        train_step(backend_of(tiny_dir), _recipe(), samples, version=0)
    assert samples[2].eid.uid in str(caught.value)


def test_without_a_coefficient_nobody_is_asked(tiny_dir):
    recipe = _recipe(teacher_kl_fn_args={"kl_coef": 0.0})
    assert not recipe.needs_teacher and recipe.idle_at_zero_advantage
    metrics = train_step(backend_of(tiny_dir), recipe, experiences(), version=0)
    assert "actor/teacher_kl" not in metrics


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"teacher_kl_fn": None, "teacher_kl_fn_args": {"kl_coef": 0.5}},
            "algorithm.teacher_kl_fn_args has no effect without algorithm.teacher_kl_fn",
        ),
        ({"algorithm_type": "sft"}, "'sft' learns from rows of data: expected none"),
        ({"algorithm_type": "mix"}, "'mix' learns from rows of data: expected none"),
        ({"sample_strategy": "mix"}, "'mix' brings an expert's rows, and the teacher of algorithm"),
        ({"teacher_kl_fn_args": {"coef": 1.0}}, "has no option 'coef'"),
        ({"teacher_kl_fn_args": {"kl_coef": -1.0}}, "kl_coef"),
    ],
)
def test_what_cannot_be_is_refused(given, sentence):
    with pytest.raises(ValueError, match="teacher_kl_fn") as caught:
        _recipe(**given)
    assert sentence in str(caught.value)


def test_a_distillation_takes_no_experts_rows_either():
    with pytest.raises(ValueError, match="brings an expert's rows, and the teacher of 'on_policy_"):
        _recipe(algorithm_type="on_policy_distill", teacher_kl_fn=None, sample_strategy="mix")
