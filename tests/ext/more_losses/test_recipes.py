"""Recipes of the extension's parts, the rows of its algorithms, and their former names."""

from __future__ import annotations

import pytest

from tests.algorithms.test_recipes import experiences_of
from trireme.algorithms import advantage, kl, policy_loss, sequence_loss, table, token_advantage
from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.ext.more_losses import advantages, losses, sequence_losses, token_advantages
from trireme.extensions import extensions
from trireme.registry import ALGORITHMS, POLICY_LOSSES


def test_every_name_of_the_extension_is_known():
    names = extensions()["more_losses"].names
    assert {kind: len(own) for kind, own in names.items()} == {
        "algorithm": 15,
        "advantage": 12,
        "policy_loss": 14,
        "kl_loss": 1,
    }


def test_what_lay_in_the_kernel_is_found_there():
    assert policy_loss.fipo is losses.fipo and kl.sdar is losses.sdar
    assert sequence_loss.real is sequence_losses.real and advantage.rec is advantages.rec
    assert token_advantage.jsd is token_advantages.jsd
    assert table.real is ALGORITHMS.get("real")
    assert POLICY_LOSSES.get("trireme.algorithms.policy_loss.m2po") is losses.m2po


def test_an_advantage_of_tokens_may_start_from_that_of_groups():
    args = {"std_threshold": 0.01, "mu": 1.0}
    recipe = get_recipe(
        AlgorithmConfig.model_construct(
            algorithm_type="grpo", advantage_fn="clipb", advantage_fn_args=args
        )
    )
    kept, metrics = recipe.advantages(
        experiences_of({(0, 0): 0.0, (0, 1): 2.0, (1, 0): 9.0, (1, 1): 9.0})
    )
    assert [float(e.advantages[2]) for e in kept if e.advantages is not None] == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], abs=1e-5
    )
    assert metrics["filtered_count"] == 2
    assert recipe.token_advantage is not None and recipe.token_advantage.options == {"mu": 1.0}
    with pytest.raises(ValueError, match=r"no option 'mus'.*It has: mu, epsilon, std_threshold"):
        given = {"advantage_fn": "clipb", "advantage_fn_args": {"mus": 1}}
        get_recipe(AlgorithmConfig.model_construct(algorithm_type="grpo", **given))


def test_raft_learns_from_the_only_rollout_of_a_task():
    recipe = get_recipe(AlgorithmConfig.model_construct(algorithm_type="raft"))
    assert not recipe.needs_groups
    kept, _ = recipe.advantages(experiences_of({(0, 0): 1.0, (1, 0): 0.0}))
    assert [e.eid.task for e in kept] == [0]
