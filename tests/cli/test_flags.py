"""Flags with ms-swift's names become the keys of the YAML."""

from __future__ import annotations

from pathlib import Path

from trireme.cli.flags import SchedulerFlags
from trireme.config import load_config

YAML = """
buffer:
  explorer_input:
    taskset: {path: tasks.jsonl}
    eval_tasksets: [{path: a.jsonl}, {path: b.jsonl}]
"""


def test_flags_reach_every_taskset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    plugin = tmp_path / "plugin.py"
    plugin.touch()
    flags = SchedulerFlags(
        multi_turn_scheduler="math_tip_trick",
        max_turns=3,
        loss_scale="last_round",
        reward_funcs=["accuracy", "format"],
        reward_weights=[1.0, 0.5],
        external_plugins=[plugin],
        base_urls=["http://127.0.0.1:8000"],
    )
    config = load_config(file, flags.overrides(file))
    inputs = config.buffer.explorer_input
    assert inputs.default_workflow_type == "multi_turn_scheduler"
    assert inputs.taskset is not None
    for taskset in (inputs.taskset, *inputs.eval_tasksets):
        assert taskset.workflow_args == {
            "scheduler": "math_tip_trick",
            "max_turns": 3,
            "loss_scale": "last_round",
        }
        assert taskset.reward_fn_args == {"funcs": ["accuracy", "format"], "weights": [1.0, 0.5]}
    assert config.plugins == [str(plugin)]
    assert config.explorer.rollout_model.engine_type == "remote"
    assert config.explorer.rollout_model.base_urls == ["http://127.0.0.1:8000"]


def test_no_flags_change_nothing(tmp_path: Path) -> None:
    assert SchedulerFlags().overrides(tmp_path / "missing.yaml") == []
