import os
import re
from pathlib import Path

import pytest
import typer

from tests.config.made import SEEDS, config_of, values
from trireme.cli.arguments import yaml_and_keys
from trireme.config import ConfigError, load_config
from trireme.config.dialect import replaced


def problems_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize("name", ["gsm8k", "stages", "alfworld"])
def test_every_seed_loads(name):
    load_config(SEEDS / f"{name}.yaml")


def test_the_seeds_own_values_are_read():
    config = load_config(SEEDS / "alfworld.yaml")
    assert config.algorithm.optimizer.lr == 5e-6
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None
    assert taskset.workflow_args == {"max_env_steps": 30}
    assert config.buffer.trainer_input.experience_buffer.replay_buffer.enable is True
    assert config.synchronizer.sync_style == "dynamic_by_explorer"


def test_an_environment_variable_replaces_its_default(monkeypatch):
    monkeypatch.setenv("TRINITY_MODEL_PATH", "/models/mine")
    assert load_config(SEEDS / "gsm8k.yaml").model.model_path == "/models/mine"
    monkeypatch.delenv("TRINITY_MODEL_PATH")
    assert load_config(SEEDS / "gsm8k.yaml").model.model_path == "Qwen/Qwen2.5-1.5B-Instruct"


def test_a_number_in_an_environment_variable_is_a_number(tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "16")
    path = tmp_path / "c.yaml"
    path.write_text("buffer: {batch_size: '${oc.env:SIZE}'}")
    assert load_config(path).buffer.batch_size == 16


def test_a_missing_environment_variable_is_named(tmp_path):
    found = problems_of(tmp_path, "model: {model_path: '${oc.env:NOWHERE}'}")
    assert found == ["model.model_path needs the environment variable NOWHERE, which is not set"]


def test_overrides_go_before_the_file(tmp_path):
    config = config_of(
        tmp_path,
        values(tmp_path),
        "trainer.grad_clip=0.5",
        "algorithm.optimizer.lr=1e-4",
        "explorer.env_vars={A: b}",
        "buffer.explorer_input.taskset.split=test",
    )
    assert config.trainer.grad_clip == 0.5
    assert config.algorithm.optimizer.lr == 1e-4
    assert config.explorer.env_vars == {"A": "b"}
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.split, taskset.default_workflow_type) == ("test", "math_workflow")


def test_overrides_reach_list_items():
    for key in ("eval_tasksets[0]", "eval_tasksets.0"):
        config = load_config(SEEDS / "gsm8k.yaml", [f"buffer.explorer_input.{key}.split=train"])
        assert config.buffer.explorer_input.eval_tasksets[0].split == "train"
    config = load_config(SEEDS / "stages.yaml", ["stages[0].buffer.total_steps=3"])
    assert config.stages[0].buffer is not None
    assert config.stages[0].buffer.total_steps == 3


@pytest.mark.parametrize("name", ["0131", "1e3", "20261129_1530", "12:30", "1.50", "'0131'"])
def test_a_name_of_digits_is_the_text_as_it_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: {name}  # today's\nstages: [{{stage_name: {name}}}]\n")
    config = load_config(path, [f"project={name}"])
    names = (config.name, config.stages[0].stage_name, config.project)
    assert names == (name.strip("'"),) * 3
    assert load_config(path, [f"stages[0].stage_name={name}"]).stages[0].stage_name == names[0]


def test_a_broken_override_says_how_it_is_written(tmp_path):
    found = problems_of(tmp_path, "stages: []", "grad_clip", "stages[4].mode=train", "nope=1")
    assert found[0] == "override 'grad_clip': expected key=value"
    assert found[1] == "stages[4].mode cannot be set: stages is empty"
    assert found[2].startswith("nope is not a known key")


