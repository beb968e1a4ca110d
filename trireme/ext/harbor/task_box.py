"""Task box: the files of one rollout of a task folder, and programs that run among them.

Behind bubblewrap a program sees the task's folders at their absolute paths (/app, /tests, /logs),
this machine's system read-only, no other file, and no network unless it is asked for. Without it
the folders are only named by variables (APP_DIR, TESTS_DIR, LOGS_DIR), and programs have all rights
of the run's user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trireme.ext.harbor.task_folders import DISK_MB, OWN, TaskFolder
from trireme.ext.sandbox.programs import TMP_MB, wall_around
from trireme.files import Unreadable, read_json, read_text, remove
from trireme.rewards.reward import number
from trireme.usercode import Refused

REWARD_BYTES = 64 * 2**10
"""Of a reward's file."""
MOST_PARTS = 100
"""Numbers in `reward.json`: each is a metric."""
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "mime.types", "passwd")
_ETC_OF_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf")


class NoReward(Refused):
    """A verifier left no reward; another try may."""

    lasting = False


class TaskBox:
    """A fresh copy of a task's environment below `root`."""

    def __init__(
        self,
        task: TaskFolder,
        root: Path,
        *,
        sandbox: bool,
        visible: Sequence[str] = (),
        tmp_mb: int = TMP_MB,
        disk_mb: int = DISK_MB,
    ) -> None:
        """`visible`: further paths of this machine, read-only behind bubblewrap; `tmp_mb`: the
        limit, in memory, of files that a program writes outside of the task's folders; `disk_mb`:
        the limit of all files in `root`. Raises ValueError for more.
        """
        self._tmp_mb = tmp_mb
        self.task, self.root, self.sandbox = task, root, sandbox
        self._visible = [str(Path(path).expanduser().absolute()) for path in visible]
        for name in (*OWN[:3], "root"):
            (root / name).mkdir(parents=True)
        for name in ("agent", "verifier"):
            (root / "logs" / name).mkdir()
        self.cwd.mkdir(parents=True, exist_ok=True)
        for source, target, mode in task.copies:
            context = task.folder / "environment"
            left_out = {context / path for path in task.ignored}
            _copy(context / source, self.at(target), root, context, mode, left_out)
            if taken_mb(root) > disk_mb:
                raise ValueError(
                    f"task {task.folder.name}: with COPY {source} its files take more than "
                    f"{disk_mb} MB: expected at most that (workflow_args.disk_mb)"
                )
        for path in root.rglob("*"):  # later writes must not go through a link either
            if path.is_symlink():
                _inside(path, root)

    def at(self, path: str) -> Path:
        """Return the path on this machine of an absolute path of the task."""
        return self.root / path.lstrip("/")

    @property
    def cwd(self) -> Path:
        """The task's working folder on this machine."""
        return self.at(self.task.workdir)

    def mend(self) -> None:
        """Make the working folder again, empty, if a program has removed it: the next one begins
        there, the verifier too, which finds that nothing is left.
        """
        if not self.cwd.is_dir():
            _inside(self.cwd.parent, self.root)
            remove(self.cwd)
            self.cwd.mkdir(parents=True)

    def put(self, name: str) -> None:
        """Copy a folder of the task, `tests` or `solution`, over an existing one of that name."""
        remove(self.root / name)
        _copy(self.task.folder / name, self.root / name, self.root, self.task.folder / name)

    def show_tests(self) -> None:
        """Copy the tests, after removing the agent's files in their place and the reward's."""
        self.put("tests")
        left = self.root / "logs" / "verifier"
        remove(left)
        left.mkdir(parents=True)

    def words(self, command: Sequence[str], *, network: bool = False) -> list[str]:
        """Return the command as it runs among the task's files."""
        if not self.sandbox:
            return list(command)
        mine = []  # first, since Python itself may be below one of them
        for folder in sorted(path.name for path in self.root.iterdir()):
            mine += ["--bind", str(self.root / folder), f"/{folder}"]
        words = [*wall_around(mine, self._tmp_mb), "--die-with-parent"]
        at = words.index("--chdir")
        del words[at : at + 2]  # bubblewrap prints a warning of two
        words += ["--share-net"] if network else []
        etc = (*_ETC, *(_ETC_OF_NETWORK if network else ()))
        for path in (*(f"/etc/{name}" for name in etc), *self._visible):
            words += ["--ro-bind-try", path, path]
        return [*words, "--chdir", self.task.workdir, "--", *command]

    def script(self, name: str) -> list[str]:
        """Return the command that runs a script of the task, such as `tests/test.sh`."""
        return ["bash", f"/{name}" if self.sandbox else str(self.root / name)]

    def environment(self, /, **more: str) -> dict[str, str]:
        """Return the variables of a program of the task: of this process's only PATH."""
        system = os.environ.get("PATH", "/usr/bin:/bin")
        path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin" if self.sandbox else system
        named = {"PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", **self.folders}
        return named | self.task.variables | more

    @property
    def folders(self) -> dict[str, str]:
        """Return APP_DIR and the like, and the home folder, as a program of the task sees them."""
        base = Path("/") if self.sandbox else self.root
        named = {f"{name.upper()}_DIR": str(base / name) for name in OWN}
        app = self.task.workdir if self.sandbox else str(self.cwd)
        return named | {"APP_DIR": app, "HOME": str(base / "root")}

    def reward(self) -> dict[str, float]:
        """Return the verifier's reward by its parts. Raises NoReward if it left none.

        An unknown program may have left anything: a link to a file of this machine, a pipe,
        gigabytes. A regular file is read, and nothing else is opened.
        """
        name = f"the verifier of task {self.task.folder.name}"
        said: Any = None
        for file in ("reward.txt", "reward.json"):
            path = self.root / "logs" / "verifier" / file
            try:
                if file == "reward.txt":
                    said = {"reward": read_text(path, REWARD_BYTES, below=self.root).strip()}
                else:
                    said = read_json(path, object, REWARD_BYTES, below=self.root)
                break
            except FileNotFoundError:
                continue
            except Unreadable as error:
                why = str(error).replace(f"{self.root}/", "/")
                raise NoReward(f"{name} left a {file} that is not a valid reward: {why}") from None
        if said is None:
            raise NoReward(f"{name} left no reward: expected /logs/verifier/reward.txt or .json")
        if not isinstance(said, Mapping) or not 0 < len(said) <= MOST_PARTS:
            raise NoReward(
                f"{name} left {said!r:.60} in reward.json: expected 1 to {MOST_PARTS} numbers by "
                "name"
            )
        return {str(key): _number(value, f"{name} gave for '{key}'") for key, value in said.items()}


