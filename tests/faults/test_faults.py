"""The harness itself: the docs list its faults, and a few of them are tried."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, environment
from tests.faults.harness import end_commands, names, trials
from tests.faults.program import POINTS


def test_the_docs_name_the_harness_faults() -> None:
    page = (ROOT / "docs/resume.md").read_text()
    listed = page.partition("<!-- faults")[2].partition("<!-- end of faults")[0]
    assert re.findall(r"^\| (.*?) \| \d", listed, re.MULTILINE) == names()


def test_kills_are_tried_at_more_than_25_named_points() -> None:
    blows = [t.blow for t in trials(quick=False) if t.blow is not None and t.blow.what == "KILL"]
    assert len({(b.point, b.when) for b in blows}) > 25
    assert {b.point for b in blows} <= set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_a_point_names_a_function_of_the_product(point: str) -> None:
    module, _, name = POINTS[point].partition(":")
    assert callable(attrgetter(name)(import_module(module)))


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_checkpoint_loses_and_doubles_nothing() -> None:
    words = [sys.executable, "-m", "tests.faults.harness", "--quick", "--only", "SIGKILL"]
    words += ["--workers", "1"]  # each loads torch anew
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_of_a_trial_that_is_not_waited_for_is_ended(tmp_path: Path) -> None:
    (work := tmp_path / "trial").mkdir()
    words = ["sleep", "6000"]
    with (
        subprocess.Popen(words, cwd=work) as command,
        subprocess.Popen(words, cwd=tmp_path.parent) as other,
    ):
        end_commands(tmp_path)
        assert command.wait() == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
