"""`trireme init`: what it writes runs as it is, and its own tests pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, environment
from tests.limits import HANG_S
from trireme.cli.init import init
from trireme.registry import COMMANDS


def call(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_starter_project_runs_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "mine"
    assert init(project) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{project}: making data and a tiny model"
    assert last == f"  cd {project} && trireme run run.yaml"
    assert not list(project.glob("*.txt"))
    told = call("-m", "trireme", "run", "run.yaml", cwd=project)
    assert "evaluation held_out" in told and "warning" not in told
    summary = json.loads((project / "checkpoints/starter/first/summary.json").read_text())
    assert summary["accuracy_before"] < 0.2 and summary["accuracy_rl"] > 0.6
    if "debug" in COMMANDS:
        words = ("debug", "run.yaml", "--reply", "2", "--reply", "1")
        debugged = call("-m", "trireme", *words, cwd=project)
        assert "No. Try again." in debugged and "unknown" not in debugged
    assert "2 passed" in call("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    call("-m", "ruff", "check", "--isolated", ".", cwd=project)


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    assert init(tmp_path) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
