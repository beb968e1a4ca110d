"""Stage: what it holds while it is open, and lets go of where it cannot be opened."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.buffer.samples import step_of
from tests.e2e.job import small_config
from tests.limits import HANG_S
from trireme.algorithms.recipes import get_recipe
from trireme.buffer.queue import QueueBuffer
from trireme.buffer.record import Record
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import Loaded
from trireme.config import ConfigError, Plan, load_config
from trireme.engines.device import Device
from trireme.launch import run as run_module
from trireme.launch.check import make_plans
from trireme.launch.explorer_side import explore_steps
from trireme.launch.listeners import RunListener
from trireme.launch.open_run import open_run
from trireme.launch.results import StageResult, changed_example, explored, summarise
from trireme.launch.resume import refuse_other_run
from trireme.launch.run import nothing_left
from trireme.launch.stage import Stage
from trireme.launch.stop import Stop
from trireme.launch.trainer_side import TrainerSide
from trireme.monitor.console import Console
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.usercode import ending


def plan_of(folder: Path, *overrides: str) -> Plan:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(small_config(folder)))
    [plan] = make_plans(load_config(path, overrides))
    return plan


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("buffer.total_steps=4", 4),
        ("buffer.total_steps=4 buffer.train_batch_size=32", 4),  # it was 2, reached halfway
        ("buffer.total_steps=8 buffer.train_batch_size=32 trainer.total_steps=3", 6),
        ("buffer.total_steps=4 buffer.train_batch_size=8 trainer.total_steps=3", 2),
        ("buffer.total_steps=2 buffer.train_batch_size=8", 2),
    ],
)
def test_the_steps_that_rewards_are_told_are_explore_steps(
    words: str, steps: int, tmp_path: Path
) -> None:
    assert explore_steps(plan_of(tmp_path, *words.split())) == steps


def test_the_summary_of_a_resumed_run_begins_where_its_first_start_did(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    monitor = JsonLinesMonitor(plan.job_dir / "monitor")
    for step, share in ((0, 0.25), (20, 0.5)):
        monitor.log(
            {"eval/held_out/accuracy/mean@1": share, "eval/held_out/tasks": 4.0}, step, "eval"
        )
    last = {"held_out": {"accuracy/mean@1": 0.75, "tasks": 4.0}}
    summary = summarise([StageResult(None, "both", "grpo", last=last)], plan.job_dir, [plan])
    assert (summary.accuracy_before, summary.accuracy_rl) == (0.25, 0.75)
    trained = summarise([StageResult(None, "train", "grpo")], plan.job_dir, [plan])
    assert trained.accuracy_before is None  # nothing was evaluated here


def test_the_accuracies_of_a_summary_are_those_of_one_taskset(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    monitor = JsonLinesMonitor(plan.job_dir / "monitor")

    def resumed(**shares: float) -> tuple[str | None, float | None, float | None]:
        last = {name: {"accuracy/mean@1": share} for name, share in shares.items()}
        summary = summarise([StageResult(None, "both", "grpo", last=last)], plan.job_dir, [plan])
        return summary.taskset, summary.accuracy_before, summary.accuracy_rl

    # as an earlier release recorded it: only the second taskset
    monitor.log({"eval/b/accuracy/mean@1": 0.125, "watchdog/stuck": 1.0}, 0, "eval")
    assert resumed(a=0.75, b=0.5) == ("b", 0.125, 0.5)
    monitor.log({"eval/a/accuracy/mean@1": 0.25}, 0, "eval")
    assert resumed(a=0.75, b=0.5) == ("a", 0.25, 0.75)
    assert resumed(c=0.75) == ("c", None, 0.75)


def example(task: int, reply: str, reward: float) -> dict[str, Any]:
    return {
        "task": task, "prompt": f"p{task}", "truth": "1", "reply": reply, "reward": reward,
        "temperature": 0.0,
    }  # fmt: skip


def test_the_example_at_the_end_is_a_task_that_the_last_stage_changed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    def shown(*stages: tuple[str, list[tuple[str, float]]]) -> tuple[str, bool]:
        rows = {label: [example(n, *each) for n, each in enumerate(s)] for label, s in stages}
        seen = changed_example(rows)
        assert list(seen["replies"]) == [label for label, _ in stages]
        return seen["prompt"], seen["changed"]

    before = "before", [("a", 0.0), ("a", 1.0), ("a", 0.0)]
    # the mean rises: not the second, which fell
    assert shown(before, ("after RL", [("a", 0.0), ("b", 0.0), ("b", 2.0)])) == ("p2", True)
    assert shown(before, ("after RL", [("a", 0.0), ("b", 1.0), ("a", 0.0)])) == ("p1", True)
    assert shown(before, ("after RL", before[1])) == ("p0", False)
    sft = "after SFT", [("b", 0.0), ("b", 0.0), ("b", 1.0)]
    assert shown(before, sft, ("after RL", [("c", 1.0), ("b", 0.0), ("b", 1.0)])) == ("p0", True)
    assert shown(("after RL", [("a", 0.0)])) == ("p0", False)
    assert changed_example({}) == {}
    result = StageResult(None, "both", "grpo", last_examples=[example(0, "a", 1.0)])
    assert summarise([result], plan.job_dir, [plan]).example["prompt"] == "p0"


def test_a_run_at_its_end_says_what_makes_it_go_on(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    last = plan.steps.train
    assert last is not None
    said = nothing_left(plan, last)
    assert said.startswith(f"nothing was left to do: step {last} was this run's last. To train on")
    assert said.endswith("; to start a new run, add --fresh, or set another name")
    assert ", raise buffer.total_" in said
    # a limit of train steps is named only where it has ended the run
    limited = plan_of(tmp_path, f"trainer.total_steps={last}")
    assert "trainer.total_steps (" in nothing_left(limited, last)
    assert "trainer.total_steps" not in nothing_left(limited, last - 1)
    said = nothing_left(plan, last + 3)
    assert f"{plan.job_dir} holds a run at step {last + 3}, past the {last} requested. To" in said


def test_a_trainer_whose_data_another_command_makes_says_that_this_one_has_ended(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path, "mode=train", "buffer.total_steps=null")
    plan = replace(plan, steps=replace(plan.steps, train=None))  # as beside mode: serve
    said = nothing_left(plan, 80)
    assert "step 80 was this run's last, and the command that fills its buffer has ended" in said
    assert "To train on, start that command again, and then this one; to start" in said


Opened = AbstractContextManager[tuple[Stage, Sequence[RunListener]]]


def opened(plan: Plan, device: Device) -> Opened:
    return open_run(plan, str(plan.model_path), device, Console())


def test_a_run_that_cannot_be_opened_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, device = plan_of(tmp_path), Device()
    handlers = list(logging.getLogger("trireme").handlers)
    threads = set(threading.enumerate())

    class Fails(RunListener):
        def listen(self, stage: Stage) -> None:
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("trireme.launch.open_run.listeners", lambda: {"fails": Fails()})
        with pytest.raises(ZeroDivisionError), opened(plan, device):
            pass
    assert logging.getLogger("trireme").handlers == handlers
    assert set(threading.enumerate()) == threads
    with opened(plan, device) as (stage, _):
        assert stage.resumed is None
    device.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    folder = JobFolder(plan.job_dir)
    recipe = get_recipe(plan.config.algorithm)
    stage: Any = SimpleNamespace(
        plan=plan, model_path=plan.model_path, folder=folder, recipe=recipe, made_with={}
    )  # fmt: skip
    resumed = Loaded(2, folder.actor_dir(2), {})
    refuse_other_run(stage, resumed)
    stage.recipe = SimpleNamespace(needs_critic=True)
    with pytest.raises(ConfigError, match="is grpo, which learns a value model, and"):
        refuse_other_run(stage, resumed)
    config = json.loads((Path(plan.model_path) / "config.json").read_text())
    folder.hf_dir(2).mkdir(parents=True)
    wide = {**config, "hidden_size": 9}
    (folder.hf_dir(2) / "config.json").write_text(json.dumps(wide))
    with pytest.raises(ConfigError, match=r"whose hidden_size is \d+, and the .* has 9;"):
        refuse_other_run(stage, resumed)


def test_a_file_that_cannot_be_closed_keeps_no_other_open(tmp_path: Path) -> None:
    plan, device = plan_of(tmp_path), Device()
    handlers = list(logging.getLogger("trireme").handlers)

    class Broken:
        def close(self) -> None:
            raise OSError("no space left on device")

        def claim(self, job: Path, *, key: str, resumes: bool) -> None: ...

        def rewind(self, step: int) -> None: ...

    with pytest.raises(OSError, match="no space left"), opened(plan, device) as (stage, _):
        stage.keep(Broken(), "input_save_path")  # pyright: ignore[reportArgumentType]
    assert logging.getLogger("trireme").handlers == handlers
    with opened(plan, device):
        pass
    device.close()


def test_a_second_job_that_names_the_copy_of_a_first_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removed what the first had written, without a word."""
    copy = f"data_processor.experience_pipeline.input_save_path={tmp_path / 'copy.db'}"
    first, second = (plan_of(tmp_path, copy, f"name={name}") for name in ("first", "second"))
    device = Device()
    with opened(first, device) as (stage, _):
        record = stage.raw_record
        assert record is not None
        record._write(step_of(1))
    monkeypatch.setattr(run_module, "load_models", lambda stage: pytest.fail("a model is loaded"))
    taken = r"input_save_path: .*/copy\.db is the copy of the job in .*/first, and this run, in "
    with pytest.raises(ValueError, match=taken):
        run_module.run_stages([second], console=Console(), stop=Stop())
    with sqlite3.connect(tmp_path / "copy.db") as connection:
        assert connection.execute("select count(*) from experiences").fetchone() == (4,)
    device.close()


