"""The example of an algorithm of one's own: it runs, computes what it says, and is short."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.job import run, small_config

FOLDER = Path(__file__).parents[2] / "examples" / "custom_algorithm"


def test_it_runs_by_its_path(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config["algorithm"] = {
        "algorithm_type": "rank_rl:RANK_RL",
        "policy_loss_fn_args": {"width": 0.3},
        "repeat_times": 4,
    }
    config["buffer"]["total_steps"] = 2
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    (tmp_path / "rank_rl.py").write_text((FOLDER / "rank_rl.py").read_text())
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "checkpoints/tests/job/monitor/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    trained = [row["metrics"] for row in rows if row["part"] == "trainer"]
    assert len(trained) == 2 and all(row["actor/grad_norm"] > 0 for row in trained)
    config["algorithm"]["policy_loss_fn_args"] = {"wide": 0.3}
    refused = run(tmp_path, config, "name=other")
    assert refused.returncode != 0
    assert "has no option 'wide' (did you mean 'width'?)" in refused.stdout + refused.stderr


def test_its_parts_compute_what_they_say() -> None:
    parts: dict[str, Any] = {}  # without the row: other tests register its name too
    exec((FOLDER / "rank_rl.py").read_text().rpartition("RANK_RL")[0], parts)
    ranks = parts["rank"](torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0]), torch.tensor([0, 0, 0, 1, 1]))
    assert ranks.tolist() == [-1, 0, 1, 0, 0]
    logprobs = torch.tensor([-1.0], requires_grad=True)
    parts["soft_clip"](logprobs, logprobs.detach(), torch.tensor([0.5])).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-0.5)


def test_it_is_short() -> None:
    tree = ast.parse((FOLDER / "rank_rl.py").read_text())
    tree.body = tree.body[1:]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[1:]
    assert len(ast.unparse(tree).replace("\n\n", "\n").splitlines()) < 20
