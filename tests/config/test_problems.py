"""Every bad input has a sentence of its own before anything is loaded."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.config.made import config_of, values, values_with, write_model, write_rows
from trireme.config import ConfigError, load_config
from trireme.config.check import free_name
from trireme.config.lookup import ModelFacts
from trireme.config.stages import used_tasksets
from trireme.launch.check import draft, make_plans
from trireme.registry import ALGORITHMS

TASKSET = "buffer.explorer_input.taskset"


def problems_of(tmp_path: Path, *overrides: str, rows: int = 32) -> list[str]:
    problems = draft(config_of(tmp_path, values(tmp_path, rows), *overrides)).problems
    return [str(problem) for problem in problems]


def only_problem(tmp_path: Path, *overrides: str, rows: int = 32) -> str:
    found = problems_of(tmp_path, *overrides, rows=rows)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("key", ["workflow_key", "reward_fn_key"])
def test_a_column_that_names_no_workflow_or_reward_is_one_problem(tmp_path, key):
    text = only_problem(tmp_path, f"{TASKSET}.format.{key}=question")
    assert text.startswith(f"{TASKSET}.format.{key} (question, row 0) cannot be used: unknown ")


@pytest.mark.extension("replay")
def test_a_replay_buffer_that_no_train_batch_fits_into_is_a_problem(tmp_path):
    """The first train step was the remainder at the run's end."""
    store = "buffer.trainer_input.experience_buffer"
    words = (f"{store}.replay_buffer.enable=true", "buffer.train_batch_size=30")  # of groups of 4
    assert only_problem(tmp_path, *words, f"{store}.capacity=7") == (
        f"{store}.capacity (7) counts groups where replay_buffer.enable is true, and as many have "
        "28 experiences, too few for a train batch (30): expected at least 8"
    )
    assert problems_of(tmp_path, *words, f"{store}.capacity=8") == []


def test_a_good_configuration_has_none(tmp_path):
    assert problems_of(tmp_path) == []


@pytest.mark.extension("sql")
def test_attention_that_cannot_be_computed_is_a_problem(tmp_path, monkeypatch):
    key = "trainer.attn_implementation"
    for kernel, why in (
        ("varlen", "is a GPU's kernel alone"),
        ("flex", "has no gradients on a CPU"),
    ):
        text = only_problem(tmp_path, f"{key}={kernel}")
        assert text == f"{key} is {kernel}, which {why}, and this run trains on a CPU: take sdpa"
    with pytest.raises(ConfigError, match="'flash_attention_2': expected one of auto, sdpa, "):
        problems_of(tmp_path, f"{key}=flash_attention_2")
    assert problems_of(tmp_path, f"{key}=flex", "mode=explore") == []
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 1)
    assert problems_of(tmp_path, f"{key}=varlen") == []
    half = "explorer.rollout_model.dtype=float32"
    assert "does not compute in float32" in only_problem(tmp_path, f"{key}=varlen", half)
    monkeypatch.setattr("trireme.config.check.metadata.version", lambda _: "2.9.1+cu128")
    text = only_problem(tmp_path, f"{key}=varlen")
    assert text == f"{key} is varlen: torch 2.9.1+cu128 has none, 2.10 and newer do"