@pytest.mark.parametrize("override", ["~trainer.grad_clip", "~trainer.grad_clip=1"])
def test_hydras_sign_for_a_key_to_delete_is_answered(tmp_path, override):
    """It was taken for the beginning of a key, or for no override."""
    sentence = (
        f"override '{override}': Hydra's ~ deletes no key here: expected the YAML without it, or "
        "trainer.grad_clip=VALUE"
    )
    assert problems_of(tmp_path, "trainer: {grad_clip: 2}", override) == [sentence]
    with pytest.raises(typer.BadParameter, match=re.escape(sentence)):
        yaml_and_keys(None, ["x.yaml", override], None)


def test_an_override_behind_the_end_of_a_list_names_the_last_entry(tmp_path):
    text = "stages: [{stage_name: a}, {stage_name: b}]"
    found = problems_of(tmp_path, text, "stages[2].mode=train")
    assert found == ["stages[2].mode cannot be set: the last entry of stages is [1]"]


def test_all_problems_are_told_at_once(tmp_path):
    text = """
    trainer: {grad_clp: 3, total_steps: abc, save_interval: -1, save_hf_checkpoint: lst}
    algorithm: {repeat_times: 2.5}
    """
    assert problems_of(tmp_path, text) == [
        "trainer.grad_clp is not a known key; did you mean 'trainer.grad_clip'?",
        "trainer.total_steps is 'abc': expected a whole number",
        "trainer.save_interval is -1: expected a number at least 0; 0 saves at the end only",
        "trainer.save_hf_checkpoint is 'lst': expected one of always, never, last; "
        "did you mean 'last'?",
        "algorithm.repeat_times is 2.5: expected a whole number",
    ]


def test_a_known_key_in_the_wrong_section_is_found(tmp_path):
    assert problems_of(tmp_path, "{grad_clip: 2, model: {lr: 1}}") == [
        "grad_clip is not a known key; did you mean 'trainer.grad_clip'?",
        "model.lr is not a known key; did you mean 'algorithm.optimizer.lr'?",
    ]
    (found,) = problems_of(tmp_path, "explorer: {rollout_model: {folder: x}}")
    assert "did you mean" not in found and "known here: name, model_path" in found


def test_a_key_of_the_section_below_is_found(tmp_path):
    text = "buffer: {explorer_input: {eval_tasksets: [{system_prompt: Hi}]}}"
    assert problems_of(tmp_path, text) == [
        "buffer.explorer_input.eval_tasksets[0].system_prompt is not a known key; did you mean "
        "'buffer.explorer_input.eval_tasksets[0].format.system_prompt'?"
    ]


@pytest.mark.extension("swift", "verl")
def test_keys_of_other_trainers_are_answered_with_ours(tmp_path):
    text = """
    algorithm: {num_generations: 8, learning_rate: 1e-6, adv_estimator: grpo, beta: 0.1}
    trainer: {per_device_train_batch_size: 4, device: cuda}
    """
    assert problems_of(tmp_path, text) == [
        f"{key} is not a known key; {hint}"
        for key, hint in {
            "algorithm.num_generations": "did you mean 'algorithm.repeat_times'?",
            "algorithm.learning_rate": "did you mean 'algorithm.optimizer.lr'?",
            "algorithm.adv_estimator": "did you mean 'algorithm.algorithm_type'?",
            "algorithm.beta": "did you mean 'algorithm.kl_loss_fn_args.kl_coef'?",
            "trainer.per_device_train_batch_size": (
                "use buffer.batch_size (tasks) and buffer.train_batch_size"
            ),
            "trainer.device": (
                "no key replaces it: a GPU is used where there is one, and none with "
                "CUDA_VISIBLE_DEVICES="
            ),
        }.items()
    ]


TRL_PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "trl.md"
VALUES = {
    *("GRPOConfig", "GRPOTrainer", "LoraConfig", "on_log", "on_step_end", "on_train_end"),
    *("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"),
    *("token_truncate", "sequence_truncate", "token_mask", "sequence_mask"),
}
"""Names in the first column of its table that are no arguments."""


