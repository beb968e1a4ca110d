"""`trireme log`: records of several files, in order of time."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.odd import ALL
from tests.test_text import commands_in
from trireme.cli.log import log, select
from trireme.cli.main import app

EXPLORER = """\
2026-01-01 10:00:00,000 INFO trireme.explorer: step 1
2026-01-01 10:00:02,000 ERROR trireme.explorer: it broke
Traceback (most recent call last):
ValueError: x
"""
TRAINER = "2026-01-01 10:00:01,000 WARNING trireme.trainer: slow\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job/log"
    folder.mkdir(parents=True)
    (folder / "explorer.log").write_text(EXPLORER)
    (folder / "trainer.log").write_text(TRAINER)
    return tmp_path / "job"


def test_records_are_merged_by_time_with_their_tracebacks(job: Path) -> None:
    texts = [entry.text for entry in select([job / "log"])]
    assert [text.split(": ")[1].split("\n")[0] for text in texts] == ["step 1", "slow", "it broke"]
    assert texts[-1].endswith("ValueError: x")


def test_records_are_chosen_by_level_keyword_and_file(job: Path) -> None:
    assert len(select([job / "log"], level="warning")) == 2
    assert [e.part for e in select([job / "log"], keyword="ValueError")] == ["explorer"]
    assert [e.part for e in select([job / "log"], pattern="train*")] == ["trainer"]


def test_the_last_lines_of_a_job_folder(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert log(job, None, last=2, color=False) == 0
    assert capsys.readouterr().out == "Traceback (most recent call last):\nValueError: x\n"
    assert log(job, None, last=4, color=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("2026-01-01 10:00:01,000 WARNING") and len(out.splitlines()) == 4


def test_the_folder_may_stand_by_itself(job: Path) -> None:
    ways = [["log", str(job)], ["log", "--log-dir", str(job)]]
    named, flagged = (CliRunner().invoke(app, words) for words in ways)
    assert named.exit_code == 0 and "slow" in named.output
    assert named.output == flagged.output
    both = CliRunner().invoke(app, ["log", str(job), "--log-dir", str(job)])
    assert both.exit_code == 2 and "expected one of them" in both.output


def test_the_logs_of_a_job_s_stages_are_found(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert log(job.parent, None, color=False) == 0
    assert "slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "LOUD"}, "--level is 'LOUD'"),
        ({"pattern": "x*"}, "--pattern 'x*' matches none of explorer.log, trainer.log"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    job: Path, options: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert log(job, None, level=options.get("level", "INFO"), pattern=options.get("pattern", "*"))
    assert message in capsys.readouterr().err


def test_a_folder_without_logs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert log(tmp_path, None) == 2
    assert capsys.readouterr().err == f"no log files in {tmp_path}\n"
    (tmp_path / "grpo").mkdir()
    assert log(tmp_path / "gropo", None) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"there is no folder {tmp_path / 'gropo'}: expected a job's")
    assert said.endswith(f"did you mean '{tmp_path / 'grpo'}'?\n")


def test_control_characters_that_another_program_logged_are_shown(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"2026-01-01 10:00:03,000 ERROR vllm: \x1b[2Jgone {ALL}\n"
    (job / "log/engine_0.log").write_text(line, encoding="utf-8", errors="surrogatepass")
    assert log(job, None, last=99, color=False) == 0
    said = capsys.readouterr().out
    assert "vllm: \u241b[2Jgone" in said and commands_in(said) == set()