@pytest.mark.extension("sql")
@pytest.mark.usefixtures("spreads")
def test_blocks_that_cannot_be_compiled_are_a_problem(tmp_path, monkeypatch):
    key = "trainer.use_torch_compile"
    asked = f"{key}=true"
    assert problems_of(tmp_path, asked) == []
    dora = "model.lora_configs=[{lora_rank: 4, use_dora: true}]"
    expected = f"{key} is true, and peft's DoRA cannot be compiled: expected use_dora false"
    assert only_problem(tmp_path, asked, dora) == expected
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    facts = {"peft_type": "LORA", "r": 4, "use_dora": True}
    (adapter / "adapter_config.json").write_text(json.dumps(facts))
    save_file({"a": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    text = only_problem(tmp_path, asked, f"model.lora_configs=[{{path: {adapter}}}]")
    assert text.endswith(f"DoRA cannot be compiled: expected another adapter than {adapter}")
    sequence = "trainer.ulysses_sequence_parallel_size=2"
    assert problems_of(tmp_path, asked, sequence) == []  # one process trains on whole sequences
    ray = ("cluster.launcher=ray", "cluster.node_num=1", "cluster.gpu_per_node=3")
    text = only_problem(tmp_path, asked, sequence, *ray)
    assert "talk to each other within a block" in text
    monkeypatch.setenv("CXX", "no-such-compiler")
    expected = f"{key} is true, and no C++ compiler is here (no-such-compiler, or what CXX names)"
    assert only_problem(tmp_path, asked) == expected
    assert problems_of(tmp_path, asked, "mode=explore") == []
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 1)
    flex = "trainer.attn_implementation=flex"
    monkeypatch.setattr("trireme.config.check.find_spec", lambda name: None)
    texts = problems_of(tmp_path, asked, flex)
    assert [text.partition(",")[0] for text in texts] == [f"{key} is true"] * 2
    assert "FlexAttention compiles itself" in texts[0]
    assert "Triton" in texts[1]


def test_capped_attention_scores_are_a_problem(tmp_path):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"attn_logit_softcapping": 50.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert "does not compute attention whose scores are capped" in only_problem(tmp_path)


def test_a_kernel_without_attention_sinks_is_a_problem(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr("trireme.config.plan.num_gpus", lambda: 1)
    asked = "trainer.attn_implementation={}".format
    assert problems_of(tmp_path, asked("varlen")) == []
    sinks = {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    save_file(sinks, folder / "more.safetensors")
    text = only_problem(tmp_path, asked("varlen"))
    assert "is varlen, which cannot compute the attention sinks of" in text
    assert text.endswith("take sdpa or flex")
    assert problems_of(tmp_path, asked("flex")) == problems_of(tmp_path, asked("auto")) == []


def test_an_adapter_of_experts_is_a_problem(tmp_path):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_experts": 8}
    (folder / "config.json").write_text(json.dumps(config))
    for targets in ("all-linear", "[q_proj, gate]", "[q_proj, down_proj]"):
        text = only_problem(tmp_path, f"model.lora_configs=[{{target_modules: {targets}}}]")
        assert text.startswith("model.lora_configs[0].target_modules is")
        assert "expected layers of attention" in text
    lora = "model.lora_configs=[{target_modules: [q_proj, layers.0.self_attn.o_proj]}]"
    assert problems_of(tmp_path, lora) == []


def test_an_adapter_of_modules_that_the_model_lacks(tmp_path):
    folder = write_model(tmp_path / "model")
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qv"]
    save_file({name: torch.zeros(2, 2) for name in names}, folder / "model.safetensors")
    key = "model.lora_configs[0].target_modules"

    def of(targets: str) -> list[str]:
        return problems_of(tmp_path, f"model.lora_configs=[{{target_modules: {targets}}}]")

    assert of("[q_proj, self_attn.v_proj]") == of("all-linear") == of("[q_proj, c_attn]") == []
    assert of("[q_projj]") == [
        f"{key} names 'q_projj', of which the model has no module; did you mean 'q_proj'?"
    ]
    assert of("[c_attn]") == [
        f"{key} names 'c_attn', of which the model has no module: expected names among q_proj, "
        "v_proj"
    ]


@pytest.mark.parametrize("targets", ["q_proj", "q_proj, v_proj"])
def test_names_of_layers_that_stand_as_text_are_no_expression(tmp_path, targets):
    found = only_problem(tmp_path, f"model.lora_configs=[{{target_modules: '{targets}'}}]")
    assert found == (
        f"model.lora_configs[0].target_modules is '{targets}', a regular expression of whole "
        f"names, which matches no layer: expected a list, [{targets}]"
    )
    for fine in ("all-linear", "lm_head", ".*q_proj", "model.layers.0.self_attn.q_proj"):
        assert problems_of(tmp_path, f"model.lora_configs=[{{target_modules: '{fine}'}}]") == []


def test_an_adapter_on_a_head_that_is_the_embedding(tmp_path):
    given = "model.lora_configs=[{target_modules: [q_proj, lm_head]}]"
    sizes: Any = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 99,
    }
    for tied in (True, False):
        tree = values_with(tmp_path, model_type="qwen3", **sizes, tie_word_embeddings=tied)
        found = [str(problem) for problem in draft(config_of(tmp_path, tree, given)).problems]
        said = [problem for problem in found if "target_modules names 'lm_head'" in problem]
        assert len(said) == tied, found


def test_a_variable_of_the_shell_in_a_path(tmp_path):
    assert "did you mean '${oc.env:MY_MODEL}'?" in only_problem(
        tmp_path, "model.model_path=$MY_MODEL"
    )


def test_more_tasks_in_a_step_than_there_are(tmp_path):
    note = "buffer.batch_size (100): there are 32 tasks, so that a step asks some of them more than"
    few = ("buffer.batch_size=100", "buffer.total_steps=2")
    [plan] = make_plans(config_of(tmp_path, values(tmp_path), *few))
    assert any(one.startswith(note) for one in plan.notes)


def test_the_error_lists_all_problems_a_line_each(tmp_path):
    config = config_of(tmp_path, values(tmp_path), f"{TASKSET}.path=/no.jsonl", "model.model_path=")
    with pytest.raises(ConfigError) as error:
        make_plans(config)
    assert [line.split()[0] for line in str(error.value).splitlines()] == [
        f"{TASKSET}.path",
        "model.model_path",
    ]


def test_a_missing_dataset_names_the_nearest_file(tmp_path):
    found = only_problem(tmp_path, f"{TASKSET}.path={tmp_path}/taks.jsonl")
    assert found == (
        f"{TASKSET}.path ({tmp_path}/taks.jsonl) is not a file or folder here; "
        f"did you mean '{tmp_path}/tasks.jsonl'?"
    )


def test_a_chat_template_in_the_place_of_its_file(tmp_path):
    text = "{% for m in messages %}{{ m.content }}{% endfor %}" * 10  # too long for a file's name
    found = only_problem(tmp_path, f"model.chat_template_path='{text}'")
    assert found.startswith("model.chat_template_path is '{% for m in messages %}")
    assert found.endswith(": expected a file, or the template itself as model.custom_chat_template")


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [-0.1, 0.999]])
def test_an_optimizer_has_two_betas_below_1(tmp_path, betas):
    expected = f"optimizer.betas is {betas}: expected two numbers of at least 0 and below 1"
    assert only_problem(tmp_path, f"algorithm.optimizer.betas={betas}") == f"algorithm.{expected}"
    critic = ("algorithm.algorithm_type=ppo", f"algorithm.critic.optimizer.betas={betas}")
    assert only_problem(tmp_path, *critic) == f"algorithm.critic.{expected}"


@pytest.mark.extension("sql")
@pytest.mark.parametrize("name", ["a/b", "trainer", ".."])
def test_an_explorers_name_has_to_name_files(tmp_path, name):
    found = only_problem(tmp_path, "mode=explore", f"explorer.name={name}")
    assert found.startswith(f"explorer.name is '{name}': expected letters, digits")


@pytest.mark.parametrize("key", ["checkpoint_root_dir", "project", "group", "name"])
def test_the_name_of_a_folder_has_no_nul(tmp_path, key):
    found = only_problem(tmp_path, f'{key}="a\\0b"')
    assert found == f"{key} is 'a\\x00b': expected the name of a folder, without NUL"


@pytest.mark.parametrize("name", ["..", "../other", "/elsewhere", "."])
def test_a_stage_has_a_folder_below_the_run_s(tmp_path, name):
    found = only_problem(tmp_path, f"stages=[{{stage_name: {name!r}}}]")
    expected = "expected the name of a folder below that of the run"
    assert found == f"stages[0].stage_name is {name!r}: {expected}"


def test_a_dataset_on_the_hub_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    tree = values(tmp_path)
    tree["buffer"]["explorer_input"]["taskset"]["path"] = "openai/gsm8k"
    (plan,) = make_plans(config_of(tmp_path, tree))
    assert f"{TASKSET}.path (openai/gsm8k): not on this machine, will be downloaded" in plan.notes
    assert plan.steps.explore is None


def test_a_dataset_without_the_prompt_column_has_its_columns_named(tmp_path):
    found = only_problem(tmp_path, f"{TASKSET}.format.prompt_key=query")
    assert found == (
        f"{TASKSET} cannot be used: dataset '{tmp_path}/tasks.jsonl' (split 'train') has no column "
        "'query' (format.prompt_key); did you mean 'question'? It has: question, answer"
    )
    assert "has no column 'x' (format.response_key)" in only_problem(
        tmp_path, f"{TASKSET}.format.response_key=x"
    )


