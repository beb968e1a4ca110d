"""A resume is refused where the checkpoint means nothing for the run that the YAML describes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.e2e.job import rows, small_config, write_jsonl
from tests.tiny import make_model
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import read_manifest
from trireme.cli.run import run as command
from trireme.config import ConfigError, Plan, load_config
from trireme.engines.engine import EngineTraits
from trireme.launch.check import examine, make_plans
from trireme.launch.explorer_side import make_scheduler
from trireme.launch.resume import ADAPTER_BASE, continued, made_with, refuse_meaningless
from trireme.task import Task

STORE = "buffer.trainer_input.experience_buffer.storage_type"
LINEAR = "algorithm.optimizer={lr: 1e-3, lr_scheduler_type: linear, min_lr_ratio: 0}"


def started(
    folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str, expected: int = 0
) -> str:
    """Return the errors that `trireme run` prints; in this process, where torch is loaded."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(small_config(folder)))
    capsys.readouterr()
    code = command(path, overrides, ())
    errors = capsys.readouterr().err
    assert code == expected, errors
    return errors


@pytest.mark.extension("sql")
def test_a_checkpoint_is_resumed_only_with_what_it_was_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path, capsys, "buffer.total_steps=1")
    job = JobFolder(tmp_path / "checkpoints/tests/job")
    held = read_manifest(job.step_dir(1), 1)["state"]["made_with"]
    assert (held["store"], held["optimizer"], held["LoRA adapter"]) == ("queue", "adamw", "none")
    before = {path: path.read_bytes() for path in job.root.rglob("*.json*")}
    make_model(tmp_path / "wide", hidden=64, max_len=256)
    for override, told in (
        (f"model.model_path={tmp_path}/wide", "whose hidden_size is 64, and the checkpoint"),
        ("algorithm.algorithm_type=ppo", "is ppo, which learns a value model, and the checkpoint"),
        ("buffer.trainer_input.experience_buffer.storage_type=sql", "store queue, and now has sql"),
        ("algorithm.optimizer.optimizer_type=sgd", "had optimizer adamw, and now has sgd"),
        ("model.lora_configs=[{lora_rank: 4}]", "had LoRA adapter none, and now has of rank 4"),
    ):
        errors = started(tmp_path, capsys, "buffer.total_steps=2", override, expected=2)
        assert told in errors.splitlines()[0]
        assert "expected the former value, or another name" in errors
    assert {path: path.read_bytes() for path in before} == before
    started(tmp_path, capsys, "buffer.total_steps=2")  # as it was


def test_a_data_set_that_is_mixed_in_from_a_resume_on_begins_at_its_first_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path, capsys, "buffer.total_steps=1")
    columns = "{prompt_type: plaintext, prompt_key: question, response_key: answer}"
    expert = f"{{path: {tmp_path}/data/train.jsonl, format: {columns}}}"
    mixed = [
        "algorithm.algorithm_type=mix",
        "algorithm.sample_strategy_args={expert_data_ratio: 0.25, sft_dataset_name: expert}",
        "buffer.train_batch_size=16",
        f"buffer.trainer_input.auxiliary_buffers={{expert: {expert}}}",
    ]
    started(tmp_path, capsys, "buffer.total_steps=2", *mixed)
    step = JobFolder(tmp_path / "checkpoints/tests/job").step_dir(2)
    assert read_manifest(step, 2)["state"]["auxiliary"] == {"expert": {"current_index": 4}}


def test_epochs_over_a_data_set_end_with_its_rows_though_batches_grow_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = "{prompt_type: plaintext, prompt_key: question, response_key: answer}"
    store = f"{{path: {tmp_path}/data/train.jsonl, format: {columns}}}"
    supervised = [
        "mode=train",
        "algorithm.algorithm_type=sft",
        "algorithm.optimizer={lr: 1e-3, lr_scheduler_type: linear, min_lr_ratio: 0}",
        "buffer.total_steps=null",
        f"buffer.trainer_input.experience_buffer={store}",
    ]
    started(tmp_path, capsys, *supervised, "buffer.train_batch_size=2")  # 8 steps: 16 rows
    grown = [*supervised, "buffer.train_batch_size=8", "buffer.total_epochs=2"]  # 16 more
    assert examine(tmp_path / "config.yaml", grown)[0][0].steps.train == 4
    started(tmp_path, capsys, *grown)
    job = JobFolder(tmp_path / "checkpoints/tests/job")
    state = read_manifest(job.step_dir(10), 10)["state"]
    assert state["buffer"] == {"current_index": 32}
    lines = [json.loads(line) for line in (job.monitor / "metrics.jsonl").open()]
    rates = [row["metrics"]["actor/lr"] for row in lines if row["part"] == "trainer"]
    assert rates[8:] == pytest.approx([2e-4, 1e-4])  # of 10


