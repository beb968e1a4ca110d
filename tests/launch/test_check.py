"""Check by making: users' own parts are validated as built-in ones are."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composites import make_composite
from tests.config.made import config_of, values, write_model, write_rows
from tests.e2e.job import write_jsonl
from trireme.buffer.record import record_for
from trireme.cli.check import check
from trireme.config.schema_rollout import TasksetConfig
from trireme.data.tasksets import Taskset
from trireme.demo.tiny_model import make_tokenizer
from trireme.experience import EID, Experience
from trireme.launch.check import draft
from trireme.launch.data import make_text
from trireme.launch.tasksets import make_eval_tasksets, make_training_taskset, rows_of
from trireme.monitor.terminal import Terminal

PLUGIN = """
from trireme import Experience, Model, Task, advantage, algorithm, orms
from trireme.registry import SELECTORS
from trireme.workflows.single_turn import SimpleWorkflow
from trireme import workflow

algorithm("own_sft", like="sft")
algorithm("own_mix", like="mix")
algorithm("own_steps", like="grpo", sample="explore_step")


@advantage("own_rank")
def rank(rewards, groups):
    return rewards


@advantage("own_reward")
def own_reward(rewards):
    return rewards


algorithm("own_rank", advantage="own_rank", policy_loss="ppo", kl="none")
algorithm("own_eight", like="own_rank", group_size=8)
algorithm("own_reward", advantage="own_reward", policy_loss="ppo", kl="none")


@workflow("own_simple")
class OwnSimple(SimpleWorkflow):
    default_reward = "math_reward"

    def format_messages(self):
        return [{"role": "user", "content": self.task_desc}]


@workflow("own_many")
class OwnMany(OwnSimple):
    async def run(self):
        return [*await super().run(), *await super().run()]


@workflow("own_function")
async def one_reply(task: Task, model: Model) -> list[Experience]:
    await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=1.0)


one_reply.one_experience = True


@SELECTORS.register("own_order")
def own_order(rows, epoch, seed, *, features):
    return range(rows)
