"""Manifest: writes and verifies checkpoints' lists of files, and finds the one that a run resumes
from.

Invariants:
- `manifest.json` names every file that a resume reads, with its size and checksum, and has a
  checksum itself: any changed byte is detected before anything is loaded.
- No path in it leads out of the checkpoint's folder.
- Checkpoints of the first format have no checksums: sizes are compared, and the log notes it.
- An export that is made again in another dtype is listed anew; all else is written once.
- A run resumes from the newest whole checkpoint, found by reading all files in the manifests: the
  `latest_*` files are for people and for other processes. Unfinished files of a trainer that died
  are removed; a folder that was renamed for a moment, and that nothing has replaced, is put back.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trireme.checkpoint.layout import MANIFEST, STEP_NAME, JobFolder
from trireme.files import TEMPORARY, Unreadable, clean, naming, read_json, write_json
from trireme.log import get_logger

logger = get_logger("checkpoint_monitor")

FORMAT = "trireme-checkpoint-2"
WITHOUT_CHECKSUMS = "trireme-checkpoint-1"
CHUNK = 1 << 22
MOST_BYTES = 1 << 30
"""Limit of a manifest in bytes: it holds the run's positions."""
_TRAINERS = ("global_step_", "latest_", "trainer_meta", "sync_state")
"""The beginnings of the names that only a trainer writes into a job's folder."""


class Damaged(ValueError):
    """A checkpoint has changed since it was saved: names the file, its state and the
    expected one.
    """


def write_manifest(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write the last file of a checkpoint's folder; bytes in `state` get separate files before."""
    plain = _plain(state, folder, "state")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "state": plain,
        "files": {name: path.stat().st_size for name, path in names.items()},
        "xxh3_128": {name: _checksum(path) for name, path in names.items()},
    }
    write_json(folder / MANIFEST, manifest | {"checksum": _checksum_of(manifest)})


def read_manifest(
    step_dir: Path, step: int, wanted: Callable[[Path], bool] = lambda path: True
) -> dict[str, Any]:
    """Return the manifest of a whole checkpoint, after comparing every `wanted` file of it.

    Raises Damaged if the manifest or a file in it has changed since it was saved.
    """
    manifest = _parsed(step_dir)
    if manifest["step"] != step:
        raise Damaged(f"{step_dir / MANIFEST} is of step {manifest['step']}: expected {step}")
    sums: Mapping[str, str] = manifest.get("xxh3_128", {})
    for name, size in manifest["files"].items():
        path = step_dir / name
        if not wanted(path):
            continue
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if path.stat().st_size != size:
            raise Damaged(f"{path} has {path.stat().st_size} bytes: expected {size}")
        if name in sums and (actual := _checksum(path)) != sums[name]:
            raise Damaged(f"{path} has the checksum {actual}: expected {sums[name]} (xxh3_128)")
    if not sums:
        logger.warning(
            "%s was saved without checksums: only the sizes of its files are known", step_dir
        )
    return manifest


def read_state(manifest: Mapping[str, Any], step_dir: Path) -> dict[str, Any]:
    """Return the saved state, with bytes from their files. Raises Damaged if a part is missing."""
    for key, kind in {"version": int, "buffer": dict}.items():
        if not isinstance(manifest["state"].get(key), kind):
            raise Damaged(f"{step_dir / MANIFEST}: 'state.{key}' is missing, or no {kind.__name__}")
    return _with_bytes(manifest["state"], step_dir)


def listed(step_dir: Path, folder: Path) -> dict[str, int]:
    """Return names and sizes of the files directly in a `folder` that a checkpoint's manifest
    lists; none without a manifest.
    """
    if not os.path.lexists(step_dir / MANIFEST):
        return {}
    inside = folder.relative_to(step_dir)
    files = {PurePosixPath(name): size for name, size in _parsed(step_dir)["files"].items()}
    return {path.name: size for path, size in files.items() if path.parent == inside}


def list_anew(step_dir: Path, *paths: Path) -> None:
    """Update a checkpoint's manifest to its present files, if it lists them at all; missing ones
    are removed from it.
    """
    manifest = _parsed(step_dir)
    for path in paths:
        name = path.relative_to(step_dir).as_posix()
        for key in ("files", "xxh3_128"):
            manifest.get(key, {}).pop(name, None)
        if path.is_file():
            manifest["files"][name] = path.stat().st_size
            if "xxh3_128" in manifest:
                manifest["xxh3_128"][name] = _checksum(path)
    if manifest.pop("checksum", None) is not None:
        manifest["checksum"] = _checksum_of(manifest)
    write_json(step_dir / MANIFEST, manifest)


