"""Cores: how many of the machine's cores this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use at once: those that it is bound to, or fewer if
    its control groups grant it less time, as a container's do (Docker's `--cpus`, a limit of
    Kubernetes), which torch does not see: on a machine of 64 cores it takes 64 threads for the time
    of 4. `root` is the folder with /proc and /sys.
    """
    bound = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        bound = len(os.sched_getaffinity(0))
    return max(1, int(min([bound, *_granted(root)])))


def _granted(root: Path) -> Iterator[float]:
    """Yield the cores that the control groups of this process grant, of those that have a limit."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):  # of version 2, or of version 1
            tree = mount / "cpu" if controllers else mount
            # a container may see the name that its group has outside, and itself as the root
            path = PurePosixPath(name.lstrip("/"))
            for group in (path, *path.parents):
                yield from _limit(tree / group)


def _limit(group: Path) -> Iterator[float]:
    """Yield the cores of a control group's limit, if it has one: microseconds of processor time in
    each period.
    """
    with suppress(OSError, ValueError):  # it has no such file, or no limit: "max"
        quota, period = map(int, (group / "cpu.max").read_text().split())
        yield quota / period
    with suppress(OSError):
        quota = int((group / "cpu.cfs_quota_us").read_text())
        if quota > 0:  # -1: no limit
            yield quota / int((group / "cpu.cfs_period_us").read_text())