"""
TASKSET = "buffer.explorer_input.taskset"
WORKFLOW = f"{TASKSET}.default_workflow_type"
TAKES = "default_workflow_type: math_workflow, format: {prompt_key: question}"
DATA = "buffer.trainer_input.experience_buffer"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "own_parts.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def checked(tmp_path: Path, plugin: Path) -> Any:
    """What `trireme check` prints of a good configuration with these overrides."""

    def run(*overrides: str) -> str:
        config_of(tmp_path, values(tmp_path))
        out = StringIO()
        console = Terminal(file=out, soft_wrap=True, width=80)
        check(tmp_path / "config.yaml", [f"plugins=[{plugin}]", *overrides], console)
        return out.getvalue()

    return run


def test_an_own_algorithm_that_reads_data_has_its_steps_and_its_mode(
    checked: Any, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "solved.jsonl", 8)
    own = (
        "algorithm.algorithm_type=own_sft",
        "buffer.train_batch_size=4",
        f"{DATA}.path={data}",
        f"{TASKSET}=null",
    )
    output = checked(*own, "mode=train")
    assert "train 2, 2 an epoch" in output
    assert f"file, {data}" in output
    assert "mode is 'both': expected train, since own_sft reads data" in checked(*own)
    columns = checked(*own, "mode=train", f"{DATA}.format.prompt_key=query")
    assert "has no column 'query' (format.prompt_key); did you mean 'question'? It has" in columns


def test_an_own_advantage_that_asks_for_groups_needs_two_rollouts(checked: Any) -> None:
    one = "algorithm.repeat_times=1"
    sentence = "expected at least 2, since own_rank compares the rollouts of one task"
    assert sentence in checked("algorithm.algorithm_type=own_rank", one)
    assert "no problems" in checked("algorithm.algorithm_type=own_reward", one)


def test_the_group_size_of_an_own_algorithm_holds_where_the_file_says_nothing(
    checked: Any, tmp_path: Path, plugin: Path
) -> None:
    own = "algorithm.algorithm_type=own_eight"
    assert "8 tasks x 4 rollouts" in checked(own)
    tree = values(tmp_path)
    del tree["algorithm"]["repeat_times"]
    [plan], problems, _ = draft(config_of(tmp_path, tree, f"plugins=[{plugin}]", own))
    assert not problems and (plan.steps.repeat_times, plan.steps.train_batch_size) == (8, 64)
    tree["stages"] = [{"stage_name": "a"}, {"stage_name": "b", "algorithm": {"repeat_times": 2}}]
    plans = draft(config_of(tmp_path, tree, f"plugins=[{plugin}]", own)).plans
    assert [plan.steps.repeat_times for plan in plans] == [8, 2]


@pytest.mark.extension("more_losses")
def test_a_part_that_is_exchanged_decides_whether_groups_are_needed(checked: Any) -> None:
    one = "algorithm.repeat_times=1"
    assert "no problems" in checked(one, "algorithm.advantage_fn=reinforce")
    sentence = "since asymre compares the rollouts of one task"
    assert sentence in checked(
        one, "algorithm.algorithm_type=asymre", "algorithm.advantage_fn=grpo"
    )


def test_an_own_algorithm_with_an_experts_rows_needs_them(checked: Any) -> None:
    output = checked("algorithm.algorithm_type=own_mix")
    assert "auxiliary_buffers is empty: own_mix needs an expert's data" in output


def test_an_own_algorithm_may_train_whole_explore_steps(checked: Any) -> None:
    assert "what an explore step left" in checked("algorithm.algorithm_type=own_steps")


def test_an_own_class_with_one_reply_has_its_train_steps(checked: Any) -> None:
    assert "explore 4, train 4, 4 an epoch" in checked(f"{WORKFLOW}=own_simple")
    own_function = checked(f"{WORKFLOW}=own_function", f"{TASKSET}.default_reward_fn_type=null")
    assert "explore 4, train 4, 4 an epoch" in own_function
    assert "train as long as there are experiences" in checked(f"{WORKFLOW}=own_many")


def test_an_own_workflow_that_chats_needs_a_chat_template(checked: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "model", template=False)
    output = checked(f"{WORKFLOW}=own_simple")
    assert "has no chat template, which own_simple needs" in output


def test_an_own_selector_by_numbers_needs_their_columns(checked: Any) -> None:
    output = checked(f"{TASKSET}.data_selector.selector_type=own_order")
    assert "give the columns that hold them as data_selector.feature_keys" in output


def test_a_run_reads_no_data_set_twice(tmp_path: Path) -> None:
    held_out = f"[{{path: {write_rows(tmp_path / 'held_out.jsonl', 4)}, {TAKES}}}]"
    overrides = [f"buffer.explorer_input.eval_tasksets={held_out}"]
    made = draft(config_of(tmp_path, values(tmp_path), *overrides))
    [plan], [parts] = made.plans, made.parts
    training, [evaluation] = make_training_taskset(plan), make_eval_tasksets(plan)
    assert isinstance(training, Taskset) and isinstance(parts.training, Taskset)
    assert training is not parts.training and training.rows is parts.training.rows
    assert parts.evaluation[0] is not None and evaluation.rows is parts.evaluation[0].rows


@pytest.mark.extension("more_losses", "multi_turn")
def test_gdpo_refuses_before_the_run_what_has_no_parts_or_changes_the_reward(checked: Any) -> None:
    gdpo = "algorithm.algorithm_type=gdpo"
    assert "no problems" in checked(gdpo)
    # what only the run knows is not refused, nor what leaves parts
    for name in ("own_many", "own_function", "own_simple", "multi_turn_scheduler"):
        reward = f"{TASKSET}.default_reward_fn_type=math_reward"
        assert "no problems" in checked(gdpo, f"{WORKFLOW}={name}", reward)
    penalty = "{name: length_penalty, args: {max_length: 64, cache_length: 8}}"
    operators = f"data_processor.experience_pipeline.operators=[{penalty}]"
    assert "operators[0].name is 'length_penalty', which changes the reward" in checked(
        gdpo, operators
    )
    assert "no problems" in checked(operators)
    filtered = "data_processor.experience_pipeline.operators=[{name: reward_std_filter}]"
    assert "no problems" in checked(gdpo, filtered)


@pytest.mark.extension("more_losses")
def test_an_operator_on_rewards_is_noted_where_those_of_steps_are_learned_from(
    checked: Any,
) -> None:
    penalty = "{name: length_penalty, args: {max_length: 64, cache_length: 8}}"
    operators = f"data_processor.experience_pipeline.operators=[{penalty}]"
    note = "without effect on a run whose workflow gives each step a reward"
    said = checked("algorithm.advantage_fn=gigpo", operators)
    assert note in " ".join(said.split()) and "no problems" in said
    assert "without effect on a run" not in checked(operators)


def test_a_reference_that_follows_is_none_of_an_adapters(checked: Any) -> None:
    follows = "algorithm.sync_ref_model=true"
    assert "no problems" in checked(follows)
    output = checked(follows, "model.lora_configs=[{lora_rank: 4}]")
    assert "algorithm.sync_ref_model is true, but two adapters" in output


@pytest.mark.extension("multi_turn")
def test_turns_without_a_reward_are_for_a_teacher_alone(checked: Any) -> None:
    turns = f"{WORKFLOW}=multi_turn_scheduler"
    teacher = 'explorer.auxiliary_models=[{model_path: "${model.model_path}"}]'
    refused = "has neither a reward nor a scheduler that gives one"
    assert refused in checked(turns)
    distilled = checked(turns, "algorithm.algorithm_type=on_policy_distill", teacher)
    assert "on_policy_distill, both" in distilled and refused not in distilled


def test_a_tokenizer_that_drops_all_text_is_refused(tmp_path: Path) -> None:
    """transformers makes Qwen3.5's own class of it, which cannot read whole words."""
    folder = make_composite(tmp_path / "seeing", "qwen3_5")
    make_tokenizer(["What is 3 + 4?"]).save_pretrained(folder)
    config = config_of(tmp_path, values(tmp_path, 32), f"model.model_path={folder}")
    [plan] = draft(config).plans
    with pytest.raises(ValueError, match=r"makes a Qwen3_5Tokenizer of .* reads 'What is 3"):
        make_text(plan, plan.model_path)


