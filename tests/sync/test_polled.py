"""PolledSync: what the trainer of another process has left in the folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.limits import HANG_S
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import write_manifest
from trireme.checkpoint.save import Saving
from trireme.engines.device import Device
from trireme.engines.engine import EngineTraits
from trireme.engines.weights import fingerprint
from trireme.files import set_aside
from trireme.sync.checkpoint import (
    POLL_SECONDS,
    STATE_FILE,
    TRIES,
    CheckpointPush,
    PolledSync,
    last_report,
)
from trireme.sync.probe import Probe, WrongWeights


class Engine:
    """Takes weights; the first folder has made way when it is read."""

    gone: Exception = FileNotFoundError("model.safetensors")

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.took: list[str] = []

    async def update_weights(self, source: Path, version: int) -> None:
        if source == self.folder.actor_dir(1):
            publish(self.folder, 2)
            raise self.gone
        self.took.append(f"{source.parent.name} as {version}")


def publish(folder: JobFolder, step: int) -> None:
    actor = folder.actor_dir(step)
    actor.mkdir(parents=True)
    (actor / "model.safetensors").touch()
    folder.latest_weights.write_text(str(step))


class Store:
    """What an explorer asks its store: whether the trainer starves, and whether it is there."""

    def __init__(self, *, starves: Iterable[bool] = (), gone: str = "") -> None:
        self.answers, self.gone = iter(starves), gone

    async def starves(self) -> bool:
        return next(self.answers, False)

    async def without_reader(self) -> str:
        return self.gone


def polled(folder: Path, **options: Any) -> tuple[PolledSync, Engine]:
    job = JobFolder(folder)
    engine: Any = Engine(job)
    options = {"style": "fixed", "interval": 1, "offset": 0, "timeout": HANG_S} | options
    return PolledSync(engine, job, dtype="float32", **options), engine


@pytest.mark.parametrize(
    "error",
    [
        Engine.gone,
        RuntimeError("unable to open file <model.safetensors> in read-only mode"),
        RuntimeError("http://127.0.0.1:1/engine/weights/commit (500): No such file or directory"),
    ],
    ids=["opening", "mapping", "elsewhere"],
)
def test_weights_that_made_way_for_newer_ones_are_not_missed(
    tmp_path: Path, error: Exception
) -> None:
    sync, engine = polled(tmp_path)
    engine.gone = error
    publish(JobFolder(tmp_path), 1)
    asyncio.run(sync.load_latest())
    assert (engine.took, sync.version) == (["global_step_2 as 1"], 1)


def test_a_trainer_that_went_back_to_an_older_checkpoint_is_followed(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path)
    folder = JobFolder(tmp_path)
    for step in (20, 30, 21, 22):  # it was started again from 20
        publish(folder, step)
        asyncio.run(sync.load_latest())
        asyncio.run(sync.load_latest())
    assert engine.took == [
        f"global_step_{step} as {n + 1}" for n, step in enumerate((20, 30, 21, 22))
    ]


@pytest.mark.parametrize(("version", "pushed_step"), [(80, 80), (79, 79)], ids=["pushed", "next"])
def test_a_checkpoint_without_a_probe_has_the_version_of_its_trainer(
    tmp_path: Path, version: int, pushed_step: int
) -> None:
    sync, engine = polled(tmp_path)
    folder = JobFolder(tmp_path)
    publish(folder, 80)
    state = {"version": version, "pushed_step": pushed_step, "buffer": {}}
    write_manifest(folder.step_dir(80), 80, state)
    asyncio.run(sync.load_latest())
    assert (engine.took, sync.version) == (["global_step_80 as 80"], 80)


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
    say(tmp_path, old, 1)
    sync, _ = polled(tmp_path, old_report=last_report(JobFolder(tmp_path)))
    assert not sync.finished
    say(tmp_path, "running", 2)
    assert not sync.finished
    say(tmp_path, "failed: ValueError: why", 3)
    with pytest.raises(RuntimeError, match="why"):
        assert sync.finished
    say(tmp_path, "stopped", 4)
    assert sync.finished


def test_the_last_weights_are_there_once_the_trainer_has_ended(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path)
    publish(JobFolder(tmp_path), 3)
    asyncio.run(sync.pull_last())  # no trainer has begun, which may begin tomorrow
    assert engine.took == ["global_step_3 as 1"]
    say(tmp_path, "running", 1)

    async def main() -> None:
        pull = asyncio.ensure_future(sync.pull_last())
        await asyncio.sleep(0.01)
        publish(JobFolder(tmp_path), 4)
        assert not pull.done()
        say(tmp_path, "stopped", 2)
        await pull

    asyncio.run(main())
    assert engine.took[1:] == ["global_step_4 as 2"]


def test_the_newest_weights_take_the_place_of_last_ones_that_do_not_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync, engine = polled(tmp_path, timeout=0.01)
    say(tmp_path, "running", 1)
    publish(JobFolder(tmp_path), 3)
    asyncio.run(sync.pull_last())
    assert engine.took == ["global_step_3 as 1"]
    assert "has not ended after 0.01 s (synchronizer.sync_timeout)" in caplog.text
    say(tmp_path, "failed: ValueError: why", 2)
    with pytest.raises(RuntimeError, match="why"):
        asyncio.run(sync.pull_last())


@pytest.mark.parametrize("there", [False, True])
def test_a_trainer_that_nobody_started_is_said_long_before_the_time_out(
    tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trireme.sync.checkpoint.NOTED", 0.1)
    sync, _ = polled(tmp_path, timeout=1.0)
    if there:
        say(tmp_path, "running", 1)
    with pytest.raises(TimeoutError, match="explore step 2 waited 1 s"):
        asyncio.run(sync.pull(2))
    sentence = f"weights of train step 2, and no command with mode: train is on {tmp_path}"
    assert caplog.text.count(sentence) == int(not there)


def test_a_trainer_that_was_killed_is_said_long_before_the_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trireme.sync.checkpoint.LOOK", 0.1)
    store = Store()
    sync, _ = polled(tmp_path, timeout=1.0, store=lambda: store)
    say(tmp_path, "running", 1)

    async def main() -> None:
        pull = asyncio.ensure_future(sync.pull(2))
        await asyncio.sleep(0.5)
        assert not caplog.text, "it is there"
        store.gone = "; no heartbeat from: default for 61 s"
        said = r"^explore step 2 waited 1 s .*; no heartbeat from: default for 61 s$"
        with pytest.raises(TimeoutError, match=said):
            await pull
        await sync.pull_last()

    asyncio.run(main())
    for wait in ("explore step 2 waits for the weights of train step 2",
                 "the last evaluation waits for the last weights"):  # fmt: skip
        said = f"{wait}; no heartbeat from: default for 61 s: if it was killed, start it again"
        assert caplog.text.count(said) == 1


@pytest.mark.parametrize(
    ("style", "steps"),
    [("fixed", [3, 5, 7]), ("explorer_driven", [3, 5, 7]), ("trainer_driven", [*range(1, 8)])],
)
def test_an_explorer_whose_beat_the_trainer_sets_looks_after_every_step(
    tmp_path: Path, style: str, steps: list[int]
) -> None:
    sync, _ = polled(tmp_path, style=style, interval=2, offset=1)
    assert [step for step in range(1, 8) if sync.due(step)] == steps


def test_a_fixed_explorer_waits_for_its_trainer_and_has_the_weights_then(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path, offset=1, timeout=HANG_S)

    async def main() -> None:
        pull = asyncio.ensure_future(sync.pull(4))  # of train step 3
        await asyncio.sleep(0.01)
        publish(JobFolder(tmp_path), 2)
        await asyncio.sleep(0.3)
        assert not pull.done() and not engine.took
        publish(JobFolder(tmp_path), 3)
        await pull

    asyncio.run(main())
    assert engine.took == ["global_step_3 as 1"]
    metrics = sync.metrics()
    assert metrics["sync/version"] == 1 and metrics["time/sync_wait"] > 0.2
    asyncio.run(sync.pull(4))
    assert engine.took == ["global_step_3 as 1"], "nothing is newer"


def test_an_explorer_whose_trainer_waits_for_experiences_waits_for_no_weights(
    tmp_path: Path,
) -> None:
    store = Store(starves=[False, True])  # the trainer trains what it has first
    sync, engine = polled(tmp_path, store=lambda: store)
    publish(JobFolder(tmp_path), 2)
    asyncio.run(sync.pull(3))  # a batch is missing: some rollouts failed
    assert engine.took == ["global_step_2 as 1"], "the newest that there are"
    assert next(store.answers, None) is None and sync.metrics()["sync/skipped"] == 1
    publish(JobFolder(tmp_path), 3)
    asyncio.run(sync.pull(3))
    assert sync.metrics()["sync/skipped"] == 1


@pytest.mark.parametrize("seconds", [POLL_SECONDS / 2, POLL_SECONDS * (TRIES + 2)])
@pytest.mark.parametrize("style", ["fixed", "trainer_driven"])
def test_older_weights_are_not_taken_for_those_that_their_checkpoint_replaces(
    tmp_path: Path, style: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, engine = polled(tmp_path, style=style)
    folder = JobFolder(tmp_path)
    publish(folder, 3)
    asyncio.run(sync.load_latest())
    publish(folder, 4)
    at_once = JobFolder.latest_weights_step
    looks: list[Path] = []

    def looked(self: JobFolder) -> int | None:
        step = at_once(self)
        if not looks:  # the folder goes between the look that ends the wait and the next one
            looks.append(set_aside(folder.step_dir(4)))
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, looks[0].rename, folder.step_dir(4))
        return step

    monkeypatch.setattr(JobFolder, "latest_weights_step", looked)
    asyncio.run(sync.pull(4))
    if style == "fixed" or seconds < POLL_SECONDS:
        assert engine.took == ["global_step_3 as 1", "global_step_4 as 2"]
    assert "global_step_3" not in str(engine.took[1:])


def test_weights_that_cannot_be_read_for_a_moment_are_read_then(tmp_path: Path) -> None:
    sync, engine = polled(tmp_path)
    publish(JobFolder(tmp_path), 3)
    load, there = engine.update_weights, asyncio.Event()

    async def away(source: Path, version: int) -> None:
        if not there.is_set():
            raise FileNotFoundError(source)
        await load(source, version)

    async def main() -> None:
        engine.update_weights = away
        loading = asyncio.ensure_future(sync.load_latest())
        await asyncio.sleep(0.01)
        there.set()
        await loading

    asyncio.run(main())
    assert engine.took == ["global_step_3 as 1"]


@pytest.mark.parametrize("lacks", [True, False])
def test_an_engine_that_was_started_again_gets_weights_that_are_no_newer(
    tmp_path: Path, lacks: bool
) -> None:
    sync, engine = polled(tmp_path)
    publish(JobFolder(tmp_path), 3)
    asyncio.run(sync.load_latest())
    asyncio.run(sync.renew(lambda: lacks))
    assert engine.took == ["global_step_3 as 1", "global_step_3 as 2"][: 1 + lacks]


class Serves:
    """An engine that scores by its one tensor; `changes`: not by what it was given."""

    traits = EngineTraits()

    def __init__(self, *, changes: float = 0.0) -> None:
        self.changes, self.weight, self.version = changes, torch.zeros(1), -1

    async def update_weights(self, source: Path, version: int) -> None:
        self.weight = load_file(source / "model.safetensors")["weight"] + self.changes
        self.version = version

    async def fingerprint(self) -> Any:
        return fingerprint({"weight": self.weight}, "float32")

    async def logprobs(self, ids: Any) -> list[list[float]]:
        return [[0.0] + [-float(self.weight[0])] * (len(row) - 1) for row in ids]


class Trains:
    """A trainer of one tensor."""

    weight = torch.tensor([0.5])

    def weights(self) -> Any:
        return {"weight": self.weight}

    def score(self, ids: Any) -> list[list[float]]:
        return [[0.0] + [-float(self.weight[0])] * (len(row) - 1) for row in ids]


def pushes(folder: Path, engine: Any = None) -> CheckpointPush:
    trainer: Any = Trains()
    return CheckpointPush(
        trainer, Device(1), JobFolder(folder), step=lambda: 7, probe=Probe(99, "float32"),
        dtype="float32", engine=engine,
    )  # fmt: skip


@pytest.mark.parametrize("here", [True, False])
def test_what_a_trainer_pushes_by_files_is_proved_in_this_process_or_another(
    tmp_path: Path, here: bool
) -> None:
    async def served(engine: Any) -> None:
        """The push by files to an engine here, or to that of an explorer elsewhere."""
        metrics = await pushes(tmp_path, engine if here else None).push(3)
        assert bool(metrics) == here
        if not here:
            sync = PolledSync(
                engine, JobFolder(tmp_path), style="fixed", interval=1, offset=0, timeout=1.0,
                dtype="float32",
            )  # fmt: skip
            await sync.pull(7)
            assert sync.version == 3
        assert engine.version == 3 and float(engine.weight[0]) == 0.5

    asyncio.run(served(Serves()))
    with pytest.raises(WrongWeights, match="after the push of version 3 the engine does not serve"):
        asyncio.run(served(Serves(changes=0.25)))


@pytest.mark.parametrize("gone", ["the weights", "the folder, for a moment"])
def test_a_checkpoint_that_takes_the_place_of_pushed_weights_is_loaded_instead(
    tmp_path: Path, gone: str
) -> None:
    job, model = JobFolder(tmp_path / "job"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    saving = Saving(job, 7, run_state={"version": 2, "buffer": {}}, model_dir=model)
    save_file(Trains().weights(), saving.actor / "huggingface" / "model.safetensors")
    sources: list[Path] = []

    class Late(Serves):
        """An engine that opens the files after the step's checkpoint has got its name."""

        async def update_weights(self, source: Path, version: int) -> None:
            sources.append(source)
            if len(sources) == 1 and gone == "the weights":
                saving.finish()
            elif len(sources) == 1:
                set_aside(job.step_dir(7))
                asyncio.get_running_loop().call_later(POLL_SECONDS / 2, saving.finish)
            await super().update_weights(source, version)

    engine = Late()
    assert asyncio.run(pushes(job.root, engine).push(3))
    assert (engine.version, float(engine.weight[0])) == (3, 0.5)
    assert sources == [job.actor_dir(7), job.hf_dir(7)]


def test_pushed_weights_that_cannot_be_loaded_end_the_run(tmp_path: Path) -> None:
    engine = Serves()
    sources: list[Path] = []

    async def damaged(source: Path, version: int) -> None:
        sources.append(source)
        raise ValueError(f"{source} is damaged")

    engine.update_weights = damaged
    with pytest.raises(ValueError, match="is damaged"):
        asyncio.run(pushes(tmp_path, engine).push(3))
    assert len(sources) == 1


def test_a_trainer_announces_what_an_explorer_elsewhere_hears(tmp_path: Path) -> None:
    sync, _ = polled(tmp_path)
    push = pushes(tmp_path)
    push.announce("running", 3)
    assert not sync.finished
    push.announce("stopped", 4)
    assert sync.finished
