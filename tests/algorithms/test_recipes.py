"""Recipes: what the YAML may say of an algorithm, and how a user adds one."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Optional

import pytest
import torch
from annotated_types import Gt, Le
from torch import Tensor

from trireme.algorithms.advantage import by_group
from trireme.algorithms.recipes import Recipe, algorithm, get_recipe
from trireme.batch import Columns, flatten
from trireme.config.schema import AlgorithmConfig
from trireme.experience import EID, Experience
from trireme.extensions import kernel
from trireme.registry import (
    ADVANTAGES,
    ALGORITHMS,
    ENTROPIES,
    KLS,
    POLICY_LOSSES,
    SAMPLES,
    advantage,
    policy_loss,
)
from trireme.usercode import fault_of


def _config(**given):
    return AlgorithmConfig.model_construct(**given)  # what a section would refuse, too


def experiences_of(rewards: Mapping[tuple[int, int], float | None]) -> list[Experience]:
    """{(task, run): reward}, each two prompt tokens and two sampled ones, the last not trained."""
    return [
        Experience(
            [5, 6, 7, 8], mask=[False, False, True, False], eid=EID(3, task, run), reward=reward
        )
        for (task, run), reward in rewards.items()
    ]


@pytest.mark.parametrize(
    ("kind", "registry", "some", "count"),
    [
        ("algorithm", ALGORITHMS, {"grpo", "grpo_verl", "ppo", "sft"}, 17),
        ("advantage", ADVANTAGES, {"grpo", "rloo", "ppo", "reinforceplusplus"}, 11),
        ("policy_loss", POLICY_LOSSES, {"ppo", "gspo", "dpo", "mix"}, 8),
        ("kl_loss", KLS, {"none", "k2", "abs"}, 7),
        ("entropy_loss", ENTROPIES, {"none", "default", "mix"}, 3),
        ("sample_strategy", SAMPLES, {"default", "warmup", "mix"}, 5),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_every_name_of_the_kernel_is_known(kind, registry, some, count):
    names = kernel().names[kind]
    assert some <= {*names} <= {*registry.built_in()} and len(names) == count
    assert all(callable(registry.get(name)) or registry is ALGORITHMS for name in names)


def test_an_algorithm_may_be_like_another():
    recipe = algorithm("like_dapo", like="dapo", kl="k1", group_size=4)
    dapo = ALGORITHMS.get("dapo")
    assert (recipe.advantage_fn, recipe.options) == ("dapo", dapo.options)
    assert (recipe.kl_loss_fn, recipe.group_size, recipe.use) == ("k1", 4, "")


def test_registering_loads_no_torch():
    code = "import sys, trireme.registry; from trireme import advantage, kl_loss; "
    code += "advantage('mine')(print); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_grpo_has_a_reference_model_unless_its_coefficient_is_zero():
    assert get_recipe(_config(algorithm_type="grpo")).needs_reference
    off = _config(algorithm_type="grpo", kl_loss_fn_args={"kl_coef": 0.0})
    assert not get_recipe(off).needs_reference
    assert not get_recipe(_config(algorithm_type="grpo", kl_loss_fn="none")).needs_reference


def test_sft_has_neither_advantage_nor_reference():
    recipe = get_recipe(_config(algorithm_type="sft"))
    assert (recipe.schema, recipe.needs_reference) == ("sft", False)
    experiences = experiences_of({(0, 0): None})
    assert recipe.advantages(experiences) == (experiences, {})


def test_given_options_are_laid_over_the_defaults():
    recipe = get_recipe(
        _config(algorithm_type="grpo", policy_loss_fn_args={"clip_range_high": 0.28})
    )
    assert recipe.policy_loss.options == {"clip_range_high": 0.28}


def test_the_mode_among_the_loss_options_counts_unless_the_key_itself_is_given():
    args = {"loss_agg_mode": "seq-mean-token-sum"}
    older = _config(algorithm_type="grpo", policy_loss_fn_args=args)
    assert get_recipe(older).loss_agg_mode == "seq-mean-token-sum"
    both = _config(algorithm_type="grpo", policy_loss_fn_args=args, loss_agg_mode="token-mean")
    assert get_recipe(both).loss_agg_mode == "token-mean"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm_type": "grpoo"}, "did you mean 'grpo'"),
        ({"policy_loss_fn": "pppo"}, "did you mean 'ppo'"),
        ({"policy_loss_fn_args": {"clip": 0.1}}, "has no option 'clip'.*It has: clip_range,"),
        ({"policy_loss_fn_args": {"delta": 0.1}}, "did you mean 'delta_sequence_masking'"),
        ({"kl_loss_fn_args": {"coef": 0.1}}, "It has: kl_coef"),
        ({"advantage_fn_args": {"epsilom": 0.1}}, "did you mean 'epsilon'"),
        ({"kl_penalty_fn": "k1"}, "expected sample_strategy explore_step"),
        (
            {"algorithm_type": "ppo", "advantage_fn_args": {"duplicate_experiences": True}},
            "'ppo' leaves no group out",
        ),
        ({"loss_agg_mode": "mean"}, "expected one of token-mean"),
        ({"policy_loss_fn": "math:pi"}, "policy_loss_fn 'math:pi' is not a function but float"),
        ({"algorithm_type": "sft", "advantage_fn_args": {"epsilon": 1}}, "has no advantage_fn"),
        (
            {"algorithm_type": "sft", "advantage_fn": "grpo"},
            "is 'grpo', and 'sft' learns from rows of data by policy_loss_fn 'sft', without",
        ),
        (
            {"algorithm_type": "dpo", "advantage_fn": "ppo"},  # it would load a value model
            "is 'ppo', and 'dpo' learns from rows of data by policy_loss_fn 'dpo', without",
        ),
        ({"algorithm_type": "sft", "teacher_kl_fn": "k2"}, "'sft' learns from rows of data"),
        (
            {"algorithm_type": "dpo", "rollout_correction": {"rollout_is": "token"}},
            "rollout_correction compares .* and 'dpo' learns from rows of data: expected none",
        ),
        (
            {"algorithm_type": "sft", "policy_loss_fn": "ppo"},
            "'ppo', which asks for 'old_logprobs', and 'sft' learns from rows of data, which have",
        ),
        (
            {"algorithm_type": "cpt", "policy_loss_fn": "cispo", "bypass_old_logprobs": False},
            "'cispo', which asks for 'advantages', and 'cpt' learns from rows of data",
        ),
        (
            {"algorithm_type": "dpo", "policy_loss_fn_args": {"top_entropy_quantile": 0.2}},
            "top_entropy_quantile chooses tokens, and policy_loss_fn 'dpo' is a loss of pairs",
        ),
        (
            {"algorithm_type": "kto", "policy_loss_fn_args": {"top_entropy_quantile": 0.2}},
            "chooses tokens, and policy_loss_fn 'kto' is a loss of labelled replies: expected 1",
        ),
        ({"sample_strategy": "mix"}, "'ppo' learns nothing from these: expected a loss that takes"),
        ({"algorithm_type": "mix", "policy_loss_fn": "gspo"}, "whose advantages are 0, and policy"),
        ({"algorithm_type": "mix", "teacher_kl_fn": "k2"}, "'mix' learns from rows of data"),
        ({"teacher_kl_fn_args": {"kl_coef": 1}}, "no effect without algorithm.teacher_kl_fn"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        get_recipe(_config(**{"algorithm_type": "grpo", **given}))


def test_an_unknown_part_is_told_first_without_asserts_too():
    """`python -O` leaves asserts out."""
    program = (
        "from types import SimpleNamespace as S; from trireme.algorithms.recipes import get_recipe;"
        "get_recipe(S(algorithm_type='grpo', kl_loss_fn='k9', loss_agg_mode='sum'))"
    )
    words = [sys.executable, "-O", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "unknown algorithm.kl_loss_fn 'k9'" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("policy_loss_fn", {"clip_range": "big"}, "'ppo': clip_range is 'big': expected a number"),
        ("policy_loss_fn", {"clip_range": -0.2}, "clip_range is -0.2: expected at least 0"),
        ("policy_loss_fn", {"clip_ratio_c": 1}, "clip_ratio_c is 1: expected more than 1"),
        ("policy_loss_fn", {"enable_sequence_masking": "yes"}, "'yes': expected true or false"),
        ("advantage_fn", {"std_cal_level": "batches"}, "one of group, batch; did you mean 'batch'"),
        ("advantage_fn", {"epsilon": [1]}, r"epsilon is \[1\]: expected a number"),
        ("advantage_fn", {"duplicate_experiences": "no"}, "is 'no': expected true or false"),
        ("kl_loss_fn", {"kl_coef": -1}, "algorithm.kl_loss_fn 'k2': kl_coef is -1: expected at le"),
        ("kl_loss_fn", {"horizon": 0}, "horizon is 0: expected more than 0"),
        ("entropy_loss_fn", {"entropy_coef": "x"}, "entropy_coef is 'x': expected a number"),
        ("sample_strategy", {"max_staleness": -1}, "max_staleness is -1: expected at least 0"),
    ],
)
def test_a_value_that_a_part_cannot_have_is_told_before_the_run(kind, args, message):
    strategy = {"sample_strategy": "staleness_control"} if kind == "sample_strategy" else {}
    with pytest.raises(ValueError, match=message):
        get_recipe(_config(algorithm_type="grpo", **strategy, **{f"{kind}_args": args}))


def test_values_are_taken_as_the_part_has_them():
    given = {"clip_range": "0.3", "clip_range_high": None, "clip_ratio_c": 2}
    options = get_recipe(_config(algorithm_type="grpo", policy_loss_fn_args=given)).policy_loss
    assert options.options == {"clip_range": 0.3, "clip_range_high": None, "clip_ratio_c": 2}
    endless = {"max_staleness": float("inf")}
    config = _config(sample_strategy="staleness_control", sample_strategy_args=endless)
    assert get_recipe(config).parts["sample_strategy"].options == endless


def test_a_users_function_has_its_own_ranges():
    @policy_loss("test_negative")
    def negative(logprobs: Tensor, *, clip_range: float = -1.0) -> Tensor:
        return logprobs * clip_range

    config = _config(policy_loss_fn="test_negative", policy_loss_fn_args={"clip_range": -2.0})
    assert get_recipe(config).policy_loss.options == {"clip_range": -2.0}


def test_advantages_are_per_task_and_lie_on_the_mask():
    experiences = experiences_of({(0, 0): 0.0, (1, 0): 9.0, (0, 1): 2.0, (1, 1): 9.0})
    kept, metrics = get_recipe(_config(algorithm_type="grpo")).advantages(experiences)
    assert kept == experiences
    half = 1 / 2**0.5
    for experience, score in zip(kept, [-half, 0, half, 0], strict=True):
        assert experience.advantages is not None and experience.returns is not None
        assert experience.advantages.tolist() == pytest.approx([0, 0, score, 0], abs=1e-5)
        assert torch.equal(experience.returns, experience.advantages)
    assert metrics["reward_mean"] == 5.0
    assert metrics["zero_std_groups"] == metrics["idle_groups"] == 0.5
    assert metrics["group_reward_std"] == 0.5  # of the population: 1 and 0


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_own_advantage_that_is_no_number_is_refused_by_name(number: float):
    @advantage(f"test_gives_{number}")
    def gives(rewards: torch.Tensor) -> torch.Tensor:
        return torch.full_like(rewards, number)

    recipe = get_recipe(_config(algorithm_type="grpo", advantage_fn=f"test_gives_{number}"))
    said = f"advantage_fn 'test_gives_{number}' gave {number} for 2 of 2 experiences, first for 3/0"
    with pytest.raises(ValueError, match=said):
        recipe.advantages(experiences_of({(0, 0): 0.0, (0, 1): 2.0}))
    if number != number:  # a filter may leave out what has nothing to compare
        assert recipe.advantages(experiences_of({(0, 0): 2.0, (0, 1): 2.0}))[0] == []


def test_groups_below_the_threshold_are_dropped_and_counted():
    config = _config(algorithm_type="grpo", advantage_fn_args={"std_threshold": 0.01})
    experiences = experiences_of({(0, 0): 0.0, (0, 1): 2.0, (1, 0): 9.0, (1, 1): 9.0})
    kept, metrics = get_recipe(config).advantages(experiences)
    assert [e.eid.task for e in kept] == [0, 0]
    assert (metrics["filtered_count"], metrics["experience_count"]) == (2, 2)
    assert metrics["skipped_group_ratio"] == 0.5


def test_groups_left_out_are_refilled_with_copies_that_have_ids_of_their_own():
    args = {"std_threshold": 0.01, "duplicate_experiences": True}
    config = _config(algorithm_type="grpo", advantage_fn_args=args)
    rewards = {(0, 0): 0.0, (0, 1): 2.0} | {(task, run): 9.0 for task in (1, 2) for run in (0, 1)}
    kept, metrics = get_recipe(config).advantages(experiences_of(rewards))
    assert [e.eid.tid for e in kept] == ["3/0"] * 6
    assert len({e.eid.uid for e in kept}) == 6
    names = ("filtered_count", "duplicated_count", "experience_count")
    assert [metrics[name] for name in names] == [4, 4, 2]
    for original, twin in zip(kept[:2], kept[2:4], strict=True):
        assert original.advantages is not None and twin.advantages is not None
        assert torch.equal(original.advantages, twin.advantages)
        assert original.advantages is not twin.advantages and original.eid.run == twin.eid.run


def test_the_draw_of_copies_is_the_steps_own():
    args = {"std_threshold": 0.01, "duplicate_experiences": True}
    recipe = get_recipe(_config(algorithm_type="grpo", advantage_fn_args=args))
    rewards = {(t, run): float(run if t < 4 else 1) for t in range(20) for run in (0, 1)}
    first, again = (recipe.advantages(experiences_of(rewards))[0] for _ in range(2))
    assert [e.eid.uid for e in first] == [e.eid.uid for e in again]
    assert len(first) == 40 and len({e.eid.tid for e in first}) == 4


def test_nothing_is_copied_where_no_group_is_left():
    args = {"std_threshold": 0.01, "duplicate_experiences": True}
    recipe = get_recipe(_config(algorithm_type="grpo", advantage_fn_args=args))
    kept, metrics = recipe.advantages(experiences_of({(0, 0): 1.0, (0, 1): 1.0}))
    assert kept == [] and metrics["duplicated_count"] == 0


def test_ranks_come_from_the_trained_tokens_log_probabilities():
    recipe = get_recipe(
        _config(algorithm_type="grpo", advantage_fn_args={"rank_penalty": 1, "norm_by_std": False})
    )
    rollouts = experiences_of({(0, 0): 1.0, (0, 1): 1.0})
    rollouts[0].logprobs = torch.tensor([0, 0, -1.0, -9.0])  # the last token is not trained
    rollouts[1].logprobs = torch.tensor([0, 0, -2.0, 0])
    kept, _ = recipe.advantages(rollouts)
    assert [float(e.advantages[2]) for e in kept if e.advantages is not None] == [-0.25, 0.25]
    rollouts[1].logprobs = None
    with pytest.raises(ValueError, match="not every experience has"):
        recipe.advantages(rollouts)


def test_a_reward_that_is_not_finite_leaves_its_group_out_of_what_is_measured_too():
    experiences = experiences_of({(0, 0): math.nan, (0, 1): 9.0, (1, 0): 0.0, (1, 1): 2.0})
    kept, metrics = get_recipe(_config(algorithm_type="grpo")).advantages(experiences)
    assert [e.eid.task for e in kept] == [1, 1]
    assert metrics["reward_mean"] == pytest.approx(11 / 3)
    assert metrics["group_reward_std"] == 1.0


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e20])
@pytest.mark.parametrize("name", ["grpo", "rloo", "remax"])
def test_a_reward_beyond_float32_leaves_its_group_out_whatever_compares_it(name, reward):
    rewards = {(0, 0): reward, (0, 1): 9.0, (1, 0): 0.0, (1, 1): 2.0}
    recipe = get_recipe(_config(algorithm_type="grpo", advantage_fn=name))
    kept, metrics = recipe.advantages(experiences_of(rewards))
    assert {e.eid.task for e in kept if e.advantages is not None and e.advantages.any()} == {1}
    assert all(e.advantages is not None and e.advantages.isfinite().all() for e in kept)
    assert metrics["reward_mean"] == pytest.approx(11 / 3)


def test_an_experience_without_a_reward_is_named():
    with pytest.raises(ValueError, match="3/0/1/0 has no reward"):
        get_recipe(_config(algorithm_type="grpo")).advantages(
            experiences_of({(0, 0): 1, (0, 1): None})
        )


def test_the_infos_of_an_experience_without_a_reward_are_listed():
    made = experiences_of({(0, 0): 1, (0, 1): None})
    made[1].info["rollout_infos"] = {"total_rewards": 1.0, "num_turns": 2}
    with pytest.raises(ValueError, match="total_reward of rollout_infos, which has total_rewards"):
        get_recipe(_config(algorithm_type="grpo")).advantages(made)


def test_where_the_trainer_computes_advantages_the_rewards_are_metrics_if_all_are_known():
    recipe = get_recipe(_config(algorithm_type="ppo"))
    kept, metrics = recipe.advantages(experiences := experiences_of({(0, 0): 1.0, (0, 1): 2.0}))
    assert kept == experiences and experiences[0].advantages is None
    assert (metrics["reward_mean"], metrics["group_reward_std"]) == (1.5, 0.5)
    assert recipe.advantages(experiences_of({(0, 0): 1.0, (0, 1): None}))[1] == {}
    assert recipe.advantages([]) == ([], {})


def test_no_experiences_have_no_advantages():
    kept, metrics = get_recipe(_config(algorithm_type="grpo")).advantages([])
    assert kept == [] and metrics["experience_count"] == 0


@pytest.mark.parametrize("strategy", ["default", "warmup"])
def test_the_default_strategy_takes_what_the_buffer_gives(strategy):
    class Five:
        async def take_step(self) -> list[Experience]:
            raise AssertionError("not asked for")

        async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
            return experiences_of({(0, run): 0.0 for run in range(n)})

    recipe = get_recipe(_config(algorithm_type="grpo", sample_strategy=strategy))
    taken, sampled = asyncio.run(recipe.take(Five(), 5))
    assert len(taken) == 5 and not sampled


def staleness(**options: float) -> Recipe:
    given = {"sample_strategy": "staleness_control", "sample_strategy_args": options}
    return get_recipe(_config(algorithm_type="grpo", **given))


class Once:
    """Gives one list, whatever is asked for, and then its end."""

    def __init__(self, *versions: int) -> None:
        self.left = experiences_of({(i, 0): 0.0 for i in range(len(versions))})
        for experience, version in zip(self.left, versions, strict=True):
            experience.versions = torch.full((len(experience.tokens),), version)
        self.asked: list[tuple[int, float]] = []

    async def take_step(self) -> list[Experience]:
        raise AssertionError("not asked for")

    async def take(self, n: int, *, oldest: float = 0) -> list[Experience]:
        self.asked.append((n, oldest))
        if not self.left:
            raise EOFError
        taken, self.left = self.left, []
        return taken


def test_what_no_weights_sampled_is_never_stale():
    taken, _ = asyncio.run(staleness(max_staleness=1).take(Once(-1, -1), 2, version=9))
    assert [e.version for e in taken] == [-1, -1]


def test_stale_experiences_are_dropped_and_counted():
    ages = Once(0, 0, 2, 1, 3)
    taken, sampled = asyncio.run(staleness(max_staleness=1).take(ages, 2, version=3))
    assert [e.version for e in taken] == [2, 3] and ages.asked == [(2, 2.0)]
    assert sampled == {"sample/dropped_stale": 3.0, "sample/dropped_stale_groups": 3.0}


def test_last_ones_that_are_all_stale_are_no_batch():
    with pytest.raises(EOFError) as end:
        asyncio.run(staleness(max_staleness=1).take(Once(0, 1), 2, version=3))
    (said,) = end.value.__notes__
    assert said.startswith("the last 2 experiences (2 groups) were not trained: they were more ")
    with pytest.raises(EOFError) as end:
        asyncio.run(staleness(max_staleness=1).take(Once(), 2, version=3))
    assert not hasattr(end.value, "__notes__")


@advantage("rank")
def rank(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards [N], group ids [N] -> advantages [N]: the rank in the group, in [-1, 1]."""
    out = torch.zeros_like(rewards)
    for member in by_group(groups):  # member: bool [N]
        r = rewards[member]
        below = (r[:, None] > r).sum(1) - (r[:, None] < r).sum(1)
        out[member] = below / max(len(r) - 1, 1)
    return out


