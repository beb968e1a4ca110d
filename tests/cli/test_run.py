"""`trireme run`: what each way to end looks like from outside."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import trireme
from tests.e2e.job import small_config
from trireme.cli import run as command
from trireme.cli.main import app
from trireme.config import ConfigError, Problem
from trireme.launch.check import refuse_old_rows
from trireme.launch.stop import Stop

Calls = list[dict[str, Any]]


def plan(job_dir: Path, stage_name: str | None = None) -> Any:
    notes = ("there is no GPU: the run takes place on the CPU",)
    root = job_dir if stage_name is None else job_dir.parent
    names = {"stage_name": stage_name, "explorer_name": ""}
    return SimpleNamespace(job_dir=job_dir, root_dir=root, notes=notes, **names)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A launcher whose `run_stages` the test sets, and one plan for it."""
    module: Any = ModuleType("trireme.launch.run")
    monkeypatch.setitem(sys.modules, "trireme.launch.run", module)
    made = SimpleNamespace(plans=[plan(tmp_path / "job")])
    monkeypatch.setattr(command, "draft_of", lambda *_: made)
    return module


def test_a_run_says_how_it_fits_this_machine_and_returns_0(
    stages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.run_stages = lambda plans, **_: None
    assert command.run(Path("x.yaml"), [], []) == 0
    assert capsys.readouterr().out == "there is no GPU: the run takes place on the CPU\n"


def test_a_run_that_fails_says_why_and_where_the_traceback_is(
    stages: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(plans: Any, **_: Any) -> None:
        raise RuntimeError("the probe found other weights in the engine")

    stages.run_stages = fail
    assert command.run(Path("x.yaml"), [], []) == 1
    details = tmp_path / "job/log/error.log"
    assert capsys.readouterr().err.splitlines() == [
        "error: the probe found other weights in the engine",
        f"details: {details}",
    ]
    assert "in fail" in details.read_text()


def test_an_error_of_ours_is_not_hidden(stages: Any) -> None:
    def fail(plans: Any, **_: Any) -> None:
        raise AssertionError("an invariant")

    stages.run_stages = fail
    with pytest.raises(AssertionError, match="an invariant"):
        command.run(Path("x.yaml"), [], [])


def test_a_thread_that_a_full_disk_ends_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", others.append)

    def end(error: Exception) -> None:
        raise error

    with command.brief_threads():
        for error in (OSError(28, "No space left on device"), KeyError("a bug")):
            thread = threading.Thread(target=end, args=(error,), name="writer")
            thread.start()
            thread.join()
    expected = "warning: thread 'writer' has ended: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == expected
    assert [one.exc_type for one in others] == [KeyError]
    assert threading.excepthook == others.append


def test_control_c_ends_with_130(stages: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(plans: Any, **_: Any) -> None:
        raise KeyboardInterrupt

    stages.run_stages = interrupt
    assert command.run(Path("x.yaml"), [], []) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C: nothing had begun\n"


def test_signals_are_the_runs_whatever_handlers_a_plug_in_has_installed(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C was then the plug-in's: no checkpoint was saved."""
    made = command.draft_of(None, [], [])
    heard: list[bool] = []

    def draft_of(*_: Any) -> Any:
        signal.signal(signal.SIGINT, lambda *_: None)
        return made

    def run_stages(plans: Any, *, stop: Stop, **_: Any) -> None:
        heard.append(stop.hears(signal.SIGINT))

    monkeypatch.setattr(command, "draft_of", draft_of)
    stages.run_stages = run_stages
    assert command.run(Path("x.yaml"), [], []) == 0
    assert heard == [True]


def test_a_configuration_that_cannot_run_starts_nothing(
    stages: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError([Problem("trainer.grad_clip", "is -1"), Problem("mode", "is 'x'")])

    monkeypatch.setattr(command, "draft_of", refuse)
    assert command.run(Path("x.yaml"), [], []) == 2
    assert capsys.readouterr().err == "error: trainer.grad_clip is -1\nmode is 'x'\n"


def test_without_a_yaml_a_wrong_key_is_said_to_be_the_demos(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIREME_MODEL_PATH", raising=False)
    assert command.run(None, ["max_step=5"], []) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("error: the demo, since no YAML is named: max_step is not a known")
    assert "arithmetic.yaml" not in refused and "TRIREME_MODEL_PATH" not in os.environ


def test_a_missing_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(Path("no-such.yaml"), [], []) == 2
    assert capsys.readouterr().err == "error: there is no configuration file no-such.yaml\n"


def test_a_job_with_stages_logs_its_end_beside_them(tmp_path: Path) -> None:
    assert command.log_folder([plan(tmp_path / "job/sft", "sft")]) == tmp_path / "job/log"
    assert command.log_folder([plan(tmp_path / "job")]) == tmp_path / "job/log"


def test_plugin_folders_come_before_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIREME_PLUGIN_DIRS", "/theirs")
    command.add_plugin_dirs([tmp_path])
    assert command.os.environ["TRIREME_PLUGIN_DIRS"] == f"{tmp_path}:/theirs"


def test_a_comparison_needs_two_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path)))
    assert command.run(config, [], [], compare=True) == 2
    said = capsys.readouterr().err
    assert "--compare needs two stages, first sft" in said and said.endswith("has grpo\n")


def test_a_new_run_of_the_same_yaml_has_the_next_free_name(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path)))
    [plan] = command.draft_of(config, [], []).plans
    (plan.job_dir / "log").mkdir(parents=True)
    made = command.draft_of(config, ["trainer.grad_clip=0.5"], [], True)
    [fresh] = made.plans
    assert fresh.job_dir == plan.job_dir.with_name(f"{plan.config.name}_2")
    assert fresh.config.trainer.grad_clip == 0.5
    refuse_old_rows(made)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["mode=explore"], "mode is explore, whose run's folder other commands name: expected"),
        (
            [
                "buffer.trainer_input.experience_buffer.storage_type=sql",
                "buffer.trainer_input.experience_buffer.path=sqlite:////tmp/shared.db",
            ],
            "experience_buffer.name is 'experience_buffer', in a database outside the run's folder",
        ),
    ],
)
def test_a_new_run_meets_no_earlier_experiences(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path)))
    with pytest.raises(ConfigError, match=expected):
        refuse_old_rows(command.draft_of(config, overrides, []))
    name = "buffer.trainer_input.experience_buffer.name=job_rows"
    if "explore" not in overrides[0]:
        refuse_old_rows(command.draft_of(config, [*overrides, name], []))


