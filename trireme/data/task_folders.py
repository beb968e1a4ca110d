"""Task folders: tasks in Harbor's form, each a folder, read as the rows of a data set.

A folder has `task.toml`, `instruction.md`, `environment/` (a Dockerfile and its files), `tests/`
(`test.sh` leaves the reward in /logs/verifier) and perhaps `solution/solve.sh`. There is no
container: of a Dockerfile the files, the folder and the variables are taken, and what else it does
is refused.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

TOML = "task.toml"
COLUMNS = ("name", "prompt", "folder")
"""Of the rows: the folder's name, `instruction.md`, and where the folder is."""
OWN = ("app", "tests", "logs", "solution")
"""Folders of the root that tasks name by their absolute paths."""
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr")
_SILENT = ("FROM", "ARG", "LABEL", "EXPOSE", "CMD", "USER", "MAINTAINER", "SHELL", "STOPSIGNAL")
_NEEDED = ("instruction.md", "tests/test.sh")
_LARGEST = 1 << 20
"""Bytes of a file that is looked through for absolute paths."""


@dataclass(frozen=True)
class TaskFolder:
    """One task, as it runs without a container."""

    folder: Path
    agent_seconds: float
    verifier_seconds: float
    verifier_env: dict[str, str]
    workdir: str = "/app"
    copies: tuple[tuple[str, str], ...] = ()
    """Paths below `environment/`, each with the absolute one where it goes."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def roots(self) -> list[str]:
        """The folders of the root that it has."""
        named = (path.split("/")[1] for path in (self.workdir, *(to for _, to in self.copies)))
        return list(dict.fromkeys([*OWN[:3], "root", *filter(None, named)]))


def task_files(location: Path, split: str) -> list[Path]:
    """`task.toml` and `instruction.md` of every task of a split, in the order of their names; none
    where the folder is no set of tasks. A folder without splits is the split `train`.
    """
    places = [location / split, *([location] if split == "train" else [])]
    for place in places:
        if tomls := sorted(place.glob(f"*/{TOML}")):
            texts = [toml.with_name("instruction.md") for toml in tomls]
            return [*tomls, *(text for text in texts if text.is_file())]
    return []


def task_rows(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and row of each task of `task_files`. Raises ValueError for one that is not whole."""
    for toml in files:
        if toml.name != TOML:
            continue
        folder = toml.parent.absolute()
        for name in _NEEDED:
            if not (folder / name).is_file():
                raise ValueError(f"has a task without {name}: {folder}")
        text = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        yield str(toml), {"name": folder.name, "prompt": text, "folder": str(folder)}


