"""One writer or reader of an SQL buffer as a process of its own, which may be killed at any moment.

A writer notes the step that it has put, as an explorer does; a reader writes checkpoints of what it
has learned from, as a trainer does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.buffer.samples import step_of, uids
from tests.limits import HANG_S
from trireme.buffer.buffer import Closed
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import Experience
from trireme.ext.sql.buffer import SqlBuffer
from trireme.files import write_json

TASKS, RUNS = 25, 4
BATCH, SAVE_INTERVAL = 64, 5
LEASE = 10.0
GO = "go"
"""In the folder, once all writers have opened the buffer."""
ALL_KILLED = "all_killed"
"""In the folder, once nobody else is to be killed: until then nobody comes to an end."""
SHARE_BEFORE = 0.5
"""The part of their share of all experiences that readers take before that."""


def open_as(url: str, role: Any, name: str) -> SqlBuffer:
    section = ExperienceBufferConfig(lease_time=LEASE, max_read_timeout=HANG_S)
    return SqlBuffer("shared", url, section, role=role, party=name)


def made(name: str, step: int) -> list[Experience]:
    """What writer `name` puts at a step: whole groups, ids with its name."""
    experiences = step_of(step, tasks=TASKS, runs=RUNS)
    for experience in experiences:
        experience.eid.batch = f"{step}/{name}"
    return experiences


def load(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


async def appears(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


async def write(url: str, name: str, folder: Path, steps: int) -> None:
    """Every step once, or again after a kill."""
    buffer, meta = open_as(url, "explore", name), folder / f"{name}.json"
    if not meta.exists():
        write_json(meta, 0)
    await appears(folder / GO)  # else the first could have ended before the others begin
    for step in range(load(meta, 0), steps):
        if step == steps - 1:
            await appears(folder / ALL_KILLED)
        await buffer.put(made(name, step))
        write_json(meta, step + 1)
    await buffer.close()


async def read(url: str, name: str, folder: Path, share: int = 0) -> None:
    """Until the writers have ended."""
    buffer, checkpoint = open_as(url, "train", name), folder / f"{name}.json"
    saved = load(checkpoint, None)
    if saved is not None:
        buffer.load_state(saved["buffer"])
    learned: list[str] = saved["learned"] if saved else []
    ended, taken = False, 0
    while not ended:
        try:
            learned += uids(await buffer.take(BATCH))
        except Closed:
            ended = True
        taken += 1
        if ended or taken % SAVE_INTERVAL == 0:
            write_json(checkpoint, {"buffer": buffer.state(), "learned": learned})
            buffer.commit()
            if len(learned) >= SHARE_BEFORE * share:  # having committed: nothing is under a lease
                await appears(folder / ALL_KILLED)
    await buffer.close()


if __name__ == "__main__":
    role, address, own_name, place, *count = sys.argv[1:]
    os.nice(5)
    if role == "explore":
        asyncio.run(write(address, own_name, Path(place), int(count[0])))
    else:
        asyncio.run(read(address, own_name, Path(place), share=int(count[0]) * TASKS * RUNS))
