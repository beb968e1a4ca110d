"""PolledSync: what the trainer of another process has left in the folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trireme.checkpoint.layout import JobFolder
from trireme.sync.checkpoint import STATE_FILE, TRIES, PolledSync


class Engine:
    """Takes weights; the first folder has made way when it is read."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.took: list[str] = []

    async def update_weights(self, source: Path, version: int) -> None:
        if source == self.folder.actor_dir(1):
            publish(self.folder, 2)
            raise FileNotFoundError(source)
        self.took.append(f"{source.parent.name} as {version}")


def publish(folder: JobFolder, step: int) -> None:
    actor = folder.actor_dir(step)
    actor.mkdir(parents=True)
    (actor / "model.safetensors").touch()
    folder.latest_weights.write_text(str(step))


def polled(folder: Path) -> tuple[PolledSync, Engine]:
    job = JobFolder(folder)
    engine: Any = Engine(job)
    options: dict[str, Any] = {"style": "fixed", "interval": 1, "offset": 0, "timeout": 1.0}
    return PolledSync(engine, job, dtype="float32", **options), engine


def test_weights_that_made_way_for_newer_ones_are_not_missed(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path)
    publish(JobFolder(tmp_path), 1)
    asyncio.run(sync.load_latest())
    assert (engine.took, sync.version) == (["global_step_2 as 1"], 1)


def test_a_checkpoint_that_takes_the_weights_place_is_read_instead(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path)
    folder = JobFolder(tmp_path)
    publish(folder, 3)
    load = engine.update_weights

    async def swapped(source: Path, version: int) -> None:
        if source == folder.actor_dir(3):  # its full checkpoint comes between look and read
            folder.hf_dir(3).mkdir()
            (source / "model.safetensors").rename(folder.hf_dir(3) / "model.safetensors")
            raise FileNotFoundError(source)
        await load(source, version)

    engine.update_weights = swapped
    asyncio.run(sync.load_latest())
    assert (engine.took, sync.version) == (["actor as 1"], 1)


def test_weights_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path)
    publish(JobFolder(tmp_path), 3)
    seen: list[Path] = []

    async def damaged(source: Path, version: int) -> None:
        seen.append(source)
        raise ValueError(f"{source} is damaged")

    engine.update_weights = damaged
    with pytest.raises(ValueError, match="is damaged"):
        asyncio.run(sync.load_latest())
    assert len(seen) == 1 + TRIES


def say(folder: Path, state: str, time: int) -> None:
    path = folder / STATE_FILE
    path.write_text(json.dumps({"trainer": state, "step": 1}))
    os.utime(path, ns=(time, time))


@pytest.mark.parametrize("old", ["stopped", "failed: ValueError: no"])
def test_what_an_earlier_trainer_said_is_no_news(tmp_path: Path, old: str) -> None:
    sync, _ = polled(tmp_path)
    say(tmp_path, old, 1)
    sync.forget()
    assert not sync.finished
    say(tmp_path, "running", 2)
    assert not sync.finished
    say(tmp_path, "failed: ValueError: why", 3)
    with pytest.raises(RuntimeError, match="why"):
        assert sync.finished
    say(tmp_path, "stopped", 4)
    assert sync.finished


@pytest.mark.parametrize("there", [False, True])
def test_a_trainer_that_nobody_started_is_said_long_before_the_time_out(
    tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trireme.sync.checkpoint.NOTED", 0.1)
    sync, _ = polled(tmp_path)
    if there:
        say(tmp_path, "running", 1)
    with pytest.raises(TimeoutError, match="explore step 2 waited 1 s"):
        asyncio.run(sync.pull(2))
    sentence = f"weights of train step 2, and no command with mode: train is on {tmp_path}"
    assert caplog.text.count(sentence) == int(not there)
