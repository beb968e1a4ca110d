"""Counts this machine's GPUs and their memory, without loading torch."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path


def num_gpus() -> int:
    """GPUs that the installed torch can use, told without loading it."""
    try:
        cpu_build = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        cpu_build = True
    if cpu_build:
        return 0
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    listed = [part for part in visible.split(",") if part.strip() not in ("", "-1")]
    return min(present, len(listed))


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine that a run may use, by its driver; None where that
    does not say.
    """
    what = "--query-gpu=index,uuid,memory.total"
    asked = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [part.strip() for part in (visible or "").split(",") if part.strip()]
    sizes = [
        int(row[2])
        for row in rows
        if len(row) == 3
        and row[2].isdigit()  # listed are indices, or how ids begin
        and (visible is None or row[0] in listed or row[1].startswith(tuple(listed)))
    ]
    return min(sizes) * 2**20 if sizes else None
