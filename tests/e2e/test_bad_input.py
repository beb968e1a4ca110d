"""Bad input, from outside: one clear sentence, a failing exit code, and nothing was loaded."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.e2e.job import environment, run, small_config, started, write_jsonl
from tests.limits import HANG_S
from tests.tiny import make_model
from trireme.cli.main import app

TASKSET = "buffer.explorer_input.taskset"
LIGHT = """
import sys
from trireme.cli.main import app
try:
    app()
finally:
    slow = {"trireme.engines.torch.engine", "trireme.trainer.backend", "sqlalchemy", "datasets"}
    print("loaded:", *(slow & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder and a configuration that has no problem."""
    folder = tmp_path_factory.mktemp("good")
    config = small_config(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_jsonl(folder / "empty.jsonl", [])
    (folder / "broken.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": \n')
    make_model(folder / "plain", template=None)
    (folder / "file").write_text("")
    (folder / "other.jsonl").write_text("{}\n")
    return folder, config


def complaints(name: str, folder: Path, *overrides: str) -> list[str]:
    """What a command says of a configuration: its exit code must be a failure's."""
    done = CliRunner().invoke(app, [name, "--config", str(folder / "config.yaml"), *overrides])
    assert done.exit_code == {"check": 1, "run": 2}[name], done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert not (folder / "checkpoints").exists()  # nothing was started
    told = [line for line in done.output.splitlines() if not line.startswith("trireme ")]
    lines = [line for line in told if "problem: " in line or name == "run"]
    return [line.removeprefix("problem: ").removeprefix("error: ") for line in lines]


CASES: dict[str, tuple[list[str], Callable[[Path], list[str]]]] = {
    "unknown key": (
        ["trainer.grad_clipp=1"],
        lambda folder: ["trainer.grad_clipp", "did you mean", "grad_clip"],
    ),
    "wrong type": (
        ["buffer.batch_size=four"],
        lambda folder: ["buffer.batch_size", "'four'", "whole number"],
    ),
    "missing data set": (
        [f"{TASKSET}.path=data/trian.jsonl"],
        lambda folder: [f"{TASKSET}.path", "data/trian.jsonl"],
    ),
    "no prompt column": (
        [f"{TASKSET}.format.prompt_key=query"],
        lambda folder: ["prompt_key", "'query'", "train.jsonl", "question, answer"],
    ),
    "empty data set": (
        [f"{TASKSET}.path={{folder}}/empty.jsonl"],
        lambda folder: [f"{TASKSET}.path", f"{folder}/empty.jsonl", "no rows"],
    ),
    "broken line": (
        [f"{TASKSET}.path={{folder}}/broken.jsonl"],
        lambda folder: [f"{folder}/broken.jsonl, line 2", "not JSON"],
    ),
    "missing model": (
        ["model.model_path={folder}/mdoel"],
        lambda folder: ["model.model_path", f"{folder}/mdoel", f"'{folder}/model'"],
    ),
    "missing critic": (
        ["algorithm.algorithm_type=ppo", "model.critic_model_path={folder}/mdoel"],
        lambda folder: ["model.critic_model_path", f"{folder}/mdoel", f"'{folder}/model'"],
    ),
    "no chat template": (
        ["model.model_path={folder}/plain"],
        lambda folder: [f"{folder}/plain", "no chat template", "simple_workflow"],
    ),
    "response too long": (
        ["model.max_response_tokens=128"],
        lambda folder: ["model.max_response_tokens", "128", "model.max_model_len"],
    ),
    "unknown workflow": (
        [f"{TASKSET}.default_workflow_type=simple_workflwo"],
        lambda folder: ["'simple_workflwo'", "did you mean 'simple_workflow'", "math_workflow"],
    ),
    "unknown reward": (
        [f"{TASKSET}.default_reward_fn_type=math_rewrad"],
        lambda folder: ["'math_rewrad'", "did you mean 'math_reward'", "countdown_reward"],
    ),
    "unknown algorithm": (
        ["algorithm.algorithm_type=gropo"],
        lambda folder: ["algorithm.algorithm_type", "'gropo'", "did you mean 'grpo'", "sft"],
    ),
    "no step": (
        ["buffer.batch_size=40", "buffer.train_batch_size=16", "buffer.total_steps=null"],
        lambda folder: ["buffer.batch_size 40", "not one batch", "16 rows"],
    ),
    "one rollout": (
        ["algorithm.repeat_times=1"],
        lambda folder: ["algorithm.repeat_times is 1", "at least 2", "grpo"],
    ),
    "another job's copy": (
        ["buffer.trainer_input.experience_buffer.path={folder}/other.jsonl"],
        lambda folder: ["experience_buffer.path", f"{folder}/other.jsonl", "names no job"],
    ),
    "folder below a file": (
        ["checkpoint_root_dir={folder}/file/jobs"],
        lambda folder: ["checkpoint_root_dir", f"{folder}/file", "cannot be written"],
    ),
}


@pytest.mark.parametrize("name", ["check", "run"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(good: tuple[Path, dict[str, Any]], case: str, name: str) -> None:
    folder, _ = good
    overrides, expected = CASES[case]
    found = complaints(name, folder, *(word.replace("{folder}", str(folder)) for word in overrides))
    assert len(found) == 1, found
    for part in expected(folder):
        assert part in found[0], found[0]
    assert "Traceback" not in found[0]


def test_check_and_run_say_all_problems_at_once_and_load_no_engine(
    good: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = good
    words = [f"{TASKSET}.path=/no.jsonl", "model.max_response_tokens=128"]
    words += ["algorithm.repeat_times=1", f"{TASKSET}.default_reward_fn_type=math_rewrad"]
    for name, code in (("check", 1), ("run", 2)):
        done = subprocess.run(
            [sys.executable, "-c", LIGHT, name, "--config", str(folder / "config.yaml"), *words],
            capture_output=True, text=True, timeout=HANG_S, env=environment(), cwd=folder,
        )  # fmt: skip
        said = (done.stdout + done.stderr).splitlines()
        assert done.returncode == code, said
        problems = [word for word in words if any(word.split("=")[0] in line for line in said)]
        assert problems == words
        assert "loaded:" in said, said
    assert not (folder / "checkpoints").exists()


def test_a_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("project: x\nname: [unclosed\n")
    [line] = complaints("run", tmp_path)
    assert str(tmp_path / "config.yaml") in line and "line" in line
    [line] = complaints("run", tmp_path / "none")
    assert str(tmp_path / "none/config.yaml") in line


FULL = {
    20_000: ("buffer/explorer_output.db", "disk I/O error"),
    150_000: ("actor/optim_world_size_1_rank_0.pt", "File too large"),
}


@pytest.mark.parametrize("limit", FULL)
def test_a_full_disk_ends_the_run_and_leaves_no_half_file(tmp_path: Path, limit: int) -> None:
    """No file may grow past the limit, as on a full disk."""
    config = small_config(tmp_path)
    words = ("trainer.save_interval=1", "explorer.eval_on_startup=false")
    small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    process = started(tmp_path, config, *words, prepare=small)
    _, said = process.communicate()
    assert process.returncode == 1, process.said()
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    path, reason = FULL[limit]
    assert path in error and str(tmp_path / "checkpoints") in error and reason in error
    assert "Traceback" not in said
    job = tmp_path / "checkpoints/tests/job"
    assert not list(job.glob("global_step_*")), "half a checkpoint under a final name"
    assert not list(job.glob(".tmp-*"))
    if limit == min(FULL):  # with room again, the same command goes through
        done = run(tmp_path, config)
        assert done.returncode == 0, done.stderr


def test_another_jobs_copy_on_a_server_is_refused_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file here plays a server's database, which `check` does not ask."""

    def loaded(*_: Any) -> None:
        raise AssertionError("models were loaded")

    monkeypatch.setattr("trireme.launch.run.others_copies", lambda plans: [])
    monkeypatch.setattr("trireme.launch.run.load_models", loaded)
    other = write_jsonl(tmp_path / "other.jsonl", [{"eid": "1/0/0", "step": 1}])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(small_config(tmp_path)))
    key = f"buffer.trainer_input.experience_buffer.path={other}"
    words = ["run", "--config", str(tmp_path / "config.yaml"), key]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert f"{other} has experiences but names no job" in done.output
