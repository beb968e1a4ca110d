"""Several tasksets, a selector that learns, a model that judges: the same run when it is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import rows, run, small_config, started, weights, write_jsonl


def curriculum(folder: Path) -> dict[str, Any]:
    config = small_config(folder)
    rated = [{**row, "weak": i / 9, "strong": 1.0} for i, row in enumerate(rows(9))]
    columns = {"prompt_key": "question", "response_key": "answer"}
    hard = {
        "path": str(write_jsonl(folder / "data" / "rated.jsonl", rated)),
        "format": columns,
        "data_selector": {
            "selector_type": "difficulty_based",
            "feature_keys": ["weak", "strong"],
            "kwargs": {"tau": 0.05, "target_reward": 0.5},
        },
    }
    inputs = config["buffer"]["explorer_input"]
    inputs["tasksets"] = [
        {**inputs.pop("taskset"), "data_selector": {"selector_type": "shuffle"}},
        hard,
    ]
    inputs["default_reward_fn_type"] = [
        {"name": "tests.e2e.job:length_reward", "weight": 2.0},
        {"name": "ruler", "weight": 0.5},
    ]
    config["explorer"]["auxiliary_models"] = [
        {"model_path": config["model"]["model_path"], "max_model_len": 256}
    ]
    return config


@pytest.mark.extension("curricula", "judges")
def test_a_killed_curriculum_asks_for_the_same_tasks(tmp_path: Path) -> None:
    config = curriculum(tmp_path / "whole")
    done = run(tmp_path / "whole", config)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = tmp_path / "whole/checkpoints/tests/job"
    metrics = (whole / "monitor/metrics.jsonl").read_text()
    assert "rollout/rewards/ruler/mean" in metrics and "rollout/judge_success/mean" in metrics

    folder = tmp_path / "killed"
    config = curriculum(folder)
    job = folder / "checkpoints/tests/job"
    started(folder, config).kill_when(job / "global_step_2")
    done = run(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(job, 4) == weights(whole, 4)