def test_a_lone_explorer_that_ends_early_says_who_wanted_no_more() -> None:
    def said(name: str | None, planned: int | None, steps: int) -> str:
        plan: Any = SimpleNamespace(explorer_name=name, steps=SimpleNamespace(explore=planned))
        return explored(plan, steps)

    wanted_no_more = ", and the trainer wants no more"
    assert said("second", 8, 5) == f"second has explored 5 steps{wanted_no_more}"
    assert said(None, 8, 8) == "explorer has explored 8 steps: all that there were"
    assert said(None, None, 5) == "explorer has explored 5 steps: all that there were"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("no rows"), "no rows"),
        (KeyError("milk"), "KeyError: 'milk'"),  # a bug of ours
        (ValueError("no price\n  prices.py:8: return x"), "no price\n  prices.py:8: return x"),
    ],
)
def test_what_is_recorded_of_an_error_has_its_place(error: Exception, sentence: str) -> None:
    try:
        raise error
    except Exception as raised:
        said = ending(raised)
    assert said.startswith(sentence) and "\n  " in said
    assert ("test_stage.py:" in said) == ("\n" not in sentence)


class Shares:
    """An engine that shares the trainer's device."""

    servers = None
    awake = True
    colocation: Any = None

    async def pause(self, *, weights_follow: bool = False) -> None:
        self.awake = False


