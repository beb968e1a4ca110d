"""Files: writes files and folders atomically, and reads files of unknown content safely.

- Everything is written to a temporary sibling, synced to disk, then renamed: each file appears
  whole or not at all, and a process may die at any instruction. Disk errors name the path.
- A path may be garbage, a folder, a pipe or gigabytes: reading never waits and always has a limit,
  and the error is one sentence that names the file.
- A file without state that is not what it should be is renamed with one warning (`usable`,
  `for_appending`); its damaged lines are skipped (`read_jsonl`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

from trireme.text import as_json

TEMPORARY = ".tmp-"
"""The prefix of unfinished files and folders."""
LARGEST = 64 * 2**20
"""Most bytes of a file that is read as a whole, and of a line."""
DAMAGED = ".damaged"
"""The suffix of a file that was renamed out of the way."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
_NEEDED_TYPES = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}

_WHOLE_BYTES = 64 * 2**20
"""Of larger files a fingerprint reads samples only."""
_SAMPLES, _SAMPLE_BYTES = 64, 2**20
_NO_SYNC = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""The errors of file systems that cannot sync a folder, or anything."""

_logger = logging.getLogger("trireme.files")
Value = TypeVar("Value")


class Unreadable(ValueError):
    """A file is not what it should be: one sentence that names it, without its content."""


def open_regular(
    path: Path, flags: int = os.O_RDONLY, *, below: Path | None = None, mode: int = 0o666
) -> int:
    """Open a regular file and return its descriptor, without waiting, as opening a pipe would.

    `below`: a folder around `path`; no link on the way from it to the file is followed, not even
    one that replaces a folder in the meantime. Raises FileNotFoundError, and Unreadable for
    anything that is not a regular file or may not be opened.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    opened: list[int] = []
    try:
        if below is None:
            place, name = None, os.fspath(path)
        else:
            flags |= os.O_NOFOLLOW
            *folders, name = path.relative_to(below).parts
            opened.append(os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for folder in folders:
                into = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                opened.append(os.open(folder, into, dir_fd=opened[-1]))
            place = opened[-1]
        try:
            there = os.stat(name, dir_fd=place, follow_symlinks=below is None)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        else:
            _refuse_other_kinds(path, there)  # opening a device may have an effect
        descriptor = os.open(name, flags, mode, dir_fd=place)
        try:
            _refuse_other_kinds(path, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    except FileNotFoundError as error:
        if path.is_symlink():
            raise Unreadable(f"{path} is a link to nothing: expected a regular file") from error
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        for one in opened:
            os.close(one)


def _refuse_other_kinds(path: Path, there: os.stat_result) -> None:
    if not stat.S_ISREG(there.st_mode):
        kind = _KINDS.get(stat.S_IFMT(there.st_mode), "no file")
        raise Unreadable(f"{path} is {kind}: expected a regular file")


def _unreadable(path: Path, error: OSError) -> Unreadable:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return Unreadable(f"{path} lies behind a link or a file: expected a regular file")
    return Unreadable(f"{path} cannot be read: {error.strerror or error}")


def read_bytes(path: Path, most: int = LARGEST, *, below: Path | None = None) -> bytes:
    """Return all of a regular file. Raises FileNotFoundError, and Unreadable for one of more bytes
    than `most` and as `open_regular` does, whose `below` this is.
    """
    data = bytearray()
    with open(open_regular(path, below=below), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            while size <= most and len(data) <= most and (part := file.read(1 << 20)):
                data += part
        except OSError as error:
            raise _unreadable(path, error) from error
    if (size := max(size, len(data))) > most:
        raise Unreadable(f"{path} has {size} bytes: expected at most {most}")
    return bytes(data)


def read_text(path: Path, most: int = LARGEST, *, below: Path | None = None) -> str:
    """Return all of a text file in UTF-8. Raises as `read_bytes`, and Unreadable if it is
    not text.
    """
    data = read_bytes(path, most, below=below)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"{path}, line {line}: no text in UTF-8") from error


def read_json(
    path: Path, kind: type[Value] = dict, most: int = LARGEST, *, below: Path | None = None
) -> Value:
    """Return the value of a JSON file, a `kind`. Raises as `read_text`, and Unreadable for another
    kind.
    """
    return _value(str(path), read_text(path, most, below=below), kind)


def _value(where: str, text: str | bytes, kind: type[Value]) -> Value:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise Unreadable(
            f"{where} is not JSON that can be read: it is nested too deeply"
        ) from error
    except ValueError as error:
        raise Unreadable(f"{where} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise Unreadable(
            f"{where} holds a {type(value).__name__}: expected {_NEEDED_TYPES.get(kind, kind)}"
        )
    return value


def json_or(path: Path, otherwise: Value) -> Value:
    """Read a JSON file that carries no state, of the type of `otherwise`. Return `otherwise` if the
    file is missing or damaged; a damaged one is renamed, with a warning.
    """
    try:
        return read_json(path, type(otherwise))
    except FileNotFoundError:
        return otherwise
    except Unreadable as error:
        out_of_the_way(path, error)
        return otherwise


def usable(path: Path, *, below: Path | None = None) -> bool:
    """Return whether there is a regular file that can be read and written. Anything else of its
    name, which has no state, is renamed, with a warning. `below`: see `open_regular`.
    """
    try:
        os.close(open_regular(path, os.O_RDWR, below=below))
    except FileNotFoundError:
        return False
    except Unreadable as error:
        out_of_the_way(path, error)
        return False
    return True


def out_of_the_way(path: Path, error: Exception, meanwhile: str = "one begins anew") -> None:
    """Rename a file without state that is not what it should be, with a warning."""
    names = (path.with_name(f"{path.name}{DAMAGED}{n or ''}") for n in range(1000))
    to = next((name for name in names if not os.path.lexists(name)), None)
    with naming(path):
        if to is None:
            raise OSError(errno.EEXIST, f"there are 1000 names like {path.name}{DAMAGED}")
        os.rename(path, to)
    _logger.warning("%s: renamed to %s, and %s", error, to.name, meanwhile)


def for_appending(path: Path) -> IO[bytes]:
    """Open a file without state for appending; see `usable`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    usable(path)
    with naming(path):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(open_regular(path, flags), "ab", buffering=0)


def append(path: Path, data: bytes) -> int:
    """Add all bytes to a file without state, and return its size; see `usable`. Raises OSError
    naming the path.
    """
    with for_appending(path) as file:
        append_to(file, path, data)
        return file.tell()


def append_to(file: IO[bytes], path: Path, data: bytes) -> None:
    """Add all bytes to the file of `for_appending`: an almost full disk takes a part of them and
    raises nothing. Raises OSError naming the path.
    """
    with naming(path):
        while data:
            data = data[file.write(data) :]


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
    write_text(path, as_json(value, indent=2) + "\n")


def read_jsonl(path: Path, **needed: type) -> list[dict[str, Any]]:
    """The rows of a file's whole lines; none where there is no file. Damaged lines and errors are
    those of `jsonl_rows`.
    """
    return [row for row, _ in jsonl_rows(path, **needed)]


def jsonl_rows(path: Path, **needed: type) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the row and the bytes of each whole line, one at a time: a file may be gigabytes. None
    where there is no file.

    Lines that are not rows, or lack one of the `needed` keys, are passed by with a warning that
    names the first. Raises Unreadable if the file cannot be read.
    """
    first, damaged = "", 0
    for number, line in _lines(path):
        try:
            if line is None:
                raise Unreadable(f"{path}, line {number}, is longer than {LARGEST} bytes")
            row = _value(f"{path}, line {number},", line.decode("utf-8", "replace"), dict)
            for key, kind in needed.items():
                if not isinstance(row.get(key), kind):
                    expected = _NEEDED_TYPES[kind]
                    raise Unreadable(f"{path}, line {number}, has no '{key}' that is {expected}")
        except Unreadable as error:
            first, damaged = first or error.args[0], damaged + 1
            continue
        yield row, line
    if damaged:
        others = f", and so are {damaged - 1} more lines" if damaged > 1 else ""
        _say_passed_by(first, others)


@lru_cache(maxsize=256)  # a file may be read several times
def _say_passed_by(first: str, others: str) -> None:
    _logger.warning("%s: passed by%s", first, others)


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and bytes of each whole line, None for one that is too long."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return
    number, long = 1, False
    with open(descriptor, "rb") as file:
        while part := file.readline(LARGEST):
            if not part.endswith(b"\n"):
                long = True  # or the half of a last line
                continue
            yield number, None if long else part
            number, long = number + 1, False


def whole_lines(path: Path) -> bool:
    """Return whether there is a file of lines that can be read and written, which has no state; see
    `usable`. An unfinished last line of a killed process is cut off.
    """
    if not usable(path):
        return False
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        size = left = file.seek(0, os.SEEK_END)
        while left > max(0, size - LARGEST):
            begin = max(0, left - (1 << 20))
            file.seek(begin)
            if (found := file.read(left - begin).rfind(b"\n")) >= 0:
                left = begin + found + 1
                break
            left = begin
        if left > max(0, size - LARGEST) or size <= LARGEST:
            file.truncate(left)
            return True
    error = Unreadable(f"{path} ends in a line of more than {LARGEST} bytes")
    out_of_the_way(path, error)
    return False


def fingerprint(files: Iterable[Path]) -> str | None:
    """Return the SHA-256 over names, sizes and contents (large files: samples); None if a file is
    missing.
    """
    digest = hashlib.sha256()
    try:
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                if size <= _WHOLE_BYTES:
                    digest.update(file.read())
                    continue
                for sample in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


class CannotWrite(OSError):
    """A full disk, a folder without permission: one sentence that names the path."""


class InUse(ValueError):
    """Another process holds the lock."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` at the end, or vanishes on an error."""
    temporary = temporary_name(path)
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        if os.path.lexists(temporary):  # false also where no file can be under that name
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path` at the end, or vanishes on an error.

    An existing folder is replaced: for a moment there is none, and never half of one.
    """
    temporary, old = temporary_name(path), temporary_name(path)
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


def temporary_name(path: Path) -> Path:
    """An unused name in the same folder, which `clean` recognises."""
    return path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{os.urandom(3).hex()}"


def clean(folder: Path, *names: str) -> list[Path]:
    """Remove unfinished files of a dead process from a folder; returns their names. Only those
    whose names would begin with one of `names`: others may be a living process's.
    """
    leftovers = [path for name in names for path in sorted(folder.glob(f"{TEMPORARY}{name}*"))]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


def set_aside(path: Path) -> Path:
    """Rename a folder that is to be removed, so that no half of it is ever visible under its name;
    returns the new name, which `clean` recognises.
    """
    old = temporary_name(path)
    with naming(path):
        os.replace(path, old)
    return old


def remove(path: Path) -> None:
    """Remove any leftover of a program under a name: a link, a folder that may not be entered, or
    one deeper than Python's stack. Raises OSError naming what remains.
    """
    if path.is_symlink() or not path.is_dir():
        with naming(path):
            path.unlink(missing_ok=True)
        return
    with suppress(OSError, RecursionError):
        shutil.rmtree(path)
        return
    for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*words, "--", os.fspath(path)], capture_output=True, check=False)
    if os.path.lexists(path):
        raise CannotWrite(f"cannot remove {path}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make disk errors name the path being written."""
    try:
        yield
    except CannotWrite:
        raise  # an inner file has named itself
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def alone(path: Path, else_say: str) -> Iterator[None]:
    """Allow one process at a time, by a lock that ends with it. Raises InUse for the second one."""
    with naming(path):
        file = _lock_file(path)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(else_say) from error
        except OSError:
            pass  # a disk without locks
        yield


def _lock_file(path: Path) -> IO[bytes]:
    # a link may lead to the file of another lock: a holder of both would wait for itself
    usable(path, below=path.parent)
    flags = os.O_RDWR | os.O_CREAT
    return open(open_regular(path, flags, below=path.parent), "r+b", buffering=0)


# `filelock` does not fit: it asks every 50 ms instead of waiting (four processes in turns of 1 ms
# waited up to 0.8 s for one, here 0.03 s), and raises for a disk without locks.
@contextmanager
def in_turn(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Allow one process or thread after the other, by a lock on the file `path`, which is empty.

    `waits` is called if another has it.
    """
    with naming(path):
        file = _lock_file(path)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a disk without locks
        yield


def sync_all(folder: Path) -> None:
    """Sync everything in a folder to disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Sync a file (or a folder's list of names) to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
