"""Listeners and steering: what a package of others brings follows a run, here and on Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.job import small_config
from tests.packages import install, manifests_read_anew
from trireme import extensions
from trireme.checkpoint.layout import JobFolder
from trireme.cli.run import run as command
from trireme.config import load_config
from trireme.extensions import names_of
from trireme.launch.check import checked, draft
from trireme.registry import LISTENERS, STEERINGS

MANIFEST = """
about = "A diary of each run."
[listener]
diary = "things:Diary"
[steering]
brake = "things:Brake"
"""
THINGS = '''
import json
from trireme.config import ConfigError, Problem
from trireme.launch.listeners import RunListener
from trireme.monitor.events import Ended, Saved, StepDone


class Diary(RunListener):
    """Writes a line for each step, where the run's group is diary."""

    name = "the diary"

    def examine(self, plan):
        if plan.config.group == "secret":
            yield Problem("group", "is secret: expected one that a diary may name")

    def begin(self, stage):
        if stage.resumed and stage.plan.config.group == "once":
            raise ConfigError([Problem("group", "is once: expected a run that begins")])

    def listen(self, stage):
        self.file = stage.folder.monitor / "diary.jsonl"
        if stage.plan.config.group == "diary":
            stage.stream.subscribe(self)

    def hear(self, event):
        match event:
            case StepDone():
                self.write(event.part, event.step)
            case Saved():
                self.write("saved", event.step)
            case Ended():
                self.write("ended", event.failed)

    def write(self, *line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def end(self):
        steps = len(self.file.read_text().splitlines()) if self.file.exists() else 0
        return [{"cause": "diary", "part": "trainer", "step": 0, "text": f"{steps} lines"}]


class Brake:
    """Ends a training after its first step, where the run's group is brake."""

    ended_by = ""
    saves = False

    def examine(self, plan):
        if plan.config.group == "handbrake":
            yield Problem("group", "is handbrake: expected one that moves")

    def make(self, parts):
        return self if parts.plan.config.group == "brake" else None

    async def notify(self, event, step, **facts):
        if event == "on_step_end":
            self.ended_by = f"the brake ended the training at step {step}"
'''


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package that brings a listener and a steering."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    with manifests_read_anew():
        yield install(tmp_path / "site", "diary", MANIFEST, THINGS, package="diary", first_line="")
    for module in ("diary", "diary.things"):
        sys.modules.pop(module, None)
    LISTENERS._registered.pop("diary", None)
    LISTENERS._forget("diary")
    STEERINGS._registered.pop("brake", None)


def started(folder: Path, *overrides: str) -> int:
    """The exit code of `trireme run` in this process."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(small_config(folder)))
    return command(path, overrides, ())


def heard(folder: Path, *overrides: str) -> None:
    assert started(folder, "group=diary", "buffer.total_steps=2", *overrides) == 0
    job = folder / "checkpoints/tests/diary/job"
    *before, last = map(json.loads, (job / "monitor/diary.jsonl").read_text().splitlines())
    steps = [("explorer", 1), ("explorer", 2), ("saved", 2), ("trainer", 1), ("trainer", 2)]
    assert sorted({tuple(line) for line in before}) == steps and last == ["ended", False]
    summary = json.loads((job / "summary.json").read_text())
    [warning] = [one for one in summary["warnings"] if one["cause"] == "diary"]
    assert warning["text"] == f"{len(before)} lines"


def test_a_listener_of_a_package_hears_what_a_run_does(package: Path, tmp_path: Path) -> None:
    heard(tmp_path)


@pytest.mark.slow
@pytest.mark.large
def test_a_listener_of_a_package_hears_what_the_processes_of_ray_do(
    package: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    # a cluster of another test, which ends with it, is not to be found
    heard(tmp_path, "cluster.launcher=ray", "cluster.ray_address=local")


def test_a_listener_says_what_is_wrong_with_a_configuration_and_with_a_resume(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(tmp_path, "group=secret") == 2
    sentence = "error: group is secret: expected one that a diary may name"
    assert sentence in capsys.readouterr().err
    assert started(tmp_path, "group=once", "buffer.total_steps=2") == 0
    job = tmp_path / "checkpoints/tests/once/job"
    before = (job / "monitor/metrics.jsonl").read_bytes()
    assert started(tmp_path, "group=once") == 2
    assert "group is once: expected a run that begins" in capsys.readouterr().err
    assert (job / "monitor/metrics.jsonl").read_bytes() == before


def test_what_steers_a_training_may_be_of_a_package(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(tmp_path, "group=handbrake") == 2
    assert "error: group is handbrake: expected one that moves" in capsys.readouterr().err
    assert started(tmp_path, "group=brake") == 0
    assert "the brake ended the training at step 1" in capsys.readouterr().out
    assert JobFolder(tmp_path / "checkpoints/tests/brake/job").steps() == [1]


def test_a_key_that_only_an_extension_reads_which_is_not_here_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_config(tmp_path)))
    config = load_config(path, ("monitor.monitor_type=wandb",))
    monkeypatch.setattr(extensions, "extensions", dict)
    names_of.cache_clear()
    try:
        problems = draft(config).problems
    finally:
        names_of.cache_clear()
    assert [str(problem) for problem in problems] == [
        "monitor.monitor_type (wandb) needs the extension 'trackers', which is not here: "
        "`trireme extensions` lists what is"
    ]


def test_a_listener_that_cannot_be_made_is_left_out_with_a_warning(
    package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = "    def __init__(self):\n        import no_such_package_for_diaries\n"
    package.write_text(THINGS.replace('    name = "the diary"\n', late))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(small_config(tmp_path)))
    for _ in range(2):
        checked(load_config(path))
    sentence = "listener 'diary' is left out: it cannot be used: No module named 'no_such_package"
    assert len([text for text in caplog.messages if sentence in text]) == 1
