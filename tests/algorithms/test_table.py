"""Table: every row of the kernel's algorithms as its paper has it, typed by hand.

The numbers are the papers' (or, where a paper leaves one open, those of the system whose YAML we
read): a changed default of a row or of a part it names is a changed algorithm.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.extensions import kernel

K2 = {"kl_loss_fn": "k2"}
PPO = {
    "clip_range": 0.2,
    "clip_range_low": None,
    "clip_range_high": None,
    "clip_ratio_c": 3.0,
    "enable_sequence_masking": False,
    "fallback_to_policy_gradient": False,
}
BY_STD = {"epsilon": 1e-6, "std_threshold": None, "std_cal_level": "group"}
GRPO = BY_STD | {"norm_by_std": True, "rank_penalty": None}
MU = {"mu": 0.1, "clip_range": 0.2}

Row = tuple[tuple[str | None, dict], tuple[str, dict], dict[str, Any]]
# algorithm: ((advantage, its options), (policy loss, its options), what else differs from a row
# without reference, critic, entropy bonus and greedy run, averaged over the batch's tokens)
ROWS: dict[str, Row] = {
    "sft": ((None, {}), ("sft", {}), {"schema": "sft"}),
    "cpt": ((None, {}), ("sft", {}), {"schema": "cpt"}),
    # arXiv:2305.18290: beta 0.1, a log sigmoid a pair
    "dpo": (
        (None, {}),
        ("dpo", {"beta": 0.1, "label_smoothing": 0.0}),
        {"schema": "dpo", "loss_agg_mode": "seq-mean-token-mean", "reference": True},
    ),
    # arXiv:2402.01306: beta 0.1, both kinds of replies weigh 1
    "kto": (
        (None, {}),
        ("kto", {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
        {"schema": "kto", "loss_agg_mode": "seq-mean-token-mean", "reference": True},
    ),
    # arXiv:1707.06347 with the dual clip of arXiv:1912.09729; arXiv:1506.02438
    "ppo": (
        ("ppo", {"gamma": 1.0, "lam": 1.0}),
        ("ppo", PPO),
        K2 | {"critic": True, "in_trainer": True},
    ),
    # arXiv:2402.03300
    "grpo": (("grpo", GRPO), ("ppo", PPO), K2),
    "multi_step_grpo": (("step_wise_grpo", BY_STD | {"enable_step_norm": False}), ("ppo", PPO), K2),
    # arXiv:2503.14476: clip-higher, token mean, no KL, groups that teach nothing are left out
    "dapo": (
        ("dapo", {"std_threshold": 0.0, "overlong_length": None, "overlong_penalty": 1.0}),
        ("ppo", PPO | {"clip_range_low": 0.2, "clip_range_high": 0.28}),
        {},
    ),
    # arXiv:2503.20783: no std, no mean over a reply's own length
    "dr_grpo": (
        ("grpo", GRPO | {"norm_by_std": False}),
        ("ppo", PPO),
        {"kl_loss_fn": "none", "loss_agg_mode": "seq-mean-token-sum-norm"},
    ),
    # arXiv:2507.18071
    "gspo": (
        ("grpo", GRPO),
        ("gspo", dict.fromkeys(("clip_range", "clip_range_low", "clip_range_high"))),
        K2 | {"loss_agg_mode": "seq-mean-token-mean"},
    ),
    # arXiv:2506.13585
    "cispo": (
        ("grpo", GRPO),
        ("cispo", {"clip_range_low": 1.0, "clip_range_high": 0.28, "enable_mask_clip": False}),
        K2,
    ),
    # arXiv:2402.14740
    "rloo": (("rloo", {}), ("ppo", PPO), K2),
    # arXiv:2501.03262
    "reinforceplusplus": (
        ("reinforceplusplus", {"gamma": 1.0}),
        ("ppo", PPO),
        K2 | {"in_trainer": True},
    ),
    # arXiv:2310.10505
    "remax": (
        ("remax", {}),
        ("ppo", PPO),
        {"kl_loss_fn": "none", "greedy_run": True, "group_size": 2},
    ),
    # arXiv:2505.17826
    "mix": (
        ("grpo", GRPO),
        ("mix", MU),
        K2 | {"entropy_loss_fn": "mix", "sample_strategy": "mix"},
    ),
    # arXiv:2306.13649
    "on_policy_distill": (
        ("on_policy_distill", {"kl_coef": 1.0}),
        ("ppo", PPO),
        {"entropy_loss_fn": "none", "in_trainer": True},
    ),
}
PLAIN = {
    "schema": "experience",
    "kl_loss_fn": "none",
    "kl_penalty_fn": "none",
    "loss_agg_mode": "token-mean",
    "sample_strategy": "default",
    "group_size": 1,
    "greedy_run": False,
}


def _recipe(name: str, **given: Any) -> Recipe:
    return get_recipe(AlgorithmConfig(algorithm_type=name, **given))


def _options(recipe: Recipe, kind: str) -> dict[str, Any]:
    """What a part runs with: its function's defaults, and the row's options over them."""
    part = recipe.parts[kind]
    parameters = inspect.signature(part.function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | dict(part.options)


def test_every_algorithm_has_a_row_here():
    assert {*ROWS, "grpo_verl"} == {*kernel().names["algorithm"]}
    assert _recipe("grpo_verl") is not None and _recipe("grpo_verl").name == "grpo"


@pytest.mark.parametrize("name", ROWS)
def test_the_row_is_the_papers(name):
    agrees(name, ROWS[name])


def agrees(name: str, row: Row) -> None:
    """Assert that an algorithm is this row."""
    (advantage, advantage_options), (loss, loss_options), rest = row
    recipe = _recipe(name)
    assert (recipe.advantage_fn, recipe.policy_loss_fn) == (advantage, loss)
    for kind, expected in (
        ("advantage_fn", advantage_options),
        ("policy_loss_fn", loss_options),
    ):
        got = _options(recipe, kind) if expected else {}
        assert {key: got[key] for key in expected} == expected
    from_data = rest.get("schema", "experience") != "experience"
    entropy = rest.get("entropy_loss_fn", "none" if from_data else "default")
    assert recipe.entropy_loss_fn == entropy and recipe.entropy is None, "its coefficient is 0"
    assert {field: getattr(recipe, field) for field in PLAIN} == {
        field: rest.get(field, usual) for field, usual in PLAIN.items()
    }
    assert recipe.needs_reference == rest.get("reference", recipe.kl_loss_fn == "k2")
    assert recipe.needs_critic == rest.get("critic", False)
    assert (recipe.token_advantage is not None) == rest.get("in_trainer", False)
    assert recipe.bypass_old_logprobs
    if recipe.kl is not None:
        assert recipe.kl.settings == {
            "kl_coef": 0.001,
            "adaptive": False,
            "target_kl": 0.1,
            "horizon": 10000.0,
        }
