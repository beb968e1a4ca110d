"""Trackers show a run, go on with it after a resume, and never stop it."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.e2e.job import wait_for
from tests.ext.trackers.opened import open_monitor
from tests.limits import HANG_S
from trireme.experience import EID, Experience
from trireme.ext.trackers import trackers
from trireme.ext.trackers.trackers import ROLLOUTS, TrackedRun, examine_trackers
from trireme.monitor import events

calls: list[tuple[dict[str, float], int, str]] = []


def callback(metrics: dict[str, float], step: int, part: str) -> None:
    """A user's tracker."""
    calls.append((metrics, step, part))


def raising(metrics: dict[str, float], step: int, part: str) -> None:
    """One that fails each time."""
    raise RuntimeError(f"no route to host at step {step}")


hang = threading.Event()


def hanging(metrics: dict[str, float], step: int, part: str) -> None:
    """One that waits for a network that is gone."""
    hang.wait(HANG_S)


class Broken:
    """One that cannot start."""

    def __init__(self, run: TrackedRun, **options: Any) -> None:
        raise PermissionError("api_key not configured")


ME = __name__


def test_a_function_gets_each_step_under_both_names(tmp_path: Path) -> None:
    calls.clear()
    monitor = open_monitor(tmp_path, f"{ME}:callback")
    monitor.log({"rollout/reward/mean": 0.5, "time/explore": 2.0}, 3, "explorer")
    monitor.close()
    want = {"rollout/reward/mean": 0.5, "time/explore": 2.0, "reward": 0.5}
    assert calls == [(want, 3, "explorer")]
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["metrics"] == {"rollout/reward/mean": 0.5, "time/explore": 2.0}


@pytest.mark.parametrize("kind", ["raising", "Broken"])
def test_one_that_fails_is_said_once_and_the_others_go_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls.clear()
    with caplog.at_level(logging.WARNING):
        monitor = open_monitor(tmp_path, [f"{ME}:{kind}", f"{ME}:callback"])
        for step in (1, 2, 3):
            monitor.log({"x": 1.0}, step, "trainer")
        monitor.close()
    [warning] = [r.getMessage() for r in caplog.records if "tracker" in r.getMessage()]
    assert kind in warning and "the run continues" in warning
    assert [step for _, step, _ in calls] == [1, 2, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_one_that_hangs_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "CLOSE_S", 0.1)
    monitor = open_monitor(tmp_path, f"{ME}:hanging")
    monitor.log({"x": 1.0}, 1, "trainer")
    monitor.close()
    hang.set()
    assert "has not ended within 0.1 s" in caplog.text


@pytest.mark.parametrize(
    ("kinds", "args", "sentence"),
    [
        ("wandbb", None, "did you mean 'wandb'"),
        (["tensorboard", "mlflw"], None, "did you mean 'mlflow'"),
        (f"{ME}:nothing", None, "has no 'nothing'"),
        (f"{ME}:callback", {"mode": "offline"}, "takes no options"),
        (f"{ME}:Named", None, "a class with the methods log, rollouts and close"),
        (f"{ME}:Waits", None, r"close \(one with on_step_end and the like goes into trainer.call"),
        (f"{ME}:ME", None, r"expected a function \(metrics, step, part\)"),
        (["tensorboard", f"{ME}:callback"], {"wandb": {}}, "has no option 'wandb'"),
        ("tensorboard", {"mode": "x"}, "has no option 'mode'"),
    ],
)
def test_a_wrong_tracker_is_refused_before_the_run(
    kinds: Any, args: dict[str, Any] | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        examine_trackers(kinds, args)


def test_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers._PACKAGES, "wandb", ("no_such_package", "wandb"))
    with pytest.raises(ValueError, match="needs the package no_such_package: pip install wandb"):
        examine_trackers("wandb", None)


class Waits:
    """No tracker, but what `trainer.callbacks` takes."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class Named:
    """One whose runs have ids."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = f"id of {run.name}"

    def log(self, metrics: dict[str, float], step: int, part: str) -> None:
        """It shows nothing, and lacks `rollouts`."""

    def close(self, *, failed: bool = False) -> None:
        """Nothing is held."""


def test_two_commands_of_a_job_keep_both_ids(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path, name="job")
    both = [open_monitor(run, f"{ME}:Named", part=part) for part in ("trainer", "explorer")]
    for monitor in both:
        monitor.close()
    ids = json.loads((tmp_path / "trackers.json").read_text())
    assert ids == {f"{ME}:Named-{part}": f"id of job-{part}" for part in ("trainer", "explorer")}


class Store:
    """One with exactly the three methods of docs/trackers.md, one of them async."""

    def __init__(self, run: TrackedRun, *, unit: float = 1.0) -> None:
        self._unit = unit

    async def log(self, metrics: dict[str, float], step: int, part: str) -> None:
        """Waits, as one that sends does."""
        await asyncio.sleep(0)
        calls.append(({"x": metrics["x"] * self._unit}, step, part))

    def rollouts(self, rows: list[Any], step: int) -> None:
        """Nothing to show."""

    def close(self, *, failed: bool = False) -> None:
        """Nothing is held."""


class Site:
    """Where a tracker comes from."""

    def store(self, run: TrackedRun) -> Store:
        """A bound method makes one."""
        return Store(run, unit=3.0)


halved, of_site = functools.partial(Store, unit=0.5), Site().store
loops: list[asyncio.AbstractEventLoop] = []


