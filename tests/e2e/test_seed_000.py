"""Seed 000's two ALFWorld YAMLs on the real engine, as a user types it, with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S

pytest.importorskip("textworld", reason="ALFWorld is not installed: make test-extras runs these")

from tests.e2e.job import environment
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.alfworld.game import Game
from trireme.ext.alfworld.make_games import make_games

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Games in the real layout, the data set of the seed's script, and a model of their words."""
    folder = tmp_path_factory.mktemp("alfworld")
    files = make_games(folder / "alfworld", "train", 4, seed=5)
    make_games(folder / "alfworld", "valid_seen", 2, seed=6)
    script = ROOT / "examples" / "grpo_alfworld" / "get_alfworld_data.py"
    words = ["--local_dir", str(folder / "data"), "--train_size", "4", "--test_size", "2"]
    words += ["--test_split", "valid_seen"]
    found = {**environment(), "ALFWORLD_DATA": str(folder / "alfworld")}
    done = subprocess.run(
        [sys.executable, str(script), *words], env=found, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    texts = ["<think></think><action></action>"]
    for file in files:
        seen, info = Game(str(file)).reset()
        texts += [seen, *info["admissible_commands"]]
    make_tiny_model(folder / "model", texts, seed=0, max_len=2048, largest=9)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "each"), [("grpo_alfworld", 1), ("grpo_alfworld_general_multi_step", 3)]
)
def test_the_yaml_runs_with_a_tiny_model(
    data: Path, tmp_path: Path, example: str, each: int
) -> None:
    program = "from trireme.cli.main import main; main()"
    overrides: dict[str, Any] = {
        "model.model_path": data / "model",
        "model.max_response_tokens": 12,
        "model.max_model_len": 2048,
        "algorithm.repeat_times": 2,
        "buffer.total_steps": 4,
        "buffer.batch_size": 2,
        "buffer.train_batch_size": 2 * 2 * each,
        "buffer.explorer_input.taskset.path": data / "data",
        "buffer.explorer_input.taskset.workflow_args.max_env_steps": 3,
        "checkpoint_root_dir": tmp_path,
        "trainer.max_token_len_per_gpu": 8192,
    }
    command = [sys.executable, "-c", program, "run", "--config"]
    command += [str(ROOT / "examples" / example / "alfworld.yaml")]
    command += [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [lines] = tmp_path.rglob("experience_buffer.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(rows) == 4 * 2 * 2 * each
    # a tiny random model solves nothing: the floor of the seed's workflow
    assert {row["reward"] for row in rows} == {-0.1}
    assert all("Observation" in row["prompt"] or "welcome" in row["prompt"].lower() for row in rows)
    [meta] = tmp_path.rglob("trainer_meta.json")
    assert os.path.getsize(meta) > 0
