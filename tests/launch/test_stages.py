"""Stages in one process: what one of them held is free when the next begins, and what their engines
hold is free while they train.
"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import small_config, write_jsonl
from trireme.checkpoint.layout import JobFolder
from trireme.config import ConfigError, Plan
from trireme.config.load import load_config
from trireme.files import write_json
from trireme.launch import run
from trireme.launch.check import checked
from trireme.launch.stage import Stage
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.monitor.figures import Summary
from trireme.monitor.monitor import FILE_NAME, read_metrics
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


def test_a_bench_measures_the_last_of_finished_stages_and_finishes_none(tmp_path: Path) -> None:
    plans = _two_stages(tmp_path)
    run.run_stages(plans, console=Console(), stop=Stop())
    folder = JobFolder(plans[0].root_dir)
    done = folder.stage_meta.read_bytes()

    def measured() -> list[int]:
        measuring = checked(load_config(tmp_path / "config.yaml", ["mode=bench"])).plans
        assert [plan.mode for plan in measuring] == ["train", "bench"]
        run.run_stages(measuring, console=Console(), stop=Stop())
        rows = read_metrics(JobFolder(plans[1].job_dir).monitor / FILE_NAME)
        return [row["step"] for row in rows if row["part"] == "bench"]

    assert measured() and folder.stage_meta.read_bytes() == done
    meta = json.loads(done)
    write_json(folder.stage_meta, meta | {"finished": meta["finished"][:1]})  # as if it still ran
    assert measured()
    assert len(run.finished_stages(plans[0].root_dir)) == 1


def test_a_bench_leaves_the_summary_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "config.yaml", small_config(tmp_path))

    def started(*overrides: str) -> Summary:
        plans = checked(load_config(tmp_path / "config.yaml", overrides)).plans
        return run.run_stages(plans, console=Console(), stop=Stop())

    trained = started()
    job = tmp_path / "checkpoints/tests/job"
    capsys.readouterr()
    measured = started("mode=bench")
    assert "run: measures the model and all checkpoints\n" in capsys.readouterr().out
    assert Summary.read(job) == trained != measured
    assert Summary.read(job / "monitor/bench") == measured
    assert started() == trained  # it is finished


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


def test_two_stages_that_explore_have_a_copy_each(tmp_path: Path) -> None:
    """The second removed the first one's experiences."""
    _two_stages(tmp_path)
    config = json.loads((tmp_path / "config.yaml").read_text())
    config["stages"] = [{"stage_name": "one"}, {"stage_name": "two"}]
    write_json(tmp_path / "config.yaml", config)
    copy = "data_processor.experience_pipeline.input_save_path"
    for path in (f"sqlite:///{tmp_path}/copy.db", "postgresql://me:secret@host/x"):
        config = load_config(tmp_path / "config.yaml", [f"{copy}={path}"])
        with pytest.raises(ConfigError, match=rf"{copy} is .* of the stages one and two") as error:
            checked(config)
        assert "secret" not in str(error.value)
        apart = "stages.1.data_processor.experience_pipeline.save_input=false"
        checked(load_config(tmp_path / "config.yaml", [f"{copy}={path}", apart]))
    checked(load_config(tmp_path / "config.yaml", [f"{copy}=copy.db"]))  # in each one's folder


def test_stages_that_are_done_are_those_of_the_file(tmp_path: Path) -> None:
    """By their places alone another stage would count as done, and its model be the next one's."""
    plans = _two_stages(tmp_path)
    run.run_stages(plans, console=Console(), stop=Stop())
    other = checked(load_config(tmp_path / "config.yaml", ["stages.0.stage_name=dpo"])).plans
    with pytest.raises(ConfigError, match=r"stages\[0\] is 'dpo', .* done there was 'sft'"):
        run.run_stages(other, console=Console(), stop=Stop())
    path = JobFolder(plans[0].root_dir).stage_meta
    meta = json.loads(path.read_text())
    meta["finished"].append(meta["finished"][-1] | {"name": "rl_2"})
    path.write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=r"stages\[2\] is not there, .* done there was 'rl_2'"):
        run.run_stages(plans, console=Console(), stop=Stop())


@pytest.mark.parametrize(("train_batch_size", "train_steps"), [(32, 2), (8, 8)])
def test_the_last_evaluation_is_numbered_like_those_of_the_intervals(
    tmp_path: Path, train_batch_size: int, train_steps: int
) -> None:
    """By the number of a train step of two explore steps, or of half a one, it would take an
    earlier one's place, or stand far behind them on a curve.
    """
    config = small_config(tmp_path)
    config["buffer"]["train_batch_size"] = train_batch_size
    write_json(tmp_path / "config.yaml", config)
    [plan] = checked(load_config(tmp_path / "config.yaml", [])).plans
    run.run_stages([plan], console=Console(), stop=Stop())
    rows = read_metrics(JobFolder(plan.job_dir).monitor / FILE_NAME)
    assert [row["step"] for row in rows if row["part"] == "trainer"][-1] == train_steps
    assert {row["step"] for row in rows if row["part"] == "eval"} == {0, 2, 4}
