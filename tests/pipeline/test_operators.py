"""Operators: what each built-in one keeps and changes, and what users' own may be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from trireme.experience import EID, Experience
from trireme.pipeline.operators import ExperienceOperator, OperatorFailed, make_operator, pass_rates
from trireme.registry import OPERATORS


def one(reward: float | None, run: int, task: int = 0, step: int = 0, **info: Any) -> Experience:
    length = 2 + run + step
    return Experience(
        range(length + 1), prompt_length=1, reward=reward, info=info, eid=EID(1, task, run, step)
    )


def rewards(experiences: list[Experience]) -> list[float | None]:
    return [e.reward for e in experiences]


def apply(name: Any, given: list[Experience], **args: Any) -> tuple[list[Experience], Any]:
    return asyncio.run(make_operator(OPERATORS, name, args, "operators[0]")(given))


def test_a_reward_at_the_threshold_stays() -> None:
    kept, metrics = apply("reward_filter", [one(r, i) for i, r in enumerate([0.4, 0.5, 0.6])],
                          threshold=0.5)  # fmt: skip
    assert rewards(kept) == [0.5, 0.6] and metrics == {"dropped": 1.0}


def test_a_reward_that_is_none_or_not_finite_is_invalid() -> None:
    given = [one(r, i) for i, r in enumerate([None, float("nan"), float("inf"), 0.0])]
    assert rewards(apply("invalid_reward_filter", given)[0]) == [0.0]


def test_a_filter_of_rewards_names_the_experience_that_has_none() -> None:
    with pytest.raises(OperatorFailed, match=r"'reward_filter' failed.* 1/0/1/0 has no reward"):
        apply("reward_filter", [one(1.0, 0), one(None, 1)])


def test_groups_whose_rewards_hardly_differ_are_dropped_whole() -> None:
    given = [one(r, i) for i, r in enumerate([0.0, 1.0])]  # population deviation 0.5
    given += [one(r, i, task=1) for i, r in enumerate([0.5, 0.7])]  # 0.1
    given += [one(1.0, 0, task=2)]
    assert {e.eid.task for e in apply("reward_std_filter", given)[0]} == {0, 1}
    assert {e.eid.task for e in apply("reward_std_filter", given, threshold=0.1001)[0]} == {0}
    assert apply("reward_std_filter", given, threshold=0.5)[1] == {"dropped": 5.0}


def test_shaping_goes_through_its_configurations_in_order() -> None:
    given = [one(1.0, 0, brief=0.5, steps=4)]
    shaping = [
        {"stats_key": "brief", "op_type": "ADD", "weight": 2.0},  # 1 + 1 = 2
        {"stats_key": "steps", "op_type": "DIV", "weight": 0.5},  # 2 / 2 = 1
        {"stats_key": "brief", "op_type": "SUB", "weight": 1.0},  # 0.5
        {"stats_key": "steps", "op_type": "MUL", "weight": 1.5},  # 0.5 * 6 = 3
    ]
    kept, metrics = apply("reward_shaping_mapper", given, reward_shaping_configs=shaping)
    assert rewards(kept) == [3.0] and metrics == {"reward_mean": 3.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"stats_key": "depth", "op_type": "ADD"}, "no number 'depth' in its info: it has brief"),
        ({"stats_key": "brief", "op_type": "DIV", "weight": 0}, "divided by 0"),
    ],
)
def test_shaping_says_what_is_wrong(config: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorFailed, match=message):
        apply("reward_shaping_mapper", [one(1.0, 0, brief=0.5)], reward_shaping_configs=[config])


def test_equal_runs_of_a_task_are_kept_once() -> None:
    same = [one(1.0, 0), one(1.0, 0, task=1)]
    twin = one(1.0, 0)
    twin.eid = EID(1, 0, 7)
    kept, metrics = apply("deduplication", [*same, twin, one(0.0, 1)])
    assert [e.eid.rid for e in kept] == ["1/0/0", "1/1/0", "1/0/1"]
    assert metrics == {"dropped": 1.0}


def test_runs_are_equal_only_when_all_their_steps_are() -> None:
    def steps(run: int, last: int) -> list[Experience]:
        out = [one(1.0, 0), one(1.0, 0, step=last)]
        for step, experience in enumerate(out):
            experience.eid = EID(1, 0, run, step)
        return out

    given = [*steps(0, 1), *steps(1, 1), *steps(2, 2)]
    assert {e.eid.run for e in apply("deduplication", given)[0]} == {0, 2}


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_group_with_a_reward_that_is_not_finite_has_no_spread(broken: float) -> None:
    """After another operator's division, say."""
    given = [one(r, i) for i, r in enumerate([0.0, 1.0])]
    given += [one(r, i, task=1) for i, r in enumerate([0.0, 1.0, broken])]
    assert apply("reward_std_filter", given) == (given[:2], {"dropped": 3.0})