def test_an_empty_dataset(tmp_path):
    assert "has no rows in split 'train'" in only_problem(tmp_path, rows=0)


def test_a_broken_line_is_named_with_its_file(tmp_path):
    data = write_rows(tmp_path / "broken.jsonl", 2)
    data.write_text(data.read_text() + '{"question": \n')
    found = only_problem(tmp_path, f"{TASKSET}.path={data}")
    assert f"has a line that is not JSON: {data}, line 3" in found
    data.write_text("[1, 2]\n")
    assert f"{data}, line 1: expected an object" in only_problem(tmp_path, f"{TASKSET}.path={data}")


def test_a_missing_split_names_those_there_are(tmp_path):
    write_rows(tmp_path / "data" / "train.jsonl", 9)
    write_rows(tmp_path / "data" / "test.jsonl", 9)
    path = f"{TASKSET}.path={tmp_path}/data"
    assert "has no split 'dev'; it has: test, train" in only_problem(
        tmp_path, path, f"{TASKSET}.split=dev"
    )


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"cut"),
            "is damaged, or was not downloaded to its end: model.safetensors: is not a safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00002.safetensors"}}'
            ),
            "model-00002.safetensors with tensor a is missing",
        ),
    ],
)
def test_a_model_that_is_not_whole(tmp_path, spoil, expected):
    spoil(write_model(tmp_path / "model"))
    assert expected in only_problem(tmp_path)


def test_a_missing_model(tmp_path):
    assert "is not a file or folder here" in only_problem(tmp_path, "model.model_path=./no/model")
    assert only_problem(tmp_path, "model.model_path=") == (
        "model.model_path is not given: expected a model's folder or hub id"
    )


def test_a_chat_workflow_needs_a_chat_template(tmp_path):
    write_model(tmp_path / "model", template=False)
    found = only_problem(tmp_path)
    assert "has no chat template, which math_workflow needs" in found
    template = tmp_path / "chatml.jinja"
    template.write_text("{{ messages }}")
    assert problems_of(tmp_path, f"model.chat_template_path={template}") == []
    base = (
        f"{TASKSET}.default_workflow_type=math_boxed_workflow",
        f"{TASKSET}.workflow_args={{use_base: true}}",
    )
    assert problems_of(tmp_path, *base) == []


def test_a_response_as_long_as_the_model(tmp_path):
    assert only_problem(tmp_path, "model.max_response_tokens=256") == (
        "model.max_response_tokens is 256: expected less than model.max_model_len (256)"
    )
    assert "make 264 tokens: expected at most" in only_problem(
        tmp_path, "model.max_prompt_tokens=200"
    )
    assert "model.max_model_len is not given" in only_problem(tmp_path, "model.max_model_len=null")


def test_an_unknown_workflow_reward_or_algorithm_lists_the_known(tmp_path):
    found = only_problem(tmp_path, f"{TASKSET}.default_workflow_type=math_workflo")
    assert "did you mean 'math_workflow'?" in found
    assert "Known: " in found
    assert "simple_workflow" in found
    found = only_problem(tmp_path, f"{TASKSET}.default_reward_fn_type=nope")
    assert "unknown reward function 'nope'" in found
    assert "math_reward" in found
    found = only_problem(tmp_path, "algorithm.algorithm_type=grop")
    known = ", ".join(ALGORITHMS.names())  # other tests of this process register theirs
    assert {"grpo", "sft"} <= set(ALGORITHMS.names())
    assert found == (
        f"unknown algorithm.algorithm_type 'grop'; did you mean 'grpo'? Known: {known}"
    )
    found = problems_of(tmp_path, "algorithm.policy_loss_fn=nope", "algorithm.kl_loss_fn=k22")
    assert [text.partition(" Known")[0] for text in found] == [
        "unknown algorithm.policy_loss_fn 'nope'.", "unknown algorithm.kl_loss_fn 'k22';"
        " did you mean 'k2'?",
    ]  # fmt: skip
    found = only_problem(tmp_path, "algorithm.teacher_kl_fn=k22")
    assert found.startswith("unknown algorithm.teacher_kl_fn 'k22'")  # not its registry's key


