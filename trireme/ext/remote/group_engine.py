"""Group engine: an engine as a member of its trainer's weight group, in the engine's process.

The trainer leads the engine's workers through an update: join, then receive and commit. The group's
headers describe the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trireme.aio import in_thread
from trireme.config.lookup import weight_files
from trireme.engines.engine import Engine
from trireme.ext.remote.weight_group import Meeting, WeightGroup


def refuse_no_weights(path: str) -> None:
    """Raise ValueError for a client's path that is neither a folder of safetensors nor such a file.
    The sentence never depends on what is there: a client that sends weights need not learn what
    else exists.
    """
    try:
        files = weight_files(Path(path))
        for file in files:
            if not file.is_file():  # a named pipe would be waited for
                raise ValueError(file)
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
    except (OSError, ValueError, SafetensorError):
        files = []
    if not files:
        raise ValueError(
            f"path is {path[:200]!r}: expected a folder of safetensors files that this server can "
            "read, or one such file"
        )


class GroupEngine(Protocol):
    """An engine whose workers are members of the group themselves."""

    group_size: int
    """Its workers."""

    async def join_group(self, meeting: Meeting) -> None:
        """Connect all workers to the group, waiting for the others."""
        ...

    async def receive_weights(self) -> None:
        """Pause, and receive the weights that the trainer broadcasts."""
        ...

    async def commit_weights(self, version: int) -> None:
        """Use the new weights from now on, and resume."""
        ...


class EmbeddedGroup:
    """The same for an engine of this process, which withholds new weights until the commit."""

    group_size = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group: WeightGroup | None = None
        self._tensors: dict[str, Tensor] = {}
        self._resume = False

    async def join_group(self, meeting: Meeting) -> None:
        """Connect this process to the trainer's weight group."""

        def join() -> WeightGroup:
            group = WeightGroup(meeting)
            group.connect()
            return group

        self._group = await in_thread(join, name="weight-group")

    async def receive_weights(self) -> None:
        """Pause the engine and receive all tensors. Raises ValueError before `join_group`."""
        group = self._group
        if group is None:
            raise ValueError("this engine is in no weight group: join one first")
        # paused by a failed update, the engine still has to resume after this one
        self._resume = self._resume or not self._engine.health().paused
        await self._engine.pause()
        self._tensors = await in_thread(lambda: dict(group.receive()), name="weight-group")

    async def commit_weights(self, version: int) -> None:
        """Put the received tensors to use as `version`, and resume the engine if this update paused
        it.
        """
        tensors, self._tensors = self._tensors, {}
        await self._engine.update_weights(tensors, version)
        if self._resume:
            self._resume = False
            await self._engine.resume()
