"""Task folders: tasks in Harbor's form, each a folder, read as the rows of a data set.

A folder has `task.toml`, `instruction.md`, `environment/` (a Dockerfile and its files), `tests/`
(`test.sh` leaves the reward in /logs/verifier) and perhaps `solution/solve.sh`. There is no
container: a Dockerfile's files, folder and variables are used, and its other instructions are
refused.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trireme.config.lookup import located
from trireme.data.rows import DataSet, NoRows, Rows
from trireme.ext.harbor.docker_ignore import FILES, left_out, patterns_of
from trireme.files import LARGEST, Unreadable, read_text

TOML = "task.toml"
COLUMNS = ("name", "prompt", "folder")
"""The columns of the rows: the folder's name, `instruction.md`, and the folder's path."""
OWN = ("app", "tests", "logs", "solution")
"""Folders of the root that tasks name by their absolute paths."""
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr")
_SILENT = ("FROM", "ARG", "LABEL", "EXPOSE", "CMD", "USER", "MAINTAINER", "SHELL", "STOPSIGNAL")
_NEEDED = ("instruction.md", "tests/test.sh")
MOST_FILES, DEEPEST = 100_000, 100
"""Most files and folders of a task's folder, and their greatest depth."""
FILE_MB = 1024
"""The largest file of a task, unless `workflow_args.file_mb` overrides it."""
DISK_MB = 10_240
"""The most that all files of a rollout take, unless `workflow_args.disk_mb` overrides it."""
MOST_S = 1e9
"""The longest time-out of a task: waiting functions take no larger number."""
_LARGEST = 1 << 20
"""Bytes of a file that is looked through for absolute paths."""


class Copy(NamedTuple):
    """A file or folder that the task's environment has."""

    source: str
    """Its path below `environment/`."""
    target: str
    """Its absolute destination."""
    mode: int | None = None
    """The permissions of the copies; None: those of the files."""


@dataclass(frozen=True)
class TaskFolder:
    """One task, as it runs without a container."""

    folder: Path
    agent_seconds: float
    verifier_seconds: float
    verifier_env: dict[str, str]
    workdir: str = "/app"
    copies: tuple[Copy, ...] = ()
    ignored: frozenset[str] = frozenset()
    """Paths below `environment/` that no copy contains."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def roots(self) -> list[str]:
        """The names in the root that are its own."""
        named = (
            path.split("/")[1] for path in (self.workdir, *(copy.target for copy in self.copies))
        )
        return list(dict.fromkeys([*OWN[:3], "root", *filter(None, named)]))


class TaskFolders:
    """The tasks of a folder as rows. See RowSource."""

    reproducible = True

    def takes(self, data: DataSet) -> bool:
        """Return whether the path is a folder of task folders."""
        return bool(self.files(data))

    def files(self, data: DataSet) -> list[Path]:
        """Return the tasks' files; empty if there is no such path or split."""
        try:
            location = located(data.path, "datasets")
            return task_files(location, data.split_name) if location is not None else []
        except ValueError:  # there is no such path or split
            return []

    def read(self, data: DataSet) -> Rows:
        """Read a row for each task."""
        try:
            tasks = list(task_rows(self.files(data)))
        except ValueError as error:
            raise NoRows(data.path, str(error)) from error
        source = f"dataset '{data.path}' (split '{data.split_name}')"
        rows, places = [row for _, row in tasks], [place for place, _ in tasks]
        return Rows(source, rows, COLUMNS, places=places)


def task_files(location: Path, split: str) -> list[Path]:
    """Return `task.toml` and `instruction.md` of every task of a split, in the order of their
    names; none if the folder is not a set of tasks. A folder without splits is the split `train`.
    """
    places = [location / split, *([location] if split == "train" else [])]
    for place in places:
        if tomls := sorted(place.glob(f"*/{TOML}")):
            texts = [toml.with_name("instruction.md") for toml in tomls]
            return [*tomls, *(text for text in texts if text.is_file())]
    return []


