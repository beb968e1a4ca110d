"""Resume: finds the checkpoint that a run goes on from.

The newest whole one, found by reading all that the folders' manifests list: the `latest_*` files
are for people and for other processes. What a process that died left half-written is removed; a
folder that had to give way for a moment, and whose successor never came, is put back.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import Damaged, read_manifest, read_state
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
    """The newest whole checkpoint, damaged ones passed by; None where a run begins.

    Raises Damaged where there are checkpoints and none is whole: a run that began anew would write
    over what may still be saved of them.
    """
    _put_back(folder)
    for leftover in clean(folder.root):
        logger.info("removed %s, which was never finished", leftover)
    damage: list[Damaged] = []
    for step in reversed(folder.steps()):
        if not folder.is_full(step):
            continue
        root = folder.step_dir(step)
        try:
            return Loaded(step, folder.actor_dir(step), read_state(read_manifest(root, step), root))
        except Damaged as error:
            damage.append(error)
            logger.warning("checkpoint %s is damaged and passed by: %s", root, error)
    if damage:
        raise Damaged(
            f"no checkpoint in {folder.root} is whole ({damage[0]}): give the run another name, "
            "set continue_from_checkpoint: false, or remove the damaged folders to begin anew"
        )
    return None


def _put_back(folder: JobFolder) -> None:
    """Rename a complete checkpoint from its temporary name if its own name is free."""
    for path in sorted(folder.root.glob(f"{TEMPORARY}global_step_*")):
        name = re.match(r"global_step_(\d+)-", path.name.removeprefix(TEMPORARY))
        if name is None or (target := folder.step_dir(int(name[1]))).exists():
            continue
        with suppress(Damaged):  # one that was never finished
            read_manifest(path, int(name[1]))
            path.rename(target)
            logger.info("%s was left under a temporary name: put back", target)
