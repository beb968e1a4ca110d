"""Doors: a package of others brings a store and a source of rows, as ours enter: by names
in a manifest.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.made import config_of, values
from tests.packages import install, manifests_read_anew
from tests.test_documents import blocks_of
from trireme.checkpoint.layout import JobFolder
from trireme.config.schema_rollout import TasksetConfig
from trireme.data.rows import NoRows, load_rows
from trireme.experience import EID, Experience
from trireme.launch.check import draft, make_plans
from trireme.launch.data import make_buffer
from trireme.launch.tasksets import rows_of
from trireme.registry import STORES

MANIFEST = """
about = "What a made-up package brings."
[store]
shelf = "things:Shelf"
[source]
count = "things:Count"
"""

THINGS = '''
from trireme.buffer.buffer import InMemory
from trireme.config import Problem


class ShelfBuffer(InMemory):
    """The newest first."""

    def __post_init__(self):
        super().__post_init__()
        self.lying = []

    async def put(self, experiences):
        self.lying += experiences

    async def take(self, n, *, oldest=0):
        return [self.lying.pop() for _ in range(n)]

    def __len__(self):
        return len(self.lying)


class Shelf:
    between_processes = False
    keeps_steps = False

    def place(self, path, name):
        return path or f"{name}.shelf"

    def examine(self, config, key, path, seed):
        if path.endswith(".db"):
            yield Problem(f"{key}.path", f"is {path}: expected no database")

    def make(self, parts):
        return ShelfBuffer(parts.config.name, capacity=parts.config.capacity)
'''


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A package that brings what MANIFEST names."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 0)
    with manifests_read_anew():
        code = f"{THINGS}\n\n{blocks_of('data.md')}"
        install(tmp_path / "site", "made_up", MANIFEST, code, package="made_up", first_line="")
        yield
    for module in ("made_up", "made_up.things"):
        sys.modules.pop(module, None)


KEY = "buffer.trainer_input.experience_buffer"


def test_a_store_is_named_by_storage_type_checked_and_made(package: None, tmp_path: Path) -> None:
    config = config_of(tmp_path, values(tmp_path, 32), f"{KEY}.storage_type=shelf")
    (plan,) = make_plans(config)
    assert plan.store.kind == "shelf"
    assert plan.store.path == str(plan.job_dir / "buffer" / "experience_buffer.shelf")
    chat = SimpleNamespace(reader=None)
    text: Any = SimpleNamespace(tokenizer=None, template=None, chat=chat)
    buffer = make_buffer(plan, JobFolder(plan.job_dir), text)

    async def run() -> list[str]:
        await buffer.put([Experience(tokens=torch.tensor([1, 2]), prompt_length=1, eid=EID(1, n))
                          for n in range(3)])  # fmt: skip
        return [e.eid.tid for e in await buffer.take(2)]

    assert type(buffer).__module__ == "made_up.things"
    assert asyncio.run(run()) == ["1/2", "1/1"] and len(buffer) == 1


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("storage_type=shelf", "path=a.db"), f"{KEY}.path is a.db: expected no database"),
        (
            ("storage_type=shelff",),
            f"{KEY}.storage_type is 'shelff': expected one of queue, file, *shelf; did you mean "
            "'shelf'?",
        ),
        pytest.param(
            ("storage_type=replay",),
            f"{KEY}.storage_type is replay: expected replay_buffer.enable true",
            marks=pytest.mark.extension("replay"),
        ),
    ],
)
def test_what_is_wrong_with_a_store_is_said_before_the_run(
    package: None, tmp_path: Path, overrides: tuple[str, ...], problem: str
) -> None:
    keys = [f"{KEY}.{one}" for one in overrides]
    problems = draft(config_of(tmp_path, values(tmp_path, 32), *keys)).problems
    assert len(problems) == 1 and fnmatchcase(str(problems[0]), f"{problem}*")


def test_a_store_of_one_process_is_none_for_commands_of_their_own(
    package: None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, values(tmp_path, 32), f"{KEY}.storage_type=shelf", "mode=explore")
    if "sql" not in STORES:
        return  # nothing carries experiences between processes
    (plan,) = make_plans(config)
    assert plan.store.kind == "sql"
    assert any(f"{KEY}.storage_type (shelf): explorer and trainer are two" in n for n in plan.notes)


def test_a_source_gives_the_rows_of_the_paths_that_it_takes(package: None) -> None:
    assert [row["answer"] for row in load_rows("count:5", split="train[1:3]")] == ["2", "3"]
    assert len(rows_of(TasksetConfig(path="count:4"))) == 4
    with pytest.raises(NoRows, match="'count:-1' counts down: expected a number from 0"):
        load_rows("count:-1")
    with pytest.raises(NoRows, match="'count:0' has no rows in split 'train'"):
        load_rows("count:0")