@pytest.mark.extension("swift")
def test_every_argument_on_the_page_of_trl_is_answered(tmp_path: Path) -> None:
    """The page says so; and those of `trl grpo --config`."""
    table = TRL_PAGE.read_text().partition("## Key by key")[2].partition("## Where")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    names = {name for cell in cells for name in re.findall(r"`(\w+)[=(`]", cell)} - VALUES
    names |= {"model_name_or_path", "dataset_name", "dataset_train_split", "use_peft", "optim"}
    assert len(names) > 100
    assert [name for name in sorted(names) if not replaced(name)] == []


@pytest.mark.extension("swift", "verl")
@pytest.mark.parametrize(
    "name",
    [
        "chat_template_kwargs",
        "delta",
        "entropy_coef",
        "environment_factory",
        "generation_kwargs",
        "log_completions",
        "mask_truncated_completions",
        "max_tool_calling_iterations",
        "off_policy_mask_threshold",
        "rollout_func",
        "sapo_temperature_pos",
        "scale_rewards",
        "shuffle_dataset",
        "top_entropy_quantile",
        "train_dataset",
        "use_vllm",
        "use_bias_correction_kl",
        "vespo_k_pos",
        "vllm_importance_sampling_mode",
        "vllm_max_model_length",
        "bf16",
        "gamma",
        "lam",
        "use_kl_in_reward",
        "filter_groups",
        "use_kl_loss",
        "kl_loss_coef",
        "entropy_coeff",
        "ppo_epochs",
        "clip_ratio",
        "clip_ratio_c",
        "logger",
        "default_local_dir",
        "norm_adv_by_std_in_grpo",
    ],
)
def test_an_option_of_trl_or_verl_is_answered_with_its_key(tmp_path: Path, name: str) -> None:
    [said] = problems_of(tmp_path, f"algorithm: {{{name}: 1}}")
    assert re.search(r"is not a known key; (did you mean '|use |no key replaces it: )", said)


def test_plug_ins_data_and_models_have_one_rule(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    for name in ("data/a.jsonl", "model/config.json", "mine.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (home / "x.yaml").write_text(
        "plugins: [mine.py]\nmodel: {model_path: model}\n"
        "buffer: {explorer_input: {taskset: {path: data/a.jsonl}, eval_tasksets: [{path: b/c}]}}"
    )

    def paths():
        config = load_config(home / "x.yaml")
        inputs = config.buffer.explorer_input
        assert inputs.taskset is not None
        return (*config.plugins, config.model.model_path, inputs.taskset.path)

    here.mkdir()
    monkeypatch.chdir(here)
    beside = tuple(str(home / name) for name in ("mine.py", "model", "data/a.jsonl"))
    assert paths() == beside
    (here / "model").mkdir()
    assert paths() == beside  # what lies beside the YAML goes before
    typed = load_config(home / "x.yaml", ["model.model_path=model"])
    assert typed.model.model_path == "model"  # as a shell's user expects it
    assert load_config(home / "x.yaml").buffer.explorer_input.eval_tasksets[0].path == "b/c"


def test_what_trinity_s_files_say_is_taken(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        "trainer: {max_checkpoints_to_keep: 0}\n"
        "model: {lora_configs: [{exclude_modules: [lm_head]}]}"
    )
    config = load_config(file)
    assert config.trainer.max_checkpoints_to_keep == 0
    [lora] = config.model.lora_configs or []
    assert lora.exclude_modules == ["lm_head"]


def test_an_unknown_key_in_a_list_or_a_stage_is_named_in_full(tmp_path):
    text = """
    buffer: {explorer_input: {eval_tasksets: [{nme: x}]}}
    stages: [{stage_name: a, buffer: {train_batch: 3}}]
    """
    found = problems_of(tmp_path, text)
    assert found[0].startswith("buffer.explorer_input.eval_tasksets[0].nme is not a known key")
    assert "did you mean 'stages[0].buffer.train_batch_size'?" in found[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("explorer: 3", "explorer is 3: expected a section with keys of its own, such as name, "),
        ("algorithm: grpo", "expected a section with keys of its own, such as algorithm_type, re"),
        (
            "model:\n  model_path:x",
            "with keys of its own; the colon of a key has a space behind it: 'model_path: x'",
        ),
        ("explorer: {max_timeout: 30m}", "max_timeout is '30m': expected a number of seconds"),
        (
            "explorer: {dynamic_timeout: 3m}",
            "is '3m': expected a section with keys of its own, such",
        ),
        ("algorithm: {kl_loss_fn: off}", "is False: expected text; 'none' leaves it out"),
        ("algorithm: {kl_loss_fn_args: 0}", "is 0: expected a section with keys of its own"),
        ("stages: 3", "stages is 3: expected a list"),
        ("stages: {a: {mode: train}}", "expected a list, each entry of which begins with '- '"),
        (
            "buffer: {explorer_input: {taskset: [{name: a_long_name, path: /with/a/long/path}]}}",
            "is [{'name': 'a_long_name', 'path': '/with/a/long/path'}]: expected a section",
        ),
        ("mode: boht", "did you mean 'both'?"),
        ("trainer: {use_dynamic_bsz: 3}", "is 3: expected true or false"),
        ("trainer: {grad_clip: true}", "is True: expected a number"),
        ("buffer: {batch_size: }", "buffer.batch_size is empty: expected a whole number"),
        ("algorithm: {optimizer: {lr: .inf}}", "algorithm.optimizer.lr is inf: expected a number"),
        ("model: {top_p: 1.5}", "expected a number above 0 and at most 1"),
        ("explorer: {runner_per_model: 0}", "is 0: expected a number at least 1"),
        ("explorer: {runner_per_model: few}", "is 'few': expected a whole number"),
        ("trainer: {profile: {steps: [0]}}", "steps[0] is 0: expected a number at least 1"),
    ],
)
def test_a_wrong_type_or_range_says_what_is_allowed(tmp_path, text, expected):
    assert expected in problems_of(tmp_path, text)[0]


