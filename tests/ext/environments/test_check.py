"""What is known before a run of workflows over environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_problems import problems_of
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
