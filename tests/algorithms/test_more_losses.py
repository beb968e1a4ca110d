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
    chord_mu,
    cispo,
    dppo,
    fipo,
    importance_sampling,
    m2po,
    mix,
    mix_chord,
    opmd,
    ppo,
    rollout_correction,
    sampler_measures,
    sapo,
    second_moment_mask,
    sft_is,
    sft_phi,
    sppo,
    topr,
)
from trireme.algorithms.sequence_loss import dpo, geo_mean, gspo, kto, real, rec, vespo


def _slope(loss, ratio: float, advantage: float, **options) -> tuple[float, float]:
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


def _lp(ratio: float) -> float:
    return math.log(ratio) - 1


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "options", "value", "slope"),
    [
        (opmd, 2.0, 3.0, {}, -1.5 * _lp(2), -1.5),
        (opmd, 2.0, 3.0, {"tau": 2.0}, -_lp(2), -1),
        (importance_sampling, 2.0, 3.0, {}, -6, -6),
        (cispo, 1.1, 2.0, {}, -2.2 * _lp(1.1), -2.2),
        (cispo, 3.0, 2.0, {}, -2.56 * _lp(3), -2.56),  # clipped, and still learning
        (cispo, 3.0, 2.0, {"enable_mask_clip": True}, 0, 0),
        (cispo, 3.0, -2.0, {"enable_mask_clip": True}, 2.56 * _lp(3), 2.56),
        # the mask has ranges of its own
        (cispo, 3.0, 2.0, {"enable_mask_clip": True, "mask_clip_range_high": 2.5}, -2.56 * _lp(3),
         -2.56),
        (cispo, 0.5, -2.0, {"enable_mask_clip": True, "mask_clip_range_low": 0.2}, 0, 0),
        (cispo, 0.5, -2.0, {"enable_mask_clip": True, "clip_range_low": 0.2}, 1.6 * _lp(0.5), 1.6),
        (sapo, 1.0, 2.0, {}, -4, -2),  # at r = 1 the slope is that of -A r
        (sapo, 3.0, 1.0, {}, -4 / (1 + math.exp(-2)), -12 * math.exp(-2) / (1 + math.exp(-2)) ** 2),
        (sapo, 1.0, -2.0, {}, 4 / 1.05, 2),
        (topr, 3.0, 2.0, {}, -2 * _lp(3), -2),
        (topr, 3.0, -2.0, {}, 2 * _lp(3), 2),
        (topr, 0.5, -2.0, {}, _lp(0.5), 1),
        (m2po, 1.2, 2.0, {}, -2.4, -2.4),
        (m2po, 1.2, 2.0, {"log_ratio_clip": 0.1}, -2 * math.exp(0.1), 0),
        (sppo, 1.2, 2.0, {}, -2 * math.log(1.2), -2),
        (sppo, 1.4, 2.0, {}, 0, 0),
        (sppo, 0.7, 2.0, {}, 0, 0),
        (gspo, 1.0002, 2.0, {}, -2.0004, -2.0004),
        (gspo, 1.01, 2.0, {}, -2.0008, 0),
        (gspo, 0.99, -2.0, {}, 1.9994, 0),
        (gspo, 1.01, -2.0, {}, 2.02, 2.02),
        (geo_mean, 1.2, 2.0, {}, -2.4, -2.4),
        (geo_mean, 2.0, 2.0, {}, -2 * math.exp(0.4), 0),
        (geo_mean, 0.5, 2.0, {}, -1, -1),
        (geo_mean, 0.5, -2.0, {"clip_range_low": 0.1}, 2 * math.exp(-0.1), 0),
        (geo_mean, 2.0, -2.0, {}, 4, 4),
        # p_old is 1 / e: p - p_old is 0.184 at r = 1.5, 0.294 at 1.8, -0.294 at 0.2
        (dppo, 1.5, 2.0, {"kl_tau": 0.0}, -3, -3),
        (dppo, 1.8, 2.0, {"kl_tau": 0.0}, 0, 0),
        (dppo, 1.8, -2.0, {"kl_tau": 0.0}, 3.6, 3.6),
        (dppo, 0.2, -2.0, {"kl_tau": 0.5}, 0.5 * math.log(0.2) ** 2, math.log(0.2)),
        (dppo, 0.2, -2.0, {"dppo_mask_low": 0.3, "kl_tau": 0.0}, 0.4, 0.4),
        (vespo, 1.0, 2.0, {}, -2 * _lp(1), -2),
        (vespo, 2.0, 3.0, {}, -12 * math.exp(-3) * _lp(2), -12 * math.exp(-3)),
        (vespo, 2.0, -3.0, {}, 24 * math.exp(-2) * _lp(2), 24 * math.exp(-2)),
        (vespo, 0.5, 1.0, {"k_pos": 1.0, "lambda_pos": 0.5}, -0.5 * math.exp(0.25) * _lp(0.5),
         -0.5 * math.exp(0.25)),
        (gspo, 1.3, 2.0, {"clip_range": 0.25}, -2.5, 0),
        (gspo, 0.7, -2.0, {"clip_range": 0.25}, 1.5, 0),
        (gspo, 1.3, 2.0, {"clip_range": 0.25, "clip_range_high": 0.5}, -2.6, -2.6),
        (gspo, 0.7, -2.0, {"clip_range": 0.25, "clip_range_low": 0.5}, 1.4, 1.4),
        (rec, 1.1, 2.0, {}, -2 * _lp(1.1), -2),
        (rec, 1.3, 2.0, {}, -2 * _lp(1.3), -2),  # nothing is clipped unless asked for
        (rec, 1.3, 2.0, {"clip_mode": "one-side"}, 0, 0),
        (rec, 0.5, 2.0, {"clip_mode": "one-side"}, -2 * _lp(0.5), -2),
        (rec, 0.5, -2.0, {"clip_mode": "one-side"}, 0, 0),
        (rec, 1.3, 2.0, {"clip_mode": "gspo-one-side"}, 0, 0),
        (rec, 0.5, 2.0, {"clip_mode": "two-side"}, 0, 0),
        (rec, 0.5, 2.0, {"clip_mode": "ring"}, 0, 0),
        (rec, 0.3, 2.0, {"clip_mode": "ring"}, -2 * _lp(0.3), -2),
        (rec, 2.5, -2.0, {"clip_mode": "ring"}, 0, 0),
        (rec, 3.5, 2.0, {"clip_mode": "ring"}, 0, 0),
        (rec, 3.5, -2.0, {"clip_mode": "ring"}, 2 * _lp(3.5), 2),
        (rec, 1.1, 2.0, {"weight": "importance_sampling"}, -2.2 * _lp(1.1), -2.2),
        (rec, 1.1, 2.0, {"weight": "gspo_importance_sampling"}, -2.2 * _lp(1.1), -2.2),
        (rec, 1.1, 2.0, {"weight": "advantage", "temp": 4.0}, -2 * math.exp(0.5) * _lp(1.1),
         -2 * math.exp(0.5)),
        (rec, 2.0, 0.0, {"regularizer": "k2", "regularizer_coef": 3.0}, 3 * math.log(2) ** 2,
         6 * math.log(2)),
        (rec, 2.0, 0.0, {"regularizer": "forward-kl", "regularizer_coef": 3.0}, -3 * math.log(2),
         -3),
        (ppo, 3.0, 2.0, {"fallback_to_policy_gradient": True}, -2, -2),
        (ppo, 0.5, -1.0, {"enable_sequence_masking": True}, 0, 0),
        (ppo, 0.5, 1.0, {"enable_sequence_masking": True}, -0.5, -0.5),
        (ppo, 0.5, -1.0, {"enable_sequence_masking": True, "delta_sequence_masking": 0.7}, 0.8, 0),
    ],
)  # fmt: skip
def test_a_tokens_loss_and_slope(loss, ratio, advantage, options, value, slope):
    assert _slope(loss, ratio, advantage, **options) == pytest.approx((value, slope), abs=1e-6)