def taken_mb(folder: Path) -> int:
    """Return what the files of a folder take on the disk; programs may change it meanwhile, and
    its depth is theirs.
    """
    done = subprocess.run(["du", "-sk", str(folder)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) // 1024 if done.stdout else 0


def total(parts: Mapping[str, float]) -> float:
    """Return the reward: the part of that name, or else the sum of all."""
    return parts["reward"] if "reward" in parts else sum(parts.values())


def _number(value: Any, what: str) -> float:
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return number(value, what, NoReward)


def _copy(
    source: Path,
    target: Path,
    root: Path,
    context: Path,
    mode: int | None = None,
    left_out: Container[Path] = (),
) -> None:
    """Copy as COPY does: a folder's contents, or a file. Raises ValueError outside `root`.

    Links that stay within `context` are copied as links, others as the files that they lead to.
    `mode`: the permissions of all copies; this user can always list and write the folders.
    """
    _inside(target, root)
    if not source.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() and not source.exists():  # to nothing, or to itself
            target.symlink_to(os.readlink(source))
        else:
            copied = Path(shutil.copy2(source, target))
            if mode is not None:
                copied.chmod(mode)
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        to = target / path.name
        if path in left_out:
            continue
        if path.is_symlink() and _stays(path, context):
            to.symlink_to(os.readlink(path))
        else:
            _copy(path, to, root, context, mode, left_out)
    shutil.copystat(source, target)
    if mode is not None:
        target.chmod(mode | 0o700)


def _stays(link: Path, context: Path) -> bool:
    target = Path(os.path.realpath(link))
    relative = not os.path.isabs(os.readlink(link))
    return target.is_dir() or (relative and target.is_relative_to(os.path.realpath(context)))


def _inside(path: Path, root: Path) -> None:
    """Raise ValueError for a path that links lead out of a rollout's files."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise ValueError(
            f"/{path.relative_to(root)} of the task is behind a link that leaves the task's "
            "files: expected links that stay within them wherever COPY puts them"
        )