def task_rows(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and row of each task of `task_files`. Raises ValueError for an incomplete one."""
    for toml in files:
        if toml.name != TOML:
            continue
        folder = toml.parent.absolute()
        for name in _NEEDED:
            if not os.path.lexists(folder / name):
                raise ValueError(f"has a task without {name}: {folder}")
        try:
            text = _text(folder, "instruction.md").strip()
        except (Unreadable, FileNotFoundError) as error:
            raise ValueError(f"has a task that cannot be read: {error}") from error
        yield str(toml), {"name": folder.name, "prompt": text, "folder": str(folder)}


def read_task(
    folder: Path, *, skip_run: bool = False, file_mb: int = FILE_MB, disk_mb: int = DISK_MB
) -> TaskFolder:
    """Read the task in a folder. `skip_run`: the results of its Dockerfile's RUN are on this
    machine already.

    Raises ValueError, naming file and line, for anything that needs a container, and for files that
    may not be copied: a link that leaves the task, anything but a file, one beyond `file_mb`, more
    than `disk_mb` in all.
    """
    name = f"task {folder.name}"
    _refuse_what_is_no_file(name, folder, file_mb, disk_mb)
    try:
        said = tomllib.loads(_text(folder, TOML))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {TOML} cannot be read: {error}") from error
    if said.get("steps"):
        raise ValueError(f"{name}: {TOML} has several steps: expected a task with one step")
    environment, verifier = _table(name, said, "environment"), _table(name, said, "verifier")
    if verifier.get("environment_mode", "shared") != "shared" or "environment" in verifier:
        raise ValueError(f"{name}: its verifier needs a separate container, which is not supported")
    if environment.get("docker_image") and not skip_run:
        raise ValueError(
            f"{name}: environment.docker_image ({environment['docker_image']}) is not unpacked: "
            "expected a Dockerfile; or set workflow_args.skip_run if this machine has all of "
            "its contents"
        )
    compose = [*(folder / "environment").glob("docker-compose.y*ml")]
    if compose:
        raise ValueError(f"{name}: {compose[0].name} needs containers: expected only a Dockerfile")
    made = TaskFolder(
        folder,
        _seconds(name, said, "agent"),
        _seconds(name, said, "verifier"),
        _variables(name, verifier, "verifier"),
        variables=_variables(name, environment, "environment"),
    )
    docker = folder / "environment" / "Dockerfile"
    if not docker.is_file():
        files = sorted(path.name for path in (folder / "environment").glob("*"))
        return _with(made, copies=tuple(Copy(file, f"/app/{file}") for file in files))
    return _of_dockerfile(made, docker, skip_run)


def absolute_path(task: TaskFolder) -> str | None:
    """Return where a task's scripts name a folder of the root that is the task's; None if nowhere.

    `${LOGS_DIR:-/logs}` names none, because the variable takes precedence.
    """
    folder, roots = task.folder, dict.fromkeys([*OWN, *task.roots])
    names = "|".join(map(re.escape, sorted(roots, key=len, reverse=True)))
    named = re.compile(rf"(?<![\w.\-/}}])(?<!:-)/({names})(?![\w-])")
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        if path.name in (TOML, "Dockerfile"):
            continue
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if match := named.search(line.removeprefix("#!")):
                return f"{path.relative_to(folder)}, line {number}: {match[0]}"
    return None


def _table(name: str, said: dict[str, Any], key: str, above: str = "") -> dict[str, Any]:
    value = said.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {TOML} has {above}{key} = {value!r}: expected a table")
    return value


def _variables(name: str, said: dict[str, Any], section: str) -> dict[str, str]:
    table = _table(name, said, "env", f"{section}.")
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{name}: {section}.env.{key} is {value!r}: expected text")
        if "${" in str(value):
            raise ValueError(
                f"{name}: {section}.env.{key} is '{value}', and tasks do not receive variables "
                "of this machine: expected the value itself"
            )
    return _settable({key: str(value) for key, value in table.items()}, f"{name}: {section}.env: ")


def _settable(variables: dict[str, str], where: str = "") -> dict[str, str]:
    """Return the variables. Raises ValueError for one that no process can be given."""
    for key, value in variables.items():
        if not key or "=" in key or "\0" in f"{key}{value}":
            raise ValueError(
                f"{where}{key!r:.60} with the value {value!r:.60} is not a possible environment "
                "variable"
            )
    return variables


def _seconds(name: str, said: dict[str, Any], section: str) -> float:
    value = _table(name, said, section).get("timeout_sec", 600.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_S:
        raise ValueError(f"{name}: {section}.timeout_sec is {value!r}: expected seconds")
    return float(value)


def _with(task: TaskFolder, **changes: Any) -> TaskFolder:
    """Return the task with these changes, if all of its folders may be made. Raises ValueError."""
    changed = TaskFolder(**{**vars(task), **changes})
    for root in changed.roots:
        if root in _SYSTEM:
            raise ValueError(
                f"task {task.folder.name}: its Dockerfile writes below /{root}, which belongs to "
                "this machine: expected /app or another folder of the task"
            )
    return changed


def _text(folder: Path, name: str) -> str:
    """Return a text of a task. Raises Unreadable, also for a link that leaves the task's folder."""
    whole = Path(os.path.realpath(folder))
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(whole):
        raise Unreadable(_leaves(folder, folder / name))
    return read_text(path, LARGEST, below=whole)


def _refuse_what_is_no_file(name: str, folder: Path, file_mb: int, disk_mb: int) -> None:
    """Raise ValueError for entries that a task's folder may not contain, anywhere: its scripts run
    on this machine, and its files are copied.

    A link may lead to another file of the task; in `environment/`, and to a folder, it must stay
    within the copied folder.
    """
    whole, taken = Path(os.path.realpath(folder)), 0
    for path in _entries(name, folder):
        place = path.relative_to(folder)
        there = path.lstat()
        if stat.S_ISLNK(there.st_mode):
            target = Path(os.path.realpath(path))
            bound = target.is_dir() or place.parts[0] == "environment"
            if not target.is_relative_to(whole / place.parts[0] if bound else whole):
                raise ValueError(
                    f"{name}: {_leaves(folder, path, place.parts[0] if bound else '')}"
                )
            if os.path.isabs(os.readlink(path)) and target.is_file():  # copied as the file
                taken += target.stat().st_size
        elif stat.S_ISREG(there.st_mode):
            if there.st_size > file_mb * 2**20:
                raise ValueError(
                    f"{name}: {place} has {there.st_size >> 20} MB: expected at most {file_mb} "
                    "(workflow_args.file_mb)"
                )
            taken += there.st_size
        elif not stat.S_ISDIR(there.st_mode):
            raise ValueError(f"{name}: {place} is a pipe, a socket or a device: expected a file")
        if taken > disk_mb * 2**20:
            raise ValueError(
                f"{name}: its files have more than {disk_mb} MB in all: expected at most that "
                "(workflow_args.disk_mb)"
            )


def _entries(name: str, folder: Path) -> Iterator[Path]:
    """Yield all entries of a folder, following no link. Raises ValueError for too many."""
    pending, count = [folder], 0
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = Path(entry.path)
                count += 1
                if count > MOST_FILES or len(path.parts) - len(folder.parts) > DEEPEST:
                    raise ValueError(
                        f"{name} has more than {MOST_FILES} files, or folders more than {DEEPEST} "
                        "deep: expected fewer"
                    )
                yield path
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)


