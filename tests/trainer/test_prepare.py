"""Prepare: token rewards, KL penalties, pairs, and the reference's scores of a data set."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.trainer.samples import backend_of, critic_of, experiences, move
from trireme.algorithms.kl import LOSS_AGG_MODES, top_entropy
from trireme.algorithms.recipes import get_recipe
from trireme.algorithms.token_advantage import in_trainer
from trireme.batch import flatten
from trireme.experience import EID, Experience
from trireme.registry import ADVANTAGES
from trireme.trainer.learning import TrainState, prepare, split_pairs, token_rewards
from trireme.trainer.step import train_step


def _recipe(name: str, **given):
    return get_recipe(SimpleNamespace(algorithm_type=name, **given))


def test_a_scalar_reward_lies_on_the_last_trained_token():
    e = Experience([1, 2, 3, 4, 5], mask=[0, 0, 1, 1, 0], reward=2.0)
    none = Experience([1, 2], mask=[0, 0], reward=3.0)
    batch = flatten([e, none, e])
    assert token_rewards([e, none, e], batch, asked_by="x").tolist() == [0, 2, 0, 2]


def test_token_rewards_on_untrained_tokens_go_to_the_one_before():
    e = Experience(
        [1, 2, 3, 4, 5, 6], mask=[0, 1, 0, 0, 1, 0], token_rewards=[9, 1, 2, 4, 8, 16], reward=0.0
    )
    assert token_rewards([e], flatten([e]), asked_by="x").tolist() == [7, 24]


def test_an_experience_without_a_reward_is_named():
    e = Experience([1, 2], mask=[0, 1], eid=EID(3, 1))
    with pytest.raises(ValueError, match="'gae' asks for rewards, and experience 3/1/0/0 has none"):
        token_rewards([e], flatten([e]), asked_by="'gae'")


@pytest.mark.parametrize("given", [{"reward": float("nan")}, {"token_rewards": [0, float("inf")]}])
def test_a_reward_that_is_no_finite_number_is_refused_by_the_experiences_id(given):
    e = Experience([1, 2], mask=[0, 1], eid=EID(3, 1), **{"reward": 0.0, **given})
    with pytest.raises(ValueError, match="3/1/0/0 has a reward that is not finite, which 'x"):
        token_rewards([e], flatten([e]), asked_by="'x'")


@pytest.mark.parametrize(
    ("which", "told"),
    [
        (0, r"'broken' gave nan for 2 of \d+ tokens, first for token \d+ of experience 0/0/0/0"),
        (1, "'broken' gave returns of inf for 2 of"),
    ],
)
def test_an_advantage_in_the_trainer_that_is_no_finite_number_is_refused(
    tiny_dir, monkeypatch, which, told
):
    @in_trainer
    def broken(old_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.ones_like(old_logprobs), torch.ones_like(old_logprobs)
        out[which][:2] = (math.nan, math.inf)[which]
        return out

    monkeypatch.setattr(ADVANTAGES, "_registered", {**ADVANTAGES._registered, "broken": broken})
    samples, recipe = _rewarded(), _recipe("grpo", advantage_fn="broken", kl_loss_fn="none")
    with pytest.raises(ValueError, match=told):
        prepare(backend_of(tiny_dir), recipe, samples, flatten(samples), TrainState(recipe))


def test_a_pair_becomes_two_samples_that_share_the_prompt():
    pair = Experience([1, 2], prompt_length=2, chosen=[3], rejected=[4, 5], eid=EID(0, 7))
    better, worse = split_pairs([pair])
    assert (better.tokens.tolist(), worse.tokens.tolist()) == ([1, 2, 3], [1, 2, 4, 5])
    assert (better.eid.uid, worse.eid.uid) == ("0/7/0/0", "0/7/1/0")
    assert better.mask.tolist() == [False, False, True]
    another = Experience([1, 2], prompt_length=2, chosen=[3], rejected=[4], eid=EID(0, 7, 1))
    names = [e.eid.uid for e in split_pairs([pair, another])]
    assert names == ["0/7/0/0", "0/7/1/0", "0/7/2/0", "0/7/3/0"]  # each of its own
    with pytest.raises(ValueError, match="0/7/0/0 is not a pair"):
        split_pairs([Experience([1], prompt_length=1, eid=EID(0, 7))])


def _rewarded() -> list[Experience]:
    samples = experiences()
    for n, e in enumerate(samples):
        e.reward = float(n % 3)
    return samples


def test_the_kl_penalty_is_taken_off_the_token_rewards(tiny_dir):
    backend = backend_of(tiny_dir, max_token_len=100, reference=True)
    samples = _rewarded()
    batch = flatten(samples)
    args = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.5}, "kl_loss_fn": "none"}
    recipe = _recipe("reinforceplusplus", **args)
    assert recipe.needs_reference
    done, metrics = prepare(backend, recipe, samples, batch, TrainState(recipe))
    old = batch.fields["old_logprobs"]
    distance = old - backend.logprobs(batch, reference=True)
    plain = token_rewards(samples, batch, asked_by="x") - 0.5 * distance
    for n in range(batch.num_samples):
        mine = batch.sample_ids == n
        to_go = plain[mine].flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(done.fields["returns"][mine], to_go, atol=1e-5, rtol=1e-5)
    assert metrics["critic/kl_penalty"] == pytest.approx(float(distance.mean()), abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforceplusplus_baseline"])
def test_the_kl_penalty_is_taken_off_the_rewards_of_groups(tiny_dir, name):
    backend = backend_of(tiny_dir, max_token_len=100, reference=True)
    recipe = _recipe(
        "grpo", advantage_fn=name, kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.5},
        kl_loss_fn="none", sample_strategy="explore_step", bypass_old_logprobs=False,
    )  # fmt: skip
    samples = [e for e in _rewarded() if e.trained_tokens][:4]
    for n, e in enumerate(samples):
        e.eid = EID(0, n // 2, n % 2)
    other = experiences()[4]
    other.eid, other.reward = EID(0, 1, 1, 1), samples[3].reward  # the last run left two
    samples, _ = recipe.advantages([*samples, other])
    move(backend)
    batch = flatten(samples)
    done, metrics = prepare(backend, recipe, samples, batch, TrainState(recipe))
    distance = (backend.logprobs(batch) - backend.logprobs(batch, reference=True)).double()
    assert float(distance.abs().mean()) > 1e-3
    summed = [float(distance[batch.sample_ids == n].sum()) for n in range(5)]
    summed[3] = summed[4] = summed[3] + summed[4]
    a, b, c, d = ((samples[n].reward or 0.0) - 0.5 * summed[n] for n in range(4))
    if name == "rloo":
        expected = [a - b, b - a, c - d, d - c]
    else:
        expected = [(a - b) / 2, (b - a) / 2, (c - d) / 2, (d - c) / 2]
        over_batch = torch.tensor(expected, dtype=torch.float64).std()
        stds = [abs(a - b) / 2**0.5] * 2 + [abs(c - d) / 2**0.5] * 2
        stds = [float(over_batch)] * 4 if name == "reinforceplusplus_baseline" else stds
        expected = [x / (std + 1e-6) for x, std in zip(expected, stds, strict=True)]
    want = torch.tensor([*expected, expected[3]])[batch.sample_ids]
    torch.testing.assert_close(done.fields["advantages"], want, atol=2e-5, rtol=2e-5)
    assert metrics["critic/kl_penalty"] == pytest.approx(float(distance.mean()), abs=1e-6)
    assert samples[0].reward != pytest.approx(a)  # what is recorded is the reward itself


@pytest.mark.parametrize(
    "given",
    [
        {"advantage_fn": "reinforceplusplus"},
        {"advantage_fn": "ppo"},
        {
            "advantage_fn": "reinforceplusplus",
            "kl_penalty_fn": "k1",
            "kl_penalty_fn_args": {"kl_coef": 0.5, "adaptive": True},
        },
    ],
    ids=str,
)
def test_an_experts_rows_count_in_no_baseline_critic_or_coefficient(given, tiny_dir):
    recipe = _recipe("mix", kl_loss_fn="none", **given)
    samples, experts = _rewarded(), experiences()[:2]
    for e in experts:
        e.reward, e.advantages, e.returns = 0.0, torch.zeros(len(e.tokens)), None
        e.info["is_expert"] = True

    def prepared(given: list[Experience]):
        backend = backend_of(tiny_dir, max_token_len=100, reference=recipe.needs_reference)
        state = TrainState(recipe, critic_of(tiny_dir) if recipe.needs_critic else None)
        move(backend)
        return *prepare(backend, recipe, given, flatten(given), state), state.state()

    mixed = [samples[0], experts[0], *samples[1:], experts[1]]
    alone, metrics, state = prepared(samples)
    done, got, reached = prepared(mixed)
    expert = done.fields["expert"]
    for name in ("advantages", "returns"):
        torch.testing.assert_close(done.fields[name][~expert], alone.fields[name])
        assert not done.fields[name][expert].any()
    assert alone.fields["advantages"].any() and expert.any()
    assert got == pytest.approx(metrics, abs=1e-6)
    assert reached["coefficients"] == pytest.approx(state["coefficients"])


def test_tokens_of_an_expert_are_not_left_out_for_their_entropy(tiny_dir):
    recipe = _recipe("mix", kl_loss_fn="none", policy_loss_fn_args={"top_entropy_quantile": 0.3})
    samples = _rewarded()
    samples[1].info["is_expert"] = True
    backend = backend_of(tiny_dir, max_token_len=100)
    done, _ = prepare(backend, recipe, samples, flatten(samples), TrainState(recipe))
    expert, selected = done.fields["expert"], done.fields["selected"].bool()
    _, entropies, _ = backend.scores(done)
    assert expert.any() and selected[expert].all()
    torch.testing.assert_close(selected[~expert], top_entropy(entropies[~expert], 0.3))
    assert not selected.all()


@pytest.mark.extension("more_losses")
@pytest.mark.parametrize("name", ["clipb", "clipv"])
def test_entropy_clips_get_the_entropies_of_the_trained_weights(tiny_dir, name):
    args = {"mu": 0.5, "max_frac": 1.0} if name == "clipv" else {"mu": 0.5}
    recipe = _recipe(
        "grpo", advantage_fn=name, advantage_fn_args=args, kl_loss_fn="none",
        entropy_loss_fn="none",
    )  # fmt: skip
    backend = backend_of(tiny_dir, max_token_len=100)
    samples, _ = recipe.advantages(_rewarded())
    batch = flatten(samples)
    before = batch.fields["advantages"]
    prepared, metrics = prepare(backend, recipe, samples, batch, TrainState(recipe))
    logprobs, entropies, means = backend.scores(batch)
    torch.testing.assert_close(logprobs, backend.logprobs(batch))
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    logits = model(torch.from_numpy(batch.tokens[0])[None]).logits[0].log_softmax(-1)
    first, logits = (
        batch.sample_ids == 0,
        logits.detach()[batch.positions[batch.sample_ids == 0] - 1],
    )
    own = -(logits.exp() * logits).sum(-1)
    torch.testing.assert_close(entropies[first], own)
    over_words = logits.exp() * (own[:, None] + logits)  # S of each word of the vocabulary
    torch.testing.assert_close(means[first], (logits.exp() * over_words).sum(-1))
    s = logprobs.exp() * (entropies + logprobs)
    s = s - s.mean() if name == "clipb" else s - means
    out = (before < 0) & (s < -0.5 * s.std(correction=0))
    assert 0 < int(out.sum()) < len(s)
    torch.testing.assert_close(prepared.fields["advantages"], before * ~out)
    assert metrics["critic/advantage_abs_mean"] < float(before.abs().mean())


def test_an_adaptive_coefficient_moves_and_comes_back_after_a_resume(tiny_dir):
    adaptive = {"kl_coef": 0.5, "adaptive": True, "target_kl": 1e-4, "horizon": 80}
    recipe = _recipe("grpo", kl_loss_fn="k2", kl_loss_fn_args=adaptive)
    backend = backend_of(tiny_dir, max_token_len=100, reference=True)
    train_state = TrainState(recipe)
    first = train_step(backend, recipe, experiences(), version=0, train_state=train_state)
    # the policy is its reference: a divergence of 0 is far below the target, 8 samples of 80
    assert first["actor/kl_coef"] == 0.5
    assert train_state.coefficients["kl_loss_fn"] == pytest.approx(0.5 * (1 - 0.2 * 0.1))
    state = train_state.state()
    again = TrainState(recipe)
    again.load_state(state)
    assert again.coefficients == train_state.coefficients and again.steps == 1
    train_state.adapt("kl_loss_fn", 0.0, 8)  # while the checkpoint is written behind the training
    assert state["coefficients"] == again.coefficients != train_state.coefficients


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_adaptive_coefficient_follows_the_mean_of_a_token_in_every_mode(mode, tiny_dir):
    """Two modes sum the tokens, so that the loss is several times the mean of a token."""
    backend = backend_of(tiny_dir, max_token_len=100, reference=True)
    move(backend)
    batch = flatten(experiences())
    drift = backend.logprobs(batch) - backend.logprobs(batch, reference=True)
    adaptive = {"kl_coef": 0.5, "adaptive": True, "horizon": 80}
    adaptive["target_kl"] = 2 * float(drift.square().mean() / 2)
    recipe = _recipe("grpo", kl_loss_fn="k2", kl_loss_fn_args=adaptive, loss_agg_mode=mode)
    train_state = TrainState(recipe)
    train_step(backend, recipe, experiences(), version=0, train_state=train_state)
    assert train_state.coefficients["kl_loss_fn"] == pytest.approx(0.5 * (1 - 0.2 * 0.1))
