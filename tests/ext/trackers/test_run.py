"""A run sends its figures and sample rollouts to users' trackers, and goes on where one fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.job import small_config
from trireme.config import load_config
from trireme.ext.trackers.trackers import Rollout, TrackedRun
from trireme.launch.check import make_plans
from trireme.launch.run import run_stages
from trireme.launch.stop import Stop
from trireme.monitor.console import Console


class Kept:
    """A tracker that writes lines of JSON."""

    def __init__(self, run: TrackedRun, *, file: str) -> None:
        self.id = run.name
        self._file = Path(file)

    def log(self, metrics: Mapping[str, float], step: int, part: str) -> None:
        self._write({"part": part, "step": step, "reward": metrics.get("reward")})

    def rollouts(self, rows: Sequence[Rollout], step: int) -> None:
        for row in rows:
            self._write({"rollout": row})

    def close(self, *, failed: bool = False) -> None:
        self._write({"closed": True, "failed": failed})

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def broken(metrics: dict[str, float], step: int, part: str) -> None:
    """A tracker whose server is gone."""
    raise ConnectionError("the server is gone")


def test_a_run_sends_every_step_and_some_rollouts(tmp_path: Path) -> None:
    file, kept = tmp_path / "kept.jsonl", f"{__name__}:Kept"
    kinds = {"monitor_type": [kept, f"{__name__}:broken"]}
    config = small_config(tmp_path) | {
        "monitor": kinds | {"monitor_args": {kept: {"file": str(file)}}},
        "name": "tracked",
    }
    path = tmp_path / "tracked.yaml"
    path.write_text(yaml.safe_dump(config))
    run_stages(make_plans(load_config(path)), console=Console(), stop=Stop())
    job = tmp_path / "checkpoints/tests/tracked"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[-1] == {"closed": True, "failed": False}
    steps = [(line["part"], line["step"]) for line in lines if "part" in line]
    written = [
        json.loads(line) for line in (job / "monitor/metrics.jsonl").read_text().splitlines()
    ]
    # the evaluation of the last step comes again with the last weights
    assert set(steps) == {(row["part"], row["step"]) for row in written}
    rewards = {
        r["step"]: r["metrics"]["rollout/reward/mean"] for r in written if r["part"] == "explorer"
    }
    sent = {line["step"]: line["reward"] for line in lines if line.get("part") == "explorer"}
    assert sent == rewards and len(sent) == 4
    rollouts = [line["rollout"] for line in lines if "rollout" in line]
    assert [row["step"] for row in rollouts] == [1, 2, 3, 4]
    assert all(row["prompt"] and row["completion"] for row in rollouts)
    assert json.loads((job / "monitor/trackers.json").read_text()) == {kept: "tracked"}
    assert not (job / "monitor/tensorboard").exists()
