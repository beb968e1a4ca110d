"""Stages in one process: what one of them held is free when the next begins."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import small_config, write_jsonl
from trireme.config.load import load_config
from trireme.files import write_json
from trireme.launch import run
from trireme.launch.check import checked
from trireme.launch.stop import Stop
from trireme.monitor.console import Console


def test_the_models_of_a_stage_are_gone_when_the_next_one_loads_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients and moments of a warm-up stayed through the reinforcement: the object that
    ends a run held a function of them.
    """
    loaded: list[weakref.ref[Any]] = []
    left: list[int] = []
    load = run.load_models

    def watched(*args: Any) -> Any:
        gc.collect()
        left.append(sum(one() is not None for one in loaded))
        models = load(*args)
        loaded.append(weakref.ref(models.backend))
        return models

    monkeypatch.setattr(run, "load_models", watched)
    config = small_config(tmp_path)
    shown = write_jsonl(
        tmp_path / "shown.jsonl",
        [
            {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}
            for _ in range(4)
        ],
    )
    data = {
        "name": "shown",
        "path": str(shown),
        "format": {"prompt_type": "messages", "messages_key": "messages"},
    }
    sft = {
        "stage_name": "sft",
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {
            "train_batch_size": 2,
            "total_steps": 1,
            "trainer_input": {"experience_buffer": data},
        },
    }
    config["buffer"]["total_steps"] = 1
    config["stages"] = [sft, {"stage_name": "grpo"}]
    write_json(tmp_path / "config.yaml", config)
    plans = checked(load_config(tmp_path / "config.yaml", [])).plans
    run.run_stages(plans, console=Console(), stop=Stop())
    assert left == [0, 0]
