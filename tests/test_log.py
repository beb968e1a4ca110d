"""One log file a part, and a console that does not flood."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import IO

import pytest

from trireme.files import naming
from trireme.log import (
    get_logger,
    hide_passwords,
    part_of,
    setup_logging,
    write_failure,
)


def test_each_part_writes_its_own_file(tmp_path: Path) -> None:
    close = setup_logging(tmp_path / "log", "INFO")
    get_logger("explorer").info("step %d", 3)
    get_logger("explorer_runner_1").info("a rollout")
    logging.getLogger("trireme.sync.probe").info("weights agree")
    close()
    names = {file.name for file in (tmp_path / "log").iterdir()}
    assert names == {"explorer.log", "explorer_runner_1.log", "synchronizer.log"}  # no empty ones
    assert "INFO trireme.explorer: step 3" in (tmp_path / "log/explorer.log").read_text()
    assert "a rollout" in (tmp_path / "log/explorer_runner_1.log").read_text()
    assert "weights agree" in (tmp_path / "log/synchronizer.log").read_text()


def test_modules_log_into_the_file_of_their_part() -> None:
    assert part_of("trireme.buffer.queue") == "queue_experience_buffer"
    assert part_of("trireme.checkpoint.save") == "checkpoint_monitor"
    assert part_of("trireme.pipeline.pipeline") == "explorer_experience_pipeline"
    assert part_of("trireme.registry") == "launcher"


def test_a_lower_level_than_asked_for_is_left_out(tmp_path: Path) -> None:
    close = setup_logging(tmp_path, "warning")
    get_logger("trainer").info("quiet")
    get_logger("trainer").debug("quieter")
    close()
    assert not (tmp_path / "trainer.log").exists()


def test_the_console_shows_the_first_line_and_the_file_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    close = setup_logging(tmp_path, "INFO")
    get_logger("explorer").info("not shown")
    get_logger("explorer").warning("rollout 1/2/3 failed\nTraceback: deep inside")
    close()
    assert capsys.readouterr().err == "warning: rollout 1/2/3 failed\n"
    assert "Traceback: deep inside" in (tmp_path / "explorer.log").read_text()


def test_a_log_on_a_full_disk_says_so_once_and_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: IO[bytes], path: Path, data: bytes) -> None:
        with naming(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trireme.log.append_to", full)
    close = setup_logging(tmp_path, "INFO")
    get_logger("explorer").info("lost")
    get_logger("trainer").warning("shown all the same")
    close()
    path = tmp_path / "explorer.log"
    assert capsys.readouterr().err == (
        f"warning: cannot write {path}: No space left on device: the logs lack lines from now on\n"
        "warning: shown all the same\n"
    )


def test_a_warning_that_repeats_is_shown_three_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    close = setup_logging(tmp_path, "INFO")
    for i in range(10):
        get_logger("explorer").warning("rollout %d failed", i)
    close()
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 3
    assert shown[-1] == f"warning: rollout 2 failed (more of these: {tmp_path / 'explorer.log'})"
    assert len((tmp_path / "explorer.log").read_text().splitlines()) == 10


def test_closing_ends_it_and_a_second_run_appends(tmp_path: Path) -> None:
    for text in ("first", "second"):
        close = setup_logging(tmp_path, "INFO")
        get_logger("trainer").info(text)
        close()
    get_logger("trainer").info("to nobody")
    lines = (tmp_path / "trainer.log").read_text().splitlines()
    assert [line.split(": ")[1] for line in lines] == ["first", "second"]


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log.level is 'LOUD': expected one of DEBUG, INFO"):
        setup_logging(tmp_path, "LOUD")


def test_the_traceback_of_a_failed_run_is_kept(tmp_path: Path) -> None:
    try:
        raise RuntimeError("the engine broke")
    except RuntimeError as error:
        path = write_failure(tmp_path / "log", error)
    assert path is not None
    assert "RuntimeError: the engine broke" in path.read_text()
    assert "test_log.py" in path.read_text()


def test_a_failure_in_a_folder_that_cannot_be_written_has_no_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file where the folder should be")
    assert write_failure(tmp_path / "log", RuntimeError("x")) is None


def test_an_address_without_a_user_keeps_its_port() -> None:
    told = "the rollout server http://127.0.0.1:8000 is gone"
    assert hide_passwords(told) == told
    assert (
        hide_passwords("postgresql://me:secret@host:5432/db") == "postgresql://me:***@host:5432/db"
    )
