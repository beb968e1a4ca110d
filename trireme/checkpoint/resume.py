"""Resume: which checkpoint a run goes on from, and what it holds.

The newest whole one, found by looking at the folders: the `latest_*` files are for people and for
other processes. What a process that died left half-written is removed; a folder that had to give
way for a moment, and whose successor never came, is put back.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.save import FORMAT, MANIFEST
from trireme.files import TEMPORARY, clean
from trireme.log import get_logger

logger = get_logger("checkpoint_monitor")


@dataclass
class Loaded:
    """A checkpoint, read."""

    step: int
    actor: Path
    """The folder of what the trainer wrote; `saved.read` reads it."""
    run_state: dict[str, Any]


def load_checkpoint(folder: JobFolder) -> Loaded | None:
    """The newest whole checkpoint, incomplete ones passed by; None where a run begins."""
    _put_back(folder)
    for leftover in clean(folder.root):
        logger.info("removed %s, which was never finished", leftover)
    for step in reversed(folder.steps()):
        if not folder.is_full(step):
            continue
        missing = what_is_missing(folder.step_dir(step))
        if missing is None:
            return _load(folder, step)
        logger.warning("checkpoint %s is passed by: %s", folder.step_dir(step), missing)
    return None


def what_is_missing(step_dir: Path) -> str | None:
    """Why a checkpoint is not whole; None where all that its manifest lists is there."""
    path = step_dir / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return f"its {MANIFEST} is damaged"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')!r}, not {FORMAT!r}"
    for name, size in manifest["files"].items():
        file = step_dir / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _load(folder: JobFolder, step: int) -> Loaded:
    root = folder.step_dir(step)
    manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    return Loaded(
        step=manifest["step"],
        actor=folder.actor_dir(step),
        run_state=_with_bytes(manifest["state"], root),
    )


def _with_bytes(value: Any, root: Path) -> Any:
    """The reverse of what saving did to bytes."""
    if isinstance(value, dict):
        if set(value) == {"$file"}:
            return (root / value["$file"]).read_bytes()
        return {key: _with_bytes(inner, root) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_bytes(inner, root) for inner in value]
    return value


def _put_back(folder: JobFolder) -> None:
    """A whole checkpoint under a temporary name, where nothing stands under its own."""
    for path in sorted(folder.root.glob(f"{TEMPORARY}global_step_*")):
        step = re.match(r"global_step_(\d+)-", path.name.removeprefix(TEMPORARY))
        if step is None or folder.step_dir(int(step[1])).exists():
            continue
        if what_is_missing(path) is None:
            path.rename(folder.step_dir(int(step[1])))
            logger.info(
                "%s was left under a temporary name: put back", folder.step_dir(int(step[1]))
            )