def test_the_length_penalty_falls_evenly_over_its_cache() -> None:
    """Trained tokens 2 to 7, L = 6, C = 4: free up to 2, then a quarter a token, all at 6."""
    kept, metrics = apply("length_penalty", [one(1.0, i) for i in range(6)],
                          max_length=6, cache_length=4, penalty_factor=2.0)  # fmt: skip
    assert rewards(kept) == [1.0, 0.5, 0.0, -0.5, -1.0, -1.0]
    assert metrics == {"penalized": 5.0}


def test_a_changed_reward_reaches_the_rewards_of_tokens_too() -> None:
    """Where the tokens have rewards, ppo and reinforceplusplus learn from these alone."""
    given = [one(1.0, 3, bonus=0.5), one(1.0, 3, 1, bonus=0.5), one(1.0, 3, 2, bonus=0.5)]
    given[0].token_rewards = torch.tensor([0.0, 0.5, 0, 0, 0, 0.5])
    given[1].token_rewards = torch.tensor([0.0, 0.5, 0, 0.5, 0, 0])
    given[1].mask = torch.tensor([False, True, False, True, False, False])
    before = given[0].token_rewards
    configs = [{"stats_key": "bonus", "op_type": "SUB"}]
    kept, _ = apply("reward_shaping_mapper", given, reward_shaping_configs=configs)
    assert rewards(kept) == [0.5] * 3 and kept[2].token_rewards is None
    apply("length_penalty", kept, max_length=5, cache_length=5)
    whole, holed = (e.token_rewards for e in kept[:2])
    assert whole is not None and whole.tolist() == [0, 0.5, 0, 0, 0, -1.0]
    assert holed is not None and holed.tolist() == pytest.approx([0, 0.5, 0, -0.4, 0, 0])
    assert before.tolist() == [0, 0.5, 0, 0, 0, 0.5]  # a record of the raw one is as it was


def test_pass_rates_are_of_each_row_by_the_last_steps_of_its_runs() -> None:
    def tried(reward: float, run: int, task: int, step: int = 0) -> Experience:
        return one(reward, run, task, step, task_index={"taskset_id": task % 2, "index": 40 + task})

    given = [tried(0.0, 0, 0), tried(1.0, 0, 0, 1), tried(0.0, 1, 0), tried(1.5, 0, 1)]
    assert pass_rates(given) == {0: {40: 0.5}, 1: {41: 1.0}}
    assert apply("pass_rate_calculator", given) == (given, {"mean": 0.75})


def test_a_row_that_several_tasks_tried_has_the_mean_of_their_clipped_rates() -> None:
    """With this operator and without it a curriculum is told the same."""
    rewards = {0: [1.0, 0.0], 1: [2.0, 1.5], 2: [-1.0], 3: [None], 4: [1.0], 5: [1.0]}
    rows = {0: (0, 3), 1: (0, 4), 2: (0, 5), 3: (0, 6), 4: (1, 3), 5: (0, 3)}
    given = []
    for task, members in rewards.items():
        taskset, row = rows[task]
        index = {"taskset_id": taskset, "index": row}
        given += [one(reward, run, task, task_index=index) for run, reward in enumerate(members)]
    assert pass_rates(given) == {0: {3: 0.75, 4: 1.0, 5: 0.0}, 1: {3: 1.0}}


def test_a_reward_that_is_not_finite_is_in_no_pass_rate() -> None:
    nan, inf = float("nan"), float("inf")
    given = []
    for row, members in enumerate([[1.0, nan], [inf, -inf, 0.5], [nan, inf]]):
        index = {"taskset_id": 0, "index": row}
        given += [one(reward, run, row, task_index=index) for run, reward in enumerate(members)]
    assert pass_rates(given) == {0: {0: 1.0, 1: 0.5}}


def keep_first(experiences: list[Experience], *, count: int = 1) -> Any:
    return experiences[:count], {"kept": count}


async def keep_none(experiences: list[Experience]) -> Any:
    await asyncio.sleep(0)
    return []


class Halve(ExperienceOperator):
    def __init__(self, by: float = 2.0) -> None:
        self.by = by

    def process(self, exps: list[Experience]) -> Any:
        for experience in exps:
            experience.reward = (experience.reward or 0.0) / self.by
        return exps, {"halved": len(exps)}


class Waits:
    """Trinity's other form: everything may be async."""

    async def prepare(self) -> None:
        self.ready = True

    async def process(self, exps: list[Experience]) -> Any:
        assert self.ready
        return exps[1:], {}

    async def close(self) -> None:
        self.ready = False


