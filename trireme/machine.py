"""Machine: how many cores, and how much memory, this process may use here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

ROOT = Path("/")
"""The folder with /proc and /sys."""


def cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use at once: those that it is bound to, or fewer if
    its control groups grant it less time, as a container's do (Docker's `--cpus`, a limit of
    Kubernetes), which torch does not see: on a machine of 64 cores it takes 64 threads for the time
    of 4.
    """
    found: list[float] = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        found = [len(os.sched_getaffinity(0))]
    for group in _groups("cpu", root):  # microseconds of processor time, in each period
        quota = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us")
        period = quota[1:] or _numbers(group / "cpu.cfs_period_us")
        if quota and period and quota[0] > 0:  # -1: no limit
            found.append(quota[0] / period[0])
    return max(1, int(min(found)))


def memory(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may use at most: the machine's memory with its swap space,
    or less if its control groups grant it less; their limits of memory are without swap space, of
    which it has more (Docker's `--memory` alone grants as much again). None: not known.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kibibytes = dict(line.split(":", 1) for line in lines)
        names = "MemTotal", "SwapTotal"
        whole, swap = (1024 * int(kibibytes[name].removesuffix("kB")) for name in names)
    except (OSError, KeyError, ValueError):  # Linux alone has it
        return None
    found = [whole + swap]
    for group in _groups("memory", root):
        more = min([swap, *_numbers(group / "memory.swap.max")])
        limits = _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
        found += [limit + more for limit in limits]
        found += _numbers(group / "memory.memsw.limit_in_bytes")  # version 1: of both together
    return min(found)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of version 2, and those of version 1 that
    are about `controller`.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, about, name = line.split(":", 2)
        if not about or controller in about.split(","):
            # a container may see the name that its group has outside, and itself as the root
            path = PurePosixPath(name.lstrip("/"))
            tree = mount / controller if about else mount
            yield from (tree / group for group in (path, *path.parents))


def _numbers(file: Path) -> list[int]:
    """Return the numbers of a control group's file; none if it is not there, or has no limit."""
    with suppress(OSError, ValueError):  # "max"
        return [*map(int, file.read_text().split())]
    return []