def _leaves(folder: Path, path: Path, bound: str = "") -> str:
    to = os.readlink(path) if path.is_symlink() else os.path.realpath(path)
    within = f"{bound}/" if bound else "the task's folder"
    return (
        f"{path.relative_to(folder)} is a link to {to}: expected a file, or a link that stays "
        f"within {within}"
    )


def _folded(path: PurePosixPath) -> PurePosixPath:
    """Return the absolute path without `..`, as in a container: nothing is above the root."""
    return PurePosixPath("/" + posixpath.normpath(path).lstrip("/"))


def _of_dockerfile(task: TaskFolder, file: Path, skip_run: bool) -> TaskFolder:
    """Add the effects of a Dockerfile's instructions to `task`. Raises ValueError for one that is
    not possible here.

    A variable of `task.toml` takes precedence over one of the same name here.
    """
    workdir = PurePosixPath("/app")
    copies: list[Copy] = []
    variables: dict[str, str] = {}
    stages, ignored = 0, _ignored(task, file.parent)
    try:
        text = _text(task.folder, "environment/Dockerfile")
    except (OSError, Unreadable) as error:
        raise ValueError(
            f"task {task.folder.name}: environment/Dockerfile cannot be read: {error}"
        ) from error
    for number, line in _instructions(text):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        where = f"task {task.folder.name}: environment/Dockerfile, line {number}, `{line:.60}`"
        stages += word == "FROM"
        if (word == "RUN" and skip_run) or (word in _SILENT and stages < 2):
            continue
        if word not in ("WORKDIR", "COPY", "ENV") or "$" in rest or "<<" in rest:
            hint = "; or set workflow_args.skip_run if this machine has what it installs"
            raise ValueError(
                f"{where}, cannot be done without a container: expected FROM, WORKDIR, COPY and ENV"
                f"{hint if word == 'RUN' else ''}"
            )
        try:
            if not rest:
                raise ValueError(f"nothing follows {word}")
            if word == "WORKDIR":
                workdir = _folded(workdir / rest.strip("\"'"))
            elif word == "ENV":
                variables |= _assigned(rest)
            else:
                copies += _copied(file.parent, rest, workdir, ignored)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    variables |= task.variables
    copied = {"copies": tuple(copies), "ignored": ignored}
    return _with(task, workdir=str(workdir), variables=variables, **copied)


