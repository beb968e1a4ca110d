"""Several explorers and trainers on one store, some of them killed: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ext.sql.party import ALL_KILLED, GO, RUNS, TASKS, made, read
from tests.limits import HANG_S
from tests.postgres import Server


class Parties:
    """Processes by name."""

    def __init__(self, url: str, folder: Path, steps: int) -> None:
        self.url, self.folder, self.steps = url, folder, steps
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, role: str, name: str) -> None:
        words = [role, self.url, name, str(self.folder), str(self.steps)]
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.ext.sql.party", *words], stderr=subprocess.PIPE, text=True
        )

    def done(self, name: str) -> int:
        """Steps that a writer has put, or experiences that a reader's checkpoint holds."""
        path = self.folder / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else 0
        return len(found["learned"]) if isinstance(found, dict) else found

    def kill_at(self, name: str, done: int) -> None:
        """SIGKILL in the middle of what it does after having come so far."""
        process = self.running.pop(name)
        while self.done(name) < done:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.communicate()

    def finish(self) -> None:
        for name, process in self.running.items():
            _, errors = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, f"{name}: {errors}"


@contextmanager
def parties(url: str, folder: Path, steps: int) -> Iterator[Parties]:
    found = Parties(url, folder, steps)
    try:
        yield found
    finally:
        for process in found.running.values():
            process.kill()
            process.wait()


def play(url: str, folder: Path, number: int, steps: int) -> float:
    """All write and read, a writer and a reader are killed; seconds until all have ended."""
    with parties(url, folder, steps) as all_of_them:
        for i in range(number):
            all_of_them.start("explore", f"explorer_{i}")
            all_of_them.start("train", f"trainer_{i}")
        explorers = [f"explorer_{i}" for i in range(number)]
        while not all((folder / f"{name}.json").exists() for name in explorers):
            assert all(all_of_them.running[name].poll() is None for name in explorers)
            time.sleep(0.01)
        (folder / GO).touch()
        while not all_of_them.done("explorer_0"):
            assert all_of_them.running["explorer_0"].poll() is None
            time.sleep(0.01)
        started = time.monotonic()
        all_of_them.kill_at("explorer_1", steps // 3)
        all_of_them.start("explore", "explorer_1")  # as a launcher does; it repeats its step
        all_of_them.kill_at("trainer_1", steps * TASKS * RUNS // 6)  # this one stays away
        (folder / ALL_KILLED).touch()
        all_of_them.finish()
        return time.monotonic() - started


def check(url: str, folder: Path, number: int, steps: int) -> None:
    """What the killed trainer may still hold is its own to finish; then all is learned once."""
    asyncio.run(read(url, "trainer_1", folder))
    checkpoints = [folder / f"trainer_{i}.json" for i in range(number)]
    learned = [uid for path in checkpoints for uid in json.loads(path.read_text())["learned"]]
    wanted = {
        e.eid.uid for i in range(number) for s in range(steps) for e in made(f"explorer_{i}", s)
    }
    assert len(learned) == len(set(learned)) == len(wanted)
    assert set(learned) == wanted


def test_on_sqlite_each_experience_is_learned_from_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    play(url, tmp_path, 2, 12)
    check(url, tmp_path, 2, 12)


@pytest.mark.large
def test_on_postgres_each_of_40_000_experiences_is_learned_from_once(
    postgres: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, steps = postgres.database(), 100
    seconds = play(url, tmp_path, 4, steps)
    check(url, tmp_path, 4, steps)
    total = 4 * steps * TASKS * RUNS
    with capsys.disabled():
        print(f"\n{total} experiences: {seconds:.1f} s, {total / seconds:.0f} a second")
