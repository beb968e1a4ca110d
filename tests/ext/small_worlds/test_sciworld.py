"""ScienceWorld's own program, where it and Java are installed; its rows, everywhere."""

from __future__ import annotations

import asyncio
import shutil
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.fake import make
from trireme.ext.small_worlds import experiment
from trireme.ext.small_worlds.sciworld import experiment_of
from trireme.task import Task
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


@pytest.mark.parametrize("number", [None, 1.5, "x", True, -1])
def test_a_row_with_a_wrong_number_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="the row's var_num is"):
        experiment_of(Task({"task_name": "boil", "var_num": number, "prompt": "a"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workflow_args": {"simplification": "easy,hard"}}, "no simplification 'hard'"),
        ({"workflow_args": {"max_env_stps": 3}}, "did you mean 'max_env_steps'"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/java")
    examine = resolve("sciworld_workflow").examine
    assert examine is not None
    examine(Task(ROW, workflow_args={"simplification": "openDoors,openContainers"}))
    with pytest.raises(ValueError, match=said):
        examine(Task(ROW, **options))


class World:
    """In place of ScienceWorld: counts how often it is started."""

    started = 0

    def __init__(self, _: str, **options: Any) -> None:
        type(self).started += 1

    get_task_names = staticmethod(lambda: ["boil"])
    get_max_variations = staticmethod(lambda _: 2)
    load = staticmethod(lambda *args, **options: None)


def test_a_wrong_row_leaves_the_world_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "extra", lambda *_: SimpleNamespace(ScienceWorldEnv=World))
    monkeypatch.setattr(experiment, "_idle", [])
    for name, number in (("fly", 0), ("boil", 2), ("fly", 1)):
        with pytest.raises(ValueError, match="has"):
            experiment.Experiment(name, number)
    experiment.Experiment("boil", 1)
    assert World.started == 1


@pytest.mark.skipif(not THERE, reason="scienceworld or Java is not installed")
def test_as_many_actions_are_played_as_the_yaml_says() -> None:
    task = Task(ROW, workflow_args={"max_env_steps": 60, "env_workers": 1})
    model = make(["<action>wait1</action>"] * 60, max_model_len=10**6)
    [e] = asyncio.run(resolve("sciworld_workflow").call(task, model, 1, 0))
    assert e.metrics["actual_env_steps"] == 60 and e.metrics["env_done"] == 0.0


@pytest.mark.skipif(not THERE, reason="scienceworld or Java is not installed")
def test_the_gold_actions_earn_1_and_fewer_a_part() -> None:
    from trireme.ext.small_worlds.experiment import Experiment

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
