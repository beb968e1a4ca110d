"""Machine: which accelerators are here, told without loading torch."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path


def num_gpus() -> int:
    """GPUs that the installed torch can use."""
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
