"""Environments that misbehave, made in worker processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np


class Fake:
    """Counts; `action` says what to do."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def reset(self) -> tuple[str, dict[str, Any]]:
        print("an environment that talks")
        return f"{os.getpid()}", {"start": self.count}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise ValueError("no such door")
        if action == "forget":
            return None
        if action == "hang":
            time.sleep(3600)
        if action.startswith("start"):
            child = subprocess.Popen(["sleep", "3600"])
            if action == "start and hang":
                Path(os.environ["FAKE_CHILD"]).write_text(str(child.pid))
                time.sleep(3600)
            return str(child.pid), 0.0, False, {}
        if action == "die":
            os._exit(7)
        if action == "array":
            return "a grid", np.float32(0.5), np.bool_(True), {"mask": np.array([1, 0, 1])}
        if action == "keys":
            return "a grid", 0.0, False, {(0, 1): "a wall"}
        self.count += 1
        return f"{action} {self.count}", 0.5, self.count >= 3, {"n": self.count}

    def close(self) -> None:
        pass


class Later:
    """Its methods are coroutines."""

    async def reset(self) -> str:
        return "a door"


def make(start: int = 0, broken: bool = False, later: bool = False) -> Any:
    if broken:
        raise FileNotFoundError("no game file")
    return Later() if later else Fake(start)