def test_a_run_whose_rows_are_too_long_says_that_it_made_fewer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = "{prompt_type: plaintext, prompt_key: question, response_key: answer}"
    config = small_config(tmp_path)
    longer = [row | {"question": row["question"] * (20 if n % 4 else 1)}
              for n, row in enumerate(rows(16))]  # fmt: skip
    path = write_jsonl(tmp_path / "data/long.jsonl", longer)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    supervised = ["mode=train", "algorithm.algorithm_type=sft", "buffer.total_steps=null"]
    store = f"buffer.trainer_input.experience_buffer={{path: {path}, format: {columns}}}"
    words = [*supervised, store, "buffer.train_batch_size=4"]
    assert command(tmp_path / "config.yaml", words, ()) == 0
    assert "the data set ended with train step 1 of 4: " in capsys.readouterr().out


def of_every_second(task: Task, answer: str) -> float:
    """Reward the length of the replies to every second task; the others have equal rewards."""
    return float(len(answer) * (int(task.task_id) % 2))


def test_a_run_whose_groups_are_left_out_says_that_it_made_fewer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    reward = f"buffer.explorer_input.default_reward_fn_type={__name__}:of_every_second"
    words = ["algorithm.algorithm_type=dapo", "buffer.total_steps=2", reward]
    assert command(tmp_path / "config.yaml", words, ()) == 0
    shown = capsys.readouterr().out
    assert "the rollouts ended with train step 1 of 2: groups that are left out" in shown
    assert "run 1/2  " in shown


def test_tasks_that_give_fewer_steps_than_the_most_leave_none_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that groups were left out or rollouts failed, and none had."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(small_config(tmp_path)))
    words = ["buffer.total_steps=1", "trainer.total_steps=9"]
    assert command(tmp_path / "config.yaml", words, ()) == 0
    shown = capsys.readouterr().out
    assert "trainer.total_steps (9): the tasks give 1" in " ".join(shown.split())
    assert "run 1/9  " in shown and "left out" not in shown


def test_a_trainer_beside_an_explorer_that_makes_fewer_steps_does_not_blame_groups_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(small_config(tmp_path)))
    shared = [f"{STORE}=sql", "buffer.trainer_input.experience_buffer.name=shared"]
    shared.append("synchronizer.sync_style=explorer_driven")
    for words in (
        ["mode=explore", "buffer.total_steps=1"],
        ["mode=train", "trainer.total_steps=4"],
    ):
        assert command(tmp_path / "config.yaml", [*shared, *words], ()) == 0
    said = "the rollouts ended with train step 1 of 4: fewer explore steps, groups that are left"
    assert said in capsys.readouterr().out


@pytest.mark.extension("sql")
def test_a_trainer_beside_an_explorer_trains_all_that_its_steps_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [f"{STORE}=sql", "buffer.trainer_input.experience_buffer.name=shared"]
    shared += ["synchronizer.sync_style=explorer_driven", "buffer.total_steps=2"]
    for mode in ("explore", "train"):
        started(tmp_path, capsys, *shared, f"mode={mode}", "buffer.train_batch_size=8", LINEAR)
    assert rates_of(tmp_path) == pytest.approx([4e-3 / 4, 3e-3 / 4, 2e-3 / 4, 1e-3 / 4])


