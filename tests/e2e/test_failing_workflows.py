"""Workflows that fail: the run goes on and counts them; a step of which nothing is left ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config
from tests.e2e.test_modes import metrics

PLUGIN = '''
"""Every task fails in its own way, by the sum that it asks for."""
import asyncio
import time

from trireme import Experience, Model, Task, workflow


async def answered(task: Task, model: Model) -> list[Experience]:
    reply = await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=len(reply.text) / 8)


def number(task: Task) -> int:
    return int(task.prompt.split("(")[1].rstrip(")"))


@workflow("moody")
async def moody(task: Task, model: Model) -> list[Experience]:
    """Of 16 tasks: one raises, one hangs, one returns nothing, one None."""
    match number(task):
        case 1:
            raise KeyError("the tool broke")
        case 6:
            await asyncio.sleep(3600)
        case 11:
            return []
        case 12:
            await answered(task, model)
            return None
    return await answered(task, model)


@workflow("stuck")
def stuck(task: Task, model) -> list[Experience]:
    """Blocks its thread, where nobody can cancel it, in one task of the second step."""
    if number(task) == 5:
        time.sleep(3600)
    found = model.chat([{"role": "user", "content": task.prompt}])
    for experience in found:
        experience.reward = len(experience.response_text) / 8
    return found


@workflow("picky")
async def picky(task: Task, model: Model) -> list[Experience]:
    """Four of 16 tasks ask for what no engine can do; the others use the same one meanwhile."""
    wrong = {1: {"temperature": "hot"}, 6: {"stop": [5]}, 11: {"n": 0}}
    if number(task) == 12:
        await model.generate([10**6])
    await model.generate("a", **{"max_tokens": 2} | wrong.get(number(task), {}))
    return await answered(task, model)


@workflow("broken")
async def broken(task: Task, model: Model) -> list[Experience]:
    """Works in the first step and never again."""
    if number(task) >= 100 or number(task) < 4:
        return await answered(task, model)
    raise ZeroDivisionError(f"no luck with {task.prompt}")
'''


def job(folder: Path, workflow: str) -> dict[str, Any]:
    """A small run with one of the plug-in's workflows; evaluations keep the plain one."""
    (folder / "moody.py").write_text(PLUGIN)
    config = small_config(folder)
    config["plugins"] = [str(folder / "moody.py")]
    for taskset in config["buffer"]["explorer_input"]["eval_tasksets"]:
        taskset["default_workflow_type"] = "simple_workflow"
    config["buffer"]["explorer_input"]["default_workflow_type"] = workflow
    config["synchronizer"] = {"sync_style": "dynamic_by_explorer"}
    config["explorer"] |= {"max_timeout": 4.0, "max_retry_times": int(workflow == "moody")}
    return config


@pytest.mark.parametrize("workflow", ["moody", "stuck"])
def test_the_run_goes_on_and_counts_what_failed(tmp_path: Path, workflow: str) -> None:
    config, repeats = job(tmp_path, workflow), 4
    if workflow == "stuck":  # one rollout after the other waits for the whole time-out
        config["algorithm"]["repeat_times"] = repeats = 2
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "checkpoints/tests/job"
    explored, trained = metrics(folder, "explorer"), metrics(folder, "trainer")
    counted = [
        {kind: row[f"rollout/failed/{kind}"] for kind in ("error", "timeout", "empty")}
        for row in explored
    ]
    fine = {"error": 0, "timeout": 0, "empty": 0}
    if workflow == "stuck":
        assert counted == [fine, fine | {"timeout": repeats}, fine, fine]
    else:
        assert counted == [
            fine | {"error": 4}, fine | {"timeout": 4}, fine | {"empty": 4}, fine | {"error": 4}
        ]  # fmt: skip
        # what raises a KeyError, and what returns None, would do it again
        assert [row["rollout/retries"] for row in explored] == [0, 4, 4, 0]
        # the watchdog of learning has warnings of its own
        *warned, last = [row for row in done.stderr.splitlines() if "rollouts failed" in row
                         or "workflow 'moody' failed in" in row]  # fmt: skip
        first = "(timeout): workflow 'moody' failed: it took longer than explorer.max"
        assert done.stderr.count(first) == done.stderr.count("(timeout)") == 1
        causes = [
            "of step 1: KeyError: 'the tool broke' (",
            "of step 2: it took longer",
        ]
        causes += ["of step 3: returned no experience", "of step 4: returned None"]
        for line, said in zip(warned, causes, strict=True):
            assert f"workflow 'moody' failed in 4 of 16 rollouts {said}" in line, done.stderr
        assert last.startswith("warning: 16 of 73 rollouts failed and were left out: 4 x workflow")
        assert f'{tmp_path}/moody.py:23: raise KeyError("the tool broke"))' in warned[0]
    lived = sum(row["rollout/experiences"] for row in explored)
    assert lived == 16 * repeats - sum(sum(row.values()) for row in counted)
    assert sum(row["perf/experiences"] for row in trained) == lived


def test_options_that_no_engine_can_run_fail_their_own_rollouts_alone(tmp_path: Path) -> None:
    done = run(tmp_path, job(tmp_path, "picky"))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "checkpoints/tests/job"
    counted = [row["rollout/failed/error"] for row in metrics(folder, "explorer")]
    assert sum(counted) == 16
    assert "sampling temperature is 'hot': expected 0 (greedy), or a number" in done.stderr
    assert "the prompt holds the id 1000000 (at 0): expected 0 to" in done.stderr


def test_a_step_of_which_nothing_is_left_stops_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, job(tmp_path, "broken"))
    assert done.returncode == 1, done.stdout
    [place] = [i for i, row in enumerate(done.stderr.splitlines()) if row.startswith("error: ")]
    sentence, line, details = done.stderr.splitlines()[place:]
    assert "workflow 'broken' failed in all 16 rollouts of step 2: ZeroDivisionError" in sentence
    assert line.startswith(f"  {tmp_path}/moody.py:") and "raise ZeroDivisionError(" in line
    assert details.startswith("details: ")
    folder = tmp_path / "checkpoints/tests/job"
    assert len(metrics(folder, "explorer")) == 1
    log = (folder / "log/error.log").read_text()
    assert "ZeroDivisionError" in log and 'moody.py", line ' in log


def test_a_smaller_share_may_be_too_much(tmp_path: Path) -> None:
    config = job(tmp_path, "moody")
    config["explorer"]["max_failures"] = 0.2
    done = run(tmp_path, config)
    assert done.returncode == 1, done.stdout
    said = "error: workflow 'moody' failed in 4 of 16 rollouts of step 1 (explorer.max_failures is"
    assert said in done.stderr
    assert "KeyError: 'the tool broke'" in done.stderr
