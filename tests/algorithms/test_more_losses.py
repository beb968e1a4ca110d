"""Policy losses beyond PPO against hand-worked values, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trireme.algorithms import kl
from trireme.algorithms.kl import own_entropy, segment_mean, segment_sum, top_entropy
from trireme.algorithms.policy_loss import (
    cispo,
    importance_sampling,
    mix,
    ppo,
    rollout_correction,
    sampler_measures,
)
from trireme.algorithms.sequence_loss import dpo, gspo, kto


def slope_of(loss, ratio: float, advantage: float, **options) -> tuple[float, float]:
    """The loss of one token with p = ratio * p_old, p_old = 1/e, and its slope in log p."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    given = {"logprobs": logprobs, "old_logprobs": old, "advantages": torch.tensor([advantage])}
    names = loss.__code__.co_varnames[: loss.__code__.co_argcount]
    given["sample_ids"] = torch.tensor([0])
    found = loss(**{n: given[n] for n in names if n in given}, **options)
    value = found[0] if isinstance(found, tuple) else found
    value.sum().backward()
    slope = 0.0 if logprobs.grad is None else logprobs.grad.item()
    return value.item(), slope


def lp(ratio: float) -> float:
    """log p where p is this many times 1/e."""
    return math.log(ratio) - 1


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "options", "value", "slope"),
    [
        (importance_sampling, 2.0, 3.0, {}, -6, -6),
        (cispo, 1.1, 2.0, {}, -2.2 * lp(1.1), -2.2),
        (cispo, 3.0, 2.0, {}, -2.56 * lp(3), -2.56),  # clipped, and still learning
        (cispo, 3.0, 2.0, {"enable_mask_clip": True}, 0, 0),
        (cispo, 3.0, -2.0, {"enable_mask_clip": True}, 2.56 * lp(3), 2.56),
        # the mask has ranges of its own
        (cispo, 3.0, 2.0, {"enable_mask_clip": True, "mask_clip_range_high": 2.5}, -2.56 * lp(3),
         -2.56),
        (cispo, 0.5, -2.0, {"enable_mask_clip": True, "mask_clip_range_low": 0.2}, 0, 0),
        (cispo, 0.5, -2.0, {"enable_mask_clip": True, "clip_range_low": 0.2}, 1.6 * lp(0.5), 1.6),
        (gspo, 1.0002, 2.0, {}, -2.0004, -2.0004),
        (gspo, 1.01, 2.0, {}, -2.0008, 0),
        (gspo, 0.99, -2.0, {}, 1.9994, 0),
        (gspo, 1.01, -2.0, {}, 2.02, 2.02),
        (gspo, 1.3, 2.0, {"clip_range": 0.25}, -2.5, 0),
        (gspo, 0.7, -2.0, {"clip_range": 0.25}, 1.5, 0),
        (gspo, 1.3, 2.0, {"clip_range": 0.25, "clip_range_high": 0.5}, -2.6, -2.6),
        (gspo, 0.7, -2.0, {"clip_range": 0.25, "clip_range_low": 0.5}, 1.4, 1.4),
        (ppo, 3.0, 2.0, {"fallback_to_policy_gradient": True}, -2, -2),
        (ppo, 0.5, -1.0, {"enable_sequence_masking": True}, 0, 0),
        (ppo, 0.5, 1.0, {"enable_sequence_masking": True}, -0.5, -0.5),
        (ppo, 0.5, -1.0, {"enable_sequence_masking": True, "delta_sequence_masking": 0.7}, 0.8, 0),
    ],
)  # fmt: skip
def test_a_tokens_loss_and_slope(loss, ratio, advantage, options, value, slope):
    assert slope_of(loss, ratio, advantage, **options) == pytest.approx((value, slope), abs=1e-6)


def reported_by(loss: Any) -> dict[str, Tensor]:
    """What a loss reports of three tokens, how far the policy has moved among it."""
    old = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([lp(1.8), lp(0.2), lp(1.1)], dtype=torch.float64).requires_grad_()
    given = {"logprobs": logprobs, "old_logprobs": old, "sample_ids": torch.tensor([0, 0, 1])}
    given |= {"advantages": torch.tensor([2.0, 2.0, -1.0]), "positions": torch.tensor([3, 4, 3])}
    given |= {"sampler_logprobs": old}
    names = loss.__code__.co_varnames[: loss.__code__.co_argcount]
    _, reported = loss(**{name: given[name] for name in names})
    expected = [-math.log(1.8), -math.log(0.2), -math.log(1.1)]
    assert reported["ppo_kl"].tolist() == pytest.approx(expected)
    assert not any(values.requires_grad for values in reported.values())
    return reported