@pytest.mark.parametrize(("size", "limit", "steps"), [(32, None, 4), (8, 6, 3), (16, 9, 4)])
def test_a_task_knows_how_many_explore_steps_the_run_has(
    tmp_path: Path, size: int, limit: int | None, steps: int
) -> None:
    """Of 16 rollouts each; it was told the train steps where these were fewer."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(small_config(tmp_path)))
    words = [f"buffer.train_batch_size={size}", f"trainer.total_steps={limit or 'null'}"]
    [plan] = examine(tmp_path / "config.yaml", words)[0]
    engine: Any = SimpleNamespace(traits=EngineTraits())
    text: Any = SimpleNamespace(chat=None)
    assert make_scheduler(plan, "", engine, text, None)._num_steps == steps


def rates_of(folder: Path) -> list[float]:
    """Return the learning rate of each train step of the job."""
    lines = (JobFolder(folder / "checkpoints/tests/job").monitor / "metrics.jsonl").open()
    rows = map(json.loads, lines)
    return [row["metrics"]["actor/lr"] for row in rows if row["part"] == "trainer"]


def test_epochs_over_a_data_set_end_a_schedule_though_batches_shrink_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = "{prompt_type: plaintext, prompt_key: question, response_key: answer}"
    supervised = [
        "mode=train",
        "algorithm.algorithm_type=sft",
        LINEAR,
        "buffer.total_steps=null",
        f"buffer.trainer_input.experience_buffer={{path: {tmp_path}/data/train.jsonl, "
        f"format: {columns}}}",
    ]
    started(tmp_path, capsys, *supervised, "buffer.train_batch_size=8")  # 2 steps: 16 rows
    more = [*supervised, "buffer.train_batch_size=4", "buffer.total_epochs=2"]  # 4 steps more
    started(tmp_path, capsys, *more)
    assert rates_of(tmp_path)[2:] == pytest.approx([4e-3 / 6, 3e-3 / 6, 2e-3 / 6, 1e-3 / 6])


@pytest.mark.parametrize(
    ("first", "then", "lrs"),
    [
        # 2 explore steps as 4 train steps, 2 more as 2
        (["buffer.total_steps=2", "buffer.train_batch_size=8"],
         ["buffer.total_steps=4", "buffer.train_batch_size=16"], [2e-3 / 6, 1e-3 / 6]),
        # 16 tasks by 8, 16 more by 4
        (["buffer.total_steps=null", "buffer.batch_size=8", "buffer.train_batch_size=32"],
         ["buffer.total_steps=null", "buffer.total_epochs=2", "buffer.train_batch_size=16"],
         [4e-3 / 6, 3e-3 / 6, 2e-3 / 6, 1e-3 / 6]),
        # 2 explore steps, of which 8 experiences wait in the store, and 2 more, as 3 train steps
        *(pytest.param(
            ["buffer.total_steps=2", "buffer.train_batch_size=8", "trainer.total_steps=3", store],
            ["buffer.total_steps=4", "buffer.train_batch_size=16", store],
            [3e-3 / 6, 2e-3 / 6, 1e-3 / 6], marks=marks)
          for store, marks in ((f"{STORE}=queue", ()),
                               (f"{STORE}=sql", pytest.mark.extension("sql")))),
    ],
)  # fmt: skip
def test_a_run_whose_batches_change_at_a_resume_counts_the_steps_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: list[str], then: list[str],
    lrs: list[float],
) -> None:  # fmt: skip
    started(tmp_path, capsys, *first, LINEAR)
    started(tmp_path, capsys, *then, LINEAR)
    assert rates_of(tmp_path)[-len(lrs) :] == pytest.approx(lrs)
    assert len(rates_of(tmp_path)) == 6
    plan = examine(tmp_path / "config.yaml", [*then, LINEAR])[0][0]
    assert continued(plan).steps.train == 6  # also with what the second attempt has saved


def with_adapter(folder: Path, lora: dict[str, Any]) -> tuple[Plan, Recipe, JobFolder]:
    """A run with this adapter: its plan, its algorithm and its folder."""
    config = small_config(folder)
    config["model"]["lora_configs"] = [lora]
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(config))
    [plan] = make_plans(load_config(path))
    return plan, get_recipe(plan.config.algorithm), JobFolder(plan.job_dir)


def test_a_resume_is_refused_where_the_adapter_it_began_from_was_overwritten(
    tmp_path: Path,
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    weights = adapter / "adapter_model.safetensors"
    save_file({"a": torch.zeros(2)}, weights)
    plan, recipe, folder = with_adapter(tmp_path, {"path": str(adapter)})
    old = made_with(plan, plan.model_path, recipe)
    refuse_meaningless(folder, 1, old, old)
    save_file({"a": torch.ones(2)}, weights)
    new = made_with(plan, plan.model_path, recipe)
    with pytest.raises(ConfigError, match=r"had SHA-256 of the adapter begun from \w{64}, and now"):
        refuse_meaningless(folder, 1, old, new)
    refuse_meaningless(folder, 1, {}, new)  # as earlier releases wrote it


def test_a_resume_is_refused_where_the_weights_below_an_adapter_are_others(tmp_path: Path) -> None:
    plan, recipe, folder = with_adapter(tmp_path, {"lora_rank": 4})
    make_model(tmp_path / "other", seed=1, max_len=256)
    old = made_with(plan, plan.model_path, recipe)
    new = made_with(plan, str(tmp_path / "other"), recipe)
    with pytest.raises(ConfigError, match="has a LoRA adapter of other weights than those that"):
        refuse_meaningless(folder, 1, old, new)


def test_files_that_only_the_trainers_machine_has_are_compared_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of a cluster need not have the model that it names by its id."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    plan, recipe, folder = with_adapter(tmp_path, {"lora_rank": 4})
    there = made_with(plan, plan.model_path, recipe)
    here = made_with(plan, "somebody/model", recipe)
    assert there[ADAPTER_BASE] is not None and here[ADAPTER_BASE] is None
    refuse_meaningless(folder, 1, there, here)
    refuse_meaningless(folder, 1, here, there)
    with pytest.raises(ConfigError, match="had LoRA adapter of rank 4, alpha 32, and now has none"):
        refuse_meaningless(folder, 1, there, {**here, "LoRA adapter": "none"})
