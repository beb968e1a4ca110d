"""Losses of the extension against hand-worked values, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.test_more_losses import lp, reported_by, slope_of
from trireme.ext.more_losses.losses import (
    chord_mu,
    dppo,
    fipo,
    m2po,
    mix_chord,
    opmd,
    sapo,
    second_moment_mask,
    sft_is,
    sft_phi,
    sppo,
    topr,
)
from trireme.ext.more_losses.sequence_losses import geo_mean, real, rec, vespo


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "options", "value", "slope"),
    [
        (opmd, 2.0, 3.0, {}, -1.5 * lp(2), -1.5),
        (opmd, 2.0, 3.0, {"tau": 2.0}, -lp(2), -1),
        (sapo, 1.0, 2.0, {}, -4, -2),  # at r = 1 the slope is that of -A r
        (sapo, 3.0, 1.0, {}, -4 / (1 + math.exp(-2)), -12 * math.exp(-2) / (1 + math.exp(-2)) ** 2),
        (sapo, 1.0, -2.0, {}, 4 / 1.05, 2),
        (topr, 3.0, 2.0, {}, -2 * lp(3), -2),
        (topr, 3.0, -2.0, {}, 2 * lp(3), 2),
        (topr, 0.5, -2.0, {}, lp(0.5), 1),
        (m2po, 1.2, 2.0, {}, -2.4, -2.4),
        (m2po, 1.2, 2.0, {"log_ratio_clip": 0.1}, -2 * math.exp(0.1), 0),
        (sppo, 1.2, 2.0, {}, -2 * math.log(1.2), -2),
        (sppo, 1.4, 2.0, {}, 0, 0),
        (sppo, 0.7, 2.0, {}, 0, 0),
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
        (vespo, 1.0, 2.0, {}, -2 * lp(1), -2),
        (vespo, 2.0, 3.0, {}, -12 * math.exp(-3) * lp(2), -12 * math.exp(-3)),
        (vespo, 2.0, -3.0, {}, 24 * math.exp(-2) * lp(2), 24 * math.exp(-2)),
        (vespo, 0.5, 1.0, {"k_pos": 1.0, "lambda_pos": 0.5}, -0.5 * math.exp(0.25) * lp(0.5),
         -0.5 * math.exp(0.25)),
        (rec, 1.1, 2.0, {}, -2 * lp(1.1), -2),
        (rec, 1.3, 2.0, {}, -2 * lp(1.3), -2),  # nothing is clipped unless asked for
        (rec, 1.3, 2.0, {"clip_mode": "one-side"}, 0, 0),
        (rec, 0.5, 2.0, {"clip_mode": "one-side"}, -2 * lp(0.5), -2),
        (rec, 0.5, -2.0, {"clip_mode": "one-side"}, 0, 0),
        (rec, 1.3, 2.0, {"clip_mode": "gspo-one-side"}, 0, 0),
        (rec, 0.5, 2.0, {"clip_mode": "two-side"}, 0, 0),
        (rec, 0.5, 2.0, {"clip_mode": "ring"}, 0, 0),
        (rec, 0.3, 2.0, {"clip_mode": "ring"}, -2 * lp(0.3), -2),
        (rec, 2.5, -2.0, {"clip_mode": "ring"}, 0, 0),
        (rec, 3.5, 2.0, {"clip_mode": "ring"}, 0, 0),
        (rec, 3.5, -2.0, {"clip_mode": "ring"}, 2 * lp(3.5), 2),
        (rec, 1.1, 2.0, {"weight": "importance_sampling"}, -2.2 * lp(1.1), -2.2),
        (rec, 1.1, 2.0, {"weight": "gspo_importance_sampling"}, -2.2 * lp(1.1), -2.2),
        (rec, 1.1, 2.0, {"weight": "advantage", "temp": 4.0}, -2 * math.exp(0.5) * lp(1.1),
         -2 * math.exp(0.5)),
        (rec, 2.0, 0.0, {"regularizer": "k2", "regularizer_coef": 3.0}, 3 * math.log(2) ** 2,
         6 * math.log(2)),
        (rec, 2.0, 0.0, {"regularizer": "forward-kl", "regularizer_coef": 3.0}, -3 * math.log(2),
         -3),
    ],
)  # fmt: skip
def test_a_tokens_loss_and_slope(loss, ratio, advantage, options, value, slope):
    assert slope_of(loss, ratio, advantage, **options) == pytest.approx((value, slope), abs=1e-6)


@pytest.mark.parametrize("loss", [dppo, m2po, fipo, geo_mean, vespo, rec, real])
def test_a_loss_reports_how_far_the_policy_has_moved(loss):
    reported = reported_by(loss)
    if loss is dppo:
        assert reported["masked"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("option", ["clip_mode", "weight", "regularizer"])
def test_rec_refuses_an_unknown_variant(option):
    with pytest.raises(ValueError, match=f"{option} is 'other': expected one of none, "):
        slope_of(rec, 1.0, 1.0, **{option: "other"})


def test_weighted_imitation():
    p = torch.tensor([0.5, 0.9], dtype=torch.float64)
    assert sft_is(p.log()).tolist() == pytest.approx((-p * p.log()).tolist())
    assert sft_phi(p.log()).tolist() == pytest.approx((-p * (1 - p) * p.log()).tolist())
    assert sft_phi(p.log(), cutoff_prob=0.8)[1] == 0


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


def test_chord_is_mix_with_a_weight_of_its_own():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    old, advantages = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.0])
    expert, step = torch.tensor([False, True]), torch.tensor(5)
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
