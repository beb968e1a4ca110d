"""Files that say where a run stands, of kinds that a run of one command does not have: whatever has
become of one, one sentence names it, and none is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_damaged_files import DAMAGES
from tests.model.fake import FakeEngine
from trireme.checkpoint.layout import JobFolder
from trireme.explorer.explorer import explorer_state
from trireme.files import write_json
from trireme.launch.run import finished_stages
from trireme.sync.checkpoint import STATE_FILE, PolledSync

MEANT = {"latest_iteration": 3, "taskset_states": [{"current_index": 12}]}
STAGES = {"latest_stage": 0, "finished": []}
PROBE = {"fingerprint": [], "logprobs": [], "version": 1, "ids": []}


def polled(job: Path) -> PolledSync:
    engine: Any = FakeEngine(lambda _: "")
    return PolledSync(engine, JobFolder(job), style="fixed", interval=1, offset=0, timeout=1.0,
                      dtype="float32")  # fmt: skip


READERS: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "explorer_meta.json": (MEANT, lambda job: explorer_state(job / "explorer_meta.json")),
    "stage_meta.json": (STAGES, finished_stages),
    STATE_FILE: ({"trainer": "runs", "step": 1}, lambda job: polled(job).finished),
    "global_step_1/probe.json": (PROBE, lambda job: asyncio.run(polled(job)._load(1))),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", READERS)
def test_damaged_state_is_one_sentence(name: str, damage: str, tmp_path: Path) -> None:
    value, read = READERS[name]
    job = tmp_path / "job"
    (job / "global_step_1" / "actor").mkdir(parents=True)
    write_json(job / name, value)
    if name != "global_step_1/probe.json":
        read(job)
    if name == STATE_FILE and damage == "a link to nothing":
        return  # no trainer has begun
    DAMAGES[damage](job / name)
    with pytest.raises(ValueError, match=name) as error:
        read(job)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