@pytest.mark.parametrize("value", [0, -1])
def test_an_interval_that_means_never_elsewhere_names_the_way_to_evaluate_nothing(tmp_path, value):
    (said,) = problems_of(tmp_path, f"explorer: {{eval_interval: {value}}}")
    assert said.startswith(f"explorer.eval_interval is {value}: expected a number at least 1; to")
    assert "evaluate nothing, leave out buffer.explorer_input.eval_tasksets" in said


def test_a_number_past_the_other_end_of_a_range_gets_no_such_advice(tmp_path):
    (said,) = problems_of(tmp_path, "trainer: {total_steps: 0}")
    assert said.endswith("; without it the data ends the run, see buffer.total_epochs")
    (said,) = problems_of(tmp_path, "model: {top_p: 1.5}")
    assert said.endswith("at most 1")


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("model: {path: x}", "model.model_path"),
        ("monitor: {type: wandb}", "monitor.monitor_type"),
        ("stages: [{name: x}]", "stages[0].stage_name"),
        ("explorer: {rollout_model: {path: x}}", "explorer.rollout_model.model_path"),
    ],
)
def test_the_end_of_a_key_is_taken_for_that_key(tmp_path, text, near):
    (said,) = problems_of(tmp_path, text)
    assert said.endswith(f"is not a known key; did you mean '{near}'?")


@pytest.mark.extension("swift")
def test_another_system_s_keys_are_found_in_a_section_of_any_name(tmp_path):
    text = "{training_args: {learning_rate: 1, x: 2}, explorerr: {learning_rate: 1}}"
    assert problems_of(tmp_path, text) == [
        "training_args.learning_rate is not a known key; did you mean 'algorithm.optimizer.lr'?",
        "explorerr is not a known key; did you mean 'explorer'?",
    ]