def test_a_users_own_workflow_is_found_by_name_or_path(tmp_path, monkeypatch):
    text = "@workflow('my_workflow')\nasync def f(task, model): ..."
    (tmp_path / "mine.py").write_text(f"from trireme import workflow\n{text}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "mine", None)  # of this test alone
    del sys.modules["mine"]
    key = f"{TASKSET}.default_workflow_type"
    assert problems_of(tmp_path, f"{key}=my_workflow", "plugins=[mine.py]") == []
    assert problems_of(tmp_path, f"{key}='mine:f'", "plugins=[mine.py]") == []
    del sys.modules["mine"]
    assert problems_of(tmp_path, f"{key}='mine:f'") == []  # it lies beside the YAML
    assert "there is no module 'theirs'" in only_problem(tmp_path, f"{key}='theirs:f'")
    (here := tmp_path / "here").mkdir()
    (here / "theirs.py").write_text("async def f(task, model): ...\n")
    monkeypatch.chdir(here)
    assert problems_of(tmp_path, f"{key}='theirs:f'") == []
    monkeypatch.setenv("TRIREME_PLUGIN_DIRS", str(tmp_path))
    assert problems_of(tmp_path, f"{key}=my_workflow") == []


def test_a_plugin_that_is_not_python(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:")
    found = only_problem(tmp_path, "plugins=[broken.py]")
    assert "which fails to load: SyntaxError: " in found
    assert found.endswith(f"\n  {tmp_path}/broken.py:1: def f(:")


def test_a_taskset_without_a_workflow(tmp_path):
    found = only_problem(tmp_path, f"{TASKSET}.default_workflow_type=null")
    assert found.startswith(f"{TASKSET}.default_workflow_type is not given")
    fallback = "buffer.explorer_input.default_workflow_type=math_workflow"
    assert problems_of(tmp_path, f"{TASKSET}.default_workflow_type=null", fallback) == []


@pytest.mark.parametrize(
    "reward",
    [
        (f"{TASKSET}.default_reward_fn_type=accuracy_reward",),
        ("buffer.explorer_input.default_reward_fn_type=accuracy_reward",),
        (f"{TASKSET}.reward_fn_args.funcs=[accuracy]", f"{TASKSET}.reward_fn_args.weights=[1]"),
    ],
)
def test_a_reward_without_a_workflow_scores_one_reply(tmp_path, reward):
    unnamed = f"{TASKSET}.default_workflow_type=null"
    [plan] = make_plans(config_of(tmp_path, values(tmp_path), unnamed, *reward))
    [used] = used_tasksets(plan.config)
    assert used.workflow == "simple_workflow"
    [plan] = make_plans(config_of(tmp_path, values(tmp_path), *reward))
    [used] = used_tasksets(plan.config)
    assert used.workflow == "math_workflow"


def test_batches_that_give_no_step(tmp_path):
    found = only_problem(tmp_path, "buffer.batch_size=100", rows=30)
    assert found.endswith(
        "has 30 rows: in 1 epoch that is not one batch of buffer.batch_size 100: set it to at most "
        "30, or give more epochs"
    )


def test_grpo_compares_at_least_two_rollouts(tmp_path):
    found = only_problem(tmp_path, "algorithm.repeat_times=1")
    assert found.startswith("algorithm.repeat_times is 1: expected at least 2, since grpo")


def test_a_bench_trains_nothing_and_needs_no_two_rollouts_to_compare(tmp_path):
    tree = values(tmp_path)
    tasks = tree["buffer"]["explorer_input"]
    tasks["eval_tasksets"] = [tasks["taskset"]]
    config = config_of(tmp_path, tree, "mode=bench", "algorithm.repeat_times=1")
    assert draft(config).problems == []


@pytest.mark.parametrize("root", ["file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written(tmp_path, root):
    (tmp_path / "file").write_text("")
    root = str(tmp_path / "file") if root == "file" else root
    assert "which cannot be written" in only_problem(tmp_path, f"checkpoint_root_dir={root}")


def test_a_full_disk(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=3))
    assert "on a disk with 0.0 MB left: expected room for the model's 0." in only_problem(tmp_path)
    facts = ModelFacts(tmp_path, size=7 * 10**9)
    monkeypatch.setattr("trireme.config.check.model_facts", lambda path: facts)
    assert only_problem(tmp_path).endswith("expected room for the model's 7.0 GB")


@pytest.mark.extension("sql")
@pytest.mark.parametrize("mode", ["both", "explore"])
def test_a_batch_of_several_explore_steps_is_no_problem(tmp_path, mode):
    assert problems_of(tmp_path, f"mode={mode}", "buffer.train_batch_size=64") == []


def test_reading_data_needs_a_batch_size_a_mode_and_columns(tmp_path):
    data = write_rows(tmp_path / "sft.jsonl", 8, text="x")
    key = "buffer.trainer_input.experience_buffer"
    sft = ("algorithm.algorithm_type=sft", f"{key}.path={data}")
    found = problems_of(tmp_path, *sft)
    assert any("mode is 'both': expected train, since sft reads data" in text for text in found)
    assert any("buffer.train_batch_size is not given" in text for text in found)
    assert any("has the columns text, and none of messages, message" in text for text in found)
    good = (*sft, "mode=train", "buffer.train_batch_size=4", f"{key}.format.prompt_key=text")
    assert problems_of(tmp_path, *good, f"{key}.format.response_key=text") == []
    assert "has no column 'response' (format.response_key)" in only_problem(tmp_path, *good)
    assert "gives no step" in only_problem(
        tmp_path, *good, f"{key}.format.response_key=text", "buffer.train_batch_size=9"
    )


@pytest.mark.extension("sql")
def test_train_has_the_batch_size_of_an_explore_step(tmp_path):
    assert problems_of(tmp_path, "mode=train") == []


def test_determinism_that_cannot_be_had(tmp_path):
    found = only_problem(tmp_path, "deterministic=true", "synchronizer.sync_offset=1")
    assert found == "deterministic is true: expected synchronizer.sync_offset 0, not 1"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("synchronizer.sync_interval=2", "synchronizer.sync_interval 1, not 2"),
        ("synchronizer.sync_style=fully_async", "synchronizer.sync_style fixed, not fully_async"),
        (
            "synchronizer.sync_method=offline",
            "synchronizer.sync_method nccl or memory, not offline",
        ),
        (
            "buffer.train_batch_size=16",
            "a train_batch_size of batch_size x repeat_times (32), not 16",
        ),
        ("explorer.dynamic_timeout.enable=true", "no explorer.dynamic_timeout"),
        ("explorer.rollout_model={engine_type: torch, engine_num: 2}", "one process (explorer.r"),
        ("cluster={launcher: ray, gpu_per_node: 2}", "one process (cluster.launcher local), not"),
        ("mode=explore", "mode both or colocate, not explore"),
    ],
)
@pytest.mark.usefixtures("spreads")
def test_determinism_names_what_keeps_it_from_being_had(tmp_path, override, expected):
    found = problems_of(tmp_path, "deterministic=true", override)
    (said,) = [problem for problem in map(str, found) if problem.startswith("deterministic")]
    assert said.startswith(f"deterministic is true: expected {expected}") and ";" not in said


def test_determinism_names_all_that_it_lacks(tmp_path):
    more = ("synchronizer.sync_offset=1", "explorer.dynamic_timeout.enable=true")
    assert only_problem(tmp_path, "deterministic=true", *more) == (
        "deterministic is true: expected no explorer.dynamic_timeout; "
        "synchronizer.sync_offset 0, not 1"
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("explorer.rollout_model.engine_type=tinker", "explorer.rollout_model.engine_type"),
        ("model.trust_remote_code=true", "model.trust_remote_code"),
        (
            "data_processor.task_pipeline={priority_weights: {difficulty: 1.0}}",
            "data_processor.task_pipeline.priority_weights",
        ),
        (f"{TASKSET}.format.video_key=answer", f"{TASKSET}.format.video_key"),
    ],
)
def test_what_comes_later_is_refused_with_its_key(tmp_path, override, key):
    found = only_problem(tmp_path, override)
    assert found.startswith(key)
    assert "not supported yet" in found or "refused" in found


REPLAY = "algorithm.enable_router_replay"
RECORDS = "explorer.rollout_model.enable_return_routed_experts"
SILENT = "the experts that compute a token are not reported by "
EXPECTED = ": expected false, or explorer.rollout_model.engine_type torch"