@pytest.mark.parametrize("loss", [ppo, dppo, m2po, fipo, gspo, geo_mean, vespo, rec, real])
def test_a_loss_reports_how_far_the_policy_has_moved(loss):
    old = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([_lp(1.8), _lp(0.2), _lp(1.1)], dtype=torch.float64).requires_grad_()
    given = {"logprobs": logprobs, "old_logprobs": old, "sample_ids": torch.tensor([0, 0, 1])}
    given |= {"advantages": torch.tensor([2.0, 2.0, -1.0]), "positions": torch.tensor([3, 4, 3])}
    names = loss.__code__.co_varnames[: loss.__code__.co_argcount]
    _, reported = loss(**{name: given[name] for name in names})
    expected = [-math.log(1.8), -math.log(0.2), -math.log(1.1)]
    assert reported["ppo_kl"].tolist() == pytest.approx(expected)
    assert not any(values.requires_grad for values in reported.values())
    if loss is dppo:
        assert reported["masked"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("option", ["clip_mode", "weight", "regularizer"])
def test_rec_refuses_an_unknown_variant(option):
    with pytest.raises(ValueError, match=f"{option} is 'other': expected one of none, "):
        _slope(rec, 1.0, 1.0, **{option: "other"})


def test_weighted_imitation():
    p = torch.tensor([0.5, 0.9], dtype=torch.float64)
    assert sft_is(p.log()).tolist() == pytest.approx((-p * p.log()).tolist())
    assert sft_phi(p.log()).tolist() == pytest.approx((-p * (1 - p) * p.log()).tolist())
    assert sft_phi(p.log(), cutoff_prob=0.8)[1] == 0


def test_segments_are_summed_and_averaged_by_sample():
    values, ids = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 2])
    assert segment_sum(values, ids).tolist() == [3, 3, 6]
    assert segment_mean(values, ids).tolist() == [1.5, 1.5, 6]


