"""Whatever has become of a file of a run's folder, a resume says so in one sentence and goes on, or
ends by one that names it: nothing is waited for, and nothing is read without a limit.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config, weights
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import Damaged, load_checkpoint

pytestmark = pytest.mark.extension("trackers")


class Tracked:
    """A tracker whose run has an id, which a resume goes on with."""

    def __init__(self, run: Any) -> None:
        self.id = run.id or "tracked-1"

    def log(self, metrics: Any, step: int, part: str) -> None:
        """Nothing."""

    def rollouts(self, rows: Any, step: int) -> None:
        """Nothing."""

    def close(self, *, failed: bool = False) -> None:
        """Nothing."""


def rewritten(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def a_link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


def garbage_of(path: Path) -> Path:
    """A file of garbage outside of the job's folder."""
    job = next(parent for parent in path.parents if parent.name == "job")
    garbage = job.parent / "garbage" / path.relative_to(job)
    garbage.parent.mkdir(parents=True, exist_ok=True)
    garbage.write_bytes(GARBAGE)
    return garbage


def gigabytes(path: Path) -> None:
    os.truncate(path, 3 << 30)


def half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: max(1, len(data) // 2)])


GARBAGE = bytes(range(256)) * 8 + b"\n\xff\xfe garbage\n"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "garbage": lambda path: rewritten(path, GARBAGE),
    "empty": lambda path: rewritten(path, b""),
    "a folder": a_folder,
    "a pipe": a_pipe,
    "a link to garbage": lambda path: a_link(path, garbage_of(path)),
    "a link to nothing": lambda path: a_link(path, Path("/nowhere/at/all")),
    "gigabytes": gigabytes,
    "half of it": half,
    "deep JSON": lambda path: rewritten(path, b"[" * 200_000 + b"\n"),
}
if os.geteuid():
    DAMAGES["not ours to read"] = lambda path: path.chmod(0)

# What a damaged file does: "state" ends a resume that needs it, "spare" is passed by with a warning
# (but for damages that cannot be seen, or that a kill leaves), "unread" is only written or shown.
KINDS = (
    (r"global_step_\d+/(actor|state)/.*", "state", ()),
    (r"global_step_\d+/manifest.json", "state", ()),
    (r"global_step_\d+/\.full_checkpoint", "state", ("empty", "half of it")),
    (r"latest_\w+\.txt", "spare", ("half of it",)),
    (r"(trainer|explorer)_meta\.json", "unread", ()),
    (r"summary\.json", "unread", ()),
    (r"(.*/)?\.[\w.]*lock", "unread", ()),
    (r"log/[\w.]+\.log", "unread", ()),
    (r"monitor/metrics\.jsonl", "spare", ("empty", "half of it")),
    (r"monitor/(watchdog|trackers)\.json", "spare", ()),
    (r"monitor/tensorboard/.*", "unread", ()),
    (r"buffer/(evaluation|failed|experience_buffer)\.jsonl", "spare",
     ("empty", "half of it")),
    (r"buffer/\w+\.db", "spare", ("empty", "gigabytes")),
    (r"buffer/[\w.]+\.cut\.json", "unread", ()),
    (r"buffer/trained/step_\d+\.safetensors", "unread", ()),
    (r"run/starts\.json", "spare", ()),
    (r"run/start_\d+\.yaml", "unread", ()),  # where starts.json is damaged too
)  # fmt: skip


def files_of(job: Path) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Every file of a job's folder, with what it is; one that no row names is an error."""
    for path in sorted(path for path in job.rglob("*") if path.is_file()):
        name = path.relative_to(job).as_posix()
        rows = [(kind, seen) for pattern, kind, seen in KINDS if re.fullmatch(pattern, name)]
        assert len(rows) == 1, f"{name}: say in KINDS what a damaged one does to a resume"
        yield path, *rows[0]


def end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**20))
        return file.read().decode(errors="replace")


def config_of(folder: Path, steps: int) -> dict[str, Any]:
    config = small_config(folder)
    config["buffer"]["total_steps"] = steps
    config["monitor"] = {"monitor_type": ["tensorboard", "tests.e2e.test_damaged_files:Tracked"]}
    config["data_processor"] = {"experience_pipeline": {"save_input": True, "copy_limit_mb": 0.02}}
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = run(folder, config_of(folder, 2))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def resumed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    done = run(folder, config_of(folder, 3))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "damaged" not in done.stdout + done.stderr
    return weights(folder / "checkpoints/tests/job", 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_passes_by_whatever_carries_no_state(
    damage: str, finished: Path, resumed: bytes, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    job = tmp_path / "checkpoints/tests/job"
    named: list[str] = []
    for path, kind, unseen in files_of(job):
        if kind == "state":
            continue
        DAMAGES[damage](path)
        if kind == "spare" and damage not in unseen:
            named.append(path.name)
    done = run(tmp_path, config_of(tmp_path, 3))
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in said, said
    assert weights(job, 3) == resumed
    log = "".join(end_of(path) for path in (job / "log").glob("*.log*") if path.is_file())
    warned = [line for line in log.splitlines() if " WARNING trireme.files: " in line]
    for name in named:
        assert len([line for line in warned if f"/{name}" in line]) == 1, (name, warned)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_is_named_and_nothing_is_made_anew_over_it(
    damage: str, finished: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job"
    for path, kind, unseen in files_of(finished / "checkpoints/tests/job"):
        if kind != "state" or damage in unseen:
            continue
        shutil.rmtree(job, ignore_errors=True)
        shutil.copytree(finished / "checkpoints/tests/job", job)
        DAMAGES[damage](job / path.relative_to(finished / "checkpoints/tests/job"))
        with pytest.raises(Damaged, match=rf"no checkpoint in .* is whole .*{path.name}") as error:
            load_checkpoint(JobFolder(job))
        assert len(str(error.value)) < 800


def test_a_run_with_damaged_state_ends_by_a_sentence(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    job = tmp_path / "checkpoints/tests/job"
    a_pipe(job / "global_step_2/manifest.json")
    done = run(tmp_path, config_of(tmp_path, 3))
    assert done.returncode != 0 and "Traceback" not in done.stdout + done.stderr
    assert "manifest.json is a pipe: expected a regular file" in done.stdout + done.stderr
