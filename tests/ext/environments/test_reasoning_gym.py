"""Data sets of the real reasoning-gym, by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make test-extras")

from tests.model.fake import make
from trireme.config.schema_rollout import TasksetConfig
from trireme.ext.environments.generated import problems
from trireme.launch.tasksets import rows_of
from trireme.task import Task
from trireme.workflows.workflow import resolve

PATH = "reasoning_gym:basic_arithmetic?size=20&seed=3&min_terms=2&max_terms=2"


def ask(path: str, reply: str, **args: Any) -> Any:
    async def main() -> Any:
        columns = {"prompt_key": "question", "response_key": "answer"}
        task = Task(problems(path)[0], format_args=columns, workflow_args=args)
        return await resolve("reasoning_gym_workflow").call(task, make([reply]), 1, 0)

    return asyncio.run(main())


def test_a_taskset_is_a_data_set_of_its_size_and_seed() -> None:
    rows = rows_of(TasksetConfig(path=PATH))
    assert len(rows) == 20 and set(rows[0]) == set(rows.columns)
    assert rows[7] == rows[7] != rows_of(TasksetConfig(path=PATH.replace("seed=3", "seed=4")))[7]


@pytest.mark.parametrize("before", ["", "I think so. <answer>0</answer> No: "])
def test_the_reward_is_the_data_sets_own(before: str) -> None:
    right = problems(PATH)[0]["answer"]
    (e,) = ask(PATH, f"{before}<answer>{right}</answer>")
    assert e.reward == 1.0 and e.metrics["score"] == 1.0
    for wrong in ("<answer>none</answer>", right, f"<answer>{right}"):
        (e,) = ask(PATH, wrong)
        assert e.reward == 0.0


def test_what_a_data_set_cannot_read_is_worth_nothing() -> None:
    path = "reasoning_gym:prime_factorization?size=2&seed=1"
    row = problems(path)[0]
    with pytest.raises(ValueError, match="invalid literal"):
        problems(path).score("no", row)
    (e,) = ask(path, "<answer>no</answer>")
    assert e.reward == 0.0


def test_a_data_set_that_would_run_answers_has_to_be_allowed_to() -> None:
    path = "reasoning_gym:countdown?size=2&seed=1"
    with pytest.raises(ValueError, match="by running it as Python code"):
        ask(path, "1 + 1")
    (e,) = ask(path, f"<answer>{problems(path)[0]['answer']}</answer>", run_answers=True)
    assert e.reward == 1.0
    assert not problems("reasoning_gym:propositional_logic?size=2").runs_answers


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:leg_countin", "no data set 'leg_countin': did you mean 'leg_counting'"),
        ("reasoning_gym:leg_counting?legs=3", "has wrong options: .*'legs'"),
        ("reasoning_gym:leg_counting?min_animals=0", "has wrong options"),
    ],
)
def test_what_there_is_not_is_said(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problems(path)