def test_vespos_weight_is_of_the_product_of_a_samples_ratios():
    old = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.tensor([math.log(2), math.log(1.5), 60.0], dtype=torch.float64)
    logprobs.requires_grad_()
    loss, reported = vespo(logprobs, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]))
    phi = 9 * math.exp(-6)  # w = 3: w^2 exp(3 (1 - w))
    assert reported["vespo_weight"].tolist() == pytest.approx([phi, phi, 0.0])  # and finite
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-phi, -phi, 0.0])


def test_a_geometric_mean_is_of_clipped_ratios_and_the_clipped_have_no_gradient():
    logprobs = torch.tensor([0.2, 1.0, -0.3], dtype=torch.float64, requires_grad=True)
    loss, _ = geo_mean(logprobs, torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.long))
    s = math.exp((0.2 + 0.4 - 0.3) / 3)
    assert loss.tolist() == pytest.approx([-s] * 3)
    loss.mean().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-s / 3, 0.0, -s / 3])


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
    step = torch.tensor(5)
    chord, _ = mix_chord(logprobs, old, advantages, expert, step, mu_valley=0.5)
    p = math.exp(-2)
    assert chord.tolist() == pytest.approx([0.5 * -3, 0.5 * p * (1 - p) * 2])
    plain, _ = mix_chord(logprobs, old, advantages, expert, step, enable_phi_function=False)
    assert plain.tolist() == pytest.approx([0.9 * -3, 0.1 * 2])


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0), (5, 0.45), (10, 0.9), (15, 0.5), (20, 0.1), (99, 0.1)],
)
def test_chords_mu_rises_and_falls(step, expected):
    assert chord_mu(step, 10, 10, mu_peak=0.9, mu_valley=0.1) == pytest.approx(expected)


def test_the_entropy_of_an_experts_tokens_does_not_count():
    out = own_entropy(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    assert out.tolist() == [1, 0]


def test_corrected_k3_weighs_by_the_ratio_up_to_2():
    logprobs, ref = torch.zeros(2), torch.full((2,), -math.log(2))
    plain = 0.5 - 1 + math.log(2)
    old = torch.tensor([-math.log(1.5), -math.log(8)])
    assert kl.corrected_k3(logprobs, ref, old).tolist() == pytest.approx([1.5 * plain, 2 * plain])
    assert kl.corrected_k3(logprobs, ref).tolist() == pytest.approx([plain, plain])


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


def test_m2po_leaves_out_the_furthest_tokens_until_the_second_moment_is_low() -> None:
    logs = torch.tensor([0.1, 0.2, 0.5, 0.9, -0.9, -0.2], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    old = torch.zeros(6, dtype=torch.float64)
    # the fifth has r < 1 and A > 0: PPO's clip would not touch it. Means of the sorted squares:
    # 0.01, 0.025, 0.03 (of A < 0), 0.085, 0.23
    chosen = second_moment_mask(logs, old, advantages, m2_threshold=0.1)
    assert chosen.tolist() == [True, True, True, False, True, True]
    chosen = second_moment_mask(logs, old, advantages, m2_threshold=0.02)
    assert chosen.tolist() == [True, False, False, False, True, False]
    loss, _ = m2po(logs, old, advantages, log_ratio_clip=0.6)
    expected = [-math.exp(x) for x in (0.1, 0.2, 0.5, 0.6, -0.6)] + [math.exp(-0.2)]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    loss.sum().backward()
    assert logs.grad is not None
    slopes = [*expected[:3], 0.0, 0.0, expected[5]]  # none beyond the clip
    assert logs.grad.tolist() == pytest.approx(slopes, abs=1e-12)


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