@pytest.mark.parametrize("loss", [ppo, gspo])
def test_a_loss_reports_how_far_the_policy_has_moved(loss):
    reported_by(loss)


def test_segments_are_summed_and_averaged_by_sample():
    values, ids = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 2])
    assert segment_sum(values, ids).tolist() == [3, 3, 6]
    assert segment_mean(values, ids).tolist() == [1.5, 1.5, 6]


def test_gspos_ratio_is_the_samples_and_its_gradient_is_spread_over_it():
    old = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.tensor([2e-4, -1e-4, 0.3], dtype=torch.float64, requires_grad=True)
    loss, _ = gspo(logprobs, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]))
    s = math.exp(0.5e-4)
    assert loss.tolist() == pytest.approx([-s, -s, math.exp(0.3)])
    (loss * torch.tensor([0.5, 0.5, 1.0])).sum().backward()  # the mean over each sample
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-s / 2, -s / 2, math.exp(0.3)])


def _dpo(policy: Tensor, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """Two pairs, the second's samples apart: chosen (2 and 1 tokens), rejected (1 and 2)."""
    pairs = torch.tensor([0, 0, 1, 0, 1, 1])
    chosen = torch.tensor([True, True, True, False, False, False])
    ref = torch.tensor([-1.0, -1.0, -2.0, -1.0, -0.5, -0.5], dtype=torch.float64)
    return dpo(policy, ref, pairs, chosen, **options)


def test_dpo_is_a_loss_of_each_pair():
    policy = torch.tensor([-0.5, -1.0, -1.0, -2.0, -0.5, -0.3], dtype=torch.float64)
    # gains over the reference: .5 + 0 against -1; 1 against 0 + .2
    margins = [0.2 * 1.5, 0.2 * 0.8]
    losses = [-math.log(1 / (1 + math.exp(-m))) for m in margins]
    out, reported = _dpo(policy, beta=0.2)
    a, b = losses
    assert out.tolist() == pytest.approx([a, a, b, a, b, b])
    assert {name: values.tolist() for name, values in reported.items()} == {
        "dpo_accuracy": [1, 1],
        "dpo_margin": pytest.approx(margins),
        "dpo_reward_chosen": pytest.approx([0.2 * 0.5, 0.2 * 1.0]),
        "dpo_reward_rejected": pytest.approx([0.2 * -1.0, 0.2 * 0.2]),
    }
    flipped = [-math.log(1 / (1 + math.exp(m))) for m in margins]
    smooth = [0.9 * x + 0.1 * y for x, y in zip(losses, flipped, strict=True)]
    c, d = smooth
    smoothed, _ = _dpo(policy, beta=0.2, label_smoothing=0.1)
    assert smoothed.tolist() == pytest.approx([c, c, d, c, d, d])


def test_kto_weighs_each_replys_gain_against_the_reference_point():
    policy = torch.tensor([-0.5, -1.0, -1.0, -0.25], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -2.0, -1.5, -0.75], dtype=torch.float64)
    ids, desirable = torch.tensor([0, 0, 1, 2]), torch.tensor([True, True, False, False])
    point = torch.full((4,), 0.3, dtype=torch.float64)
    options = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss, reported = kto(policy, ref, ids, desirable, point, **options)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    # gains over the reference: .5 + 1; .5; .5
    better, worse = sigmoid(0.2 * (1.5 - 0.3)), sigmoid(0.2 * (0.3 - 0.5))
    expected = [1.5 * (1 - better)] * 2 + [0.5 * (1 - worse)] * 2
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    (loss * torch.tensor([0.5, 0.5, 1.0, 1.0])).sum().backward()  # the mean over each sample
    up, down = -1.5 * 0.2 * better * (1 - better), 0.5 * 0.2 * worse * (1 - worse)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([up, up, down, down], abs=1e-12)
    assert reported["kto_reward_desirable"].tolist() == pytest.approx([0.3])  # once a reply
    assert reported["kto_reward_undesirable"].tolist() == pytest.approx([0.1, 0.1])


def test_mix_is_ppo_on_own_tokens_and_imitation_of_the_expert():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    old, advantages = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.0])
    expert = torch.tensor([False, True])
    loss, reported = mix(logprobs, old, advantages, expert, mu=0.25)
    assert loss.tolist() == pytest.approx([0.75 * -3, 0.25 * 2])
    assert len(reported["ppo_kl"]) == 1