@pytest.mark.parametrize("key", [REPLAY, RECORDS])
def test_experts_are_recorded_of_a_mixture_by_engines_that_can(tmp_path, monkeypatch, key):
    text = only_problem(tmp_path, f"{key}=true")
    assert text == (f"{key} is true, and {tmp_path}/model is no mixture of experts: expected false")
    write_model(tmp_path / "mixture", num_experts=8)
    mixture = f"model.model_path={tmp_path}/mixture"
    assert problems_of(tmp_path, f"{key}=true", mixture) == []
    monkeypatch.setattr("trireme.engines.torch.kind.TorchKind.reports_experts", False)
    text = only_problem(tmp_path, f"{key}=true", mixture)
    assert text == f"{key} is true, and {SILENT}the engine torch{EXPECTED}"


@pytest.mark.extension("sql")
def test_a_trainer_alone_asks_no_engine_for_experts(tmp_path, monkeypatch):
    write_model(tmp_path / "mixture", num_experts=8)
    monkeypatch.setattr("trireme.engines.torch.kind.TorchKind.reports_experts", False)
    mixture = f"model.model_path={tmp_path}/mixture"
    assert problems_of(tmp_path, f"{REPLAY}=true", mixture, "mode=train") == []


@pytest.mark.extension("remote")
def test_a_user_s_servers_record_no_experts(tmp_path):
    write_model(tmp_path / "mixture", num_experts=8)
    servers = "explorer.rollout_model={engine_type: remote, base_urls: ['http://127.0.0.1:1']}"
    model = f"model.model_path={tmp_path}/mixture"
    text = only_problem(tmp_path, servers, f"{REPLAY}=true", model)
    where = "the servers of explorer.rollout_model.base_urls"
    assert text == f"{REPLAY} is true, and {SILENT}{where}{EXPECTED}"


def test_ranks_that_share_a_sequence_divide_the_heads(tmp_path):
    found = only_problem(tmp_path, "trainer.ulysses_sequence_parallel_size=3")
    assert found == (
        "trainer.ulysses_sequence_parallel_size is 3: expected a divisor of the model's 4 "
        "attention heads"
    )


@pytest.mark.extension("sql")
def test_layers_with_a_state_are_not_shared_by_ranks_and_unknown_ones_not_trained(tmp_path):
    assert problems_of(tmp_path) == []
    [file] = tmp_path.rglob("config.json")
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"layer_types": ["conv", "full_attention"]}))
    found = only_problem(tmp_path, "trainer.ulysses_sequence_parallel_size=2")
    assert found == (
        "trainer.ulysses_sequence_parallel_size is 2: expected 1, since layers of this model have "
        "a state, which passes from token to token"
    )
    file.write_text(json.dumps(plain | {"layer_types": ["indexed_attention", "full_attention"]}))
    found = only_problem(tmp_path)
    assert "has layers that cannot be trained (indexed_attention): expected attention, or" in found
    assert problems_of(tmp_path, "mode=explore") == []


@pytest.mark.extension("sql")
def test_weights_in_codes_are_not_trained_and_experts_get_no_adapter(tmp_path):
    assert problems_of(tmp_path) == []
    [file] = tmp_path.rglob("config.json")
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"quantization_config": {"quant_method": "mxfp4"}}))
    found = only_problem(tmp_path)
    assert found.startswith("model.model_path (")
    assert "has weights in mxfp4 (quantization_config in config.json), which cannot be" in found
    assert problems_of(tmp_path, "mode=explore") == []
    file.write_text(json.dumps(plain | {"num_local_experts": 4}))
    found = only_problem(tmp_path, "model.lora_configs=[{target_modules: [q_proj, gate_up_proj]}]")
    assert found == (
        "model.lora_configs[0].target_modules is ['q_proj', 'gate_up_proj'], and adapters of "
        "experts and their router are not trained here: expected layers of attention, such as "
        "['q_proj', 'k_proj', 'v_proj', 'o_proj']"
    )


def test_auxiliary_models_and_experts_must_be_there(tmp_path):
    found = only_problem(tmp_path, "explorer.auxiliary_models=[{max_model_len: 9}]")
    assert found.startswith("explorer.auxiliary_models[0].model_path is not given")
    judge = "{model_path: m, engine_type: external, base_urls: ['http://h/v1'], "
    found = only_problem(tmp_path, f"explorer.auxiliary_models=[{judge} reasoning_parser: qwen3}}]")
    assert found.startswith("explorer.auxiliary_models[0].reasoning_parser (qwen3): an OpenAI API")
    found = only_problem(tmp_path, "explorer.auxiliary_models=[{model_path: /none}]")
    assert found.startswith("explorer.auxiliary_models[0].model_path (/none)")
    mix = ("algorithm.algorithm_type=mix", "algorithm.repeat_times=2")
    expert = "buffer.trainer_input.auxiliary_buffers"
    assert only_problem(tmp_path, *mix).startswith(f"{expert} is empty: mix needs an expert's data")
    found = only_problem(tmp_path, *mix, f"{expert}={{sft_dataset: {{path: /no.jsonl}}}}")
    assert found.startswith(f"{expert}.sft_dataset.path (/no.jsonl) is not a file")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("dpo", "has no column 'chosen' (format.chosen_key). It has: question, answer"),
     ("kto", "has no column 'label' (format.label_key). It has: question, answer"),
     ("cpt", "(format.prompt_key); did you mean 'question'? It has: question, answer")],
)  # fmt: skip
def test_data_of_another_kind_is_told_by_its_columns(tmp_path, algorithm, expected):
    data = write_rows(tmp_path / "rows.jsonl", 8)
    found = only_problem(
        tmp_path,
        f"algorithm.algorithm_type={algorithm}",
        "mode=train",
        "buffer.train_batch_size=4",
        f"buffer.trainer_input.experience_buffer.path={data}",
        "buffer.explorer_input.taskset=null",
    )
    assert found.endswith(expected)


def test_sft_checks_what_it_is_evaluated_on(tmp_path):
    data = write_rows(tmp_path / "sft.jsonl", 8)
    sft = (
        "algorithm.algorithm_type=sft",
        "mode=train",
        "buffer.train_batch_size=4",
        f"buffer.trainer_input.experience_buffer.path={data}",
        "buffer.explorer_input.taskset=null",
    )
    assert problems_of(tmp_path, *sft) == []
    key = "buffer.explorer_input.eval_tasksets"
    found = only_problem(
        tmp_path, *sft, f"{key}=[{{path: /no.jsonl, default_workflow_type: math_workflow}}]"
    )
    assert found.startswith(f"{key}[0].path (/no.jsonl) is not a file")


def test_one_set_of_tasks_or_several_but_not_both(tmp_path):
    found = problems_of(tmp_path, "buffer.explorer_input.tasksets=[{path: x}]")
    assert any("has both taskset and tasksets" in text for text in found)