def test_a_broken_yaml_is_told_by_its_line(tmp_path):
    (said,) = problems_of(tmp_path, "mode: both\nmode: train\n")
    assert said.endswith("as YAML: line 2, column 1: found duplicate key mode while constructing a "
                         "mapping that begins in line 1")  # fmt: skip
    (said,) = problems_of(tmp_path, "model:\n  model_path: x\n max_model_len: 3\n")
    # libyaml's words, or those of PyYAML alone, which omegaconf before 2.4 calls
    cause = "(did not find expected key|expected <block end>.*) while parsing"
    assert re.search(f"as YAML: line 3, column 2: {cause}", said)


def test_an_empty_section_holds_its_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("explorer:\nstages:\nbuffer: {explorer_input: {taskset: {workflow_args: }}}")
    config = load_config(path)
    assert config.explorer.max_timeout == 1800
    assert config.stages == []


def test_what_is_written_in_another_way_is_converted(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "{mode: BOTH, trainer: {use_dynamic_bsz: 'FALSE', grad_clip: '2'}, explorer: {env_vars: "
        "{1: 2}, runner_per_model: '4'}, model: {lora_configs: [{target_modules: [q, 3]}]}, "
        "buffer: {explorer_input: {taskset: {workflow_args: {path: 3, 4: {5: null}}}}}}"
    )
    config = load_config(path)
    assert (config.mode, config.trainer.use_dynamic_bsz, config.trainer.grad_clip) == (
        "both",
        False,
        2.0,
    )
    assert (config.explorer.env_vars, config.explorer.runner_per_model) == ({"1": "2"}, 4)
    [lora] = config.model.lora_configs or []
    assert lora.target_modules == ["q", "3"]
    assert config.buffer.explorer_input.taskset is not None
    args = config.buffer.explorer_input.taskset.workflow_args
    assert args == {"path": 3, "4": {5: None}}


def test_what_is_no_yaml_is_told_with_its_file(tmp_path):
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "none.yaml")
    assert "cannot be read as YAML" in problems_of(tmp_path, "a: [1")[0]
    assert "holds a list" in problems_of(tmp_path, "- 1")[0]


def test_plugins_are_found_beside_the_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    path = tmp_path / "c.yaml"
    path.write_text("plugins: [mine.py]")
    monkeypatch.chdir("/")
    assert load_config(path).plugins == [str(tmp_path / "mine.py")]
    found = problems_of(tmp_path, "plugins: [yours.py]")
    assert found[0].startswith("plugins is 'yours.py': expected a file or folder")
    found = problems_of(tmp_path, "plugins: [mien.py]")
    assert found[0].endswith("or here; did you mean 'mine.py'?")
    with pytest.raises(ConfigError, match=r"no configuration file .*did you mean '.*/c\.yaml'\?"):
        load_config(tmp_path / "cc.yaml")


def test_a_run_without_names_has_those_of_its_file(tmp_path):
    folder = tmp_path / "my_project"
    folder.mkdir()
    (folder / "words.yaml").write_text("seed: 1\n")
    config = load_config(folder / "words.yaml")
    assert (config.project, config.name) == ("my_project", "words")
    config = load_config(folder / "words.yaml", ["name=other"])
    assert (config.project, config.name) == ("my_project", "other")


@pytest.mark.extension("trinity")
def test_a_variable_of_another_system_stands_for_ours_and_the_reverse(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("project: '${oc.env:TRIREME_A,none}'\nname: '${oc.env:TRINITY_A,none}'")
    names = [(None, "theirs", ("theirs", "theirs")), ("ours", None, ("ours", "ours"))]
    for ours, theirs, expected in [*names, ("ours", "theirs", ("ours", "theirs"))]:
        for name, value in (("TRIREME_A", ours), ("TRINITY_A", theirs)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        config = load_config(path)
        assert (config.project, config.name) == expected
        assert (os.environ.get("TRIREME_A"), os.environ.get("TRINITY_A")) == (ours, theirs)


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\{'name': 'a'\} is no path: expected that of a YAML"):
        load_config({"name": "a"})  # type: ignore[arg-type]