def test_the_entropy_of_an_experts_tokens_does_not_count():
    out = own_entropy(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    assert out.tolist() == [1, 0]


def test_corrected_k3_weighs_by_the_ratio_up_to_2():
    logprobs, ref = torch.zeros(2), torch.full((2,), -math.log(2))
    plain = 0.5 - 1 + math.log(2)
    old = torch.tensor([-math.log(1.5), -math.log(8)])
    assert kl.corrected_k3(logprobs, ref, old).tolist() == pytest.approx([1.5 * plain, 2 * plain])
    assert kl.corrected_k3(logprobs, ref).tolist() == pytest.approx([plain, plain])


def test_corrected_k3_of_a_token_that_was_all_but_impossible_has_a_gradient():
    """exp(99) is infinite in float32."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl.corrected_k3(logprobs, torch.tensor([-2.0]), torch.tensor([-100.0])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(2 * (1 - math.exp(-1)))


def test_a_coefficient_of_a_batch_beyond_its_horizon_stays_above_0():
    for count in (4000, 8192, 10**6):
        assert kl.adapted(0.1, 0.0, count, target_kl=0.1, horizon=1000) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.1, 1), (0.11, 1 + 0.1 * 64 / 1000), (9, 1 + 0.2 * 64 / 1000),
                                 (0, 1 - 0.2 * 64 / 1000)],
)  # fmt: skip
def test_a_coefficient_follows_its_target(divergence, expected):
    got = kl.adapted(1.0, divergence, 64, target_kl=0.1, horizon=1000)
    assert got == pytest.approx(expected)


RATIOS = torch.tensor([3.0, 0.6, 1.0, 1.0, 0.1], dtype=torch.float64)
SAMPLES = torch.tensor([0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rollout_is": "token"}, [2, 0.6, 1, 1, 0.1]),
        ({"rollout_is": "token", "rollout_is_threshold": 2.5}, [2.5, 0.6, 1, 1, 0.1]),
        ({"rollout_is": "sequence"}, [1.8, 1.8, 1, 1, 0.1]),
        ({"rollout_rs": "token"}, [0, 1, 1, 1, 0]),
        ({"rollout_rs": "sequence"}, [1, 1, 1, 1, 0]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 1.7}, [0, 0, 1, 1, 0]),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.5}, [1, 1, 1, 1, 0]),
        ({"rollout_rs": "token", "rollout_rs_threshold_lower": 0.05}, [0, 1, 1, 1, 1]),
        ({"rollout_is": "token", "rollout_rs": "token"}, [0, 0.6, 1, 1, 0]),
        ({}, [1, 1, 1, 1, 1]),
    ],
)
def test_the_correction_truncates_or_masks(options, expected):
    sampler = torch.full((5,), -1.0, dtype=torch.float64)
    weights, reported = rollout_correction(sampler + RATIOS.log(), sampler, SAMPLES, **options)
    assert weights.tolist() == pytest.approx(expected)
    assert ("truncated" in reported) == ("rollout_is" in options)
    if options in ({"rollout_is": "token"}, {"rollout_is": "token", "rollout_rs": "token"}):
        assert reported["truncated"].tolist() == [1, 0, 0, 0, 0]
    if "rollout_rs" in options:
        assert reported["masked"].tolist() == [float(weight == 0) for weight in expected]


def test_the_correction_of_a_token_that_the_sampler_hardly_had_is_finite():
    """e^200 is no float32: an untruncated weight of inf would make the whole step's loss NaN."""
    far = torch.tensor([200.0, -200.0])
    weights, reported = rollout_correction(
        far, torch.zeros(2), torch.tensor([0, 1]), rollout_is="token", rollout_is_threshold=math.inf
    )
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert all(value.isfinite().all() for value in reported.values())


def test_the_default_ratio_already_is_the_truncated_correction_of_each_token():
    """Sampler and trainer differ, as in bfloat16; the old log-probabilities are the sampler's."""
    torch.manual_seed(0)
    sampler = -torch.rand(4000, dtype=torch.float64)
    gap = 0.3 * torch.randn(4000, dtype=torch.float64)
    advantages = torch.randn(4000, dtype=torch.float64)

    def slopes(correct: bool) -> Tensor:
        logprobs = (sampler + gap).requires_grad_()
        old = logprobs.detach() if correct else sampler
        loss, _ = ppo(logprobs, old, advantages)
        if correct:
            weights, _ = rollout_correction(
                logprobs, sampler, torch.arange(4000), rollout_is="token"
            )
            loss = loss * weights
        loss.sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad

    default, corrected = slopes(False), slopes(True)
    inside = (gap.exp() - 1).abs() < 0.2
    assert 0.4 < inside.double().mean() < 0.9
    assert torch.allclose(default[inside], corrected[inside])
    # beyond the clip range the loss's own bound is the stricter one: nothing weighs more
    assert (default.abs() <= corrected.abs() + 1e-12)[gap.exp() < 2].all()
    uncorrected = -advantages
    assert not torch.allclose(default[inside], uncorrected[inside], rtol=0.05)


def test_the_correction_refuses_an_unknown_level():
    with pytest.raises(ValueError, match="rollout_is is 'word': expected one of token, sequence, "):
        rollout_correction(RATIOS, RATIOS, SAMPLES, rollout_is="word")  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rollout_is": "geometric", "rollout_is_threshold": 1.5}, [1.5, 1.5, 0.5, 0.5]),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token",
             "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 1e-9},
            [1.0, 0.0, 0.25, 1.0],
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": math.inf, "rollout_rs": "geometric",
             "rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 1e-9},
            [0.0, 0.0, 0.25, 1.0],
        ),
    ],
    ids=["samples truncated", "tokens masked from above", "samples masked from above"],
)  # fmt: skip
def test_corrections_from_above_alone(options: dict[str, Any], expected: list[float]) -> None:
    """Ratios 1, 4 of the first sample (their root 2) and 1/4, 1 of the second (1/2)."""
    ratios = torch.tensor([1.0, 4.0, 0.25, 1.0], dtype=torch.float64)
    samples = torch.tensor([0, 0, 1, 1])
    weights, _ = rollout_correction(ratios.log(), torch.zeros(4), samples, **options)
    assert weights.tolist() == pytest.approx(expected, abs=1e-12)


