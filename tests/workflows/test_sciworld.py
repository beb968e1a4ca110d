"""ScienceWorld's own program, where it and Java are installed; its rows, everywhere."""

from __future__ import annotations

import asyncio
import shutil
from importlib.util import find_spec
from typing import Any

import pytest

from tests.model.fake import make
from trireme.task import Task
from trireme.workflows.sciworld import experiment_of
from trireme.workflows.workflow import resolve

THERE = find_spec("scienceworld") is not None and shutil.which("java") is not None
ROW = {"prompt": '{"task_name": "find-plant", "var_num": 1, "jar_path": "x"}'}


@pytest.mark.parametrize("row", [ROW, {"task_name": "find-plant", "var_num": 1, "prompt": "a"}])
def test_a_row_names_its_experiment(row: dict[str, Any]) -> None:
    assert experiment_of(Task(row)) == {"task_name": "find-plant", "var_num": 1}


@pytest.mark.parametrize("prompt", ["boil", "[1]", 3, None])
def test_a_row_without_one_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match="expected JSON like"):
        experiment_of(Task({"prompt": prompt}))


@pytest.mark.skipif(not THERE, reason="scienceworld or Java is not installed")
def test_the_gold_actions_earn_1_and_fewer_a_part() -> None:
    from trireme.envs.sciworld import Experiment

    env = Experiment("find-plant", 1)
    gold = env.reset()[1]["gold"]
    env.close()
    assert Experiment("find-plant", 1)._world is env._world  # the program is started once
    env.close()
    with pytest.raises(ValueError, match="has no task 'fly'"):
        Experiment("fly")

    def reward(actions: list[str]) -> Any:
        task = Task(ROW, workflow_args={"max_env_steps": len(actions), "env_workers": 1})
        replies = [f"<action>{action}</action>" for action in actions]
        [e] = asyncio.run(resolve("sciworld_workflow").call(task, make(replies), 1, 0))
        return e

    done = reward(gold)
    assert done.reward == pytest.approx(1.0) and done.metrics["env_done"] == 1.0
    assert "Your task is to find" in (done.messages or [])[1]["content"]
    some = reward(gold[:2])
    assert 0 < some.reward < 1 and some.metrics["env_done"] == 0.0
