"""examples/agents/learn.yaml as its README starts it, for a few steps: an SDK's agent learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

pytest.importorskip("agents", reason="make test-agents installs openai-agents")

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents"


def test_the_agent_of_the_example_calls_its_tools_in_recorded_turns(tmp_path: Path) -> None:
    environment = {**os.environ, "TRIREME_CHECKPOINT_ROOT_DIR": str(tmp_path)}
    few = ["buffer.total_steps=2", "buffer.batch_size=4", "buffer.explorer_input.eval_tasksets=[]"]
    run = ["-m", "trireme", "run", "--config", str(EXAMPLE / "learn.yaml"), *few]
    for words in ([str(EXAMPLE / "make_tasks.py")], run):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, timeout=HANG_S,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "Trireme-examples/agents_0/grpo/monitor/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    explored, trained = (
        [row["metrics"] for row in rows if row["part"] == part] for part in ("explorer", "trainer")
    )
    assert len(explored) == len(trained) == 2
    for metrics in explored:  # nearly every agent calls a tool, and some the right one
        assert metrics["rollout/tools/mean"] > 0.5 and 0 < metrics["rollout/reward/mean"] < 1
        assert metrics["rollout/runs"] == 32 and not metrics["rollout/failed"]
    assert max(metrics["rollout/logprob_diff_max"] for metrics in trained) < 1e-4