def test_a_stopped_new_run_is_resumed_by_its_name(tmp_path: Path) -> None:
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path)))
    [plan] = command.draft_of(config, [], []).plans
    stop = Stop()
    stop.begin(plan)
    (plan.job_dir / "global_step_2").mkdir(parents=True)
    (plan.job_dir / "global_step_2/manifest.json").touch()
    assert stop.what_is_left().endswith("is saved; the same command resumes from it")
    stop.fresh = True
    assert stop.what_is_left().endswith(f"add name={plan.config.name} in place of --fresh")


@pytest.mark.extension("evaluation", "rollout_server")
@pytest.mark.parametrize(
    ("words", "waits"),
    [
        (
            ["run", "none.yaml"],
            f"trireme {trireme.__version__}: none.yaml; loading torch, and checking model, data "
            "and workflows",
        ),
        (["debug", "none.yaml"], "none.yaml: loading torch and the task"),
        (["eval", "-c", "none.yaml", "-m", "m"], "loading torch, and checking models and tasks"),
        (["rollout", "--model", "none"], "loading none"),
    ],
)
def test_a_command_says_what_it_waits_for_before_it_waits(words: list[str], waits: str) -> None:
    done = CliRunner().invoke(app, words)
    lines = done.output.splitlines()
    assert done.exit_code != 0 and lines.index(waits) < len(lines) - 1
