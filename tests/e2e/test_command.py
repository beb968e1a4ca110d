"""`trireme run` with a program for each rollout, which knows an address and a key and no more."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config
from tests.e2e.test_modes import metrics
from tests.e2e.test_two_commands import Pair
from tests.ext.agents.test_command import ASK
from tests.tiny import make_model
from tests.vllm import needs_vllm
from trireme.registry import LAUNCHERS

AGENT = f"""{ASK}
begun = [{{"role": "user", "content": sys.argv[1]}}]
said = ask(sys.argv[1], max_tokens=6)
print(said, file=sys.stderr)
print(len(set(said)) / 6)
"""
ON_RAY = ("cluster.launcher=ray", "cluster.ray_address=local", "cluster.node_num=1")
needs_ray = pytest.mark.skipif("ray" not in LAUNCHERS, reason="the extension 'ray' is not here")
pytestmark = pytest.mark.slow


ENGINES = [
    pytest.param((), id="embedded"),
    pytest.param(
        ("explorer.rollout_model.engine_type=torch", "explorer.rollout_model.engine_num=2"),
        id="processes",
        marks=pytest.mark.large,
    ),
    pytest.param(
        (*ON_RAY, "cluster.gpu_per_node=2"), id="ray", marks=[pytest.mark.large, needs_ray]
    ),
    pytest.param(("explorer.rollout_model.engine_type=vllm",), id="vllm", marks=needs_vllm),
]


def keep_temporary_files_in(folder: str) -> None:
    """Called in a process of its own."""
    tempfile.tempdir = folder


def with_programs(folder: Path) -> dict[str, Any]:
    """The small job, each of its rollouts a program."""
    config = small_config(folder)
    make_model(folder / "model", max_len=256, head_dim=32)
    (folder / "agent.py").write_text(AGENT)
    inputs: dict[str, Any] = config["buffer"]["explorer_input"]
    del inputs["default_reward_fn_type"]
    inputs["default_workflow_type"] = "command_workflow"
    options = {
        "command": [sys.executable, "-S", str(folder / "agent.py"), "{question}"],
        "cwd": "{workdir}",
    }
    for taskset in (inputs["taskset"], *inputs["eval_tasksets"]):
        taskset["workflow_args"] = dict(options)
    return config


@pytest.mark.parametrize("overrides", ENGINES)
def test_programs_are_the_rollouts_whatever_generates(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = with_programs(tmp_path)
    config["buffer"]["total_steps"] = 2
    done = run(tmp_path, config, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "checkpoints/tests/job"
    explored, trained = metrics(folder, "explorer"), metrics(folder, "trainer")
    assert [row["rollout/experiences"] for row in explored if "rollout/tasks" in row] == [16, 16]
    assert len(trained) == 2 and max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4
    assert "evaluation held_out at the end: reward" in done.stdout


def test_programs_of_a_killed_explorer_end_and_each_rollout_counts_once(tmp_path: Path) -> None:
    """Fully asynchronous, LoRA, a store: two commands, of which one is killed amid its second step.

    The store's rows are what every part's own account says, and no folder is left behind.
    """
    config = with_programs(tmp_path)
    config["model"]["lora_configs"] = [{"lora_rank": 4, "lora_alpha": 8}]
    config["synchronizer"] = {"sync_style": "fully_async", "sync_method": "checkpoint"}
    config["buffer"]["train_batch_size"] = 16
    store = {"storage_type": "sql", "name": "shared"}
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    config["explorer"]["eval_on_startup"] = False
    (tmp_path / "tmp").mkdir()
    pair = Pair(tmp_path, config)
    prepare = functools.partial(keep_temporary_files_in, str(tmp_path / "tmp"))
    pair.start("train")
    pair.start("explore", prepare=prepare)

    def amid_the_second_step() -> bool:
        return pair.explored() == 1 and any((tmp_path / "tmp").glob("trireme-*/stdout.txt"))

    try:
        pair.kill_when("explore", amid_the_second_step)
        pair.start("explore", prepare=prepare)
        pair.finish()
    finally:
        for process in pair.running.values():
            process.kill()
    rows = pair.rows()
    assert len({eid for eid, *_ in rows}) == len(rows) == 64
    assert {(consumed, claimed) for *_, consumed, claimed in rows} == {(1, None)}
    explored, trained = metrics(pair.job, "explorer"), metrics(pair.job, "trainer")
    assert [row["rollout/experiences"] for row in explored if "rollout/tasks" in row] == [16] * 4
    assert sum(row["perf/experiences"] for row in trained) == 64
    assert max(row.get("rollout/logprob_diff_max", 0.0) for row in trained) < 1e-4
    assert list((tmp_path / "tmp").glob("trireme-*")) == []
