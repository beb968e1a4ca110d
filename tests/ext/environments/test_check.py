"""What is known before a run of workflows over environments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.test_problems import problems_of
from tests.workflows.made import examine_rows, examine_tasks
from trireme.envs.env import Seen
from trireme.ext.environments.workflow import HouseholdWorkflow, ReasoningGymWorkflow
from trireme.task import Task
from trireme.workflows.workflow import resolve

WORKFLOW = "buffer.explorer_input.taskset.default_workflow_type"


@pytest.mark.extension("more_losses")
@pytest.mark.parametrize("name", ["gym_workflow", "textarena_workflow"])
def test_gdpo_refuses_before_the_run_what_has_no_parts(tmp_path: Path, name: str) -> None:
    words = ("algorithm.algorithm_type=gdpo", f"{WORKFLOW}={name}")
    sentence = f"workflow '{name}' gives rewards without parts"
    assert any(sentence in problem for problem in problems_of(tmp_path, *words))
    assert not any("without parts" in problem for problem in problems_of(tmp_path, words[1]))


def test_a_batch_of_an_agents_steps_is_no_problem(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        "mode=explore",
        "buffer.train_batch_size=64",
        f"{WORKFLOW}=sudoku_workflow",
    )
    assert not any("train_batch_size" in str(problem) for problem in found)


def test_a_lake_may_have_rows_without_a_prompt() -> None:
    lake = resolve("frozen_lake_workflow")
    assert lake.examine is not None and not lake.reads_prompt
    lake.examine(Task(raw_task={"seed": 1, "size": 4}))
    with pytest.raises(ValueError, match="the column 'seed' or 'prompt'"):
        lake.examine(Task(raw_task={"size": 4}))
    for wrong in ({"p": 0.0}, {"p": 80}, {"size": 1}, {"size": "big"}):
        with pytest.raises(ValueError, match=f"a lake of size .*{next(iter(wrong.values()))}"):
            lake.examine(Task(raw_task={"seed": 1, **wrong}))


@pytest.mark.parametrize(
    ("workflow", "prompt", "args", "reward", "said"),
    [
        ("sudoku_workflow", 1, {"emty": 3}, None, r"no option 'emty' \(did you mean 'empty'\?\)"),
        ("sudoku_workflow", 1, {"size": 5}, None, "a Sudoku of size 5: expected 4 or 9"),
        ("sudoku_workflow", "who?", {}, None, "'prompt' .* is 'who\\?': expected the number"),
        ("household_workflow", 1, {"max_env_steps": 0}, None, "max_env_steps is 0: .* at least 1"),
        ("household_workflow", 1, {"max_env_step": 5}, None, "did you mean 'max_env_steps'"),
        ("household_workflow", 1, {}, "math_reward", "'math_reward', which workflow 'household_"),
    ],
)
def test_what_an_environment_would_not_read_is_refused(
    workflow: str, prompt: Any, args: dict[str, Any], reward: str | None, said: str
) -> None:
    task = Task({"prompt": prompt}, workflow=workflow, workflow_args=args, reward_fn=reward)
    with pytest.raises(ValueError, match=said):
        examine_tasks([task])


@pytest.mark.parametrize(
    ("workflow", "args"),
    [
        ("sudoku_workflow", {"size": 9, "empty": 40, "max_env_steps": 60, "per_step": True}),
        ("household_workflow", {"max_env_steps": 10}),
    ],
)
def test_the_options_of_an_environment_are_no_problem(workflow: str, args: dict[str, Any]) -> None:
    examine_rows(workflow, [{"prompt": 3}], args)


@pytest.mark.parametrize("workflow", ["sudoku_workflow", "household_workflow"])
def test_a_later_row_without_an_episode_is_named(workflow: str) -> None:
    first, last = (Task({"prompt": prompt}, workflow=workflow) for prompt in (3, "who?"))
    with pytest.raises(ValueError, match=r"dataset 'x', row 1: .* 'who\?': expected the number"):
        examine_tasks([first, last])


def test_a_subclass_may_read_options_and_a_reward_of_its_own() -> None:
    class Mine(HouseholdWorkflow):
        def final_reward(self, seen: Seen, total: float) -> float:
            return total * (self.task.reward_fn is not None)

    task = Task({"prompt": 1}, workflow=Mine, workflow_args={"rooms": 2}, reward_fn="math_reward")
    examine_tasks([task])


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ("gym_workflow", "gym_workflow needs workflow_args.env_id"),
        ("textarena_workflow", "textarena_workflow needs workflow_args.env_id"),
    ],
)
def test_an_environment_without_a_name_is_refused(workflow: str, said: str) -> None:
    examine = resolve(workflow).examine
    assert examine is not None
    with pytest.raises(ValueError, match=said):
        examine(Task({"prompt": 3}))


def test_an_error_of_score_answer_scores_0_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def score(answer: str, row: Any) -> float:
        raise IndexError(f"no {answer}")

    async def both(one: Any, task: Task) -> list[dict[str, float]]:
        return [await one.reward_fn(task, f"<answer>{said}</answer>") for said in "ab"]

    one: Any = object.__new__(ReasoningGymWorkflow)
    one._problems = SimpleNamespace(score=score)
    task = Task({"generated_by": "reasoning_gym:x"})
    assert asyncio.run(both(one, task)) == [{"score": 0.0}] * 2
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("reasoning_gym:x: score_answer raised IndexError (no a) for an answer")


@pytest.mark.parametrize("workflow", ["gym_workflow", "textarena_workflow"])
def test_an_environment_is_made_once_and_every_row_is_examined(
    workflow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Made:
        def __init__(self, env_id: str, *, seed: int, **options: Any) -> None:
            if env_id == "gone":
                raise ValueError("gone cannot be made")
            made.append(seed)

        def close(self) -> None:
            pass

    for name in ("TextGym", "ArenaGame"):
        monkeypatch.setattr(f"trireme.ext.environments.workflow.{name}", Made)
    monkeypatch.setattr("trireme.ext.environments.workflow._tried", set())
    code = resolve(workflow).code
    monkeypatch.setattr(code, "needs", lambda task: {})
    rows = [{"prompt": 3}, {"prompt": 4}, {"prompt": "who?"}]
    for _ in range(2):
        examine_rows(workflow, rows[:2], {"env_id": "there"})
        with pytest.raises(ValueError, match="gone cannot be made"):
            examine_rows(workflow, rows[:2], {"env_id": "gone"})
    assert made == [3]
    with pytest.raises(ValueError, match=r"dataset 'x', row 2: .* 'who\?': expected the number"):
        examine_rows(workflow, rows, {"env_id": "there"})
