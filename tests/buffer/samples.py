"""What buffer tests share: experiences with known ids, a clock that jumps, one loop a test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from tests.limits import HANG_S
from trireme.config.schema_rollout import ExperienceBufferConfig
from trireme.experience import EID, Experience

T = TypeVar("T")


def sample(batch: int, task: int, run: int) -> Experience:
    length = 4 + (batch + task + run) % 3
    return Experience(
        range(1, length + 1),
        prompt_length=2,
        logprobs=[-0.5] * (length - 2),
        versions=[batch] * (length - 2),
        eid=EID(batch, task, run),
        reward=float(run),
        prompt_text=f"question {task}",
        response_text=f"answer {run}",
        info={"task_index": {"index": task}},
        metrics={"accuracy": 1.0},
    )


def step_of(batch: int, *, tasks: int = 2, runs: int = 2) -> list[Experience]:
    """All experiences of an explore step, group by group."""
    return [sample(batch, task, run) for task in range(tasks) for run in range(runs)]


def uids(experiences: list[Experience]) -> list[str]:
    return [e.eid.uid for e in experiences]


class JumpingClock:
    """Time passes only by sleeping, at once."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.01)  # whoever can go on does so first
        self.time += seconds


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; a hang fails it."""
    return asyncio.run(asyncio.wait_for(coroutine, HANG_S))


def sql_buffer(
    name: str,
    url: str,
    *,
    role: Any = "both",
    party: str | None = None,
    reuse: Any = None,
    clock: Any = None,
    **keys: Any,
) -> Any:
    """An SqlBuffer with these keys of its section; without its extension the test is skipped."""
    make = pytest.importorskip("trireme.ext.sql.buffer").SqlBuffer
    section = ExperienceBufferConfig(**keys)
    return make(name, url, section, role=role, party=party, reuse=reuse, clock=clock)
