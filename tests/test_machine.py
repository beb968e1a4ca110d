"""Machine: how many cores, and how much memory, a process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from trireme.machine import cores, memory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores without control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "most"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/jobs/7\n", {"jobs/7/cpu.max": "max 100000\n", "jobs/cpu.max": "800000 50000\n"}, 16),
        ("0::/outside/the/container\n", {"cpu.max": "300000 100000\n"}, 3),
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "600000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        (
            "1:cpu:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            64,
        ),
    ],
)
def test_the_smallest_limit_of_its_groups_counts(
    root: Path, groups: str, files: dict[str, str], most: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    write(root, {"proc/self/cgroup": groups, **files})
    assert cores(root) == most


def test_without_control_groups_it_is_those_that_it_is_bound_to(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores(root) == 64
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(root) == 1


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1024 kB\nSwapTotal:       2097152 kB\n"


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/\n", {}, 18),
        ("0::/a\n", {"a/memory.max": "max\n", "memory.max": f"{4 * 2**30}\n"}, 6),
        ("0::/\n", {"memory.max": f"{4 * 2**30}\n", "memory.swap.max": "0\n"}, 4),
        ("0::/\n", {"memory.max": f"{4 * 2**30}\n", "memory.swap.max": "max\n"}, 6),
        ("3:memory:/a\n1:cpu:/b\n", {"memory/a/memory.limit_in_bytes": f"{2 * 2**30}\n"}, 4),
        (
            "3:memory:/\n",
            {
                "memory/memory.limit_in_bytes": f"{2 * 2**30}\n",
                "memory/memory.memsw.limit_in_bytes": f"{3 * 2**30}\n",
            },
            3,
        ),
        ("3:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 18),
    ],
)
def test_memory_is_the_machines_with_its_swap_or_the_smallest_limit_of_its_groups_with_theirs(
    root: Path, groups: str, files: dict[str, str], gib: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    write(root, {"proc/self/cgroup": groups, "proc/meminfo": MEMINFO, **files})
    assert memory(root) == gib * 2**30


@pytest.mark.parametrize("text", ["", "MemTotal: much\nSwapTotal: 0 kB\n", "nothing"])
def test_memory_that_no_file_tells_is_not_known(root: Path, text: str) -> None:
    assert memory(root) is None
    write(root, {"proc/meminfo": text})
    assert memory(root) is None


@pytest.mark.parametrize(("chosen", "count"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_a_device_takes_no_more_threads_than_that_unless_the_user_has_chosen(
    chosen: dict[str, str], count: int
) -> None:
    program = """
import os
os.sched_getaffinity = lambda process: {0}  # in place of a container's limit
import torch
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(8)
from trireme.engines.device import Device
print(Device()._pool.submit(torch.get_num_threads).result())
"""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S,
        env=env | chosen,
    )  # fmt: skip
    assert (done.stdout.split(), done.returncode) == ([str(count)], 0), done.stderr
