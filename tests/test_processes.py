"""Processes: what users' code leaves running is ended and named, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.limits import HANG_S
from trireme.processes import MARK, end_now, ending_leftovers, environment

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux alone")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def a_child(folder: Path) -> None:
    subprocess.Popen(["sleep", "60"])


def a_grandchild(folder: Path) -> None:
    subprocess.run("sleep 60 >/dev/null 2>&1 &", shell=True, check=True)


def a_session_of_its_own(folder: Path) -> None:
    subprocess.run("setsid sh -c 'trap \"\" TERM; sleep 60' >/dev/null 2>&1 &", shell=True)


def a_daemon(folder: Path) -> None:
    """Forks twice, and starts no program."""
    code = (
        "import os, sys, time\n"
        "def daemon():\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    names: dict[str, Callable[[], None]] = {}
    exec(code, names)
    names["daemon"]()


def marked(token: str) -> set[int]:
    """Processes, by what a shell would look for."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """What ran before: a server that the user started, say."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("leave", [a_child, a_grandchild, a_session_of_its_own])
def test_what_is_left_running_is_ended_and_named(
    leave: Callable[[Path], None], tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    notes: list[str] = []
    with ending_leftovers(notes.append):
        token = os.environ[MARK]
        leave(tmp_path)
        deadline = time.monotonic() + HANG_S
        while not (left := marked(token)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left
    [note] = notes
    assert note.startswith("ended ") and "that rollouts had left running: " in note
    assert "sleep 60" in note
    assert not any(map(alive, left)) and not marked(token)
    assert stranger.poll() is None and MARK not in os.environ


def test_a_fork_that_starts_no_program_is_found_by_its_own_note(tmp_path: Path) -> None:
    """In a process of its own, since this one has threads."""
    code = (
        "import sys, os\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from tests.test_processes import a_daemon, alive\n"
        "from trireme.processes import ending_leftovers, _forks\n"
        "with ending_leftovers(print):\n"
        "    a_daemon(Path())\n"
        "    a_daemon(Path())\n"
        "    while len(_forks()) < 4:\n"
        "        pass\n"
        "assert not any(alive(pid) for pid, _ in _forks())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ended 2 processes that rollouts had left running: ")


def test_what_has_ended_by_itself_is_no_news() -> None:
    notes: list[str] = []
    with ending_leftovers(notes.append):
        subprocess.run(["true"], check=True)
        gone = subprocess.Popen(["true"])
        while alive(gone.pid):
            time.sleep(0.01)
    assert not notes and gone.wait() == 0


def test_a_process_that_goes_at_once_takes_them_along() -> None:
    with ending_leftovers(lambda text: None):
        left = subprocess.Popen(["sleep", "60"])
        while not marked(os.environ[MARK]):
            time.sleep(0.01)
        end_now()
        assert left.wait(HANG_S) == -9


def test_variables_are_as_before_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAS_THERE", "a")
    monkeypatch.delenv("WAS_NOT", raising=False)
    with pytest.raises(ValueError), environment({"WAS_THERE": "b", "WAS_NOT": "c"}):
        assert (os.environ["WAS_THERE"], os.environ["WAS_NOT"]) == ("b", "c")
        raise ValueError
    assert os.environ["WAS_THERE"] == "a" and "WAS_NOT" not in os.environ