@policy_loss("soft_clip")
def soft_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, width: float = 0.2):
    """All [M] -> loss [M]: the ratio's gain saturates smoothly past `width`."""
    ratio = (logprobs - old_logprobs).exp()
    return -advantages * (1 + width * torch.tanh((ratio - 1) / width))


algorithm("rank_rl", advantage="rank", policy_loss="soft_clip", kl="none", group_size=8)


def test_a_users_algorithm_is_two_functions_and_a_line():
    recipe = get_recipe(_config(algorithm_type="rank_rl", policy_loss_fn_args={"width": 0.3}))
    assert recipe.group_size == 8 and not recipe.needs_reference
    kept, _ = recipe.advantages(experiences_of({(0, run): float(run) for run in range(3)}))
    assert [e.advantages[2].item() for e in kept if e.advantages is not None] == [-1, 0, 1]
    logprobs = torch.tensor([-1.0], requires_grad=True)
    data = {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach(),
        "advantages": torch.tensor([0.5]),
    }
    recipe.policy_loss(Columns(data)).backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-0.5)


def test_a_users_option_is_checked_against_the_signature():
    with pytest.raises(ValueError, match=r"'soft_clip' has no option 'clip'. It has: width"):
        get_recipe(_config(algorithm_type="rank_rl", policy_loss_fn_args={"clip": 1}))


