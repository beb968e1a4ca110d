"""What is known before a run of models that give rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_problems import only_problem, problems_of
from tests.tiny import make_reward_model

TASKSET = "buffer.explorer_input.taskset"
PLUGIN = """
from trireme import orms
from trireme.rewards.judge import ModelJudge


class OwnJudge(ModelJudge):
    pass


orms["judge_of_ones_own"] = OwnJudge
"""


def test_an_own_judge_needs_the_model_that_it_asks(tmp_path: Path) -> None:
    plugin = tmp_path / "judge_of_ones_own.py"
    plugin.write_text(PLUGIN)
    name = f"{TASKSET}.default_reward_fn_type=judge_of_ones_own"
    output = only_problem(tmp_path, f"plugins=[{plugin}]", name)
    assert "explorer.auxiliary_models has 0 models, and the reward 'judge_of_ones_own'" in output


@pytest.mark.extension("more_losses")
def test_gdpo_refuses_before_the_run_what_has_no_parts(tmp_path: Path) -> None:
    name = "math_trainable_ruler_workflow"
    words = ("algorithm.algorithm_type=gdpo", f"{TASKSET}.default_workflow_type={name}")
    sentence = f"workflow '{name}' gives rewards without parts"
    assert any(sentence in problem for problem in problems_of(tmp_path, *words))
    assert not any("without parts" in problem for problem in problems_of(tmp_path, words[1]))


def test_a_reward_model_without_a_score_head_is_refused(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == []
    options = f"{{model_path: {tmp_path / 'model'}}}"
    reward = (f"{TASKSET}.default_reward_fn_type=reward_model", f"{TASKSET}.reward_fn_args=")
    [said] = problems_of(tmp_path, reward[0], reward[1] + options)
    assert "default_reward_fn_type cannot be used: reward_model: model_path" in said
    assert "has the architecture none, which has no score head" in said
    good = make_reward_model(tmp_path / "scores")
    assert problems_of(tmp_path, reward[0], f"{reward[1]}{{model_path: {good}}}") == []


def test_rewards_in_a_list_and_the_models_that_they_ask(tmp_path: Path) -> None:
    key = f"{TASKSET}.default_reward_fn_type"
    assert problems_of(tmp_path, f"{key}=[math_reward, {{name: repetition, weight: 0.1}}]") == []
    assert "expected a name, or a section" in only_problem(tmp_path, f"{key}=[{{weight: 1}}]")
    found = only_problem(tmp_path, f"{key}=[ruler]")
    assert "explorer.auxiliary_models has 0 models, and the reward 'ruler' asks" in found
    served = "{name: judge, base_url: 'http://127.0.0.1:9/v1', model: m}"
    assert problems_of(tmp_path, f"{key}=[{served}]") == []
    judging = f"{TASKSET}.default_workflow_type=math_ruler_workflow"
    none = f"{key}=null"
    assert "'ruler' asks one" in only_problem(tmp_path, judging, none)


def test_a_reward_is_suggested_also_where_it_is_one_of_groups(tmp_path: Path) -> None:
    reward = "buffer.explorer_input.taskset.default_reward_fn_type=rulr"
    assert "did you mean 'ruler'?" in only_problem(tmp_path, reward)