def read_task(folder: Path, *, skip_run: bool = False) -> TaskFolder:
    """The task in a folder. `skip_run`: what its Dockerfile runs is on this machine already.

    Raises ValueError, naming file and line, for what cannot be done without a container.
    """
    name = f"task {folder.name}"
    try:
        said = tomllib.loads((folder / TOML).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {TOML} cannot be read: {error}") from error
    if said.get("steps"):
        raise ValueError(f"{name}: {TOML} has several steps: expected a task of one")
    environment, verifier = _table(name, said, "environment"), _table(name, said, "verifier")
    if verifier.get("environment_mode", "shared") != "shared" or "environment" in verifier:
        raise ValueError(f"{name}: its verifier wants a container of its own: there is none here")
    if environment.get("docker_image") and not skip_run:
        raise ValueError(
            f"{name}: environment.docker_image ({environment['docker_image']}) is not taken apart: "
            "expected a Dockerfile; or set workflow_args.skip_run where this machine has all of it"
        )
    compose = [*(folder / "environment").glob("docker-compose.y*ml")]
    if compose:
        raise ValueError(f"{name}: {compose[0].name} needs containers: expected a Dockerfile alone")
    made = TaskFolder(
        folder,
        _seconds(name, said, "agent"),
        _seconds(name, said, "verifier"),
        _variables(name, verifier, "verifier"),
        variables=_variables(name, environment, "environment"),
    )
    _links_stay(name, folder / "environment")
    docker = folder / "environment" / "Dockerfile"
    if not docker.is_file():
        files = sorted(path.name for path in (folder / "environment").glob("*"))
        return _with(made, copies=tuple((file, f"/app/{file}") for file in files))
    return _of_dockerfile(made, docker, skip_run)


def absolute_path(folder: Path) -> str | None:
    """Where the scripts of a task name a folder of the root; None: nowhere.

    `${LOGS_DIR:-/logs}` names none: the variable goes before.
    """
    named = re.compile(rf"(?<![\w.\-/}}])(?<!:-)/({'|'.join((*OWN, 'root'))})(?![\w-])")
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
            raise ValueError(f"{name}: {section}.env.{key} is {value!r}: expected a text")
        if "${" in str(value):
            raise ValueError(
                f"{name}: {section}.env.{key} is '{value}', and no task is given variables of this "
                "machine: expected the value itself"
            )
    return {key: str(value) for key, value in table.items()}


def _seconds(name: str, said: dict[str, Any], section: str) -> float:
    value = _table(name, said, section).get("timeout_sec", 600.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}: {section}.timeout_sec is {value!r}: expected seconds")
    return float(value)


def _with(task: TaskFolder, **changes: Any) -> TaskFolder:
    """The task with these, where all of its folders may be made. Raises ValueError."""
    changed = TaskFolder(**{**vars(task), **changes})
    for root in changed.roots:
        if root in _SYSTEM:
            raise ValueError(
                f"task {task.folder.name}: its Dockerfile writes below /{root}, which is this "
                "machine's own: expected /app or another folder of the task's"
            )
    return changed


def _links_stay(name: str, context: Path) -> None:
    inside = os.path.realpath(context)
    for path in sorted(context.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise ValueError(
                f"{name}: environment/{path.relative_to(context)} is a link to "
                f"{os.readlink(path)}: expected a file, or a link that stays within environment/"
            )


def _folded(path: PurePosixPath) -> PurePosixPath:
    """The absolute path without `..`, as a container has it: nothing lies above the root."""
    return PurePosixPath("/" + posixpath.normpath(path).lstrip("/"))


def _of_dockerfile(task: TaskFolder, file: Path, skip_run: bool) -> TaskFolder:
    """What the instructions of a Dockerfile come to. Raises ValueError for one that cannot be.

    A variable of `task.toml` goes before one of the same name here.
    """
    workdir = PurePosixPath("/app")
    copies: list[tuple[str, str]] = []
    variables: dict[str, str] = {}
    stages = 0
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
            hint = "; or set workflow_args.skip_run where this machine has what it installs"
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
                copies += _copied(file.parent, rest, workdir)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    variables |= task.variables
    return _with(task, workdir=str(workdir), copies=tuple(copies), variables=variables)


def _assigned(rest: str) -> dict[str, str]:
    """The variables of an ENV: `NAME=value ...`, or one as `NAME value`."""
    pairs = shlex.split(rest) if "=" in rest.split()[0] else ["=".join(rest.split(None, 1))]
    for pair in pairs:
        if "=" not in pair.lstrip("="):
            raise ValueError(f"'{pair}' is no variable with its value: expected NAME=value")
    return dict(pair.split("=", 1) for pair in pairs)


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each instruction, continued lines joined."""
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not parts):
            continue
        begun = begun if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            yield begun, " ".join(parts)
            parts = []


def _copied(context: Path, rest: str, workdir: PurePosixPath) -> Iterator[tuple[str, str]]:
    """Each file or folder that a COPY names, with the path where it goes."""
    words = [word for word in rest.split() if not word.startswith(("--chown", "--chmod"))]
    if " ".join(words).startswith("["):
        words = _listed(" ".join(words))
    if len(words) < 2 or words[0].startswith("--"):
        raise ValueError("expected COPY with files of the folder and where they go")
    *sources, last = words
    target = _folded(workdir / last)
    for source in sources:
        pattern = source.strip("/").removeprefix("./") or "."
        found = [context] if pattern == "." else sorted(context.glob(pattern))
        if not found or any(not p.resolve().is_relative_to(context.resolve()) for p in found):
            raise ValueError(f"there is no '{source}' in the task's environment/")
        inside = last.endswith(("/", ".")) or len(sources) > 1 or len(found) > 1
        for path in found:
            to = target if path.is_dir() or not inside else target / path.name
            yield str(path.relative_to(context)), str(to)


def _listed(text: str) -> list[str]:
    """The words of a COPY in its JSON form."""
    try:
        words = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text} is no JSON ({error}): expected a list of texts") from error
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{text} is no list of texts")
    return words