SELECTOR = f"{TASKSET}.data_selector"


@pytest.mark.extension("curricula")
def test_a_selector_that_is_not_there_or_lacks_its_columns(tmp_path):
    found = only_problem(tmp_path, f"{SELECTOR}.selector_type=suffle")
    assert "unknown data_selector 'suffle'; did you mean 'shuffle'?" in found
    hard = f"{SELECTOR}.selector_type=difficulty_based"
    found = only_problem(tmp_path, hard)
    assert found.endswith("give the columns that hold them as data_selector.feature_keys")
    found = only_problem(tmp_path, hard, f"{SELECTOR}.feature_keys=[question, rate]")
    assert "has no column 'rate' (data_selector.feature_keys)" in found


def test_auxiliary_models_are_looked_at(tmp_path):
    key = "explorer.auxiliary_models"
    found = only_problem(tmp_path, f"{key}=[{{model_path: /nowhere/x}}]")
    assert found.startswith(f"{key}[0].model_path (/nowhere/x) is not a file or folder here")
    served = "model_path: m, base_urls: ['http://127.0.0.1:9/v1']"
    assert problems_of(tmp_path, f"{key}=[{{engine_type: external, {served}}}]") == []
    found = only_problem(tmp_path, f"{key}=[{{engine_type: external, model_path: m}}]")
    assert found.startswith(f"{key}[0].base_urls is []: expected the server's address")
    found = only_problem(tmp_path, f"{key}=[{{engine_type: tinker, model_path: model}}]")
    assert found.startswith(f"{key}[0].engine_type (tinker) is not supported yet")
    found = only_problem(tmp_path, "explorer.rollout_model.engine_type=external")
    assert "(external) is for explorer.auxiliary_models alone" in found


def test_a_limit_of_explore_steps_needs_the_trainers_batch(tmp_path):
    dapo = ("algorithm.algorithm_type=dapo", "algorithm.repeat_times=2")
    key = "algorithm.advantage_fn_args.max_resample_times"
    assert problems_of(tmp_path, *dapo, f"{key}=3") == []
    replay = "buffer.trainer_input.experience_buffer.replay_buffer.enable=true"
    alone = [(f"mode={mode}", f"mode {mode}") for mode in ("explore", "train", "serve")]
    for other, why in (*alone, (replay, "a replay buffer")):
        found = problems_of(tmp_path, *dapo, f"{key}=3", other)
        assert any(f"{key} is 3, and has no effect with {why}" in one for one in found), found


def test_a_teacher_must_be_there_and_score_what_is_sampled(tmp_path):
    key, kl = "explorer.auxiliary_models", "algorithm.teacher_kl_fn=k2"
    empty = f"{key} is empty: the algorithm needs a teacher, the first of them"
    assert only_problem(tmp_path, kl) == empty
    assert only_problem(tmp_path, "algorithm.algorithm_type=on_policy_distill") == empty
    served = "engine_type: external, model_path: m, base_urls: ['http://127.0.0.1:9/v1']"
    found = only_problem(tmp_path, kl, f"{key}=[{{{served}}}]")
    assert found.startswith(f"{key}[0].engine_type is external: the OpenAI API scores no given")
    short = f"{key}=[{{model_path: {tmp_path / 'model'}, max_model_len: 16}}]"
    found = only_problem(tmp_path, kl, short, "model.max_model_len=96")
    assert found.startswith(f"{key}[0].max_model_len is 16: expected at least 96")
    assert problems_of(tmp_path, short, "model.max_model_len=96") == []


def test_bench_needs_something_to_measure(tmp_path):
    assert "bench has nothing to measure" in only_problem(tmp_path, "mode=bench")


def test_long_lengths_are_a_note(tmp_path):
    write_model(tmp_path / "model", max_positions=100)
    (plan,) = make_plans(config_of(tmp_path, values(tmp_path)))
    assert any("longer than the 100 positions" in note for note in plan.notes)


@pytest.mark.parametrize(
    "facts",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 100},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 100}},
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}, "max_positions": 100},
    ],
)
def test_lengths_that_change_the_rotary_embeddings_of_other_rows_are_refused(facts, tmp_path):
    path = write_model(tmp_path / "long", **{"max_positions": 200} | facts)
    longer = f"model.model_path={path}", "model.max_model_len=128"
    why = "model.max_model_len is 128: expected at most 100, since a longer sequence changes"
    assert only_problem(tmp_path, *longer).startswith(why)
    assert problems_of(tmp_path, f"model.model_path={path}", "model.max_model_len=100") == []


@pytest.mark.extension("sql")
def test_lengths_that_change_rotary_embeddings_are_explored(tmp_path):
    rope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 100}
    path = write_model(tmp_path / "long", max_positions=200, **rope)
    longer = f"model.model_path={path}", "model.max_model_len=128"
    assert problems_of(tmp_path, *longer, "mode=explore") == []
    noted = "model.max_model_len (128): up to 100 each reply is by its own tokens alone; a longer"
    for length, count in ((128, 1), (100, 0)):
        given = f"model.model_path={path}", f"model.max_model_len={length}", "mode=explore"
        (plan,) = make_plans(config_of(tmp_path, values(tmp_path), *given))
        assert len([note for note in plan.notes if note.startswith(noted)]) == count


def test_columns_of_an_array_and_of_a_saved_data_set(tmp_path):
    array = tmp_path / "tasks.json"
    array.write_text(json.dumps([{"question": "q", "answer": "a"}] * 16))
    (plan,) = make_plans(config_of(tmp_path, values(tmp_path), f"{TASKSET}.path={array}"))
    assert plan.steps.explore == 2


@pytest.mark.extension("http")
@pytest.mark.extension("sql")
def test_a_server_for_other_machines_needs_a_key(tmp_path):
    problem = only_problem(tmp_path, "mode=serve", "explorer.listen_address=10.0.0.1")
    assert problem.startswith("explorer.listen_address is 10.0.0.1: other machines need")


@pytest.mark.extension("data_juicer")
@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            "experience_pipeline",
            "experience operator 'reward_filtr'; did you mean 'reward_filter'?",
        ),
        ("task_pipeline", "task operator 'reward_filtr'. Known: data_juicer"),
    ],
)
def test_an_operator_that_is_not_there_is_named(tmp_path, pipeline, message):
    key = f"data_processor.{pipeline}"
    found = only_problem(tmp_path, f"{key}={{operators: [{{name: reward_filtr}}]}}")
    assert found.startswith(f"{key}.operators[0]: unknown {message}")