HERE = __name__


def test_own_operators_are_functions_and_classes_plain_and_async() -> None:
    given = [one(1.0, 0), one(0.5, 1)]
    kept, metrics = apply(f"{HERE}:keep_first", given)
    assert kept == given[:1] and metrics == {"kept": 1.0}
    assert apply(f"{HERE}:keep_none", given) == ([], {})
    assert rewards(apply(f"{HERE}:Halve", given, by=5)[0]) == [0.2, 0.1]

    async def main() -> None:
        operator = make_operator(OPERATORS, f"{HERE}:Waits", {}, "operators[0]")
        await operator.prepare()
        assert await operator(given) == (given[1:], {})
        await operator.close()
        assert operator.made.ready is False

    asyncio.run(main())


def shaping(**config: Any) -> dict[str, Any]:
    one = {"stats_key": "brief", "op_type": "ADD", **config}
    return {"reward_shaping_configs": [one]}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("reward_filtr", {}, r"unknown experience operator 'reward_filtr'; did you mean"),
        ("reward_filter", {"treshold": 1}, r"no option 'treshold' \(did you mean 'threshold'"),
        ("length_penalty", {"max_length": 3}, "needs the option 'cache_length'"),
        (
            "length_penalty",
            {"max_length": 3, "cache_length": 4},
            "cache_length is 4: expected",
        ),
        ("reward_filter", {"threshold": "x"}, "'reward_filter': threshold is 'x': expected a numb"),
        ("reward_shaping_mapper", shaping(op_type="POW"), "op_type is 'POW': expected ADD"),
        ("reward_shaping_mapper", shaping(stats_key=None), "stats_key is None: expected the name"),
        ("reward_shaping_mapper", shaping(weight="x"), "weight is 'x': expected a number"),
        ("dapo_dynamic_sampling", {"std_threshold": 0.0}, "'std_threshold': reward_std_filter"),
        (f"{HERE}:HERE", {}, "is str: expected a function or class"),
        ("tests.pipeline.test_operators:one", {"depth": 1, "reward": 1}, "needs the option 'run'"),
        ("collections:Counter", {}, "has no method 'process'"),
    ],
)
def test_an_operator_that_cannot_be_is_named(name: str, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_operator(OPERATORS, name, args, "operators[0]")


def doubles(experiences: list[Experience]) -> Any:
    return [*experiences, experiences[0]]


def strays(experiences: list[Experience]) -> Any:
    return [one(1.0, 0, task=9)]


def says_nothing(experiences: list[Experience]) -> Any:
    return None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("doubles", r"returned the experience 1/0/0/0 twice"),
        ("strays", r"of the group 1/9, which this explore step does not have"),
        ("says_nothing", r"returned NoneType: expected a list of experiences"),
    ],
)
def test_what_an_operator_must_not_return(name: str, message: str) -> None:
    with pytest.raises(OperatorFailed, match=message):
        apply(f"{HERE}:{name}", [one(1.0, 0), one(0.5, 1)])


def test_dynamic_sampling_drops_groups_that_are_all_right_or_all_wrong() -> None:
    given = [one(1.0, 0), one(0.5, 1), one(0.0, 0, task=1), one(1.0, 1, task=1), one(1.0, 0, 2)]
    kept, metrics = apply("dapo_dynamic_sampling", given)
    assert {e.eid.task for e in kept} == {1}
    assert metrics == {"dropped": 3.0, "all_right": 1.0, "all_wrong": 0.0}  # a group of one is none
    kept, _ = apply("dapo_dynamic_sampling", given, correct_threshold=0.5)
    assert {e.eid.task for e in kept} == {0, 1}


def test_dynamic_sampling_looks_at_correctness_and_not_at_a_reward_that_length_shaped() -> None:
    given = [one(1.0, 0), one(0.3, 1), one(-0.5, 0, task=1), one(0.1, 1, task=1)]
    for experience, right in zip(given, (1.0, 1.0, 0.0, 1.0), strict=True):
        experience.metrics["accuracy"] = right
    assert {e.eid.task for e in apply("dapo_dynamic_sampling", given)[0]} == {1}
    kept, _ = apply("dapo_dynamic_sampling", given, metric_key="other")
    assert {e.eid.task for e in kept} == {1}  # of task 0 both rewards are above 0


def test_replies_that_the_length_cut_are_not_trained_and_keep_their_rewards() -> None:
    given = [one(1.0, 0), one(0.0, 1)]
    given[1].truncate_status = "response_truncated"
    kept, metrics = apply("mask_response_truncated", given)
    assert rewards(kept) == [1.0, 0.0] and metrics == {"masked": 1.0}
    assert [e.trained_tokens for e in kept] == [2, 0]
