"""Task box: the files of one rollout of a task folder, and programs that run among them.

Behind bubblewrap a program sees the task's folders at their absolute paths (/app, /tests, /logs),
this machine's system read-only, no other file, and no network unless it is asked for. Without it
the folders are named by variables alone (APP_DIR, TESTS_DIR, LOGS_DIR), and programs have all that
the run's user has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trireme.data.task_folders import OWN, TaskFolder
from trireme.rewards.reward import number
from trireme.rewards.sandbox import wall
from trireme.usercode import Refused

_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "mime.types", "passwd")
_ETC_OF_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf")


class NoReward(Refused):
    """A verifier left no reward; another try may."""

    lasting = False


class TaskBox:
    """A fresh copy of a task's environment below `root`."""

    def __init__(
        self, task: TaskFolder, root: Path, *, sandbox: bool, visible: Sequence[str] = ()
    ) -> None:
        """`visible`: further paths of this machine, read-only behind bubblewrap."""
        self.task, self.root, self.sandbox = task, root, sandbox
        self._visible = [str(Path(path).expanduser().absolute()) for path in visible]
        for name in task.roots:
            (root / name).mkdir(parents=True)
        for name in ("agent", "verifier"):
            (root / "logs" / name).mkdir()
        self.cwd.mkdir(parents=True, exist_ok=True)
        for source, target in task.copies:
            _copy(task.folder / "environment" / source, self.at(target), root)
        for path in root.rglob("*"):  # what is written later must not go through a link either
            if path.is_symlink():
                _inside(path, root)

    def at(self, path: str) -> Path:
        """Where an absolute path of the task lies on this machine."""
        return self.root / path.lstrip("/")

    @property
    def cwd(self) -> Path:
        """The task's working folder on this machine."""
        return self.at(self.task.workdir)

    def put(self, name: str) -> None:
        """Copy a folder of the task, `tests` or `solution`, over what is there of that name."""
        shutil.rmtree(self.root / name, ignore_errors=True)
        shutil.copytree(self.task.folder / name, self.root / name)

    def show_tests(self) -> None:
        """Copy the tests, and forget what the agent has left in their place and the reward's."""
        self.put("tests")
        left = self.root / "logs" / "verifier"
        if left.is_symlink() or left.is_file():
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)
        left.mkdir(parents=True)

    def words(self, command: Sequence[str], *, network: bool = False) -> list[str]:
        """The command as it runs among the task's files."""
        if not self.sandbox:
            return list(command)
        bubblewrap, *words = wall()
        at = words.index("--chdir")
        del words[at : at + 2]  # bubblewrap prints a warning of two
        mine = []  # first, since Python itself may lie below one of them
        for folder in sorted(path.name for path in self.root.iterdir()):
            mine += ["--bind", str(self.root / folder), f"/{folder}"]
        words = [bubblewrap, *mine, *words, "--die-with-parent"]
        words += ["--share-net"] if network else []
        etc = (*_ETC, *(_ETC_OF_NETWORK if network else ()))
        for path in (*(f"/etc/{name}" for name in etc), *self._visible):
            words += ["--ro-bind-try", path, path]
        return [*words, "--chdir", self.task.workdir, "--", *command]

    def script(self, name: str) -> list[str]:
        """The words that run a script of the task, `tests/test.sh` say."""
        return ["bash", f"/{name}" if self.sandbox else str(self.root / name)]

    def environment(self, /, **more: str) -> dict[str, str]:
        """The variables of a program of the task: none of this process's but PATH."""
        system = os.environ.get("PATH", "/usr/bin:/bin")
        path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin" if self.sandbox else system
        named = {"PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", **self.folders}
        return named | self.task.variables | more

    @property
    def folders(self) -> dict[str, str]:
        """APP_DIR and the like, and the home folder, as a program of the task sees them."""
        base = Path("/") if self.sandbox else self.root
        named = {f"{name.upper()}_DIR": str(base / name) for name in OWN}
        app = self.task.workdir if self.sandbox else str(self.cwd)
        return named | {"APP_DIR": app, "HOME": str(base / "root")}

    def reward(self) -> dict[str, float]:
        """The verifier's reward by its parts. Raises NoReward where it left none."""
        folder = self.root / "logs" / "verifier"
        text, table = folder / "reward.txt", folder / "reward.json"
        name = f"the verifier of task {self.task.folder.name}"
        if text.is_file():
            said: Any = {"reward": text.read_text("utf-8", "replace").strip()}
        elif table.is_file():
            try:
                said = json.loads(table.read_text("utf-8", "replace"))
            except ValueError as error:
                raise NoReward(f"{name} left a reward.json that is no JSON: {error}") from error
        else:
            raise NoReward(f"{name} left no reward: expected /logs/verifier/reward.txt or .json")
        if not isinstance(said, Mapping) or not said:
            raise NoReward(f"{name} left {said!r:.60} in reward.json: expected numbers by name")
        return {str(key): _number(value, f"{name} gave for '{key}'") for key, value in said.items()}


def total(parts: Mapping[str, float]) -> float:
    """The reward: the part of that name, or else the sum of all."""
    return parts["reward"] if "reward" in parts else sum(parts.values())


def _number(value: Any, what: str) -> float:
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return number(value, what, NoReward)


def _copy(source: Path, target: Path, root: Path) -> None:
    """As COPY does: a folder's contents, or a file. Raises ValueError outside `root`."""
    _inside(target, root)
    if not source.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_symlink():
            (target / path.name).symlink_to(os.readlink(path))
        else:
            _copy(path, target / path.name, root)
    shutil.copystat(source, target)


def _inside(path: Path, root: Path) -> None:
    """Raise ValueError for a path that links lead out of a rollout's files."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise ValueError(
            f"/{path.relative_to(root)} of the task lies behind a link that leaves the task's "
            "files: expected links that stay within them wherever COPY puts them"
        )
