"""Pipeline: a raw copy before, group-relative advantages after, metrics under its own name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from trireme.algorithms.table import GRPO, SFT
from trireme.buffer.record import Record
from trireme.experience import EID, Experience
from trireme.pipeline.pipeline import Pipeline


def group(rewards: list[float], task: int = 0) -> list[Experience]:
    return [
        Experience([1, 2, 3], prompt_length=1, reward=reward, eid=EID(1, task, i))
        for i, reward in enumerate(rewards)
    ]


def test_advantages_are_of_each_group_alone() -> None:
    kept, metrics = asyncio.run(Pipeline(GRPO).run(group([0.0, 1.0]) + group([5.0, 5.0], task=1)))
    scores = [e.advantages[-1].item() for e in kept if e.advantages is not None]
    assert scores == pytest.approx([-0.7071, 0.7071, 0, 0], abs=1e-3)
    assert metrics and all(name.startswith("experience_pipeline/") for name in metrics)


def test_a_recipe_without_advantages_lets_experiences_through() -> None:
    given = group([0.0, 1.0])
    kept, metrics = asyncio.run(Pipeline(SFT).run(given))
    assert kept == given and metrics == {}


def test_the_raw_copy_is_of_what_came_in(tmp_path: Path) -> None:
    lines = tmp_path / "raw.jsonl"
    record = Record(lines=lines)
    asyncio.run(Pipeline(GRPO, raw=record).run(group([0.0, 1.0])))
    record.close()
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 1.0]


def test_nothing_in_gives_nothing_out() -> None:
    kept, _ = asyncio.run(Pipeline(GRPO).run([]))
    assert kept == []