def test_models_are_loaded_while_the_engine_on_their_device_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed optimizer's state comes with them: with `park_optimizer` the engine has its memory,
    when it is awake.
    """
    engine: Any = Shares()
    found: list[bool] = []

    def load(stage: Any) -> None:
        found.append(engine.awake)
        raise KeyError("enough")

    monkeypatch.setattr(run_module, "load_models", load)
    synchronizer = SimpleNamespace(sync_timeout=1.0)
    plan = SimpleNamespace(
        mode="both",
        sync=SimpleNamespace(takes_turns=True),
        config=SimpleNamespace(synchronizer=synchronizer),
    )
    device = Device()
    stage: Any = SimpleNamespace(plan=plan, device=device, trains=True)
    stop: Any = None
    with pytest.raises(KeyError, match="enough"):
        asyncio.run(run_module._run_here(stage, stop, False, engine))
    device.close()
    assert found == [False]


def test_a_checkpoint_waits_for_the_copys_server_while_the_event_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runners, time-outs and signals stood still for as long as the server was away."""
    back, record = threading.Event(), Record(lines=tmp_path / "copy.jsonl")
    write = record._write
    monkeypatch.setattr(record, "_write", lambda each: back.wait(HANG_S) and write(each))
    buffer = QueueBuffer("store", record=record)
    side: Any = SimpleNamespace(
        stage=SimpleNamespace(
            made_with={},
            plan=SimpleNamespace(steps=SimpleNamespace(sizes=[], earlier=[])),
            recipe=SimpleNamespace(from_data=True),
        ),
        buffer=buffer,
        auxiliary={},
        explorer_state=None,
        models=SimpleNamespace(train_state=SimpleNamespace(state=dict)),
    )

    async def checkpoint() -> dict[str, Any]:
        await buffer.put(step_of(1))
        saved = asyncio.create_task(TrainerSide.snapshot(side))
        await asyncio.sleep(0.05)
        assert not saved.done() and not back.is_set()
        await buffer.put(step_of(2))  # none of this checkpoint's
        back.set()
        return await saved

    threading.Timer(2, back.set).start()  # else a loop that waits would wait without end
    state = asyncio.run(checkpoint())
    assert state["buffer"]["puts"] == [4]
    assert len((tmp_path / "copy.jsonl").read_text().splitlines()) >= 4
    record.close()
