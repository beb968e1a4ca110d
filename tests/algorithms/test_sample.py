"""Sample: an expert's rows beside one's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from trireme.algorithms.recipes import get_recipe
from trireme.algorithms.sample import own_share, representative_sample
from trireme.experience import EID, Experience

MORE_LOSSES = pytest.mark.extension("more_losses")


class Rows:
    """An endless buffer of one kind, which remembers what was asked for."""

    def __init__(self, kind: str) -> None:
        self.kind, self.asked = kind, []

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        self.asked.append(n)
        return [Experience([1, 2, 3], prompt_length=1, eid=EID(self.kind, i)) for i in range(n)]

    async def take_step(self) -> list[Experience]:
        raise AssertionError("not asked for")


def _recipe(**given):
    return get_recipe(SimpleNamespace(algorithm_type="mix", **given))


def test_the_expert_gives_its_share_rounded_up():
    own, expert = Rows("own"), Rows("expert")
    recipe = _recipe(sample_strategy_args={"expert_data_ratio": 0.3})
    taken, metrics = asyncio.run(recipe.take(own, 8, 0, {"sft_dataset": expert}))
    assert (own.asked, expert.asked) == ([5], [3])
    assert metrics == {"sample/expert_count": 3}
    theirs = [e for e in taken if e.info.get("is_expert")]
    assert [e.eid.batch for e in theirs] == ["expert"] * 3
    for e in theirs:
        assert e.reward == 0 and e.version == -1
        assert e.versions is not None and set(e.versions.tolist()) == {-1}
        assert e.advantages is not None and not e.advantages.any()


def test_a_mix_without_its_buffer_is_told():
    with pytest.raises(ValueError, match=r"auxiliary_buffers\.sft_dataset, which is not given"):
        asyncio.run(_recipe().take(Rows("own"), 8))


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_share_is_between_0_and_1(ratio):
    with pytest.raises(ValueError, match="more than 0 and less than 1"):
        own_share(8, ratio)


def test_a_mix_needs_the_strategy_that_brings_the_expert():
    with pytest.raises(ValueError, match="'mix' needs an expert's rows, which 'mix' brings"):
        _recipe(sample_strategy="default")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm_type": "dpo", "loss_agg_mode": "token-mean"}, "a loss of pairs, whose mean"),
        ({"algorithm_type": "grpo", "policy_loss_fn": "dpo",
          "loss_agg_mode": "seq-mean-token-mean"}, "is of algorithm_type dpo, and of no other"),
        ({"algorithm_type": "kto", "loss_agg_mode": "token-mean"}, "labelled replies, whose mean"),
        ({"algorithm_type": "kto", "policy_loss_fn": "sft"}, "'sft', which is not a loss of label"),
        ({"algorithm_type": "dpo", "policy_loss_fn": "kto"}, "'kto', which is not a loss of pairs"),
        ({"algorithm_type": "grpo", "policy_loss_fn": "kto"}, "is of algorithm_type kto, and of"),
        ({"algorithm_type": "grpo", "teacher_kl_fn": "k9"}, "unknown algorithm.teacher_kl_fn 'k9'"),
        ({"algorithm_type": "ppo", "kl_penalty_fn": "k9"}, "unknown algorithm.kl_penalty_fn 'k9'"),
        ({"algorithm_type": "ppo", "kl_penalty_fn": "no_such:k9"}, "algorithm.kl_penalty_fn 'no_s"),
        ({"algorithm_type": "rloo", "kl_penalty_fn": "k1"}, "sample_strategy explore_step"),
        ({"algorithm_type": "remax", "kl_penalty_fn": "k1"}, "'remax' has an advantage"),
        ({"algorithm_type": "multi_step_grpo", "kl_penalty_fn": "k1"}, "not one of each rollout's"),
        pytest.param({"algorithm_type": "grpo", "advantage_fn": "gdpo", "kl_penalty_fn": "k1"},
                     "grpo or rloo", marks=MORE_LOSSES),
        pytest.param({"algorithm_type": "grpo", "advantage_fn": "clipb", "kl_penalty_fn": "k1"},
                     "no token's", marks=MORE_LOSSES),
        ({"algorithm_type": "sft", "kl_penalty_fn": "k1"}, "'sft' has no rewards"),
        ({"algorithm_type": "rloo", "kl_penalty_fn": "k1", "sample_strategy": "explore_step",
          "advantage_fn_args": {"duplicate_experiences": True}}, "duplicate_experiences: false"),
        ({"algorithm_type": "ppo", "rollout_correction": {"rollout_iss": "token"}},
         "has no option 'rollout_iss' .did you mean 'rollout_is'"),
        pytest.param({"algorithm_type": "rec", "policy_loss_fn_args": {"clip": 1}},
                     "It has: clip_mode, eps", marks=MORE_LOSSES),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_in_one_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        get_recipe(SimpleNamespace(**given))


@pytest.mark.parametrize(
    ("strategy", "once"),
    [("default", True), ("warmup", True), ("explore_step", True), ("staleness_control", True)],
)
def test_a_strategy_says_whether_a_batch_is_one_take_of_the_buffer(strategy, once):
    """Where it is, a take that is cancelled has taken nothing."""
    recipe = get_recipe(SimpleNamespace(algorithm_type="grpo", sample_strategy=strategy))
    assert recipe.takes_once is once


def test_what_a_sample_strategy_shows_is_the_worst_and_the_best():
    def rollout(reward: float | None, text: str) -> Experience:
        return Experience(
            [1, 2], prompt_length=1, reward=reward, prompt_text="?", response_text=text
        )

    rows = [rollout(0.5, "b"), rollout(1.0, "c"), rollout(None, "d"), rollout(-2.0, "a")]
    assert representative_sample(rows) == [
        {"prompt": "?", "response": "a", "reward": -2.0},
        {"prompt": "?", "response": "c", "reward": 1.0},
    ]
    assert representative_sample(rows[2:3]) == [{"prompt": "?", "response": "d", "reward": None}]
    assert representative_sample([]) == []