@pytest.mark.parametrize("sets", ["tasksets", "eval_tasksets"])
def test_two_tasksets_of_one_name(tmp_path, sets):
    tree = values(tmp_path)
    inputs = tree["buffer"]["explorer_input"]
    one = {**inputs["taskset"], "name": "sums"}
    if sets == "tasksets":
        del inputs["taskset"]
    inputs[sets] = [one, one]
    problems = draft(config_of(tmp_path, tree)).problems
    assert [str(problem) for problem in problems] == [
        f"buffer.explorer_input.{sets}[1].name is 'sums', which is that of "
        f"buffer.explorer_input.{sets}[0] too: expected its own"
    ]


@pytest.mark.parametrize("name", ["math/500", "2024"])
def test_an_evaluation_taskset_whose_name_ids_and_metrics_cannot_hold(tmp_path, name):
    tree = values(tmp_path)
    inputs = tree["buffer"]["explorer_input"]
    inputs["taskset"]["name"] = name  # no name of a metric
    assert draft(config_of(tmp_path, tree)).problems == []
    inputs["eval_tasksets"] = [{**inputs["taskset"], "name": name}]
    [problem] = draft(config_of(tmp_path, tree)).problems
    assert str(problem) == (
        f"buffer.explorer_input.eval_tasksets[0].name is '{name}': expected a name without '/' "
        "that is not only digits, since names of metrics and ids of rollouts contain it"
    )


@pytest.mark.extension("replay")
@pytest.mark.parametrize(
    ("value", "says"),
    [(-1, "at least 0"), ("x", "a number"), (float("nan"), "a number")],
)
def test_a_priority_of_no_use(tmp_path, value, says):
    tree = values(tmp_path)
    replay = {"enable": True, "priority_fn_args": {"decay": value}}
    tree["buffer"]["trainer_input"] = {"experience_buffer": {"replay_buffer": replay}}
    problems = draft(config_of(tmp_path, tree)).problems
    (found,) = [str(problem) for problem in problems]
    assert found.endswith(f"priority_fn 'linear_decay': decay is {value!r}: expected {says}")


@pytest.mark.extension("sql")
def test_a_database_of_another_kind_is_refused(tmp_path):
    key = "buffer.trainer_input.experience_buffer"
    found = only_problem(tmp_path, f"{key}.storage_type=sql", f"{key}.path=mysql://me@host/b")
    assert found.startswith(f"{key}.path is of the kind mysql: expected sqlite:///<file>")


@pytest.mark.parametrize("stop", ["", "x" * 1025])
def test_a_stop_string_that_no_engine_takes(tmp_path, stop):
    found = only_problem(tmp_path, f"{TASKSET}.rollout_args.stop=['{stop}']")
    assert found.startswith(f"{TASKSET}.rollout_args.stop has '{stop[:60]}")
    assert found.endswith(": expected texts of 1 to 1024 characters")


@pytest.mark.parametrize(("vocab", "given"), [({}, 512), ({}, -1), ({"vocab_size": None}, -1)])
def test_a_stop_id_that_the_model_does_not_have(tmp_path, vocab, given):
    tree = values(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 512} | vocab))
    tree["buffer"]["explorer_input"]["taskset"]["rollout_args"] = {"stop_token_ids": [511, given]}
    (found,) = map(str, draft(config_of(tmp_path, tree)).problems)
    most = "" if vocab else " to 511, the model's vocabulary"
    key = f"{TASKSET}.rollout_args.stop_token_ids"
    assert found == f"{key} has {given}: expected ids from 0{most}"


@pytest.mark.extension("sql")
def test_a_trainer_that_begins_in_a_folder_of_its_own_would_wait_for_ever(tmp_path):
    words = ("mode=train", "continue_from_checkpoint=false")
    told = only_problem(tmp_path, *words)
    assert told.startswith("continue_from_checkpoint is false: expected true in mode train")
    store = "buffer.trainer_input.experience_buffer"
    assert problems_of(tmp_path, *words, f"{store}.path=sqlite:///{tmp_path}/x.db") == []
    assert problems_of(tmp_path, "mode=explore", "continue_from_checkpoint=false") == []


def test_an_adapter_to_go_on_from_is_looked_at_first(tmp_path):
    def said(*more: str) -> list[str]:
        given = ", ".join((f"path: {folder}", *more))
        return problems_of(tmp_path, f"model.lora_configs=[{{{given}}}]")

    folder = tmp_path / "adaptor"
    (found,) = said()
    assert found.startswith(f"model.lora_configs[0].path ({folder}) is not a file or folder here")
    folder.mkdir()
    config = folder / "adapter_config.json"
    (found,) = said()
    assert "holds no adapter_config.json: expected the folder of an adapter that peft" in found
    config.write_text("{}")
    save_file({"a": torch.zeros(2)}, folder / "adapter_model.safetensors")
    (found,) = said()
    assert "is an adapter of type None: expected LORA" in found
    config.write_text(json.dumps({"peft_type": "LORA", "modules_to_save": ["lm_head"]}))
    (found,) = said()
    assert "also trains whole modules (modules_to_save in adapter_config.json)" in found
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert said() == []
    (found,) = said("lora_rank: 4", "use_dora: true")
    assert found.startswith("model.lora_configs[0].lora_rank is given together with path")
    assert found.endswith("leave out lora_rank, use_dora")
    apart = problems_of(tmp_path, f"model.lora_configs=[{{path: {folder}}}]", "mode=explore")
    assert any("path is not supported with mode: explore" in problem for problem in apart)
    stages = "stages=[{stage_name: a}, {stage_name: b}]"
    told = problems_of(tmp_path, f"model.lora_configs=[{{path: {folder}}}]", stages)
    assert (
        len(told) == 1 and "stage b: model.lora_configs[0].path is for the first stage" in told[0]
    )


@pytest.mark.parametrize("key", ["project", "group", "name"])
@pytest.mark.parametrize("value", ["../x", "a/../../x", "/x"])
def test_a_name_stays_in_the_folder_above_it(tmp_path: Path, key: str, value: str) -> None:
    config = config_of(tmp_path, values(tmp_path), f"{key}={value}")
    [problem] = draft(config).problems
    assert str(problem).startswith(f"{key} is '{value}': expected the name of a folder below")