def test_parts_may_be_dotted_paths():
    config = _config(algorithm_type="grpo", policy_loss_fn=f"{__name__}:soft_clip")
    assert get_recipe(config).policy_loss.function is soft_clip


def test_an_advantage_that_asks_for_what_there_is_not_is_told():
    @advantage("wants_values")
    def wants_values(rewards: Tensor, values: Tensor) -> Tensor:
        return rewards - values

    recipe = get_recipe(_config(algorithm_type="grpo", advantage_fn="wants_values"))
    with pytest.raises(ValueError, match=r"'wants_values' asks for 'values'. There is: rewards"):
        recipe.advantages(experiences_of({(0, 0): 1.0}))


def test_an_advantage_of_the_wrong_shape_is_told():
    @advantage("one_number")
    def one_number(rewards: Tensor) -> Tensor:
        return rewards.mean()

    recipe = get_recipe(_config(algorithm_type="grpo", advantage_fn="one_number"))
    with pytest.raises(ValueError, match="gave one number: expected one number per exp") as raised:
        recipe.advantages(experiences_of({(0, 0): 1.0}))
    raised.value.__traceback__ = None  # a run has no line of the user's on its way there
    fault = fault_of(raised.value)
    assert fault is not None and str(fault).startswith("algorithm.advantage_fn 'one_number' gave ")
    assert fault.place.endswith(": def one_number(rewards: Tensor) -> Tensor:")


