"""Runs on a Ray cluster of this machine: starting them, waiting for them, and what they leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import command, environment, small_config
from tests.limits import HANG_S

JOB = "checkpoints/tests/job"


def named_by_file(folder: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> Path:
    """Ray's file, in this folder, names a cluster, and no variable does."""
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = folder / "ray/ray_current_cluster"
    file.parent.mkdir()
    file.write_text(address)
    return file


def start(
    folder: Path, cluster: Any, *overrides: str, config: dict[str, Any] | None = None
) -> subprocess.Popen[str]:
    """`trireme run` of the small job, or another, on the cluster."""
    words = command(
        folder,
        small_config(folder) if config is None else config,
        f"cluster.ray_address={cluster.address}",
        *overrides,
    )
    return subprocess.Popen(
        words, env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Its stdout and stderr, once it has ended as it should."""
    try:
        said = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("\n".join(map(str, process.communicate()))) from None
    assert process.returncode == code, "\n".join(said)
    return said


def where(log: Path, part: str) -> tuple[int, str]:
    """Process and node of a part of the last run that wrote this `launcher.log`."""
    pid, node = re.findall(rf"{part}: process (\d+) on node (\w+)", log.read_text())[-1]
    return int(pid), node


def dies(process: subprocess.Popen[str], part: str, kill: Callable[[], Any]) -> str:
    """`kill` it: the run ends by itself; one sentence says who died, and none of Ray's."""
    kill()
    stdout, stderr = ended(process, code=1)
    assert "(raylet)" not in stdout + stderr and "Traceback" not in stdout + stderr, stdout
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    reason = r"its machine [\d.]+ is gone|process \d+ is gone"
    sentence = rf"error: {part} has died: ({reason}); its log is \S+\.log.*"
    assert len(errors) == 1 and re.fullmatch(sentence, errors[0]), stderr
    return errors[0]


def kill(pid: int) -> None:
    """As a machine without memory does."""
    os.kill(pid, signal.SIGKILL)


def left_behind(folder: Path) -> list[int]:
    """Processes of a run in this folder, told by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def nobody_left(folder: Path) -> bool:
    """Whether all processes of a run in this folder end."""
    deadline = time.monotonic() + HANG_S
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.5)
    return not left_behind(folder)