def test_the_next_free_name_is_counted(tmp_path: Path) -> None:
    def free(*overrides: str) -> str:
        return free_name(config_of(tmp_path, values(tmp_path), *overrides))

    job = tmp_path / "out/p/n"
    assert free() == "n"
    for name, expected in (("n", "n_2"), ("n_2", "n_3"), ("n_4", "n_3")):
        (job.with_name(name) / "log").mkdir(parents=True)
        assert free() == free("continue_from_checkpoint=false") == expected
    job.with_name("n_3").mkdir()
    assert free() == "n_3"  # nothing lies in it
    assert free("name=n_2") == "n_2_2"
    (job / "deep/log").mkdir(parents=True)
    assert free("name=n/deep") == "n/deep_2"


MADE_REWARD = """from trireme import reward
@reward("made_reward")
def made_reward(task, answer, *, most: int = 400):
    return float(len(answer) <= most)
"""


def test_a_reward_may_be_a_mapping_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "made_reward.py").write_text(MADE_REWARD)
    tree: Any = values(tmp_path) | {"plugins": ["made_reward.py"]}
    del tree["buffer"]["explorer_input"]["taskset"]["default_workflow_type"]
    for place in ("explorer_input", "explorer_input.taskset"):
        key = f"buffer.{place}.default_reward_fn_type"
        seven = f"{key}={{name: made_reward, most: 7}}"
        made = draft(config_of(tmp_path, tree, seven))
        assert made.problems == []
        [used] = used_tasksets(made.plans[0].config)
        assert (used.reward, used.reward_args) == ("made_reward", {"most": 7})
        assert used.workflow == "simple_workflow"
        weighted = f"{key}={{name: made_reward, most: 7, weight: 0.5}}"
        assert draft(config_of(tmp_path, tree, weighted)).problems == []
        own = "buffer.explorer_input.taskset.reward_fn_args={most: 9}"
        assert used_tasksets(config_of(tmp_path, tree, seven, own))[0].reward_args == {"most": 9}
        for given, expected in (("{most: 7}", "name"), ("{name: made_rewar}", "made_reward")):
            [problem, *_] = draft(config_of(tmp_path, tree, f"{key}={given}")).problems
            assert expected in str(problem)


def test_a_reward_beside_a_workflow_that_sets_its_own_is_noted(tmp_path: Path) -> None:
    (tmp_path / "own_flow.py").write_text(
        "from trireme import workflow\nfrom trireme.workflows.classes import Workflow\n\n\n"
        "@workflow('own_flow')\nasync def own_flow(task, model):\n"
        "    return model.experiences(reward=1.0)\n\n\n"
        "@workflow('asking_flow')\n"
        "async def asking_flow(task, model):\n"
        "    return model.experiences(reward=task.reward_fn is None)\n\n\n"
        "class Own(Workflow):\n"
        "    def run(self):\n        return []\n\n\n"
        "class Asking(Own):\n"
        "    def run(self):\n        return [self.task.reward_fn]\n"
    )
    tree: Any = values(tmp_path) | {"plugins": ["own_flow.py"]}
    taskset = tree["buffer"]["explorer_input"]["taskset"]
    for reward in ("math_reward", ["math_reward", "format_reward"]):
        taskset |= {"default_workflow_type": "own_flow", "default_reward_fn_type": reward}
        made = draft(config_of(tmp_path, tree))
        assert made.problems == []
        [note] = [note for note in made.plans[0].notes if "own_flow" in note]
        assert note == (
            f"buffer.explorer_input.taskset.default_reward_fn_type ({reward}): the workflow "
            "'own_flow' sets its rewards itself, and asks this one only if it calls task.reward_fn"
        )
        taskset["default_workflow_type"] = "asking_flow"
        made = draft(config_of(tmp_path, tree))
        assert made.problems == [] and not [n for n in made.plans[0].notes if "asking_flow" in n]
    for cls, noted in (("Own", True), ("Asking", False)):
        taskset["default_workflow_type"] = f"own_flow:{cls}"
        [plan] = draft(config_of(tmp_path, tree)).plans
        assert any("sets its rewards itself" in note for note in plan.notes) == noted


def test_a_tab_in_the_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tab.yaml"
    path.write_text("name: x\nmodel:\n\tmodel_path: y\n")
    with pytest.raises(ConfigError, match="as YAML: line 3 is indented with a tab: expected spac"):
        load_config(path)
    path.write_text("name: x\nmodel: [\n")
    with pytest.raises(ConfigError, match=r"as YAML: line 3, column 1: (did not find|expected)"):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.csv", b"question,answer\n", "it has names of columns and no rows"),
        ("b.csv", b"question,answer\ncaf\xe9,2\n", "line 2 is not UTF-8 text (byte 0xe9): save"),
        ("c.jsonl", b'{"question": "caf\xe9"}\n', "line 1 is not UTF-8 text (byte 0xe9): save it"),
    ],
)
def test_a_file_that_no_reader_takes_says_what_to_do(
    tmp_path: Path, name: str, data: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(data)
    path = f"buffer.explorer_input.taskset.path={tmp_path / name}"
    [problem] = draft(config_of(tmp_path, values(tmp_path), path)).problems
    assert f"has a broken file: {tmp_path / name}: {expected}" in str(problem)


def test_pairs_for_an_algorithm_that_learns_from_rewards_are_noted(tmp_path: Path) -> None:
    row = {"question": "1?", "answer": "1", "chosen": "a", "rejected": "b"}
    data = write_rows(tmp_path / "pairs.jsonl", 32, **row)
    path = f"buffer.explorer_input.taskset.path={data}"
    [plan] = draft(config_of(tmp_path, values(tmp_path), path)).plans
    [note] = [note for note in plan.notes if "chosen" in note]
    assert note.endswith("dpo learns; grpo asks their prompts, and a reward scores the replies")


@pytest.mark.parametrize(
    ("size", "fitting"), [(24, "16 or 32"), (40, "32 or 64"), (8, ""), (64, ""), (31, "16 or 32")]
)
def test_a_batch_that_does_not_divide_an_explore_step_is_noted(
    tmp_path: Path, size: int, fitting: str
) -> None:
    made = draft(config_of(tmp_path, values(tmp_path), f"buffer.train_batch_size={size}"))
    notes = [note for note in made.plans[0].notes if "train_batch_size" in note]
    text = (
        f"buffer.train_batch_size ({size}): a step explores 32 experiences, so that some batches "
        f"mix those of two steps, sampled by different weights; with {fitting} none does"
    )
    assert notes == ([text] if fitting else [])
