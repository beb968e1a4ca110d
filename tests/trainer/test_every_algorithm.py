"""Every algorithm of the table: how a batch is computed changes neither loss nor gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.samples import backend_of, critic_of, experiences, gap, gradients_of, move
from trireme.algorithms.recipes import Recipe, algorithm, get_recipe
from trireme.algorithms.token_advantage import in_trainer
from trireme.batch import flatten
from trireme.experience import EID, Experience
from trireme.extensions import extensions
from trireme.registry import ALGORITHMS
from trireme.trainer.learning import TrainState
from trireme.trainer.step import train_step


def _recipe(name: str, **given) -> Recipe:
    return get_recipe(SimpleNamespace(algorithm_type=name, **given))


def _samples(recipe: Recipe) -> list[Experience]:
    """Rollouts that share prompts, equal ones among them, or pairs, with all that parts ask for."""
    rng = torch.Generator().manual_seed(3)
    found = experiences()
    if recipe.schema == "dpo":
        return [
            Experience(
                e.tokens[:5],
                prompt_length=5,
                chosen=e.tokens[5:11],
                rejected=torch.randint(3, 90, (4 + n % 3,), generator=rng),
                eid=EID(0, n),
            )
            for n, e in enumerate(found)
        ]
    for n, e in enumerate(found):
        e.reward = float(n % 3)
        e.teacher_logprobs = -4.5 + torch.randn(len(e.tokens), generator=rng) * 0.3
        e.info["reward_parts"] = {"a": (float(n % 3), 1.0)}
        e.info["is_expert"] = n % 4 == 1
        e.info["desirable"] = n % 3 == 1
    return found


def _step(
    path, recipe: Recipe, *, share: bool, length: int, noise: float = 0.05
) -> tuple[dict, dict]:
    """Gradients that a step leaves, policy's and critic's, and its metrics."""
    options = {"max_token_len": length, "share_prefix": share}
    backend = backend_of(path, reference=recipe.needs_reference, **options)
    move(backend, noise)
    critic = critic_of(path, **options) if recipe.needs_critic else None
    if critic is not None:
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-1, 1, critic.head.weight.numel()))
    train_state = TrainState(recipe, critic)
    return gradients_of(backend, recipe, _samples(recipe), train_state=train_state)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.built_in() if name != "grpo_verl"])
def test_layout_changes_neither_loss_nor_gradient(name, tiny_dir):
    recipe = _recipe(name)
    expected, plain = _step(tiny_dir, recipe, share=False, length=10_000)
    assert sum(float(g.abs().sum()) for g in expected.values()) > 0
    for share, length in ((True, 10_000), (True, 40), (False, 30)):
        got, metrics = _step(tiny_dir, recipe, share=share, length=length)
        assert metrics["actor/loss"] == pytest.approx(plain["actor/loss"], abs=1e-5)
        assert gap(got, expected) < 1e-5, (share, length)


MIXES: list[dict[str, Any]] = [
    {"rollout_correction": {"rollout_is": "sequence", "rollout_rs": "geometric"}},
    {"kl_loss_fn": "corrected_k3", "kl_loss_fn_args": {"kl_coef": 0.1}},
    {"entropy_loss_fn_args": {"entropy_coef": 0.1}, "loss_agg_mode": "seq-mean-token-sum"},
    {"policy_loss_fn": "gspo", "loss_agg_mode": "seq-mean-token-sum-norm"},
    {"policy_loss_fn_args": {"top_entropy_quantile": 0.4}},
]
"""Parts of one algorithm beside those of another."""
if "more_losses" in extensions():
    MIXES += [
        {"policy_loss_fn": "vespo"},
        {"policy_loss_fn": "geo_mean", "loss_agg_mode": "seq-mean-token-mean"},
        {"policy_loss_fn": "dppo"},
        {"policy_loss_fn": "rec", "policy_loss_fn_args": {"clip_mode": "gspo-one-side"}},
    ]


@pytest.mark.parametrize("given", MIXES, ids=str)
def test_parts_mix_freely(given, tiny_dir):
    recipe = _recipe("grpo", **given)
    expected, _ = _step(tiny_dir, recipe, share=False, length=10_000)
    got, _ = _step(tiny_dir, recipe, share=True, length=40)
    assert gap(got, expected) < 1e-5


def test_own_and_expert_tokens_are_averaged_apart(tiny_dir):
    recipe = _recipe("mix", kl_loss_fn="none", policy_loss_fn_args={"mu": 1.0})
    _, whole = _step(tiny_dir, recipe, share=True, length=10_000)
    sft = _recipe("sft")
    backend = backend_of(tiny_dir, max_token_len=10_000)
    move(backend)
    experts = [e for e in _samples(recipe) if e.info["is_expert"]]
    alone = train_step(backend, sft, experts, version=0)
    assert whole["actor/loss"] == pytest.approx(alone["actor/loss"], abs=1e-5)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_entropy_is_that_of_own_tokens(coefficient, tiny_dir):
    args = {"entropy_coef": coefficient}
    recipe = _recipe("mix", kl_loss_fn="none", entropy_loss_fn_args=args)
    _, metrics = _step(tiny_dir, recipe, share=True, length=10_000)
    backend = backend_of(tiny_dir, max_token_len=10_000)
    move(backend)
    own = flatten([e for e in _samples(recipe) if not e.info["is_expert"]])
    logprobs, entropies, _ = backend.scores(own)
    expected = entropies if coefficient else -logprobs
    assert metrics["actor/entropy"] == pytest.approx(float(expected.mean()), rel=1e-4)


@pytest.mark.extension("more_losses")
def test_the_first_train_step_is_number_1_of_a_schedule(tiny_dir):
    args = {"mu_warmup_steps": 10, "mu_peak": 1.0}
    recipe = _recipe("mix_chord", kl_loss_fn="none", policy_loss_fn_args=args)
    _, metrics = _step(tiny_dir, recipe, share=True, length=10_000)
    assert metrics["actor/mu"] == pytest.approx(0.1)


def test_an_advantage_and_a_loss_are_given_the_same_step_and_0_in_the_first(tiny_dir):
    seen: list[tuple[str, int]] = []

    @in_trainer
    def noted_advantage(old_logprobs: Tensor, step: Tensor) -> Tensor:
        seen.append(("advantage", int(step)))
        return torch.ones_like(old_logprobs)

    def noted_loss(logprobs: Tensor, advantages: Tensor, step: Tensor) -> Tensor:
        seen.append(("loss", int(step)))
        return -advantages * logprobs

    algorithm("noted_steps", advantage=noted_advantage, policy_loss=noted_loss)
    recipe = _recipe("noted_steps", kl_loss_fn="none")
    backend, train_state = backend_of(tiny_dir, max_token_len=10_000), TrainState(recipe)
    for version in range(2):
        train_step(backend, recipe, _samples(recipe), train_state=train_state, version=version)
    assert seen == [("advantage", 0), ("loss", 0), ("advantage", 1), ("loss", 1)]


def test_a_loss_of_sequences_refuses_weights_of_tokens(tiny_dir):
    samples = experiences()
    for e in samples:
        e.loss_weight = torch.ones(len(e.tokens))
    samples[2].loss_weight = torch.full((len(samples[2].tokens),), 0.5)
    backend = backend_of(tiny_dir, max_token_len=100)
    with pytest.raises(
        ValueError, match=r"0/0/2/0 has a loss_weight of 0.5: .*'gspo' is a loss of"
    ):
        train_step(backend, _recipe("gspo", kl_loss_fn="none"), samples, version=0)
    train_step(backend, _recipe("grpo", kl_loss_fn="none"), samples, version=0)


def test_dpos_gradient_is_that_of_the_pairs_margins(tiny_dir):
    recipe = _recipe("dpo", policy_loss_fn_args={"beta": 0.3})
    got, metrics = _step(tiny_dir, recipe, share=True, length=40)
    backend = backend_of(tiny_dir, max_token_len=10_000)
    reference = {k: v.clone() for k, v in backend.module.state_dict().items()}
    move(backend)
    moved = {k: v.clone() for k, v in backend.module.state_dict().items()}

    def total(e: Experience, reply: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([e.tokens, reply])
        logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:, None]).squeeze(1)
        return chosen[len(e.tokens) - 1 :].sum()

    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_dir, attn_implementation="eager").double()
    pairs = _samples(recipe)
    plain.load_state_dict({k: v.double() for k, v in reference.items()})
    with torch.no_grad():
        known = [(total(e, e.chosen), total(e, e.rejected)) for e in pairs]  # pyright: ignore
    plain.load_state_dict({k: v.double() for k, v in moved.items()})
    loss = torch.zeros((), dtype=torch.float64)
    for e, (better, worse) in zip(pairs, known, strict=True):
        assert e.chosen is not None and e.rejected is not None
        margin = 0.3 * ((total(e, e.chosen) - better) - (total(e, e.rejected) - worse))
        loss = loss - torch.nn.functional.logsigmoid(margin) / len(pairs)
    loss.backward()
    assert metrics["actor/loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(got[name].double(), p.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("noise", [0.004, -0.004])
def test_ktos_gradient_is_that_of_the_replies_against_those_to_other_prompts(tiny_dir, noise):
    recipe = _recipe("kto", policy_loss_fn_args={"beta": 0.3, "undesirable_weight": 2.0})
    got, metrics = _step(tiny_dir, recipe, share=True, length=40, noise=noise)
    backend = backend_of(tiny_dir, max_token_len=10_000)
    reference = {k: v.clone() for k, v in backend.module.state_dict().items()}
    move(backend, noise)
    moved = {k: v.clone() for k, v in backend.module.state_dict().items()}
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_dir, attn_implementation="eager").double()
    samples = _samples(recipe)
    longest = max(len(e.tokens) for e in samples)

    def total(e: Experience, other: Experience) -> torch.Tensor:
        begin, theirs = (int(x.mask.nonzero()[0]) for x in (e, other))
        ids = torch.cat([e.tokens[:begin], other.tokens[theirs:]])[:longest]
        mask = torch.cat([torch.zeros(begin).bool(), other.mask[theirs:]])[:longest]
        logits = plain(ids[None]).logits[0, :-1] / (e.temperature or 1.0)
        return (logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1) * mask[1:]).sum()

    pairs = [(e, e) for e in samples] + [(e, samples[n - 1]) for n, e in enumerate(samples)]
    plain.load_state_dict({k: v.double() for k, v in reference.items()})
    with torch.no_grad():
        known = [total(*pair) for pair in pairs]
    plain.load_state_dict({k: v.double() for k, v in moved.items()})
    with torch.no_grad():
        gains = [total(*pair) - old for pair, old in zip(pairs, known, strict=True)]
    point = max(float(sum(gains[len(samples) :])) / len(samples), 0.0)
    assert (point > 0) == (noise > 0)
    loss = torch.zeros((), dtype=torch.float64)
    for e, old in zip(samples, known, strict=False):
        sign, weight = (1, 1.0) if e.info["desirable"] else (-1, 2.0)
        gain = total(e, e) - old
        loss = loss + weight * (1 - torch.sigmoid(0.3 * sign * (gain - point))) / len(samples)
    loss.backward()
    assert metrics["actor/kto_reference_point"] == pytest.approx(point, abs=1e-4)
    assert metrics["actor/kto_loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(got[name].double(), p.grad, atol=1e-5, rtol=1e-3)
