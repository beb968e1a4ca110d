"""What people do wrong is told in one sentence, with their own line, by the right exit code.

The rows are in mistakes.py. Here are those that need a process of their own as well.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml

from tests.e2e.job import Forked, started, wait_for
from tests.e2e.mistakes import MISTAKES, TASKSET, Mistake, answer, folder_for
from tests.limits import HANG_S
from trireme import aio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_for(tmp_path_factory.mktemp("mistakes"))


def checked(said: str, mistake: Mistake, folder: Path) -> None:
    """The sentence, the user's own line, perhaps where the details lie; nothing of ours."""
    sentence = mistake.sentence.replace("{folder}", str(folder))
    first, *more = said.splitlines()
    assert sentence in first, said
    if mistake.line:
        assert more and more[0].startswith("  /") and mistake.line in more.pop(0), said
    assert not [line for line in more if not line.startswith("details: ")], said
    assert "Traceback" not in said and "/trireme/" not in said, said


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.extension(row.extension)])
        if row.extension
        else pytest.param(row, id=row.name)
        for row in MISTAKES
    ],
)
def test_a_run_tells_a_mistake(mistake: Mistake, folder: Path) -> None:
    done = answer(mistake, folder)
    assert done.exit_code == mistake.code, done.output
    if mistake.code == 0:
        assert mistake.sentence in done.output and mistake.line in done.output, done.output
        assert mistake.sentence or not done.stderr, done.stderr
    else:
        checked(done.stderr.removeprefix("error: "), mistake, folder)


@pytest.mark.parametrize(
    "mistake", [row for row in MISTAKES if row.code == 2], ids=lambda mistake: mistake.name
)
def test_check_tells_what_run_refuses(mistake: Mistake, folder: Path) -> None:
    done = answer(mistake, folder, "check")
    assert done.exit_code == 1, done.output
    said = done.output.partition("problem: ")[2]
    checked(said, mistake, folder)


def sleeping(folder: Path, *overrides: str) -> Forked:
    """N29: the workflow that calls `time.sleep(1000)` in an `async def`, as a process."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    workflow = f"{TASKSET}.default_workflow_type=mistaken_sleeps"
    return started(folder, config, workflow, *overrides, prepare=warn_early)


def warn_early() -> None:
    """In the process: a blocked event loop is told after one second, not after ten."""
    aio.WARN_S = 1.0


def test_a_blocked_event_loop_ends_the_run(folder: Path) -> None:
    said = sleeping(folder, "explorer.max_timeout=3").communicate(timeout=HANG_S)[1]
    sentence, line, details = said.splitlines()[-3:]
    assert "workflow 'mistaken_sleeps' has blocked the event loop for 3 s" in sentence
    assert "`await asyncio.sleep(...)`" in sentence and "a plain `def`" in sentence
    assert line.startswith(f"  {folder}/mistaken_plugin.py:") and "time.sleep(1000)" in line
    assert "in sleeps" in Path(details.removeprefix("details: ")).read_text()


def test_one_control_c_ends_a_run_whose_event_loop_is_blocked(folder: Path) -> None:
    process = sleeping(folder, "name=interrupted")
    log = folder / "checkpoints/tests/interrupted/log/explorer.log"
    wait_for(lambda: log.exists() and "event loop for" in log.read_text(), process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 130, said
    assert "mistaken_sleeps' blocked the event loop" in said and "time.sleep(1000)" in said
