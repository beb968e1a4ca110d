"""`trireme` as processes that begin with its imports done: many small runs in little time.

Each is a process of its own, with its own exit code and output, and can be killed. All have one
hash seed: what may depend on the order of a set is for `tests.e2e.job.run` to show.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.e2e.job import command, environment

IMPORTS = [
    "datasets",
    "transformers.models.qwen3.modeling_qwen3",
    "trireme.cli.main",
    "trireme.cli.run",
    "trireme.launch.stages",
    "trireme.server.app",
]


class Forked:
    """A command that runs; what it prints is in `out`."""

    def __init__(self, words: Sequence[str], folder: Path, out: Path) -> None:
        self.out = out
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self.process = context.Process(target=_command, args=(list(words), folder, out))
        with patch.dict(os.environ, environment()):  # the first one starts the server
            self.process.start()

    def ended(self, seconds: float = 600) -> int:
        """The exit code; an error if there is none in time."""
        self.process.join(seconds)
        code = self.process.exitcode
        self.kill()
        assert code is not None, f"no end in {seconds:g} s:\n{self.said()}"
        return code

    def ends_well(self) -> None:
        """Exit code 0, or what it printed."""
        assert self.ended() == 0, self.said()

    def kill_when(self, path: Path, seconds: float = 600) -> None:
        """SIGKILL once that file is there, or at the end."""
        deadline = time.monotonic() + seconds
        while not path.exists() and self.process.is_alive():
            assert time.monotonic() < deadline, f"{path} never appeared:\n{self.said()}"
            time.sleep(0.002)
        self.kill()

    def said(self) -> str:
        """What it printed so far."""
        return self.out.read_text() if self.out.exists() else ""

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self.process.kill()
        self.process.join()


def started(folder: Path, config: dict[str, Any], *overrides: str) -> Forked:
    """`trireme run` on a configuration, begun."""
    words = command(folder, config, *overrides)
    return Forked(words[words.index("run") :], folder, folder / "out.txt")


def _command(words: list[str], folder: Path, out: Path) -> None:
    from trireme.cli.main import main

    os.chdir(folder)
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["trireme", *words]
    main()