async def waiting(metrics: dict[str, float], step: int, part: str) -> None:
    """An async function."""
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())
    calls.append((metrics, step, part))


@pytest.mark.parametrize(
    ("kind", "x"), [("Store", 2.0), ("halved", 1.0), ("of_site", 6.0), ("waiting", 2.0)]
)
def test_what_makes_a_tracker_and_what_is_async_is_told_of_every_step(
    kind: str, x: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls.clear()
    examine_trackers(f"{ME}:{kind}", None)
    monitor = open_monitor(tmp_path, f"{ME}:{kind}")
    for step in (1, 2):
        monitor.log({"x": 2.0}, step, "trainer")
    monitor.close()
    assert calls == [({"x": x}, 1, "trainer"), ({"x": x}, 2, "trainer")]
    assert "tracker" not in caplog.text
    assert len(set(map(id, loops))) <= 1 and all(loop.is_closed() for loop in loops)


def installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not installed: make test-trackers")


def rollout(step: int) -> Experience:
    return Experience(
        [1, 2, 3],
        prompt_length=1,
        eid=EID(batch=step, task=4),
        reward=0.25,
        prompt_text="2 + 2?",
        response_text=f"four at {step}",
    )


def tracked(folder: Path, kind: str, steps: range, **args: Any) -> str:
    """One start of a run: the id that it is kept under."""
    run = TrackedRun(folder, project="a-project", group="a-group", name="a-name", config={"lr": 1})
    monitor = open_monitor(run, kind, args=args)
    for step in steps:
        monitor.log({"rollout/reward/mean": step / 10, "eval/x/mean@4": 1.0}, step, "explorer")
        monitor.log({"actor/grad_norm": float(step)}, step - 1, "trainer")
        monitor.rollout(rollout(step))
    monitor.close()
    return json.loads((folder / "trackers.json").read_text())[kind]


def twice(folder: Path, kind: str, caplog: pytest.LogCaptureFixture, **args: Any) -> str:
    """A run and its resume, which goes on in the same tracked run."""
    first = tracked(folder, kind, range(1, ROLLOUTS + 1), **args)
    second = int(time.time())
    while int(time.time()) == second:  # wandb names an offline run's folder by the second
        time.sleep(0.05)
    again = tracked(folder, kind, range(ROLLOUTS + 1, ROLLOUTS + 3), **args)
    assert first == again
    assert not [r for r in caplog.records if "tracker" in r.getMessage()], caplog.text
    return first


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: blocks of 32 KiB in the log format of LevelDB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The history that offline runs' files hold."""
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for file in sorted(folder.rglob("*.wandb")):
        for record in map(proto.Record.FromString, wandb_records(file.read_bytes())):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                )
    return rows


def test_wandb_offline_files_hold_what_was_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed("wandb")
    twice(tmp_path, "wandb", caplog, mode="offline")
    wanted = 2 * (ROLLOUTS + 2) + 2  # both parts' steps, and a table of each run
    wait_for(lambda: len(wandb_rows(tmp_path)) >= wanted)  # its own process writes the files
    rows = wandb_rows(tmp_path)
    rewards = {r["explorer_step"]: r["reward"] for r in rows if "reward" in r}
    assert rewards == {step: step / 10 for step in range(1, ROLLOUTS + 3)}
    assert [r["trainer_step"] for r in rows if "grad_norm" in r] == list(range(ROLLOUTS + 2))
    tables = sorted(tmp_path.rglob("*.table.json"))
    texts = [json.loads(t.read_text())["data"] for t in tables]
    assert sorted(len(t) for t in texts) == [2, ROLLOUTS]
    assert any("four at 1" in row for table in texts for row in table)


def test_mlflow_store_holds_what_was_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow: Any = installed("mlflow")
    id = twice(tmp_path, "mlflow", caplog)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    rewards = client.get_metric_history(id, "reward")
    assert {m.step: m.value for m in rewards} == {s: s / 10 for s in range(1, ROLLOUTS + 3)}
    assert client.get_metric_history(id, "eval/x/mean_at_4")
    run = client.get_run(id)
    assert run.info.status == "FINISHED" and run.info.run_name == "a-name"
    names = sorted(f.path for f in client.list_artifacts(id, "rollouts"))
    assert names == [f"rollouts/step_{ROLLOUTS + 2}.jsonl", f"rollouts/step_{ROLLOUTS}.jsonl"]


def test_a_run_that_failed_is_shown_as_one(tmp_path: Path) -> None:
    mlflow: Any = installed("mlflow")
    open_monitor(TrackedRun(tmp_path, name="x"), "mlflow").close(failed=True)
    id = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    assert client.get_run(id).info.status == "FAILED"


def test_swanlab_offline_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed("swanlab")
    twice(tmp_path, "swanlab", caplog, mode="offline")
    [*files] = [f for f in (tmp_path / "swanlab").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) > 0


def test_trackio_holds_what_was_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "board"))
    installed("trackio")
    twice(tmp_path, "trackio", caplog)
    [database] = (tmp_path / "board").rglob("*.db")
    sqlite: Any = importlib.import_module("sqlite3")
    with sqlite.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    rewards = {s: json.loads(m)["reward"] for s, m in rows if "reward" in json.loads(m)}
    assert rewards == {s: s / 10 for s in range(1, ROLLOUTS + 3)}
