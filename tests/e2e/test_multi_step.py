"""Episodes of several steps, end to end: whole steps on-policy, and replay without borders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import ROOT, environment, small_config, trireme
from tests.e2e.job import run as run_job

EXAMPLE = ROOT / "examples" / "grpo_household"
SMALL = (
    *("stages=[]", "buffer.explorer_input.eval_tasksets=[]"),
    *("buffer.batch_size=2", "algorithm.repeat_times=4", "buffer.total_steps=3"),
)
REPLAY = (
    *("algorithm.sample_strategy=default", "buffer.train_batch_size=40"),
    *("synchronizer.sync_style=dynamic_by_explorer", "synchronizer.sync_interval=2"),
    "buffer.trainer_input.experience_buffer.replay_buffer.enable=true",
    "explorer.max_repeat_times_per_runner=1",
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("household")
    command = [sys.executable, str(EXAMPLE / "make_household.py"), "--out", str(folder)]
    subprocess.run(command, check=True, env=environment(), capture_output=True)
    return folder


def run(folder: Path, assets: Path, *overrides: str) -> Path:
    """The job's folder of a run that ended well."""
    words = ("run", "--config", str(EXAMPLE / "household.yaml"), *SMALL, *overrides)
    own = {
        "TRIREME_CHECKPOINT_ROOT_DIR": str(folder),
        "TRIREME_MODEL_PATH": str(assets / "model"),
        "TRIREME_TASKSET_PATH": str(assets),
    }
    done = trireme(folder, *words, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "Trireme-examples" / "household"


def steps_of(job: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job / "monitor/metrics.jsonl").open()]


def metrics(job: Path, part: str) -> list[dict[str, Any]]:
    return [row["metrics"] for row in steps_of(job) if row["part"] == part]


def test_a_train_step_learns_from_a_whole_explore_step_and_runs_repeat(
    tmp_path: Path, assets: Path
) -> None:
    weights = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        job = run(tmp_path / name, assets)
        trained, explored = metrics(job, "trainer"), metrics(job, "explorer")
        sizes = [row["perf/experiences"] for row in trained]
        assert sizes == [row["rollout/experiences"] for row in explored] and len(sizes) == 3
        assert all(8 <= size <= 80 for size in sizes)
        differences = [row["rollout/logprob_diff_max"] for row in trained if row.get(
            "rollout/logprob_diff_max") is not None]  # fmt: skip
        assert all(value < 1e-4 for value in differences)
        weights.append((job / "global_step_3/actor/huggingface/model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_replay_with_a_batch_of_another_size_than_an_explore_step(
    tmp_path: Path, assets: Path
) -> None:
    job = run(tmp_path, assets, *REPLAY)
    trained, explored = metrics(job, "trainer"), metrics(job, "explorer")
    made = sum(row["rollout/experiences"] for row in explored)
    assert len(explored) == 3
    assert sum(row["perf/experiences"] for row in trained) == made  # each once: no cool-down
    assert {row["perf/experiences"] for row in trained[:-1]} == {40}


TWO = """
from trireme import workflow


@workflow("two_replies")
async def two_replies(task, model):
    found = []
    for word in ("short", "long"):
        chat = [{"role": "user", "content": f"{task.prompt} ({word})"}]
        found.append((await model.chat(chat)).text)
    return model.experiences(reward=[len(text) / 8 for text in found])
"""


def test_the_console_counts_explore_steps_where_the_workflow_decides_on_the_train_steps(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    (tmp_path / "two.py").write_text(TWO)
    config["plugins"] = [str(tmp_path / "two.py")]
    config["buffer"]["total_steps"] = 2
    config["buffer"]["explorer_input"]["default_workflow_type"] = "two_replies"
    del config["buffer"]["explorer_input"]["eval_tasksets"]
    done = run_job(tmp_path, config)
    assert done.returncode == 0, done.stderr
    counted = re.findall(r"^run (\d+/\d+)", done.stdout, re.M)
    assert counted[-1] == "2/2" and set(counted) <= {"0/2", "1/2", "2/2"}
    job = tmp_path / "checkpoints/tests/job"
    assert [row["step"] for row in steps_of(job) if row["part"] == "trainer"] == [1, 2, 3, 4]