def test_something_that_is_no_recipe_is_refused():
    with pytest.raises(ValueError, match="not a Recipe"):
        get_recipe(SimpleNamespace(algorithm_type="trireme.algorithms.policy_loss.ppo"))


@pytest.mark.parametrize(
    "kind",
    [Annotated[float | None, Gt(0), Le(2)], Optional[Annotated[float, Gt(0), Le(2)]]],  # noqa: UP045
    ids=["whole", "arm"],
)
def test_the_range_of_an_option_stands_at_the_option_a_users_too(kind):
    def ranged(logprobs: Tensor, *, width=None) -> Tensor:
        return -logprobs * (width or 1.0)

    ranged.__annotations__["width"] = kind
    POLICY_LOSSES.register_module("ranged", ranged, force=True)

    def made(width):
        args = {"policy_loss_fn": "ranged", "policy_loss_fn_args": {"width": width}}
        return get_recipe(_config(algorithm_type="grpo", **args)).policy_loss.options["width"]

    assert (made(2), made(None), made("0.5")) == (2, None, 0.5)
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match=r"policy_loss_fn 'ranged': width is .*expected"):
            made(wrong)


def test_an_expert_s_and_own_tokens_are_averaged_each_by_a_mode_of_its_own():
    """Own: 1, 3 and no tokens; an expert's: 2 and 4, the longest reply there."""
    sizes, experts = (1, 3, 0, 2, 4), torch.tensor([False, False, False, True, True])
    batch = flatten([Experience(range(n + 1), prompt_length=1, eid=EID(0, n)) for n in sizes])
    options = {"sft_loss_agg_mode": "seq-mean-token-mean"}

    def weights(**others: str) -> list[float]:
        config = _config(algorithm_type="mix", policy_loss_fn_args=options | others)
        return get_recipe(config).weights(batch, experts).tolist()

    theirs = [1 / 4] * 2 + [1 / 8] * 4
    assert weights() == pytest.approx([1 / 4] * 4 + theirs)
    own = weights(grpo_loss_agg_mode="seq-mean-token-sum")
    assert own == pytest.approx([1 / 3] * 4 + theirs)
    with pytest.raises(
        ValueError, match=r"sft_loss_agg_mode.*one of token-mean, seq-mean-token-sum"
    ):
        weights(sft_loss_agg_mode="mean")


@pytest.mark.extension("trinity")
def test_how_a_batch_is_cut_is_no_option_of_a_loss():
    layout = {"use_dynamic_bsz": True, "ppo_mini_batch_size": 8, "train_batch_size_expert": 2}
    recipe = get_recipe(_config(algorithm_type="mix", policy_loss_fn_args={"mu": 0.3, **layout}))
    assert recipe.policy_loss.options == {"mu": 0.3}
    with pytest.raises(ValueError, match="has no option 'ppo_batch_size'"):
        get_recipe(_config(algorithm_type="mix", policy_loss_fn_args={"ppo_batch_size": 8}))


def test_a_part_that_is_neither_name_nor_function_is_refused():
    section: Any = {"name": "grpo"}
    with pytest.raises(ValueError, match=r"advantage_fn is \{'name': 'grpo'\}: expected a name or"):
        algorithm("mine", advantage=section)
