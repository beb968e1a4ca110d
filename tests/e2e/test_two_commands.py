"""Explorer and trainer as two commands on one folder: either may be killed and started again."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import Forked, small_config, started
from tests.e2e.test_modes import metrics
from tests.limits import HANG_S
from trireme.launch import run
from trireme.sync.checkpoint import STATE_FILE

STEPS, EXPERIENCES = 4, 64


def wait_until(ready: Callable[[], bool], process: Forked) -> None:
    """Wait for a moment that must come before the process ends."""
    deadline = time.monotonic() + HANG_S
    while not ready():
        assert process.poll() is None, process.said()
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.002)


class Pair:
    """`trireme run` in mode explore and in mode train, on one job folder."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self.job = folder / "checkpoints/tests/job"
        self.running: dict[str, Forked] = {}

    def start(
        self, mode: str, *overrides: str, prepare: Callable[[], object] | None = None
    ) -> None:
        """Start a part, or start it again."""
        (self.folder / mode).mkdir(exist_ok=True)
        words = (f"mode={mode}", *overrides)
        self.running[mode] = started(self.folder / mode, self.config, *words, prepare=prepare)

    def kill_when(self, mode: str, ready: Callable[[], bool]) -> None:
        """SIGKILL a part at a moment when it is known to be under way."""
        process = self.running[mode]
        wait_until(ready, process)
        process.kill()
        assert process.returncode == -signal.SIGKILL, "it had ended before it could be killed"

    def finish(self) -> None:
        """Both end by themselves, and well."""
        for process in self.running.values():
            process.ends_well()

    def explored(self) -> int:
        """Explore steps whose experiences are in the store, by the explorer's own account."""
        path = self.job / "explorer_meta.json"
        return json.loads(path.read_text())["latest_iteration"] if path.exists() else 0

    def rows(self) -> list[tuple[str, int, int, int, str | None]]:
        """What the store holds."""
        columns = "msg_id, batch, model_version, consumed, claimed_by"
        with sqlite3.connect(self.job / "buffer/shared.db") as database:
            return database.execute(f"select {columns} from shared order by id").fetchall()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Both started."""
    config = small_config(tmp_path)
    store = {"storage_type": "sql", "name": "shared"}
    config["buffer"]["train_batch_size"] = 16
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    config["explorer"]["eval_on_startup"] = False
    pair = Pair(tmp_path, config)
    for mode in ("explore", "train"):
        pair.start(mode)
    yield pair
    for process in pair.running.values():
        process.kill()
        process.wait()


def check(pair: Pair) -> None:
    """Every experience once, consumed once; weights that only get newer."""
    rows = pair.rows()
    assert len({eid for eid, *_ in rows}) == len(rows) == EXPERIENCES
    assert {(consumed, claimed) for _, _, _, consumed, claimed in rows} == {(1, None)}
    versions = [version for _, _, version, _, _ in rows]
    assert versions == sorted(versions)
    assert {(batch, version) for _, batch, version, _, _ in rows} == {
        (step + 1, step) for step in range(STEPS)
    }
    steps = [row["sync/version"] for row in metrics(pair.job, "explorer")]
    assert steps == sorted(steps)
    manifest = json.loads((pair.job / f"global_step_{STEPS}/manifest.json").read_text())
    assert manifest["step"] == STEPS and manifest["state"]["version"] == STEPS


def test_the_trainer_is_killed_before_and_after_its_first_checkpoint(pair: Pair) -> None:
    for step in (1, 3):  # checkpoints: 2, 4; the others have weights alone
        pair.kill_when("train", (pair.job / f"global_step_{step}").exists)
        pair.start("train")
    pair.finish()
    check(pair)


def test_the_explorer_is_killed_early_and_late(pair: Pair) -> None:
    for step in (1, 3):
        pair.kill_when("explore", lambda step=step: pair.explored() >= step)
        pair.start("explore")
    pair.finish()
    check(pair)


def test_a_pair_that_goes_on_may_start_with_its_explorer(pair: Pair) -> None:
    pair.finish()
    assert json.loads((pair.job / STATE_FILE).read_text())["trainer"] == "stopped"
    more = f"buffer.total_steps={STEPS + 2}"
    pair.start("explore", more)
    wait_until(lambda: pair.explored() > STEPS, pair.running["explore"])
    pair.start("train", more)
    pair.finish()
    assert pair.explored() == STEPS + 2 and (pair.job / f"global_step_{STEPS + 2}").is_dir()


def without_memory() -> None:
    """In the child: its model does not fit."""

    def load(stage: object) -> None:
        raise MemoryError("no room for the model")

    run.load_models = load


def test_a_trainer_sends_heartbeats_before_it_loads_its_model(tmp_path: Path) -> None:
    """Which takes minutes: to the explorer it would be as good as killed."""
    config = small_config(tmp_path)
    config["buffer"]["trainer_input"] = {
        "experience_buffer": {"storage_type": "sql", "name": "shared"}
    }
    pair = Pair(tmp_path, config)
    pair.start("train", prepare=without_memory)
    assert pair.running["train"].wait() != 0
    with sqlite3.connect(pair.job / "buffer/shared.db") as database:
        rows = database.execute("select name, role, closed from shared_parties").fetchall()
    assert rows == [("trainer", "train", 0)]


@pytest.mark.extension("diagnosis")
def test_each_command_says_what_it_sees_of_the_learning_once(tmp_path: Path) -> None:
    """The explorer its replies, the trainer its tokens' age; started again both say no more."""
    config = small_config(tmp_path)
    del config["buffer"]["explorer_input"]["eval_tasksets"]
    config["synchronizer"] = {"sync_style": "fully_async"}
    config["trainer"]["save_interval"] = 10
    config["buffer"]["train_batch_size"] = 16
    config["buffer"]["trainer_input"] = {
        "experience_buffer": {"storage_type": "sql", "name": "shared"}
    }
    warned = []
    for steps in (10, 12):
        config["buffer"]["total_steps"] = steps
        for mode in ("explore", "train"):  # one after the other, so that tokens are old
            pair = Pair(tmp_path, config)
            pair.start(mode)
            pair.running[mode].ends_well()
            said = pair.running[mode].said()
            warned += re.findall(r"^warning: (\w+) step \d+: (\w+): ", said, re.M)
    assert warned == [("explorer", "replies_cut"), ("trainer", "staleness")]
    files = {path.name for path in (tmp_path / "checkpoints/tests/job/monitor").glob("watch*")}
    assert files == {"watchdog_explorer.json", "watchdog_trainer.json"}
