"""Located: where a model or data set lies, a folder here, the hub's local cache, or the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from trireme.nearest import did_you_mean

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt", ".safetensors", ".gz")


def located(path: str, kind: Literal["models", "datasets"]) -> Path | None:
    """Where `path` lies on this machine; None where it is an id on the hub and not yet here.

    Raises ValueError for what looks like a local path and is not there.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    parent = local.parent
    if (
        not _HUB_ID.match(path)
        or path.endswith(_DATA_SUFFIXES)
        or (len(local.parts) > 1 and parent.is_dir())
    ):
        raise ValueError(f"is no file or folder here{_near(local)}")
    return _in_cache(path, kind)


def _near(path: Path) -> str:
    """A name beside the missing one that is nearly it, or the first folder that is missing."""
    missing = next((p for p in (*reversed(path.parents), path) if not p.exists()), path)
    beside = [p.name for p in missing.parent.iterdir()] if missing.parent.is_dir() else []
    if near := did_you_mean(missing.name, beside, "{}"):
        return f"; did you mean '{missing.parent / near}'?"
    return f" (the first part that is missing is '{missing}')" if missing != path else ""


def _in_cache(hub_id: str, kind: str) -> Path | None:
    """The newest snapshot of a hub repository in the local cache, if there is one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = root / f"{kind}--{hub_id.replace('/', '--')}" / "snapshots"
    snapshots = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
    return snapshots[-1] if snapshots else None