def _ignored(task: TaskFolder, context: Path) -> frozenset[str]:
    """Return the paths of a Dockerfile's folder that its `.dockerignore` leaves out. Raises
    ValueError for one that cannot be read.
    """
    name = f"task {task.folder.name}"
    for file in FILES:
        if not os.path.lexists(context / file):
            continue
        try:
            patterns = patterns_of(_text(task.folder, f"environment/{file}"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: environment/{file} cannot be read: {error}") from error
        paths = (path.relative_to(context) for path in _entries(name, context))
        return left_out(map(PurePosixPath, paths), patterns)
    return frozenset()


def _assigned(rest: str) -> dict[str, str]:
    """Return the variables of an ENV: `NAME=value ...`, or one as `NAME value`."""
    pairs = shlex.split(rest) if "=" in rest.split()[0] else ["=".join(rest.split(None, 1))]
    for pair in pairs:
        if "=" not in pair.lstrip("="):
            raise ValueError(f"'{pair}' does not set a variable: expected NAME=value")
    return _settable(dict(pair.split("=", 1) for pair in pairs))


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each instruction, continued lines joined."""
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not parts):
            continue
        begun = begun if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            yield begun, " ".join(parts)
            parts = []
    if parts:  # the last line goes on to nothing
        yield begun, " ".join(parts)


def _copied(
    context: Path, rest: str, workdir: PurePosixPath, ignored: frozenset[str]
) -> Iterator[Copy]:
    """Yield each file or folder that a COPY names."""
    words = [word for word in rest.split() if not word.startswith(("--chown", "--chmod"))]
    modes = [_mode(word) for word in rest.split() if word.startswith("--chmod")]
    if " ".join(words).startswith("["):
        words = _listed(" ".join(words))
    if len(words) < 2 or words[0].startswith("--"):
        raise ValueError("expected COPY with files of the folder and a destination")
    *sources, last = words
    target = _folded(workdir / last)
    for source in sources:
        pattern = source.strip("/").removeprefix("./") or "."
        there = [context] if pattern == "." else sorted(context.glob(pattern))
        found = [path for path in there if str(path.relative_to(context)) not in ignored]
        if not found or any(not p.resolve().is_relative_to(context.resolve()) for p in found):
            why = " that its .dockerignore does not leave out" if there and not found else ""
            raise ValueError(f"there is no '{source}' in the task's environment/{why}")
        inside = last.endswith(("/", ".")) or len(sources) > 1 or len(found) > 1
        for path in found:
            to = target if path.is_dir() or not inside else target / path.name
            yield Copy(str(path.relative_to(context)), str(to), *modes[-1:])


def _mode(option: str) -> int:
    """Return the permissions of `--chmod=755`. Raises ValueError for another form."""
    if (match := re.fullmatch("--chmod=([0-7]{3,4})", option)) is None:
        raise ValueError(f"{option} is not possible here: expected digits, --chmod=755")
    return int(match[1], 8)


def _listed(text: str) -> list[str]:
    """Return the words of a COPY in its JSON form."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text:.60} is not JSON ({error}): expected a list of texts") from error
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{text} is not a list of texts")
    return words
