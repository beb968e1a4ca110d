"""Files: writes files and folders atomically: each appears whole or not at all.

Everything is written beside its place, brought to the disk, then renamed: a process may die at any
instruction. Errors of the disk name the path that could not be written.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"
"""What names of unfinished files and folders begin with."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file under its final name. Raises OSError naming the path."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file under its final name. Raises OSError naming the path."""
    write_bytes(path, text.encode("utf-8"))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file of JSON lines, one for each row. Raises OSError naming the path."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, keys in their order. Raises OSError naming the path."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; none where there is no file."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines]


def drop_half_line(path: Path) -> None:
    """Cut off what a killed process left of a file's last line."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


class CannotWrite(OSError):
    """A full disk, a folder without permission: one sentence that names the path."""


class InUse(ValueError):
    """What one process may do at a time, another one is doing."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` at the end, or vanishes on an error."""
    temporary = beside(path)
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path` at the end, or vanishes on an error.

    A folder that is there already gives way: for a moment there is none, and never half of one.
    """
    temporary, old = beside(path), beside(path)
    try:
        with naming(path):
            temporary.mkdir(parents=True)
            yield temporary
            sync_all(temporary)
            if path.exists():
                os.replace(path, old)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)


def beside(path: Path) -> Path:
    """An unused name in the same folder, which `clean` recognises."""
    return path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(3)}"


def clean(folder: Path) -> list[Path]:
    """Remove what a process that died left unfinished in a folder; says what it was."""
    leftovers = sorted(folder.glob(f"{TEMPORARY}*")) if folder.is_dir() else []
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


def set_aside(path: Path) -> Path:
    """Rename a folder that is to be removed, so that no half of it is ever seen under its name;
    what it is called now, which `clean` recognises.
    """
    old = beside(path)
    with naming(path):
        os.replace(path, old)
    return old


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the disk say which path was being written."""
    try:
        yield
    except CannotWrite:
        raise  # an inner file has named itself
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def alone(path: Path, else_say: str) -> Iterator[None]:
    """One process at a time, by a lock that ends with it. Raises InUse for the second one."""
    with naming(path):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(else_say) from error
        except OSError:
            pass  # a disk that has no locks
        yield


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """One process or thread after the other, by a lock on the file `path`, which holds nothing."""
    with naming(path):
        file = path.open("w")
    with file:
        with suppress(OSError):  # a disk that has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync_all(folder: Path) -> None:
    """Bring all that lies in a folder to the disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Bring a file (or a folder's list of names) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # some file systems refuse this for folders
        with suppress(PermissionError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