def test_dpo_with_a_part_of_sft_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -3.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    pairs, chosen = torch.tensor([0, 0, 0, 0]), torch.tensor([True, True, False, False])
    given = (logprobs, logprobs.detach(), pairs, chosen)
    loss, _ = dpo(*given, beta=0.3, rpo_alpha=0.1)
    assert loss.tolist() == pytest.approx([math.log(2) + 0.1 * 2.0] * 4, abs=1e-12)
    (loss / 4).sum().backward()
    assert logprobs.grad is not None
    slope = -0.3 / 2  # of -log sigmoid at 0
    expected = [slope - 0.05, slope - 0.05, -slope, -slope]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_tokens_of_the_highest_entropy_learn() -> None:
    entropies = torch.tensor([0.1, 0.5, 0.3, 0.2, 0.4], dtype=torch.float64)
    assert top_entropy(entropies, 0.4).tolist() == [False, True, False, False, True]
    assert top_entropy(entropies, 0.01).tolist() == [False, True, False, False, False]
    assert top_entropy(entropies, 1.0).all()
    for rounded in (0.4, 0.4 - 1e-7, 0.4 + 1e-7):  # which of two equal ones is no matter of bits
        entropies[2] = rounded
        assert top_entropy(entropies, 0.4).tolist() == [False, True, True, False, True]


def test_measures_of_trainer_and_engine_by_hand() -> None:
    sampler = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    trainer = sampler + torch.tensor([math.log(0.5), math.log(1.5)], dtype=torch.float64)
    _, reported = rollout_correction(trainer, sampler, torch.tensor([0, 0]), rollout_is="token")
    means = {f"rollout_correction/{k}": float(v.mean()) for k, v in reported.items()}
    means |= sampler_measures(means)
    found = {name.rpartition("/")[2]: value for name, value in means.items()}
    assert found["ratio"] == pytest.approx(1.0, abs=1e-12)
    assert found["chi2"] == pytest.approx(0.25, abs=1e-12)  # (0.25 + 2.25) / 2 - 1
    assert found["ess"] == pytest.approx(0.8, abs=1e-12)  # 1 / 1.25
    assert found["kl"] == pytest.approx(-math.log(0.75) / 2, abs=1e-12)
    assert found["k3_kl"] == pytest.approx(-math.log(0.75) / 2, abs=1e-12)  # mean w is 1
    assert found["sampler_ppl"] == pytest.approx(math.exp(1.5), abs=1e-12)
    assert found["trainer_ppl"] == pytest.approx(math.exp(1.5 - math.log(0.75) / 2), abs=1e-12)
    assert sampler_measures({}) == {}


def test_ratios_that_round_to_nothing_have_no_effective_sample_size() -> None:
    ids = torch.zeros(3, dtype=torch.long)
    _, reported = rollout_correction(torch.full((3,), -20.0), torch.full((3,), -1.0), ids)
    means = {f"rollout_correction/{name}": float(v.mean()) for name, v in reported.items()}
    assert means["rollout_correction/chi2"] == -1
    found = sampler_measures(means)
    assert found.keys() == {"rollout_correction/trainer_ppl", "rollout_correction/sampler_ppl"}