def test_rows_without_a_prompt_are_left_out_only_where_others_have_one(tmp_path: Path) -> None:
    """A data set without the column may be for a workflow that makes its tasks from a seed."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"seed": 1}, {"seed": 2, "prompt": "two"}])
    section = TasksetConfig(path=str(path), on_error="skip")
    assert [row["seed"] for row in rows_of(section)] == [2]
    write_jsonl(path, [{"seed": 1}, {"seed": 2}])
    assert [row["seed"] for row in rows_of(section)] == [1, 2]


@pytest.mark.parametrize("file", ["copy.db", "copy.jsonl"])
@pytest.mark.parametrize(
    "key", [f"{DATA}.path", "data_processor.experience_pipeline.input_save_path"]
)
def test_another_jobs_copy_is_refused_before_the_run(
    checked: Any, tmp_path: Path, file: str, key: str
) -> None:
    """The queue's was refused once the models were loaded, and `check` passed both."""
    path, job = tmp_path / file, tmp_path / "first"
    job.mkdir()
    assert "no problems" in checked(f"{key}={path}")  # there is none yet
    record = record_for(str(path), tmp_path)
    record.claim(job, key=key, resumes=False)
    record._write([Experience(tokens=torch.tensor([1, 2]), prompt_length=1, eid=EID(1, 0, 0))])
    text = f"problem: {key}: {path} is the copy of the job in {job}, and this run, in {tmp_path}"
    assert text in checked(f"{key}={path}")  # while that job writes it
    record.close()
    before = sorted(tmp_path.iterdir())
    assert text in checked(f"{key}={path}")
    assert text in checked(f"{key}={os.path.relpath(path, tmp_path / 'out/p/n/buffer')}")
    assert sorted(tmp_path.iterdir()) == before  # nothing is written
    assert "no problems" in checked(f"{key}={path}", "mode=explore", f"{DATA}.storage_type=sql")
    (tmp_path / "out/p/n/global_step_1").mkdir(parents=True)
    (tmp_path / "out/p/n/global_step_1/.full_checkpoint").touch()
    assert text in checked(f"{key}={path}")
    job.rmdir()  # it was renamed: the run that resumes is that job
    assert "no problems" in checked(f"{key}={path}")


def test_two_stages_do_not_share_a_copy_outside_their_folders(tmp_path: Path) -> None:
    def problems(*paths: str) -> list[str]:
        stages = [
            {
                "stage_name": name,
                "buffer": {"trainer_input": {"experience_buffer": {"path": path}}},
            }
            for name, path in zip(("one", "two"), paths, strict=True)
        ]
        config = config_of(tmp_path, values(tmp_path) | {"stages": stages})
        return [str(problem) for problem in draft(config).problems]

    shared = f"{tmp_path}/copy.db"
    [problem] = problems(shared, f"sqlite:///{shared}")
    assert problem.startswith(
        f"{DATA}.path is one place outside the folders of the stages one and two"
    )
    assert len(problems("../../copy.db", "../../copy.db")) == 1  # next to both folders
    assert not problems(shared, f"{tmp_path}/other.db")
    assert not problems("copy.db", "copy.db")  # each is in its stage's folder


@pytest.mark.parametrize("path", ["explorer_output.db", "sqlite:///./explorer_output.db", "raw.db"])
def test_two_copies_of_a_stage_have_a_path_each(tmp_path: Path, path: str) -> None:
    """The second replaced the rows of the first, which have the same ids."""
    of_explorer = {"experience_pipeline": {"input_save_path": "raw.db"}} if path == "raw.db" else {}
    store = {"trainer_input": {"experience_buffer": {"path": path}}}
    given = values(tmp_path) | {"buffer": values(tmp_path).get("buffer", {}) | store}
    given |= {"data_processor": of_explorer} if of_explorer else {}
    [problem] = draft(config_of(tmp_path, given)).problems
    assert str(problem).startswith(
        f"{DATA}.path is the place of data_processor.experience_pipeline.input_save_path as well"
    )
