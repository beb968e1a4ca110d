"""Stages in one process: what one of them held is free when the next begins, and what their engines
hold is free while they train.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import small_config, write_jsonl
from trireme.config import Plan
from trireme.config.load import load_config
from trireme.files import write_json
from trireme.launch import run
from trireme.launch.check import checked
from trireme.launch.stage import Stage
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.monitor.figures import Summary
from trireme.trainer.trainer import Trainer


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
    run.run_stages(_two_stages(tmp_path), console=Console(), stop=Stop())
    assert left == [0, 0]


def test_an_engine_of_the_trainers_process_holds_no_keys_and_values_in_a_train_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of SmolLM2's rollouts were 1 GB, and new weights make them worthless."""
    engines: list[Any] = []
    held: list[tuple[int, bool]] = []
    make, step = Stage.embedded_engine, Trainer._step

    async def made(*args: Any) -> Any:
        engines.append(await make(*args))
        return engines[-1]

    def watched(*args: Any) -> Any:
        decoder = engines[-1]._decoder
        room = decoder.store.room + decoder.prompts.store.room
        held.append((room, bool(decoder.prefixes._entries)))
        return step(*args)

    monkeypatch.setattr(Stage, "embedded_engine", made)
    monkeypatch.setattr(Trainer, "_step", watched)
    run.run_stages(_two_stages(tmp_path), console=Console(), stop=Stop())
    assert len(engines) == 2 and held == [(0, False)] * 2


@pytest.mark.parametrize("staged", [True, False])
def test_a_finished_run_that_starts_again_leaves_its_summary(tmp_path: Path, staged: bool) -> None:
    plans = _two_stages(tmp_path)
    if not staged:
        plans = checked(load_config(tmp_path / "config.yaml", ["stages=[]"])).plans

    def started(compare: bool = False) -> Summary:
        return run.run_stages(plans, console=Console(), stop=Stop(), compare_sft=compare)

    first = started()
    [written] = plans[0].root_dir.glob("summary.json")
    whole = written.read_bytes()
    assert started() == first == Summary.read(written.parent)
    assert written.read_bytes() == whole
    written.write_text("{")
    assert started().wall_s != first.wall_s  # what is damaged is written again
    assert Summary.read(written.parent).steps == first.steps
    if staged:
        assert started(compare=True).phases["more_sft train"] > 0
        assert "more_sft train" in Summary.read(written.parent).phases


def _two_stages(folder: Path) -> list[Plan]:
    config = small_config(folder)
    shown = write_jsonl(
        folder / "shown.jsonl",
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
    write_json(folder / "config.yaml", config)
    return checked(load_config(folder / "config.yaml", [])).plans
