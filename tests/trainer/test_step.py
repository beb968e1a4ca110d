"""Step: one packed train step against a plain float64 loop, and however it is computed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from tests.trainer.samples import apart, backend_of, experiences, gap, gradients_of, move, of_groups
from trireme.algorithms.recipes import algorithm, get_recipe
from trireme.batch import flatten
from trireme.config.schema import AlgorithmConfig
from trireme.experience import Experience
from trireme.registry import policy_loss
from trireme.trainer import head
from trireme.trainer.learning import TrainState
from trireme.trainer.ranks import NotFinite
from trireme.trainer.step import MetricTotals, batch_loss, metrics_of, train_step

FULL = {
    "algorithm_type": "grpo",
    "kl_loss_fn": "k3",
    "kl_loss_fn_args": {"kl_coef": 0.3},
    "entropy_loss_fn_args": {"entropy_coef": 0.2},
}


MODES = ("token-mean", "seq-mean-token-mean")


def _recipe(**given):
    return get_recipe(SimpleNamespace(**given))


def _entry_terms(model, reference, e, t):
    """(policy loss, k3, entropy) of token t of an experience, in float64, by the definitions."""
    logits = model(e.tokens[None, :t]).logits[0, -1] / e.temperature
    with torch.no_grad():
        q = (reference(e.tokens[None, :t]).logits[0, -1] / e.temperature).log_softmax(-1)
    p = logits.log_softmax(-1)
    target = e.tokens[t]
    ratio = (p[target] - e.logprobs[t].double()).exp()
    a = e.advantages[t].double()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    if a < 0:
        loss = torch.minimum(loss, -a * 3.0)
    d = q[target] - p[target]
    return loss, d.exp() - 1 - d, -(p.exp() * p).sum()


def _idle(e: Experience) -> bool:
    return e.advantages is not None and not bool(e.advantages.any())


@pytest.mark.parametrize(
    ("arch", "mode", "kl", "entropy"),
    [(arch, mode, 0.3, 0.2) for arch in ("qwen3", "qwen2", "llama") for mode in MODES]
    + [("qwen3", mode, 0.0, 0.0) for mode in MODES]
    + [("qwen3", "token-mean", 0.0, 0.2), ("qwen3", "token-mean", 0.3, 0.0)],
)
def test_the_gradient_is_that_of_a_plain_float64_loop(arch, mode, kl, entropy, tmp_path):
    path = make_model(tmp_path / arch, arch, tie=arch != "llama")
    backend = backend_of(path, reference=True)
    move(backend)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    reference = copy.deepcopy(plain)
    plain.load_state_dict({k: v.double() for k, v in backend.module.state_dict().items()})
    samples = experiences() if kl and entropy else of_groups()
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(int(e.mask.sum()) for e in samples)
    for e in samples:
        own = e.mask.nonzero().squeeze(1).tolist()
        weight = 1 / num_tokens if mode == "token-mean" else 1 / (len(samples) * len(own))
        for t in own:
            loss, divergence, bonus = _entry_terms(plain, reference, e, t)
            total = total + weight * (loss + kl * divergence - entropy * bonus)
    total.backward()
    coefficients = {
        "kl_loss_fn_args": {"kl_coef": kl},
        "entropy_loss_fn_args": {"entropy_coef": entropy},
    }
    recipe = _recipe(**FULL | coefficients, loss_agg_mode=mode)
    got, metrics = gradients_of(backend, recipe, samples)
    # with neither divergence nor bonus, samples without an advantage are left out of the step
    idle = 0 if kl or entropy else sum(_idle(e) for e in samples)
    assert metrics["perf/idle_experiences"] == idle
    assert metrics["actor/loss"] == pytest.approx(total.item(), abs=1e-5)
    for name, p in plain.named_parameters():
        assert p.grad is not None
        assert torch.allclose(got[name].double(), p.grad, atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize(
    "given",
    [
        {"max_token_len": 1000},
        {"max_token_len": 30},
        {"share_prefix": False},
        {"share_prefix": False, "max_token_len": 30},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_layout_changes_neither_loss_nor_gradient(given, tiny_dir):
    expected, loss = gradients_of(
        backend_of(tiny_dir, reference=True), _recipe(**FULL), experiences()
    )
    got, same = gradients_of(
        backend_of(tiny_dir, reference=True, **given), _recipe(**FULL), experiences()
    )
    assert same["actor/loss"] == pytest.approx(loss["actor/loss"], abs=1e-6)
    for name in expected:
        assert torch.allclose(got[name], expected[name], atol=1e-6, rtol=1e-4), name


def test_logits_made_in_chunks_give_the_same_gradient(tiny_dir, monkeypatch):
    expected, _ = gradients_of(
        backend_of(tiny_dir), _recipe(**FULL | {"kl_loss_fn": "none"}), experiences()
    )
    monkeypatch.setitem(head.LOGIT_NUMBERS, "cpu", 100 * 7)
    got, _ = gradients_of(
        backend_of(tiny_dir), _recipe(**FULL | {"kl_loss_fn": "none"}), experiences()
    )
    for name in expected:
        assert torch.allclose(got[name], expected[name], atol=1e-6, rtol=1e-4), name


def test_samples_without_advantage_are_skipped_and_still_count(tiny_dir):
    samples = experiences()
    for e in samples[1:6]:
        e.advantages = torch.zeros(len(e.tokens))
    recipe = _recipe(algorithm_type="grpo", kl_loss_fn="none")
    results = []
    for skip in (True, False):
        backend = backend_of(tiny_dir)
        metrics = train_step(backend, recipe, samples, version=0, skip_idle=skip)
        results.append((metrics, backend.weights()))
    (lean, lean_weights), (plain, plain_weights) = results
    assert (lean["perf/idle_experiences"], plain["perf/idle_experiences"]) == (5, 0)
    assert lean["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert apart(lean_weights, plain_weights) < 1e-3


def test_a_batch_without_any_advantage_still_decays_the_weights(tiny_dir):
    samples = experiences()
    for e in samples:
        e.advantages = torch.zeros(len(e.tokens))
    backend = backend_of(tiny_dir)
    before = {name: w.clone() for name, w in backend.weights().items()}
    metrics = train_step(
        backend, _recipe(algorithm_type="grpo", kl_loss_fn="none"), samples, version=0
    )
    assert metrics["actor/grad_norm"] == 0
    for name, weight in backend.weights().items():
        assert torch.allclose(weight, before[name] * (1 - 1e-3 * 0.01), atol=1e-9)


def test_a_batch_without_a_trained_token_moves_nothing(tiny_dir):
    samples = experiences()[:2]
    for e in samples:
        e.mask[:] = False
    backend = backend_of(tiny_dir)
    metrics = train_step(backend, _recipe(**FULL), samples, version=0)
    assert set(metrics) == {"perf/trained_tokens", "perf/peak_memory_gib"}
    assert metrics["perf/trained_tokens"] == 0
    assert backend.optimizer.steps == 0


def test_sft_lowers_the_loss_on_its_own_data(tiny_dir):
    samples = experiences()
    for e in samples:
        e.logprobs = e.advantages = e.versions = None
    backend = backend_of(tiny_dir)
    recipe = _recipe(algorithm_type="sft")
    losses = [train_step(backend, recipe, samples, version=0)["actor/loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def test_loss_weight_scales_what_a_token_contributes(tiny_dir):
    samples = experiences()
    for e in samples:
        e.loss_weight = torch.full((len(e.tokens),), 2.0)
    recipe = _recipe(algorithm_type="sft")
    _, doubled = gradients_of(backend_of(tiny_dir), recipe, samples)
    _, plain = gradients_of(backend_of(tiny_dir), recipe, experiences())
    assert doubled["actor/loss"] == pytest.approx(2 * plain["actor/loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_weights_of_some_rows_hold_beside_rows_without(name, tiny_dir):
    """Those whose tokens all weigh 1 have none, such as a dialogue without what a scale weighs."""
    some, all_ = experiences(), experiences()
    some[0].loss_weight = all_[0].loss_weight = torch.full((len(some[0].tokens),), 0.25)
    for e in all_[1:]:
        e.loss_weight = torch.ones(len(e.tokens))
    recipe = _recipe(algorithm_type=name, kl_loss_fn="none")
    got, metrics = gradients_of(backend_of(tiny_dir), recipe, some)
    expected, expected_metrics = gradients_of(backend_of(tiny_dir), recipe, all_)
    _, unweighted = gradients_of(backend_of(tiny_dir), recipe, experiences())
    assert gap(got, expected) == 0.0
    assert metrics["actor/loss"] == expected_metrics["actor/loss"] != unweighted["actor/loss"]


def test_engine_and_trainer_are_compared_on_tokens_of_this_version(tiny_dir):
    backend = backend_of(tiny_dir)
    samples = experiences()
    for e in samples:
        [scored] = _scored(backend, e)
        off = 0.5 if e is samples[0] else 0.0
        e.logprobs = torch.tensor(scored) + off
    recipe = _recipe(algorithm_type="grpo", kl_loss_fn="none")
    assert train_step(backend, recipe, samples, version=0)["rollout/logprob_diff_max"] == (
        pytest.approx(0.5, abs=1e-4)
    )
    stale = train_step(backend, recipe, samples, version=3)
    assert "rollout/logprob_diff_max" not in stale
    assert stale["rollout/staleness_mean"] == 3


def _scored(backend, e):
    return backend.score([e.tokens.tolist()], temperature=e.temperature)


def test_a_step_reports_the_means_of_what_a_loss_tells_and_of_the_surprise(tiny_dir):
    """Over all trained tokens, of whatever micro-batch; -log p estimates the entropy."""

    @policy_loss("telling")
    def telling(logprobs, advantages):
        return -logprobs * advantages, {"told": advantages**2}

    recipe = algorithm("telling", advantage="grpo", policy_loss="telling", kl="none")
    samples, backend = experiences(), backend_of(tiny_dir)
    scored = [torch.tensor(_scored(backend, e)[0]) for e in samples]
    surprise = torch.cat([-own[e.mask] for own, e in zip(scored, samples, strict=True)])
    advantages = torch.cat([e.advantages[e.mask] for e in samples if e.advantages is not None])
    metrics = train_step(backend, recipe, samples, version=0)
    assert metrics["perf/micro_batches"] > 1
    assert metrics["actor/entropy"] == pytest.approx(float(surprise.mean()), rel=1e-5)
    assert metrics["actor/told"] == pytest.approx(float((advantages**2).mean()), rel=1e-5)


def test_old_logprobs_may_be_the_trainers_own(tiny_dir):
    samples = experiences()
    for e in samples:
        e.logprobs = None
    recipe = _recipe(algorithm_type="grpo", kl_loss_fn="none", bypass_old_logprobs=False)
    assert train_step(backend_of(tiny_dir), recipe, samples, version=0)["actor/ppo_kl"] == 0


def test_missing_data_is_named_with_the_experience(tiny_dir):
    samples = experiences()
    samples[2].logprobs = None
    with pytest.raises(
        ValueError, match=r"'ppo' asks for 'old_logprobs', which experience 0/0/2/0"
    ):
        train_step(
            backend_of(tiny_dir), _recipe(**FULL | {"kl_loss_fn": "none"}), samples, version=0
        )


def test_a_loss_that_is_not_finite_names_the_sample(tiny_dir):
    samples = experiences()
    samples[5].advantages = samples[5].mask * float("nan")
    with pytest.raises(NotFinite, match="experience 0/1/0/1 is nan at token"):
        train_step(
            backend_of(tiny_dir), _recipe(**FULL | {"kl_loss_fn": "none"}), samples, version=0
        )


def test_a_gradient_that_is_not_finite_names_the_sample_and_moves_nothing(tiny_dir):
    @policy_loss("steep_at_one_place")
    def steep(logprobs, advantages):
        # sqrt has an infinite slope at 0
        return (advantages.abs() * (logprobs - logprobs.detach())).sqrt() * (advantages == 7)

    algorithm("steep", advantage=None, policy_loss=steep)
    samples = experiences()
    for e in samples:
        e.advantages = torch.zeros(len(e.tokens))
    samples[5].advantages = 7.0 * samples[5].mask
    backend = backend_of(tiny_dir)
    before = {name: w.clone() for name, w in backend.weights().items()}
    with pytest.raises(NotFinite, match="experience"):
        train_step(backend, _recipe(algorithm_type="steep"), samples, version=0)
    assert all(torch.equal(w, before[n]) for n, w in backend.weights().items())


def test_a_gradient_whose_norm_alone_overflows_names_the_sample(tiny_dir):
    """As several ranks do: what the step cannot move by is what is looked for."""

    @policy_loss("huge")
    def huge(logprobs, advantages):
        return -logprobs * advantages

    algorithm("huge", advantage=None, policy_loss=huge)
    samples = experiences()
    samples[7].advantages = torch.full((len(samples[7].tokens),), 1e28)
    with pytest.raises(NotFinite, match=r"experience 0/2/0/0 is not finite; if .* is too large"):
        train_step(backend_of(tiny_dir), _recipe(algorithm_type="huge"), samples, version=0)


def test_a_loss_that_does_not_depend_on_the_policy_is_refused(tiny_dir):
    @policy_loss("constant")
    def constant(logprobs, advantages):
        return advantages * 0 + 1

    algorithm("constant", advantage=None, policy_loss=constant)
    with pytest.raises(ValueError, match="does not depend on the log-probabilities"):
        train_step(
            backend_of(tiny_dir), _recipe(algorithm_type="constant"), experiences(), version=0
        )


def test_a_loss_that_averages_by_itself_is_refused(tiny_dir):
    @policy_loss("averages")
    def averages(logprobs):
        return -logprobs.mean()

    algorithm("averages", advantage=None, policy_loss=averages)
    with pytest.raises(ValueError, match="not averaged"):
        train_step(
            backend_of(tiny_dir), _recipe(algorithm_type="averages"), experiences(), version=0
        )


@pytest.mark.parametrize(
    "correction", [{"rollout_is": "token"}, {"rollout_is": "sequence"}, {"rollout_rs": "token"}]
)
def test_a_rollout_correction_leaves_an_experts_tokens_alone(correction: dict[str, str]) -> None:
    """No sampler drew them: the ratio would be the policy's own probability, so that the less it
    knows of them, the less it would learn.
    """

    def gradient(**more: Any) -> Tensor:
        config = AlgorithmConfig(algorithm_type="mix", kl_loss_fn="none", **more)
        recipe = get_recipe(config)
        own = Experience([1, 2, 3], prompt_length=1, logprobs=[-1.0, -1.0], advantages=[1.0, 1.0],
                         versions=[0, 0])  # fmt: skip
        expert = Experience([1, 2, 3], prompt_length=1, logprobs=[0.0, 0.0],
                            advantages=[0.0, 0.0], versions=[-1, -1])  # fmt: skip
        batch, experts = flatten([own, expert]), torch.tensor([False, True])
        batch = batch.with_fields(expert=experts[batch.sample_ids])
        batch = batch.with_fields(weights=recipe.weights(batch, experts))
        logprobs = torch.tensor([-1.0, -1.0, -3.0, -3.0], requires_grad=True)
        options: Any = {"totals": MetricTotals(), "fresh": None, "train_state": TrainState(recipe)}
        batch_loss(batch, logprobs, None, recipe=recipe, **options).backward()
        assert logprobs.grad is not None
        measured.update(metrics_of([options["totals"].read()]))
        return logprobs.grad

    measured: dict[str, float] = {}
    torch.testing.assert_close(gradient(rollout_correction=correction), gradient())
    assert measured["rollout_correction/ratio"] == measured["rollout_correction/weight"] == 1
    assert measured["rollout_correction/sampler_nll"] == 1  # of the two own tokens alone
