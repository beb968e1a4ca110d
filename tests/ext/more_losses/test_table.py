"""Every row of the extension's algorithms as its paper has it, typed by hand."""

from __future__ import annotations

import pytest

from tests.algorithms.test_table import GRPO, K2, PPO, Row, agrees
from trireme.extensions import extensions

# as in tests/algorithms/test_table.py
ROWS: dict[str, Row] = {
    # arXiv:2505.10978
    "gigpo": (
        ("gigpo", {"omega": 1.0, "gamma": 1.0, "fnorm": "none"}),
        ("ppo", PPO | {"clip_range_low": 0.2, "clip_range_high": 0.2}),
        K2 | {"group_size": 8},
    ),
    # arXiv:2510.01161
    "m2po": (("grpo", GRPO), ("m2po", {"m2_threshold": 0.04}), {}),
    # arXiv:2602.05630
    "real": (
        ("grpo", GRPO),
        ("real", {"tau": 0.5}),
        {"kl_loss_fn": "none", "loss_agg_mode": "seq-mean-token-mean", "group_size": 8},
    ),
    # arXiv:2603.19835
    "fipo": (
        ("grpo", GRPO),
        ("fipo", {"half_life": 32.0, "influence_clip": 0.2, "safety_threshold": 4.0}),
        {"kl_loss_fn": "none"},
    ),
    # arXiv:2604.03128
    "rlsd": (
        ("rlsd", {"lam": 0.5, "weight_clip": 0.2}),
        ("ppo", PPO),
        {"kl_loss_fn": "none", "in_trainer": True},
    ),
    # arXiv:2601.05242
    "gdpo": (("gdpo", {"epsilon": 1e-4}), ("ppo", PPO), K2),
    # arXiv:2511.20347
    "sapo": (("grpo", GRPO), ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}), K2),
    # arXiv:2505.17826
    "opmd": (("opmd", {"opmd_baseline": "mean", "tau": 1.0}), ("opmd", {"tau": 1.0}), K2),
    # arXiv:2506.20520
    "asymre": (
        ("asymre", {"baseline_shift": -0.1}),
        ("opmd", {"tau": 1.0}),
        {"entropy_loss_fn": "none"},
    ),
    # arXiv:2503.14286
    "topr": (("reinforce", {}), ("topr", {"advantage_threshold": 0.0}), K2),
    # arXiv:2108.05828
    "sppo": (
        ("opmd", {"opmd_baseline": "mean"}),
        ("sppo", {"epsilon": 0.3}),
        {"entropy_loss_fn": "none"},
    ),
    # arXiv:2509.24203
    "rec": (
        ("rec", {"std_normalize": False, "drop": None}),
        (
            "rec",
            {
                "clip_mode": "none",
                "epsilon_low": 0.2,
                "epsilon_high": 0.2,
                "epsilon_low_prime": 0.6,
                "epsilon_high_prime": 2.0,
                "weight": "none",
                "temp": 1.0,
                "regularizer": "none",
                "regularizer_coef": 0.0,
            },
        ),
        K2,
    ),
    # arXiv:2304.06767
    "raft": (("raft", {"min_reward": 0.0}), ("sft", {}), {"entropy_loss_fn": "none"}),
    # arXiv:2508.11408
    "mix_chord": (
        ("grpo", GRPO),
        (
            "mix_chord",
            {
                "mu_warmup_steps": 0,
                "mu_decay_steps": 0,
                "mu_peak": 0.1,
                "mu_valley": 0.1,
                "enable_phi_function": True,
                "cutoff_prob": 1.0,
                "clip_range": 0.2,
            },
        ),
        K2 | {"entropy_loss_fn": "mix", "sample_strategy": "mix"},
    ),
    "jsd": (
        ("jsd", {"kl_coef": 1.0, "lambda_coef": 0.5, "temperature": 1.0}),
        ("ppo", PPO),
        {"entropy_loss_fn": "none", "in_trainer": True},
    ),
}


def test_every_algorithm_has_a_row_here():
    assert {*ROWS} == {*extensions()["more_losses"].names["algorithm"]}


@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_the_papers(name):
    agrees(name, ROWS[name])
