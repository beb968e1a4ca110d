"""`mode: bench` and `trireme eval`, whatever generates: the same models have the same figures."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import command, run, small_config, trireme
from tests.e2e.test_command import ENGINES
from tests.tiny import make_model

JOB = "checkpoints/tests/job"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ENGINES)
def test_bench_and_eval_agree_whatever_generates(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = small_config(tmp_path)
    make_model(tmp_path / "model", max_len=256, head_dim=32)
    inputs = config["buffer"]["explorer_input"]
    inputs["eval_tasksets"][0]["rollout_args"] = {"temperature": 0.0}
    config["buffer"]["total_steps"] = 2
    config["explorer"]["eval_on_startup"] = False
    config["algorithm"]["optimizer"]["lr"] = 0.03
    assert run(tmp_path, config).returncode == 0

    done = run(tmp_path, config, "mode=bench", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / JOB / "monitor/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    bench = {r["step"]: r["metrics"] for r in rows if r["part"] == "bench"}
    assert sorted(bench) == [0, 2]

    models = ["model", JOB]
    words = [word for model in models for word in ("--model", str(tmp_path / model))]
    out = tmp_path / "out.json"
    said = trireme(tmp_path, "eval", "config.yaml", *words, "--out", str(out), *overrides)
    assert said.returncode == 0, said.stdout + said.stderr
    values = [[v for task in one["values"] for v in task] for one in json.loads(out.read_text())]
    means = [sum(v) / len(v) for v in values]
    measured = [bench[step]["bench/held_out/accuracy/mean@1"] for step in (0, 2)]
    assert means == pytest.approx(measured) and means[0] != means[1]
    assert "runs in this process" not in done.stdout + done.stderr


def kill_the_engines(task: Any, answer: str) -> float:
    """A reward whose process has lost its engines."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    engines = [pid for pid in children if b"trireme" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in engines:
        os.kill(int(pid), signal.SIGKILL)
    return 0.0


def test_an_engine_that_dies_ends_the_evaluation_with_one_sentence(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    inputs = config["buffer"]["explorer_input"]
    inputs["default_reward_fn_type"] = "tests.ext.evaluation.test_bench:kill_the_engines"
    config["explorer"] |= {"runner_per_model": 1, "rollout_model": {"engine_type": "torch"}}
    config["explorer"]["rollout_model"]["engine_num"] = 2
    command(tmp_path, config)
    model = str(tmp_path / "model")
    said = trireme(tmp_path, "eval", "config.yaml", "--model", model, "-n", "4")
    assert said.returncode == 1 and "Traceback" not in said.stderr, said.stderr
    assert re.search(r"torch engine \d of 2 has ended by signal 9", said.stderr), said.stderr
