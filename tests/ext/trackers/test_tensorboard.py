"""TensorBoard shows what a run logs, and after a resume what counts of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.ext.trackers.opened import open_monitor
from tests.monitor.test_monitor import steps_in
from trireme.monitor.monitor import read_metrics


def test_a_resume_cuts_the_files_back_to_its_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = open_monitor(tmp_path, keep_until={"explorer": 0, "trainer": 0, "eval": 0})
    for step in (1, 2, 3):
        first.log({"x": 1.0}, step, "explorer")
        first.log({"x": 1.0}, step, "trainer")
    first.close()  # killed after the metrics of step 3; the checkpoint is of step 1
    time.sleep(1.1)  # TensorBoard reads files by name: the second of their making, then a counter
    second = open_monitor(tmp_path, keep_until={"explorer": 2, "trainer": 1, "eval": 2})
    assert [(part, step) for part, step, _ in steps_in(tmp_path)] == [
        ("explorer", 1), ("trainer", 1), ("explorer", 2),
    ]  # fmt: skip
    second.log({"x": 2.0}, 2, "trainer")
    second.log({"x": 2.0}, 3, "explorer")
    second.close()
    for part, values in (("trainer", [1.0, 2.0]), ("explorer", [1.0, 1.0, 2.0])):
        assert [x for own, _, x in steps_in(tmp_path) if own == part] == values
        curves = EventAccumulator(str(tmp_path / "tensorboard" / part)).Reload()
        assert [(e.step, e.value) for e in curves.Scalars("x")] == list(enumerate(values, 1))


def test_tensorboard_reads_what_is_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = open_monitor(tmp_path)
    monitor.log({"rollout/reward/mean": 0.25}, 7, "explorer")
    monitor.log({"eval/arith/accuracy/mean@1": 0.5}, 7, "eval")
    monitor.log({"actor/pg_loss": -1.5}, 7, "trainer")
    monitor.close()
    assert {f.name for f in (tmp_path / "tensorboard").iterdir()} == {"explorer", "trainer"}
    explorer = EventAccumulator(str(tmp_path / "tensorboard/explorer")).Reload()
    (event,) = explorer.Scalars("eval/arith/accuracy/mean@1")
    assert (event.step, event.value) == (7, 0.5)
    trainer = EventAccumulator(str(tmp_path / "tensorboard/trainer")).Reload()
    assert trainer.Scalars("actor/pg_loss")[0].value == -1.5
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("kinds", ["none", ["none"]])
def test_without_a_tracker_only_the_file_of_metrics_is_written(
    tmp_path: Path, kinds: str | list[str]
) -> None:
    monitor = open_monitor(tmp_path, kinds)
    monitor.log({"rollout/reward/mean": 0.25}, 7, "explorer")
    monitor.close()
    assert {one.name for one in tmp_path.iterdir()} == {"metrics.jsonl", ".metrics.jsonl.lock"}


def test_an_unknown_monitor_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown monitor.monitor_type 'wandbb'; did you mean"):
        open_monitor(tmp_path, "wandbb")
