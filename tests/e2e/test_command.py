"""`trireme run` with a program for each rollout, which knows an address and a key and no more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config
from tests.e2e.test_modes import metrics
from tests.engines.vllm.made import needs_vllm
from tests.tiny import make_model
from tests.workflows.test_command import ASK

AGENT = f"""{ASK}
begun = [{{"role": "user", "content": sys.argv[1]}}]
said = ask(sys.argv[1], max_tokens=6)
print(said, file=sys.stderr)
print(len(set(said)) / 6)
"""
ON_RAY = ("cluster.launcher=ray", "cluster.ray_address=local", "cluster.node_num=1")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


ENGINES = [
    pytest.param((), id="embedded"),
    pytest.param(
        ("explorer.rollout_model.engine_type=torch", "explorer.rollout_model.engine_num=2"),
        id="processes",
    ),
    pytest.param((*ON_RAY, "cluster.gpu_per_node=2"), id="ray"),
    pytest.param(("explorer.rollout_model.engine_type=vllm",), id="vllm", marks=needs_vllm),
]


@pytest.mark.parametrize("overrides", ENGINES)
def test_programs_are_the_rollouts_whatever_generates(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=32)
    (tmp_path / "agent.py").write_text(AGENT)
    inputs: dict[str, Any] = config["buffer"]["explorer_input"]
    del inputs["default_reward_fn_type"]
    inputs["default_workflow_type"] = "command_workflow"
    options = {"command": [sys.executable, "-S", "agent.py", "{question}"], "cwd": "."}
    for taskset in (inputs["taskset"], *inputs["eval_tasksets"]):
        taskset["workflow_args"] = dict(options)
    config["buffer"]["total_steps"] = 2
    done = run(tmp_path, config, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "checkpoints/tests/job"
    explored, trained = metrics(folder, "explorer"), metrics(folder, "trainer")
    assert [row["rollout/experiences"] for row in explored if "rollout/tasks" in row] == [16, 16]
    assert len(trained) == 2 and max(row["rollout/logprob_diff_max"] for row in trained) < 1e-4
    assert "evaluation held_out at the end: reward" in done.stdout
