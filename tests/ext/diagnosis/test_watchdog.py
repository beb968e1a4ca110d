"""The watchdog: each cause by the figures that show it, once, and none in a run that learns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.made import config_of, values
from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.experience import Experience
from trireme.ext.diagnosis.causes import CAUSES, Facts
from trireme.ext.diagnosis.watchdog import Warned, Watchdog, sample_of
from trireme.launch.check import make_plans
from trireme.monitor.figures import FEW, metric_of

Row = dict[str, float]
MORE_LOSSES = pytest.mark.extension("more_losses")
PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def explored(step: int, **changed: float) -> Row:
    """A step of 32 rollouts that learns."""
    mean = 0.2 + 0.01 * min(step, 50)
    healthy = {
        "rollout/reward/mean": mean,
        "rollout/reward/max": 1.0,
        "rollout/reward/min": 0.0,
        "rollout/response_length/mean": 100.0 + step,
        "rollout/truncated/mean": 0.05,
        "rollout/prompt_truncated/mean": 0.0,
        "rollout/untrained/mean": 0.0,
        "rollout/runs": 32.0,
        "rollout/tasks": 8.0,
        "rollout/failed": 0.0,
        "experience_pipeline/made": 32.0,
        "experience_pipeline/kept": 32.0,
        "experience_pipeline/not_finite": 0.0,
        "experience_pipeline/idle_groups": 0.5,
        "rollout/conversation/splits/mean": 0.0,
    }
    return healthy | {_name(key): value for key, value in changed.items()}


def trained(step: int, **changed: float) -> Row:
    """A step that learns from them."""
    healthy = {
        "actor/entropy": 0.9 / (1 + 0.02 * step),
        "rollout/logprob_diff_mean": 1e-6,
        "actor/grad_norm": 0.7,
        "actor/pg_loss": 0.5,
        "rollout/staleness_mean": 1.0,
    }
    return healthy | {_name(key): value for key, value in changed.items()}


def _name(key: str) -> str:
    """`rollout__reward__mean` is `rollout/reward/mean`."""
    return key.replace("__", "/")


ZERO: dict[str, float] = {f"rollout__reward__{kind}": 0.0 for kind in ("mean", "max", "min")}
# What each cause looks like: the part, the step from which on, and the figures that are others.
SEEN: dict[str, tuple[str, int, dict[str, float], str]] = {
    "judge_unread": (
        "explorer",
        1,
        ZERO | {"rollout__judge_success__mean": 0.0, "experience_pipeline__idle_groups": 1.0},
        "no reply of the judge in the last 3 steps could be read",
    ),
    "zero_rewards": ("explorer", 1, ZERO, "every reward of the last 3 steps is 0"),
    "equal_rewards": (
        "explorer",
        4,
        {"experience_pipeline__idle_groups": 0.95},
        "in 95% of the groups of the last 3 steps all rollouts have the same reward",
    ),
    "rewards_gone": ("explorer", 20, {"rollout__reward__mean": 0.01}, "was 0.38, and in the last"),
    "replies_cut": ("explorer", 1, {"rollout__truncated__mean": 0.6}, "60% of the rollouts of"),
    "prompts_too_long": (
        "explorer",
        1,
        {"rollout__prompt_truncated__mean": 0.25, "rollout__truncated__mean": 0.3},
        "25% of the rollouts of the last 3 steps had a prompt that is too long",
    ),
    "length_drift": (
        "explorer",
        20,
        {"rollout__response_length__mean": 300.0, "rollout__truncated__mean": 0.4},
        "from 102 to 240 tokens, and the share that is cut from 5% to 28%",
    ),
    "entropy_collapse": ("trainer", 20, {"actor__entropy": 0.02}, "to 0.02 nats a token"),
    "entropy_climb": (
        "trainer",
        20,
        {"actor__entropy": 2.0, "actor__kl_loss": 0.65},
        "nats a token, and the divergence from the reference is 0.65",
    ),
    "no_gradient": (
        "trainer",
        1,
        {"actor__grad_norm": 0.0},
        "the gradient of the last 3 steps is 0, though the policy loss is not (mean 0.5)",
    ),
    "logprob_gap": ("trainer", 1, {"rollout__logprob_diff_mean": 0.1}, "differ by 0.1 nats"),
    "staleness": ("trainer", 1, {"rollout__staleness_mean": 9.0}, "tokens are 9.0 pushes old"),
    "tools_dropped": (
        "explorer",
        1,
        {"rollout__conversation__tools_dropped__mean": 1.0},
        "renders none of the tools",
    ),
    "history_rewritten": (
        "explorer",
        1,
        {"rollout__conversation__splits__mean": 2.0},
        "is split 2.0 times",
    ),
    "nothing_masked": ("explorer", 1, {"rollout__untrained__mean": 0.5}, "50% of the rollouts"),
    "left_out": (
        "explorer",
        1,
        {
            "experience_pipeline__emptied_groups": 8.0,
            "experience_pipeline__kept": 0.0,
            "experience_pipeline__reward_filter__dropped": 32.0,
        },
        "of 96 experiences of the last 3 steps 0 are left to train on: reward_filter left out 96",
    ),
    "reward_not_finite": (
        "explorer",
        3,
        {"experience_pipeline__not_finite": 3.0, "experience_pipeline__filtered_count": 12.0},
        "3 of 32 experiences of this step have a reward from which no advantage can be computed "
        "(NaN, or too large to be squared in 32 bits), and are left out, and 9 of their groups",
    ),
    "rollouts_failed": (
        "explorer",
        1,
        {"rollout__failed": 16.0, "rollout__failed__error": 12.0, "rollout__failed__timeout": 4.0},
        "33% of the rollouts of the last 3 steps failed (error 36, timeout 12)",
    ),
    "rows_cut": (
        "trainer",
        1,
        {"data__rows": 16.0, "data__cut": 3.0, "data__dropped": 1.0},
        "of 48 rows 9 were cut at model.max_model_len and 3 left out",
    ),
}
HEALTHY = {"explorer": explored, "trainer": trained}


def course(part: str, start: int, changed: dict[str, float], steps: int) -> Iterator[dict]:
    """Rows of `metrics.jsonl`: a part that learns, until from a step on it does not."""
    for step in range(1, steps + 1):
        metrics = HEALTHY[part](step, **(changed if step >= start else {}))
        yield {"part": part, "step": step, "metrics": metrics}


def said(watchdog: Watchdog, rows: Any) -> list[Warned]:
    return [
        one for row in rows for one in watchdog.look(row["part"], row["step"], row["metrics"])[0]
    ]


def test_a_run_that_learns_hears_nothing() -> None:
    watchdog = Watchdog()
    for part in HEALTHY:
        assert not said(watchdog, course(part, 0, {}, 200))
    assert not watchdog.end()


def test_every_cause_is_seen_here() -> None:
    assert list(SEEN) == [cause.name for cause in CAUSES]


def test_rewards_of_steps_before_the_last_are_rewards_too() -> None:
    stepwise = ZERO | {"experience_pipeline__reward_mean": 0.04}
    assert not said(Watchdog(), course("explorer", 1, stepwise, 60))


@pytest.mark.parametrize("name", SEEN)
def test_a_cause_is_said_once_with_what_to_do(name: str) -> None:
    part, start, changed, text = SEEN[name]
    watchdog = Watchdog()
    watchdog.sample = "for example"
    [warned] = said(watchdog, course(part, start, changed, 60))
    assert (warned.cause, warned.part) == (name, part)
    assert start <= warned.step < start + 2 * FEW
    assert text in warned.text and ". What to do: " in warned.text
    [cause] = [one for one in CAUSES if one.name == name]
    assert warned.sample == ("for example" if cause.shows else "")
    assert not watchdog.end()
    # the metric says when it holds
    _, flags = watchdog.look(part, 61, HEALTHY[part](61, **changed))
    assert flags == {f"watchdog/{name}": 1.0}
    for step in range(62, 70):
        _, flags = watchdog.look(part, step, HEALTHY[part](step))
    assert flags == {f"watchdog/{name}": 0.0}


@pytest.mark.parametrize("name", SEEN)
def test_a_resumed_run_says_the_rest_and_nothing_twice(name: str) -> None:
    part, start, changed, _ = SEEN[name]
    rows = [json.loads(json.dumps(row)) for row in course(part, start, changed, 60)]
    whole = Watchdog()
    expected = said(whole, rows)
    for killed in range(0, 40, 3):
        first, second = Watchdog(), Watchdog()
        before = said(first, rows[:killed])
        second.read(rows[:killed], first.warned.values())
        # the steps after the checkpoint are done again
        after = said(second, rows[max(killed - 2, 0) :])
        assert before + after == expected


def test_rewards_that_differ_are_not_said_to_be_equal() -> None:
    idle: dict[str, float] = {"experience_pipeline__idle_groups": 1.0}
    differ = {
        "experience_pipeline__zero_std_groups": 0.0,
        "experience_pipeline__group_reward_std": 0.3,
    }
    causes = [one.cause for one in said(Watchdog(), course("explorer", 1, idle | differ, 9))]
    assert causes == []
    assert said(Watchdog(), course("explorer", 1, idle, 9))


def test_an_entropy_that_climbs_a_little_is_no_fault() -> None:
    little: dict[str, float] = {"actor__entropy": 1.3}  # 0.87 at first: half as much again
    assert not said(Watchdog(), course("trainer", 20, little, 60))
    [warned] = said(Watchdog(), course("trainer", 20, {"actor__entropy": 1.4}, 60))
    assert warned.cause == "entropy_climb"
    assert "reference" not in warned.text  # no divergence was measured


def test_tools_that_are_called_unseen_are_no_fault() -> None:
    dropped = SEEN["tools_dropped"][2]
    taught = {"rollout__tool_calls__mean": 1.4, "rollout__tool_errors__mean": 0.2}
    guessed = {"rollout__tool_calls__mean": 1.4, "rollout__tool_errors__mean": 1.4}
    assert not said(Watchdog(), course("explorer", 1, dropped | taught, 9))
    [warned] = said(Watchdog(), course("explorer", 1, dropped | guessed, 9))
    assert warned.cause == "tools_dropped"


def test_two_steps_are_enough_at_the_end() -> None:
    watchdog = Watchdog()
    assert not said(watchdog, course("explorer", 1, ZERO, 2))
    assert [one.cause for one in watchdog.end()] == ["zero_rewards"]
    assert not watchdog.end()


def test_few_rollouts_are_chance() -> None:
    watchdog = Watchdog()
    rows = course("explorer", 1, ZERO | {"rollout__runs": 4.0}, 7)
    assert not said(watchdog, rows)
    assert said(watchdog, course("explorer", 1, ZERO | {"rollout__runs": 4.0}, 9))


def one_group(solved: bool) -> dict[str, float]:
    """A commit of `mode: serve`: the 8 replies to one task, which are all right or all wrong."""
    reward = dict.fromkeys(ZERO, float(solved))
    whole = {"rollout__runs": 8.0, "rollout__tasks": 1.0, "experience_pipeline__idle_groups": 1.0}
    return reward | whole


def test_steps_of_one_group_say_how_hard_their_tasks_are() -> None:
    easy, hard = one_group(True), one_group(False)
    mixed = hard | {"rollout__reward__mean": 0.5, "experience_pipeline__idle_groups": 0.0}
    order = [easy] * 5 + [hard] * 6 + [mixed] + [easy] * 3 + [mixed] + [hard] * 9
    watchdog = Watchdog()
    causes = [
        (step, one.cause)
        for step, changed in enumerate([*order, *[hard] * 10], 1)
        for one in watchdog.look("explorer", step, explored(step, **changed))[0]
    ]
    assert causes == [(28, "equal_rewards"), (31, "rewards_gone")]


def test_two_commits_of_one_group_are_too_few_at_the_end() -> None:
    watchdog = Watchdog()
    assert not said(watchdog, course("explorer", 1, one_group(False), 2))
    assert not watchdog.end()


@pytest.mark.parametrize(
    ("algorithm", "rewards_teach", "any_age"),
    [
        ("grpo", True, False),
        pytest.param("opmd", True, True, marks=MORE_LOSSES),
        pytest.param("raft", True, True, marks=MORE_LOSSES),
        ("on_policy_distill", False, False),
        pytest.param("jsd", False, False, marks=MORE_LOSSES),
    ],
)
def test_what_is_normal_in_an_algorithm_is_no_cause(
    algorithm: str, rewards_teach: bool, any_age: bool, tmp_path: Path
) -> None:
    [plan] = make_plans(config_of(tmp_path, values(tmp_path)))
    facts = Facts.of(plan, get_recipe(AlgorithmConfig(algorithm_type=algorithm)))
    assert (facts.rewards_teach, facts.staleness is None) == (rewards_teach, any_age)
    watchdog = Watchdog(facts)
    rewards = said(watchdog, course("explorer", 1, ZERO, 9))
    assert bool(rewards) == rewards_teach
    old = said(watchdog, course("trainer", 1, {"rollout__staleness_mean": 9.0}, 9))
    assert bool(old) != any_age


def test_beside_a_teacher_equal_rewards_stop_the_rewards_gradient_alone(tmp_path: Path) -> None:
    [plan] = make_plans(config_of(tmp_path, values(tmp_path)))
    recipe = get_recipe(AlgorithmConfig(algorithm_type="grpo", teacher_kl_fn="k2"))
    idle: dict[str, float] = {"experience_pipeline__idle_groups": 0.95}
    for given in (ZERO, idle):
        rows = list(course("explorer", 1, given, 9))
        [one] = said(Watchdog(Facts.of(plan, recipe)), rows)
        [plain] = said(Watchdog(), rows)
        assert "the model learns from the teacher only" in one.text
        assert "teacher" not in plain.text


def test_a_reply_of_one_token_is_always_cut() -> None:
    cut = course("explorer", 1, {"rollout__truncated__mean": 1.0}, 9)
    assert said(Watchdog(), cut)
    assert not said(Watchdog(Facts(replies_may_end=False)), cut)


def test_the_page_has_the_modules_table() -> None:
    page = PAGE.read_text()
    for cause in CAUSES:
        when = cause.when.format(limit=cause.limit)
        assert f"| `{cause.name}` | {when} | {cause.why} | {cause.do} |" in page


def test_each_cause_of_the_watchdog_has_its_metric() -> None:
    assert all(metric_of(f"watchdog/{cause.name}") for cause in CAUSES)


def test_the_sample_of_several_turns_ends_in_the_last_reply_without_marks_of_the_template() -> None:
    said = [("user", "go"), ("assistant", "left"), ("user", "A wall."), ("assistant", "right\n")]
    rollout = Experience(
        tokens=torch.arange(4),
        mask=torch.tensor([False, True, False, True]),
        messages=[{"role": role, "content": content} for role, content in said],
        response_text="left<|end|><|user|>A wall.<|end|><|assistant|>right\n<|end|>",
        reward=0.0,
    )
    assert sample_of(rollout) == "for example: the reply ends in 'right', the reward is 0"
    odd: Any = "odd"
    rollout.messages = [odd, {"role": "assistant", "content": {"text": 1}, "tool_calls": 3}]
    assert "the reply ends in 'left<|end|>" in sample_of(rollout)  # all that can be shown