def prove(*paths: Path) -> None:
    """Raise Damaged if files or folders of a checkpoint of ours have changed since they
    were saved.
    """
    for path in paths:
        for root in path.parents:
            name = STEP_NAME.match(root.name)
            if name is not None and (root / MANIFEST).is_file():
                read_manifest(root, int(name[1]), lambda p: path in (p, *p.parents))  # noqa: B023


def _parsed(step_dir: Path) -> dict[str, Any]:
    """Return the manifest, after its checksum and the types of its values are validated."""
    path = step_dir / MANIFEST
    try:
        manifest = read_json(path, dict, MOST_BYTES)
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
    except Unreadable as error:
        raise Damaged(str(error)) from error
    if manifest.get("format") not in (FORMAT, WITHOUT_CHECKSUMS):
        raise Damaged(f"{path} has the format {manifest.get('format')!r}: expected {FORMAT!r}")
    if manifest["format"] == FORMAT or "checksum" in manifest:
        rest = {key: value for key, value in manifest.items() if key != "checksum"}
        if manifest.get("checksum") != (actual := _checksum_of(rest)):
            raise Damaged(
                f"{path} has the checksum {actual}: expected {manifest.get('checksum')} (xxh3_128)"
            )
    for key, kind in {"step": int, "files": dict, "state": dict}.items():
        if not isinstance(manifest.get(key), kind):
            raise Damaged(f"{path}: '{key}' is {manifest.get(key)!r:.60}: expected {kind.__name__}")
    for name in (*manifest["files"], *_named_files(manifest["state"])):
        _refuse_outside(name, path)
    if extra := set(_named_files(manifest["state"])) - set(manifest["files"]):
        raise Damaged(f"{path}: the state is in {min(extra)}, which 'files' does not list")
    return manifest


def _refuse_outside(name: Any, manifest: Path) -> None:
    pure = PurePosixPath(name) if isinstance(name, str) else None
    if pure is None or not pure.parts or pure.is_absolute() or ".." in pure.parts:
        raise Damaged(f"{manifest} names the file {name!r}: expected a path inside its folder")


def _named_files(value: Any) -> list[Any]:
    if isinstance(value, dict):
        if set(value) == {"$file"}:
            return [value["$file"]]
        return [name for inner in value.values() for name in _named_files(inner)]
    if isinstance(value, list):
        return [name for inner in value for name in _named_files(inner)]
    return []


def _digest(data: bytes = b"") -> Any:
    import xxhash  # here: a model trains without it, on a GPU machine with no network say

    return xxhash.xxh3_128(data)


def _checksum(path: Path) -> str:
    digest = _digest()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                digest.update(part)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    return _digest(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _plain(value: Any, folder: Path, name: str) -> Any:
    """Return `value` as JSON; bytes are written to `state/` and replaced by `{"$file": path}`."""
    if isinstance(value, bytes):
        path = folder / "state" / f"{name}.bin"
        path.parent.mkdir(exist_ok=True)
        with naming(path):
            path.write_bytes(value)
        return {"$file": path.relative_to(folder).as_posix()}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, folder, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, folder, f"{name}.{index}") for index, inner in enumerate(value)]
    return value


def _with_bytes(value: Any, root: Path) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$file"}:
            return (root / value["$file"]).read_bytes()
        return {key: _with_bytes(inner, root) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_bytes(inner, root) for inner in value]
    return value


@dataclass
class Loaded:
    """A checkpoint that was read."""

    step: int
    actor: Path
    """The folder of the trainer's files; `saved.read` reads it."""
    run_state: dict[str, Any]


def load_checkpoint(folder: JobFolder, *own: Path) -> Loaded | None:
    """Load the newest whole checkpoint, skipping damaged ones; None if a run begins. `own` are the
    files in the job's folder that no other process writes, besides a trainer's.

    Raises Damaged if there are checkpoints and none is whole: a new run would overwrite what may
    still be saved of them.
    """
    _put_back(folder)
    for leftover in clean(folder.root, *_TRAINERS, *(path.name for path in own)):
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
            "set continue_from_checkpoint: false, or remove the damaged folders to start over"
        )
    return None


def newest_state(folder: JobFolder) -> tuple[int, dict[str, Any]] | None:
    """Return step and `plain_state` of the newest checkpoint whose manifest can be read; None if
    there is none.
    """
    for step in filter(folder.is_full, reversed(folder.steps())):
        with suppress(Damaged):
            return step, plain_state(folder.step_dir(step))
    return None


def plain_state(step_dir: Path) -> dict[str, Any]:
    """Return the state in a checkpoint's manifest; of its other files none is read, so that bytes
    in the state are names of files. Raises Damaged if the manifest cannot be read.
    """
    return _parsed(step_dir)["state"]


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
