"""One workflow on one task: the exchange with its tokens, from Python and from the command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trireme
from tests.e2e.job import small_config
from tests.limits import HANG_S
from trireme.cli.main import app
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.evaluation.trial import TrialFailed
from trireme.task import Task

SMALL: dict[str, Any] = {"model.max_model_len": 64, "model.max_response_tokens": 8}


async def twice(task: Task, model: trireme.Model) -> list[trireme.Experience]:
    chat: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    chat.append((await model.chat(chat)).message)
    await model.chat([*chat, {"role": "user", "content": "again"}])
    return model.experiences(reward=1.0)


def broken(task: Task, answer: str) -> float:
    return 1 / len(task.prompt[len(task.prompt) :])


def test_what_was_said_and_what_would_be_trained(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["3", "4"]
    trial = trireme.try_workflow(twice, "1 + 2?", model=tiny_dir, replies=said, **SMALL)
    [experience] = trial.experiences
    told = capsys.readouterr().out
    assert told == f"{trial}\n"
    assert repr(trial) == f"Trial(experiences=[{experience!r}])", "a notebook shows it, too"
    trained = [line.split()[0] for line in told.splitlines() if " yes " in line]
    assert [int(place) for place in trained] == experience.mask.nonzero().flatten().tolist()
    assert f"{len(trained)} of {len(experience.tokens)} tokens would be trained" in told
    assert "  user       again" in told and "reward 1 " in told
    assert all(" made up " in line for line in told.splitlines() if " yes " in line)
    assert told.endswith("each token's log-probability is made up (-0.693 in the experiences)\n")


def test_a_trial_has_its_environment_and_ends_what_it_started(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OF_THE_RUNNERS", raising=False)
    children: list[subprocess.Popen[bytes]] = []

    async def leaves(task: Task, model: trireme.Model) -> list[trireme.Experience]:
        assert os.environ["OF_THE_RUNNERS"] == "here"
        children.append(subprocess.Popen(["sleep", "60"]))
        await model.chat([{"role": "user", "content": task.prompt}])
        return model.experiences(reward=1.0)

    settings: dict[str, Any] = {"explorer.env_vars": {"OF_THE_RUNNERS": "here"}, **SMALL}
    trireme.try_workflow(leaves, "?", model=tiny_dir, replies=["1"], show=False, **settings)
    [child] = children
    assert child.wait(HANG_S) == -15 and "OF_THE_RUNNERS" not in os.environ
    left = f"note: ended 1 process that rollouts had left running: sleep 60 ({child.pid})"
    assert left in capsys.readouterr().err


def test_text_that_the_vocabulary_does_not_cover_is_pointed_out(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", ["Ann has 1 egg."], seed=0)
    options: dict[str, Any] = {"model": model, "show": False, **SMALL}
    unknown = trireme.try_workflow(twice, "Ann has 1 egg.", replies=["Ann", "Zebras"], **options)
    assert "tokens are '<|unknown|>': the model's vocabulary does not cover" in unknown.text


def test_the_model_s_own_engine_answers_also_in_a_running_loop(tiny_dir: Path) -> None:
    async def cell() -> trireme.Trial:
        row = {"question": "1 + 2?", "answer": 3}
        return trireme.try_workflow(
            None, row, model=tiny_dir, reward="accuracy_reward", rollouts=3, show=False, **SMALL
        )

    trial = asyncio.run(cell())
    assert [e.eid.run for e in trial.experiences] == [0, 1, 2]
    assert "truth: '3'" in trial.text


def test_a_reward_that_fails_is_named_with_its_line(tiny_dir: Path) -> None:
    with pytest.raises(TrialFailed, match="reward 'broken' failed: ZeroDivisionError") as caught:
        trireme.try_workflow(None, "?", model=tiny_dir, reward=broken, replies=["1"], **SMALL)
    assert "test_trial.py" in str(caught.value) and "Traceback" in caught.value.trace


def test_a_failure_that_a_run_would_retry_is_the_one_that_is_told(tiny_dir: Path) -> None:
    def number(task: Task, answer: str) -> float:
        return float(answer == "7" or int("seven"))

    with pytest.raises(TrialFailed, match="reward 'number' failed: ValueError: invalid literal"):
        trireme.try_workflow(None, "?", model=tiny_dir, reward=number, replies=["1"], **SMALL)


def test_debug_takes_a_yaml_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(tmp_path)))
    words = ["debug", str(path), "model.max_model_len=96", "--task", "2", "--reply", "#### 7"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "task 2: " in done.output and "assistant  #### 7" in done.output
    assert not (tmp_path / "checkpoints").exists()
    done = CliRunner().invoke(app, [*words[:4], "99", "--reply", "1"])
    assert done.exit_code == 2 and "there is no task 99: the taskset has 0 to 15" in done.output


@pytest.mark.extension("swift", "multi_turn")
def test_debug_takes_the_flags_that_run_and_check_take(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_config(tmp_path)))
    flags = ["--multi_turn_scheduler", "math_tip_trick_multi_turn", "--max_turns", "2"]
    flags += ["--reward_funcs", "accuracy"]
    words = ["debug", str(path), "model.max_model_len=160", *flags]
    done = CliRunner().invoke(app, [*words, "--reply", "#### 7", "--reply", "--- v1. A rule"])
    assert done.exit_code == 0, done.output
    assert "num_turns 2" in done.output and "rewards/accuracy 0" in done.output
    done = CliRunner().invoke(app, [*words, "--max_turn", "2"])
    assert done.exit_code == 2 and "did you mean --max_turns?" in done.output


def test_an_exit_in_a_task_of_the_workflows_own_is_a_failure_of_the_workflow(
    tiny_dir: Path,
) -> None:
    """asyncio ended `trireme debug` by it, with exit code 0 and without a word."""

    async def leaves(task: Task, model: trireme.Model) -> list[trireme.Experience]:
        async def part() -> None:
            sys.exit(0)

        await asyncio.create_task(part())
        return model.experiences(reward=1.0)

    with pytest.raises(TrialFailed, match="failed: SystemExit: 0"):
        trireme.try_workflow(leaves, "?", model=tiny_dir, replies=["1"], **SMALL)


def test_tools_are_no_argument_of_a_trial(tiny_dir: Path) -> None:
    with pytest.raises(trireme.ConfigError, match="tools is not a known key; use buffer"):
        trireme.try_workflow(None, "1 + 1?", model=tiny_dir, tools=[len])


def test_keys_may_name_the_root_of_their_own(tmp_path: Path, tiny_dir: Path) -> None:
    own = {"checkpoint_root_dir": str(tiny_dir.parent)}
    model = "${checkpoint_root_dir}/" + tiny_dir.name
    before = {*tiny_dir.parent.iterdir()}
    trial = trireme.try_workflow(
        None,
        "1?",
        model=model,
        reward=lambda task, answer: 1.0,
        replies=["1"],
        show=False,
        **own,
        **SMALL,
    )
    assert trial.experiences[0].reward == 1
    assert {*tiny_dir.parent.iterdir()} == before  # nothing is written


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollouts": "two"}, "rollouts is 'two': expected a number from 1"),
        ({"rollouts": 0}, "rollouts is 0: expected a number from 1"),
        ({"replies": "yes"}, "replies is 'yes': expected a list of texts"),
        ({"replies": [1]}, r"replies is \[1\]: expected a list of texts"),
    ],
)
def test_arguments_of_another_type_are_refused(
    tiny_dir: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        trireme.try_workflow("simple_workflow", "1 + 1?", model=tiny_dir, **given)
