"""Flags with ms-swift's names become the keys of the YAML; a YAML is a plain word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trireme.algorithms.recipes import get_recipe
from trireme.algorithms.sample import own_share
from trireme.cli.main import app
from trireme.config import load_config
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.swift import flag_names
from trireme.ext.swift.flag_names import INPUT
from trireme.files import write_jsonl
from trireme.registry import RM_PLUGINS
from trireme.rewards.grouped import Judge

YAML = """
buffer:
  explorer_input:
    taskset: {path: tasks.jsonl}
    eval_tasksets: [{path: a.jsonl}, {path: b.jsonl}]
"""
DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "migrate" / "ms_swift.md", DOCS / "zh" / "migrate" / "ms_swift.md")
DOCUMENTED = [
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop_words",
    "max_completion_length",
    "max_length",
    "truncation_strategy",
    "beta",
    "system",
    "steps_per_generation",
    "generation_batch_size",
    "use_vllm",
    "vllm_mode",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_base_url",
    "vllm_server_timeout",
    "vllm_server_group_port",
    "vllm_server_pass_dataset",
    "async_generate",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_data_parallel_size",
    "vllm_max_model_len",
    "vllm_enable_prefix_caching",
    "vllm_enable_lora",
    "multi_turn_scheduler",
    "max_turns",
    "completion_length_limit_scope",
    "use_gym_env",
    "gym_env",
    "loss_scale",
    "reward_funcs",
    "reward_weights",
    "reward_model",
    "reward_model_plugin",
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "tau_pos",
    "tau_neg",
    "real_tau",
    "advantage_estimator",
    "scale_rewards",
    "kl_in_reward",
    "dynamic_sample",
    "max_resample_times",
    "overlong_filter",
    "soft_max_length",
    "soft_cache_length",
    "log_completions",
    "log_entropy",
    "top_entropy_quantile",
    "dataset_shuffle",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
    "rollout_importance_sampling_mode",
    "rollout_importance_sampling_threshold",
    "log_rollout_offpolicy_metrics",
    "off_policy_sequence_mask_delta",
    "cosine_min_len_value_wrong",
    "cosine_max_len_value_wrong",
    "cosine_min_len_value_correct",
    "cosine_max_len_value_correct",
    "cosine_max_len",
    "repetition_n_grams",
    "repetition_max_penalty",
    "teacher_model",
    "teacher_kl_coef",
    "advantage_reweight",
    "sdar_loss_coef",
    "vllm_use_async_engine",
    "use_async_engine",
    "vllm_max_lora_rank",
    "sleep_level",
    "offload_model",
    "offload_optimizer",
    "move_model_batches",
    "enable_flattened_weight_sync",
    "context_manager",
    "chord_mu_peak",
    "fipo_decay_rate",
    "external_plugins",
    "multi_turns",
]
"""Flags that ms-swift's documents on GRPO and on several turns name."""


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `trireme check` with these words; the configuration that it got, or what it said."""
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "plugin.py").touch()
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr("trireme.cli.check.check", lambda *given, **_: seen.append(given) or 0)

    def call(*words: str) -> Any:
        done = CliRunner().invoke(app, ["check", *words])
        if not seen:
            return " ".join(done.output.split())
        path, given = seen.pop()
        return load_config(path, given), done.output

    return call


@pytest.mark.parametrize("at", ["taskset", "eval_tasksets[1]"])
def test_a_scheduler_is_refused_where_a_taskset_names_a_workflow_that_none_leads(
    keys: Any, tmp_path: Path, at: str
) -> None:
    tree = yaml.safe_load(YAML)
    inputs = tree["buffer"]["explorer_input"]
    own = inputs["taskset"] if at == "taskset" else inputs["eval_tasksets"][1]
    flags = ("--multi_turn_scheduler", "math_tip_trick")
    for name in ("multi_turn_scheduler", "my_file:my_scheduled"):
        own["default_workflow_type"] = name
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
        config, _ = keys("own.yaml", *flags)
        assert config.buffer.explorer_input.default_workflow_type == "multi_turn_scheduler"
    own["default_workflow_type"] = "math_workflow"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    assert (
        f"--multi_turn_scheduler math_tip_trick: {INPUT}.{at}.default_workflow_type is "
        "math_workflow, whose turns no scheduler decides: expected multi_turn_scheduler there, or "
        "nothing"
    ) in keys("own.yaml", *flags)


def test_flags_reach_every_taskset(keys: Any, tmp_path: Path) -> None:
    config, said = keys(
        *("run.yaml", "--multi_turn_scheduler", "math_tip_trick", "--max_turns", "3"),
        *("--loss_scale=last_round", "--reward_funcs", "accuracy", "format"),
        *("--reward_weights", "1", "0.5", "--external_plugins", "plugin.py", "seed=7"),
        *("--vllm_server_host", "127.0.0.1", "10.0.0.2", "--vllm_server_port", "8000", "8001"),
        *("--num_generations", "8", "--top_k", "-1", "--vllm_mode", "server"),
        *("--vllm_gpu_memory_utilization", "0.5"),
    )
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
    assert config.plugins == [str(tmp_path / "plugin.py")]
    engine = config.explorer.rollout_model
    assert engine.engine_type == "remote"
    assert engine.base_urls == ["http://127.0.0.1:8000", "http://10.0.0.2:8001"]
    assert engine.gpu_memory_utilization == 0.5
    assert (config.seed, config.algorithm.repeat_times, config.model.top_k) == (7, 8, -1)
    assert "--vllm_mode has no effect here" in said


def test_a_list_behind_one_flag_ends_where_the_yaml_or_a_key_begins(keys: Any) -> None:
    for words in (("accuracy", "format", "run.yaml"), ("accuracy", "format", "seed=1", "run.yaml")):
        config, _ = keys("--reward_funcs", *words)
        assert config.buffer.explorer_input.taskset.reward_fn_args == {
            "funcs": ["accuracy", "format"]
        }


@pytest.mark.parametrize(
    "words",
    [
        "run.yaml --bf16 --sync_ref_model --num_generations 4",
        "run.yaml --num_generations 4 --sync_ref_model --bf16",
        "--num_generations 4 --bf16 --sync_ref_model run.yaml",
        "--sync_ref_model --bf16 algorithm.repeat_times=4 run.yaml",
    ],
)
def test_a_switch_needs_no_value(keys: Any, words: str) -> None:
    config, said = keys(*words.split())
    assert (config.algorithm.sync_ref_model, config.algorithm.repeat_times) == (True, 4)
    assert "--bf16 has no effect here" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run.yaml", "--trainer.grad_clip", "0.5"), "as KEY=VALUE: trainer.grad_clip=0.5"),
        (("run.yaml", "--trainer.grad_clip=0.5"), "as KEY=VALUE: trainer.grad_clip=0.5"),
        (
            ("run.yaml", "--num_genrations", "4"),
            "no such option: --num_genrations; did you mean --num_",
        ),
        (
            ("run.yaml", "--kl_in_reward", "true"),
            "no effect by itself: expected --beta 0.04 with it",
        ),
        (("run.yaml", "--kl_in_reward", "maybe"), "maybe: expected one of true, false"),
        (
            ("run.yaml", "--num_iterations", "2", "--max_steps", "5"),
            "--max_steps 5 counts optimizer steps",
        ),
        (("run.yaml", "--beta", "low"), "--beta low: expected a number"),
        (("run.yaml", "--loss_type", "dpo"), "--loss_type dpo: expected one of grpo, bnpo"),
        (
            ("run.yaml", *["--importance_sampling_level", "sequence", "--loss_type", "cispo"]),
            "--loss_type cispo and --importance_sampling_level sequence both set",
        ),
        (
            ("run.yaml", *["--advantage_estimator", "rloo", "--scale_rewards", "gdpo"]),
            "--advantage_estimator rloo and --scale_rewards gdpo both set algorithm.advantage_fn",
        ),
        (("run.yaml", "--max_turns", "two"), "--max_turns two: expected a whole number"),
        (("run.yaml", "--reward_funcs"), "--reward_funcs needs a value"),
        (("run.yaml", "--beta", "--max_turns", "2"), "--beta needs a value"),
        (("run.yaml", "seed"), "seed: expected KEY=VALUE, or a YAML"),
        (("run.yaml", "other.yaml"), "other.yaml: expected KEY=VALUE; the YAML is run.yaml"),
        (("run.yaml", "--vllm_server_port", "1", "2"), "--vllm_server_port has 2 values"),
        ((), "expected a YAML: trireme check my.yaml"),
        (("run.yaml", "--rewards", "x"), "no such option: --rewards. Keys of the YAML are set as"),
        (("run.yaml", "--lr", "1e-5"), "KEY=VALUE, such as algorithm.optimizer.lr=1e-5"),
    ],
)
def test_what_a_word_should_have_been_is_said(
    keys: Any, words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in re.sub(r"[│╭╮╰╯─]", "", keys(*words))


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_pages_on_ms_swift_list_every_flag(page: Path) -> None:
    listed = set(re.findall(r"`--([\w*]+)`", page.read_text(encoding="utf-8")))
    named = flag_names
    tables = (named.KEYS, named.IDLE, named.ELSEWHERE, named.TASKSETS, named.TRANSLATED)
    assert {name for table in tables for name in table} - listed == set()


def test_flags_of_ms_swifts_own_scripts_and_of_earlier_versions_are_taken(keys: Any) -> None:
    words = "--fp16 true --add_version false --ds3_gather_for_generation false --run_name small"
    config, notes = keys("run.yaml", *words.split(), "--scale_rewards", "false")
    assert config.name == "small"
    assert config.algorithm.advantage_fn_args["norm_by_std"] is False
    assert "--add_version has no effect here: --output_dir is the folder of the run" in notes


def test_what_flags_of_pictures_are_told_is_true_of_models_that_see(keys: Any) -> None:
    """Both were told that prompts are text."""
    words = "--vllm_limit_mm_per_prompt {} --vllm_mm_processor_cache_gb 0"
    _, notes = keys("run.yaml", *words.split())
    assert notes.count("picture") == 2


def test_every_documented_flag_is_taken_or_told_what_to_set_instead() -> None:
    named = flag_names
    taken = {*named.KEYS, *named.IDLE, *named.TASKSETS, *named.TRANSLATED}
    assert [name for name in DOCUMENTED if name not in taken and not named.elsewhere(name)] == []
    assert taken.isdisjoint(named.ELSEWHERE)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (
            "--chord_sft_dataset x",
            "mix_chord, with the data set as buffer.trainer_input.auxiliary_buffers.sft_dataset",
        ),
        ("--chord_mu_peak 0.5", "mix_chord, with the options in policy_loss_fn_args"),
        (
            "--sdar_loss_coef 0.1",
            "expected --teacher_model MODEL (that of --model, too, which then",
        ),
        ("--completion_length_limit_scope total", "expected one of per_round"),
        (
            "--teacher_model t --advantage_reweight rlsd --sdar_loss_coef 0.1",
            "--advantage_reweight rlsd and --sdar_loss_coef 0.1 are several uses of one teacher",
        ),
        (
            "--teacher_model t --advantage_reweight rlsd --teacher_kl_coef 0.3",
            "--advantage_reweight rlsd and --teacher_kl_coef 0.3 are several uses",
        ),
        (
            "--teacher_model t --sdar_loss_coef 0.1 --teacher_kl_coef 1",
            "--sdar_loss_coef 0.1 and --teacher_kl_coef 1 are several uses",
        ),
        (
            '--columns {"answer":"solution","gold":"solution"}',
            "answer and gold both become format.response_key: expected one column for it",
        ),
        ("--cosine_max_len 9", "belongs to the reward cosine: expected that among --reward_funcs"),
    ],
)
def test_what_there_is_not_is_told_with_what_to_set(keys: Any, words: str, instead: str) -> None:
    said = keys("run.yaml", "--reward_funcs", "accuracy", *words.split())
    assert instead in " ".join(re.sub(r"[│╭╮╰╯─]", "", said).split())


def test_options_of_rewards_reach_their_reward(keys: Any) -> None:
    words = "--reward_funcs accuracy soft_overlong cosine repetition --soft_cache_length 64 "
    words += "--max_completion_length 512 --cosine_min_len_value_wrong -0.7 --repetition_n_grams 4"
    config, _ = keys("run.yaml", *words.split(), "--gym_env", "guess", "--min_p", "0.1")
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None and taskset.workflow_args["env"] == "guess"
    assert taskset.rollout_args.min_p == 0.1
    funcs = taskset.reward_fn_args["funcs"]
    assert funcs == [
        "accuracy",
        {"name": "soft_overlong", "soft_max_length": 512, "soft_cache_length": 64},
        {"name": "cosine", "max_len": 512, "min_len_value_wrong": -0.7},
        {"name": "repetition", "n_grams": 4},
    ]
    assert len(Judge.of(funcs).functions) == 4  # each takes its options


def test_reward_models_are_rewards_behind_the_functions(keys: Any) -> None:
    words = "--reward_model rm other/rm --reward_weights 1 0.5 0.2"
    config, _ = keys(
        *("run.yaml", "--reward_funcs", "accuracy", *words.split()),
        *("--reward_model_plugin", "default", "plugin:centred"),
    )
    inputs = config.buffer.explorer_input
    assert inputs.taskset is not None
    for taskset in (inputs.taskset, *inputs.eval_tasksets):
        assert taskset.reward_fn_args == {
            "funcs": [
                "accuracy",
                {"name": "reward_model", "model_path": "rm"},
                {"name": "reward_model", "model_path": "other/rm", "plugin": "plugin:centred"},
            ],
            "weights": [1.0, 0.5, 0.2],
        }
    config, _ = keys("run.yaml", "--reward_model", "rm")
    funcs = [{"name": "reward_model", "model_path": "rm"}]
    assert config.buffer.explorer_input.taskset.reward_fn_args == {"funcs": funcs}
    said = keys("run.yaml", "--reward_model", "a", "b", "--reward_model_plugin", "plugin:centred")
    assert "has 1 values and --reward_model 2" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--beta 0", {"kl_loss_fn": "none"}),
        ("--beta 0.04", {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.04}}),
        ("--loss_type dr_grpo", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("--epsilon 0.2", {"policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.2}}),
        ("--loss_type cispo --epsilon_high 5", {"policy_loss_fn": "cispo",
                                               "policy_loss_fn_args": {"clip_range_high": 4.0}}),
        ("--loss_type cispo --epsilon 0.2", {"policy_loss_fn": "cispo"}),
        ("--epsilon_high 0.28 --delta 1.5", {"policy_loss_fn_args": {"clip_range_high": 0.28,
                                                                     "clip_ratio_c": 1.5}}),
        ("--importance_sampling_level sequence --loss_type grpo", {"policy_loss_fn": "gspo"}),
        ("--teacher_model m --teacher_kl_coef 0.5", {"teacher_kl_fn": "k2",
                                                     "teacher_kl_fn_args": {"kl_coef": 0.5}}),
        ("--dynamic_sample true", {"advantage_fn_args": {"std_threshold": 0.0,
                                                         "max_resample_times": 3}}),
        ("--dynamic_sample true --max_resample_times 5",
         {"advantage_fn_args": {"std_threshold": 0.0, "max_resample_times": 5}}),
        ("--loss_type sapo --tau_pos 2 --tau_neg 1.5",
         {"policy_loss_fn_args": {"tau_pos": 2.0, "tau_neg": 1.5}}),
        ("--off_policy_sequence_mask_delta 0.2",
         {"policy_loss_fn_args": {"enable_sequence_masking": True, "delta_sequence_masking": 0.2}}),
        ("--log_rollout_offpolicy_metrics true", {"rollout_correction": {"rollout_is": None}}),
        ("--log_rollout_offpolicy_metrics true --rollout_importance_sampling_mode token_truncate",
         {"rollout_correction": {"rollout_is": "token"}}),
        ("--scale_rewards none", {"advantage_fn_args": {"norm_by_std": False}}),
        ("--rollout_importance_sampling_mode sequence_mask "
         "--rollout_importance_sampling_threshold 3",
         {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": float("inf"),
                                 "rollout_rs": "geometric", "rollout_rs_threshold": 3.0,
                                 "rollout_rs_threshold_lower": 1e-9}}),
        ("--rollout_importance_sampling_mode token_mask --rollout_importance_sampling_threshold 3",
         {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 3.0,
                                 "rollout_rs": "token", "rollout_rs_threshold": 3.0,
                                 "rollout_rs_threshold_lower": 1e-9}}),
        ("--loss_type real --real_tau 0.3", {"policy_loss_fn": "real",
                                             "policy_loss_fn_args": {"tau": 0.3}}),
        ("--loss_type fipo --delta 10 --fipo_decay_rate 16 --fipo_clip_high_only false "
         "--fipo_safety_threshold None",
         {"policy_loss_fn_args": {"clip_ratio_c": 10, "half_life": 16, "safety_threshold": None,
                                  "influence_clip_high_only": False}}),
        ("--importance_sampling_level sequence_token --epsilon_high 0.3",
         {"policy_loss_fn": "gspo",
          "policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.3}}),
        ("--teacher_model m --advantage_reweight rlsd --rlsd_lambda_warmup_steps 5",
         {"advantage_fn": "rlsd", "advantage_fn_args": {"lam_warmup_steps": 5},
          "teacher_kl_fn": None}),
        ("--teacher_model m --sdar_loss_coef 0.1 --sdar_gate_beta 3",
         {"teacher_kl_fn": "sdar", "teacher_kl_fn_args": {"kl_coef": 0.1, "gate_beta": 3.0}}),
        ("--teacher_model m --sdar_loss_coef 0 --teacher_kl_coef 0.3",
         {"teacher_kl_fn": "k2", "teacher_kl_fn_args": {"kl_coef": 0.3}}),
        ("--teacher_model m --sdar_loss_coef 0.1 --teacher_kl_coef 0",
         {"teacher_kl_fn": "sdar", "teacher_kl_fn_args": {"kl_coef": 0.1}}),
        ("--sdar_loss_coef 0.0", {"teacher_kl_fn": None}),
        ("--advantage_estimator reinforce_plus_plus --scale_rewards batch",
         {"advantage_fn": "reinforceplusplus_baseline", "advantage_fn_args": None}),
        ("--advantage_estimator reinforce_plus_plus --scale_rewards none",
         {"advantage_fn": "grpo", "advantage_fn_args": {"norm_by_std": False}}),
        ("--advantage_estimator rloo --scale_rewards none", {"advantage_fn": "rloo",
                                                            "advantage_fn_args": None}),
    ],
)  # fmt: skip
def test_flags_that_become_several_keys(keys: Any, words: str, expected: dict[str, Any]) -> None:
    config, _ = keys("run.yaml", *words.split())
    found = config.algorithm.model_dump()
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("--lora_rank 16", "--train_type lora"),
        ("--lora_alpha 16", "--train_type lora"),
        ("--teacher_kl_coef 0.5", "--teacher_model MODEL"),
        ("--sdar_gate_beta 3", "--sdar_loss_coef above 0"),
        ("--max_resample_times 5", "--dynamic_sample true"),
        ("--rollout_importance_sampling_threshold 2", "--rollout_importance_sampling_mode"),
    ],
)
def test_a_flag_that_has_no_effect_alone_is_refused(keys: Any, words: str, beside: str) -> None:
    said = " ".join(re.sub(r"[│╭╮╰╯─]", "", keys("run.yaml", *words.split())).split())
    assert f"{words} has no effect by itself: expected {beside}" in said


def test_a_teacher_is_the_auxiliary_model_and_joins_no_others(keys: Any, tmp_path: Path) -> None:
    config, _ = keys("run.yaml", "--teacher_model", "m")
    [teacher] = config.explorer.auxiliary_models
    assert teacher.model_path == "m" and config.algorithm.teacher_kl_fn == "k2"
    path = tmp_path / "run.yaml"
    path.write_text(path.read_text() + "\nexplorer: {auxiliary_models: [{model_path: judge}]}\n")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", "", keys("run.yaml", "--teacher_model", "m")).split())
    assert "the YAML has explorer.auxiliary_models already: expected the teacher there" in said


def test_the_rank_of_an_adapter_may_stand_beside_full_training(keys: Any) -> None:
    config, _ = keys("run.yaml", *["--train_type", "full", "--lora_rank", "16"])
    assert config.model.lora_configs is None


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        (["q_proj"], ["q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["all-linear"], "all-linear"),
    ],
)
def test_names_of_layers_are_a_list(keys: Any, words: list[str], targets: Any) -> None:
    config, _ = keys("run.yaml", "--train_type", "lora", "--target_modules", *words)
    assert config.model.lora_configs[0].target_modules == targets


def test_switches_of_other_sections(keys: Any, tmp_path: Path) -> None:
    operators = "\ndata_processor: {experience_pipeline: {operators: [{name: deduplication}]}}\n"
    (tmp_path / "run.yaml").write_text(YAML + operators)
    words = "--overlong_filter true --async_generate true --train_type lora --lora_rank 4"
    config, _ = keys("run.yaml", *words.split(), "--report_to", "tensorboard", "wandb")
    names = [one.name for one in config.data_processor.experience_pipeline.operators]
    assert names == ["deduplication", "mask_response_truncated"]
    assert config.synchronizer.sync_offset == 1
    assert config.model.lora_configs[0].lora_rank == 4
    assert config.monitor.monitor_type == ["tensorboard", "wandb"]


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `trireme rlhf` with these words; the configuration that it would run, or its words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    seen: list[Any] = []
    monkeypatch.setattr("trireme.cli.run.run", lambda *given, **_: seen.append(given) or 0)

    def call(words: str) -> Any:
        done = CliRunner().invoke(app, ["rlhf", *words.split()])
        return load_config(seen.pop()[0]) if seen else " ".join(done.output.split())

    return call


def test_rlhf_shows_its_yaml_only_if_it_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "rlhf --model ./none --dataset none.jsonl --reward_funcs accuracy --output_dir out"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2 and "model.model_path (./none)" in done.output
    assert done.output.startswith("# out/rlhf.yaml: the same run is `trireme run out/rlhf.yaml`\n")
    assert "project: rlhf" not in done.output


def test_rlhf_is_a_run_from_flags_alone(rlhf: Any, tmp_path: Path) -> None:
    config = rlhf(
        "--rlhf_type grpo --model m --dataset a.jsonl#500 b.jsonl --val_dataset c.jsonl "
        "--multi_turn_scheduler math_tip_trick --max_turns 2 --reward_funcs accuracy format "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --num_generations 8 "
        "--max_completion_length 256 --vllm_max_model_len 1024 --beta 0 --output_dir out "
        "model.temperature=0.7"
    )
    inputs = config.buffer.explorer_input
    assert [(one.path, one.split) for one in (*inputs.tasksets, *inputs.eval_tasksets)] == [
        ("a.jsonl", "train[:500]"), ("b.jsonl", "train"), ("c.jsonl", "train")]  # fmt: skip
    for taskset in (*inputs.tasksets, *inputs.eval_tasksets):
        assert taskset.workflow_args == {"scheduler": "math_tip_trick", "max_turns": 2}
        assert taskset.reward_fn_args == {"funcs": ["accuracy", "format"]}
        assert taskset.format.prompt_key == "messages"
    assert (config.buffer.batch_size, config.algorithm.repeat_times) == (2, 8)
    assert (config.model.max_model_len, config.model.max_prompt_tokens) == (1024, None)
    assert (config.algorithm.kl_loss_fn, config.model.temperature) == ("none", 0.7)
    assert (tmp_path / "out" / "rlhf.yaml").exists()


@pytest.mark.parametrize(
    ("words", "tasks", "of_a_step"),
    [
        ("", 1, 8),
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", 4, 32),
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4 "
         "--steps_per_generation 4", 4, 32),
        ("--per_device_train_batch_size 8 --steps_per_generation 4", 4, 8),
        ("--generation_batch_size 64", 8, 64),
        ("--generation_batch_size 64 --per_device_train_batch_size 8", 8, 8),
    ],
)  # fmt: skip
def test_rlhf_counts_completions_as_ms_swift_does(
    rlhf: Any, words: str, tasks: int, of_a_step: int
) -> None:
    buffer = rlhf(f"--model m --dataset d.jsonl {words}").buffer
    assert (buffer.batch_size, buffer.train_batch_size) == (tasks, of_a_step)


@pytest.mark.parametrize(
    ("words", "interval"),
    [
        ("--eval_steps 100", 100),
        ("--eval_steps 100 --per_device_train_batch_size 8 --steps_per_generation 4", 25),
        ("--eval_steps 2 --per_device_train_batch_size 8 --steps_per_generation 4", 1),
        ("--eval_steps 100 --num_iterations 4", 25),
        ("--save_steps 40", 40),
        ("--eval_steps 0.25 --max_steps 30", 8),
        ("--save_steps 0.5 --max_steps 30", 15),
        ("", 500),
    ],
)
def test_rlhf_evaluates_after_as_many_optimizer_steps(rlhf: Any, words: str, interval: int) -> None:
    config = rlhf(f"--model m --dataset d.jsonl --val_dataset v.jsonl {words}")
    assert config.explorer.eval_interval == interval


def test_rlhf_takes_what_is_said_of_the_optimizer_there(rlhf: Any) -> None:
    config = rlhf(
        "--model m --dataset d.jsonl --optim adamw_torch --lr_scheduler_type constant_with_warmup "
        "--warmup_ratio 0.1 --max_grad_norm 0 --max_steps 30 --save_steps 0.5"
    )
    optimizer = config.algorithm.optimizer
    assert (optimizer.lr_scheduler_type, optimizer.lr_warmup_steps_ratio) == ("constant", 0.1)
    assert (config.trainer.grad_clip, config.trainer.save_interval) == (1e9, 15)


@pytest.mark.parametrize(("words", "order"), [("", "shuffle"), ("false", "sequential")])
def test_rlhf_shuffles_unless_asked_not_to(rlhf: Any, words: str, order: str) -> None:
    flag = f"--dataset_shuffle {words}" if words else ""
    inputs = rlhf(f"--model m --dataset d.jsonl --val_dataset v.jsonl {flag}").buffer.explorer_input
    assert inputs.taskset.data_selector.selector_type == order


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model m", "--dataset is not given"),
        ("--model m n --dataset d", "n: expected KEY=VALUE, or a flag before it"),
        ("run.yaml", "a YAML is run by `trireme run run.yaml`"),
        ("--model m --dataset d seed[=3", "error: seed[ cannot be set: the file has no list seed"),
        ("--model m --dataset d --output_dir a_file", "error: cannot write a_file/rlhf.yaml: "),
        ("--model m --dataset d --dataset_shuffle no", "--dataset_shuffle no: expected true or f"),
        ("--model m --dataset d --rlhf_type dpo --dataset_shuffle false",
         "--dataset_shuffle false has no effect on dpo"),
        ("--model m --dataset d --loss_type cispo --epsilon_high 0.28",
         "--epsilon_high 0.28 is the bound of CISPO's ratio: expected at least 1"),
        ("--model m --dataset d --generation_batch_size 8 --steps_per_generation 2", "both say"),
        ("--model m --dataset d --gradient_accumulation_steps 2 --steps_per_generation 3",
         "24 completions of a generation and 16 of an"),
        ("--model m --dataset d --rlhf_type ppo", "ppo: expected grpo, gkd, dpo or kto; a cri"),
        ("--model m --dataset d --desirable_weight 2", "expected --rlhf_type kto"),
        ("--model m --dataset d e --rlhf_type kto", "--dataset has 2 names: expected one"),
        ("--model m --dataset d --rlhf_type kto --num_generations 8", "has no rollouts"),
        ("--model m --dataset d --rlhf_type kto --reward_funcs format", "has no rollouts"),
        ("--model m --dataset d --rlhf_type kto --beta x", "--beta x: expected a number"),
        ("--model m --dataset d --generation_batch_size 9", "expected a multiple of --num_gen"),
        ("--model m --dataset d --save_steps 0.5", "--save_steps 0.5 is a share of the steps: exp"),
        ("--model m --dataset d --optim adafactor", "expected one of adamw_torch, adamw_torch_fus"),
        ("--model m --dataset d#x", "--dataset d#x: expected a number of rows after #"),
    ],
)  # fmt: skip
def test_rlhf_says_what_is_missing(rlhf: Any, words: str, sentence: str) -> None:
    assert sentence in re.sub(r"[│╭╮╰╯─]", "", rlhf(words))


def test_rlhf_kto_reads_labelled_replies(rlhf: Any) -> None:
    config = rlhf(
        "--rlhf_type kto --model m --dataset a.jsonl#500 --beta 0.2 --undesirable_weight 1.5 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 1e-5 "
        "--train_type lora --lora_rank 4 --max_length 256 --num_train_epochs 3"
    )
    assert (config.mode, config.algorithm.algorithm_type) == ("train", "kto")
    assert config.algorithm.policy_loss_fn_args == {"beta": 0.2, "undesirable_weight": 1.5}
    assert config.algorithm.kl_loss_fn is None and config.model.max_model_len == 256
    data = config.buffer.trainer_input.experience_buffer
    assert (data.path, data.split) == ("a.jsonl", "train[:500]")
    assert (config.buffer.train_batch_size, config.buffer.total_epochs) == (8, 3)
    assert rlhf("--rlhf_type kto --model m --dataset a").buffer.train_batch_size == 16


def test_a_misspelt_flag_is_told_the_nearest(rlhf: Any) -> None:
    said = rlhf("--rlhf_type kto --model m --dataset a --desireable_weight 1")
    assert "did you mean --desirable_weight?" in said


def test_rlhf_multiplies_counts_by_devices_and_has_the_defaults_of_ms_swift(
    rlhf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("Think first.\n")
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    monkeypatch.setenv("NNODES", "2")
    words = "--model m --dataset d.jsonl --per_device_train_batch_size 2 --system prompt.txt "
    config = rlhf(words + '--gradient_accumulation_steps 3 --columns {"answer":"solution"}')
    assert (config.buffer.batch_size, config.buffer.train_batch_size) == (6, 48)
    assert (config.buffer.total_epochs, config.model.temperature) == (3, 0.9)
    assert config.model.lora_configs[0].lora_rank == 8
    optimizer = config.algorithm.optimizer
    assert (optimizer.lr, optimizer.lr_scheduler_type, optimizer.betas) == (
        1e-4,
        "cosine",
        [0.9, 0.95],
    )
    assert config.algorithm.bypass_old_logprobs is False
    taskset = config.buffer.explorer_input.taskset
    assert taskset.format.system_prompt == "Think first.\n"
    assert taskset.format.response_key == "answer"
    assert "expected a text file" in rlhf("--model m --dataset d --system no.txt")
    monkeypatch.setenv("NNODES", "two")
    assert "NNODES=two: expected a whole number" in rlhf("--model m --dataset d")


def test_rlhf_shares_the_length_of_vllm_between_prompt_and_reply(rlhf: Any) -> None:
    words = "--model m --dataset d --max_length 2048 --max_completion_length 2048 "
    model = rlhf(words + "--vllm_max_model_len 2048").model
    lengths = (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens)
    assert lengths == (2048, None, 1024)
    model = rlhf(words + "--vllm_max_model_len 8192").model
    assert (model.max_prompt_tokens, model.max_response_tokens) == (2048, 2048)


def test_rlhf_of_a_teacher_without_a_reward_distils(rlhf: Any) -> None:
    config = rlhf(
        "--model m --dataset d --teacher_model t --teacher_kl_coef 0.5 --num_generations 1"
    )
    assert config.algorithm.algorithm_type == "on_policy_distill"
    assert config.algorithm.advantage_fn_args == {"kl_coef": 0.5}
    assert config.algorithm.teacher_kl_fn is None
    assert [one.model_path for one in config.explorer.auxiliary_models] == ["t"]


@pytest.mark.parametrize(
    "words",
    [
        *("--sdar_loss_coef 0.1", "--advantage_reweight rlsd", "--advantage_estimator rloo"),
        *("--kl_in_reward true", "--scale_rewards none", "--dynamic_sample true"),
        "--reward_weights 1",
    ],
)
def test_rlhf_says_that_a_use_of_the_teacher_needs_a_reward(rlhf: Any, words: str) -> None:
    said = re.sub(r"[│╭╮╰╯─]", "", rlhf(f"--model m --dataset d --teacher_model t {words}"))
    expected = f"{words} needs a reward beside the teacher: expected --reward_funcs"
    assert expected in " ".join(said.split())
    config = rlhf("--model m --dataset d --teacher_model t --sdar_loss_coef 0")
    assert config.algorithm.algorithm_type == "on_policy_distill"


def test_rlhf_takes_the_kl_off_the_rewards_where_ms_swift_does(rlhf: Any) -> None:
    words = "--model m --dataset d --num_generations 4 --per_device_train_batch_size 8 "
    for flags, coefficient in (
        ("--advantage_estimator rloo", 0.04),
        ("--kl_in_reward true --beta 0.1", 0.1),
    ):
        config = rlhf(words + flags)
        algorithm = config.algorithm
        assert (algorithm.kl_penalty_fn, algorithm.kl_loss_fn) == ("k1", "none")
        assert algorithm.kl_penalty_fn_args == {"kl_coef": coefficient}
        assert algorithm.sample_strategy == "explore_step"
        assert config.buffer.train_batch_size == 0 and config.buffer.batch_size == 2
    for flags in ("--advantage_estimator rloo --beta 0", "--kl_in_reward false"):
        config = rlhf(words + flags)
        assert config.algorithm.kl_penalty_fn is None
        assert config.buffer.train_batch_size == 8
    said = rlhf(words + "--kl_in_reward true --steps_per_generation 2")
    assert "8 of a generation's 16 completions: expected all of them, or false" in said


def test_rlhf_writes_no_options_of_a_penalty_that_there_is_not(rlhf: Any) -> None:
    words = "--model m --dataset d "
    for flags in ("--beta 0", "--kl_in_reward true", "algorithm.kl_loss_fn=none"):
        assert not rlhf(words + flags).algorithm.kl_loss_fn_args
    assert rlhf(words).algorithm.kl_loss_fn_args == {"kl_coef": 0.04}
    said = rlhf(f"{words}--beta 0 algorithm.kl_loss_fn_args.kl_coef=0.2").algorithm
    assert said.kl_loss_fn_args == {"kl_coef": 0.2}  # and the run notes what the user wrote


@pytest.mark.extension("more_losses")
def test_rlhf_of_chord(rlhf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    words = "--model m --dataset d --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
    chord = (
        "--chord_sft_dataset e.jsonl#90 --chord_sft_per_device_train_batch_size 3 --chord_mu_peak "
        "0.9 --chord_mu_valley 0.05 --chord_mu_warmup_steps 0 --chord_mu_decay_steps 200 "
    )
    config = rlhf(words + chord + "--beta 0 --loss_type dapo --epsilon_high 0.3 --system Think.")
    algorithm = config.algorithm
    assert algorithm.algorithm_type == "mix_chord" and algorithm.loss_agg_mode == "token-mean"
    assert algorithm.policy_loss_fn_args == {
        "mu_peak": 0.9, "mu_valley": 0.05, "mu_warmup_steps": 0, "mu_decay_steps": 200,
        "enable_phi_function": False, "sft_loss_agg_mode": "token-mean",
        "clip_ratio_c": float("inf"), "clip_range_high": 0.3,
    }  # fmt: skip
    # 32 completions of 2 devices, and 3 x 2 x 2 rows of the expert's
    assert config.buffer.train_batch_size == 44
    assert own_share(44, get_recipe(algorithm).expert_ratio or 0) == 32
    experts = config.buffer.trainer_input.auxiliary_buffers["sft_dataset"]
    assert (experts.path, experts.split, experts.format.system_prompt) == (
        *("e.jsonl", "train[:90]", "Think."),
    )
    said = rlhf(words + chord.replace("--chord_mu_valley 0.05", ""))
    assert "--chord_mu_valley is not given" in said
    assert "--loss_type cispo with --chord_sft_dataset: expected one of grpo" in rlhf(
        words + chord + "--loss_type cispo"
    )
    for in_reward in ("--kl_in_reward true", "--advantage_estimator rloo"):
        said = rlhf(f"{words}{chord}{in_reward}")
        assert "compares whole groups: expected --kl_in_reward false" in said
    said = rlhf(words + chord + "--importance_sampling_level sequence")
    assert "--importance_sampling_level sequence with --chord_sft_dataset: expected token" in said
    assert "--chord_mu_peak has no effect by itself" in rlhf(words + "--chord_mu_peak 0.5")
    assert "no effect on dpo" in rlhf(words + "--rlhf_type dpo --chord_mu_peak 0.5")


@pytest.mark.extension("more_losses")
@pytest.mark.parametrize(("beta", "share"), [("0.3", 0.3), ("0", 1.0), ("1", 0.0)])
def test_rlhf_of_a_distillation(rlhf: Any, beta: str, share: float) -> None:
    words = "--rlhf_type gkd --model m --dataset d --teacher_model t "
    config = rlhf(words + f"--lmbda 1 --beta {beta} --temperature 1.0 --sft_alpha 0")
    assert config.algorithm.algorithm_type == "jsd" and config.algorithm.repeat_times == 1
    assert config.algorithm.advantage_fn_args == {"lambda_coef": share}
    assert config.algorithm.kl_loss_fn == "none" and get_recipe(config.algorithm).kl is None
    assert (config.buffer.batch_size, config.buffer.train_batch_size) == (16, 16)
    assert [one.model_path for one in config.explorer.auxiliary_models] == ["t"]
    for wrong, message in {
        "": "--lmbda 0.5: expected 1, since only the policy's own replies",
        "--lmbda 1 --sft_alpha 0.1": "--sft_alpha 0.1: expected 0, since replies of a data set",
        "--lmbda 1 --reward_funcs accuracy": "--reward_funcs has no effect on gkd",
        "--lmbda 1 --rlhf_type grpo": "--lmbda has no effect on grpo",
        **{
            f"--lmbda 1 {flag}": f"{flag.split()[0]} has no effect on gkd"
            for flag in (
                *("--kl_in_reward true", "--advantage_reweight rlsd", "--sdar_loss_coef 0.1"),
                *("--scale_rewards none", "--dynamic_sample true", "--reward_weights 1"),
                *("--rlsd_lambda 0.5", "--cosine_max_len 9", "--max_resample_times 2"),
            )
        },
    }.items():
        assert message in rlhf(words + wrong)
    off = "--kl_in_reward false --dynamic_sample false --sdar_loss_coef 0"
    assert rlhf(f"{words}--lmbda 1 {off}").algorithm.algorithm_type == "jsd"
    assert "--teacher_model is not given" in rlhf("--rlhf_type gkd --model m --dataset d --lmbda 1")


def test_rlhf_of_pairs(rlhf: Any) -> None:
    config = rlhf(
        "--rlhf_type dpo --model m --dataset d.jsonl --beta 0.2 --rpo_alpha 0.1 --max_length 512 "
        "--tuner_type full --loss_type sigmoid --eval_steps 5"
    )
    assert config.algorithm.policy_loss_fn_args == {"beta": 0.2, "rpo_alpha": 0.1}
    assert (config.mode, config.buffer.train_batch_size, config.model.max_model_len) == (
        *("train", 16, 512),
    )
    said = rlhf("--rlhf_type dpo --model m --dataset d --loss_type sigmoid bco_pair")
    assert "--loss_type sigmoid bco_pair with --rlhf_type dpo: expected sigmoid" in said
    said = rlhf("--rlhf_type dpo --model m --dataset d --lmbda 0.5")
    assert "--lmbda has no effect on dpo" in said


def test_rlhf_overwrites_no_yaml_by_flags_that_cannot_be(rlhf: Any, tmp_path: Path) -> None:
    words = "--model m --dataset a b --max_turns 2 --output_dir out"
    rlhf(words)
    file = tmp_path / "out" / "rlhf.yaml"
    first = file.read_text()
    rlhf(words)
    assert [path.name for path in file.parent.iterdir()] == ["rlhf.yaml"]
    for wrong in ("--max_turns two", "--beta low", "--generation_batch_size 9"):
        assert isinstance(rlhf(f"{words} {wrong}"), str)
        assert file.read_text() == first
    rlhf(f"{words} --max_steps 3")
    assert file.read_text() != first
    assert file.with_suffix(".yaml.bak").read_text() == first


def test_steps_on_a_batch_divide_what_counts_optimizer_steps(keys: Any) -> None:
    words = ("--num_iterations", "4", "--max_steps", "100", "--save_steps", "20")
    config, _ = keys("run.yaml", *words, "--warmup_steps", "8")
    assert config.algorithm.num_iterations == 4
    assert (config.trainer.total_steps, config.trainer.save_interval) == (25, 5)
    assert config.algorithm.optimizer.lr_warmup_steps == 8  # of optimizer steps, as there
    words = ("--num_iterations", "2", "--max_steps", "2000002")
    assert keys("run.yaml", *words)[0].trainer.total_steps == 1000001


def test_a_number_of_steps_goes_before_the_epochs(keys: Any) -> None:
    def explored(*words: str) -> int | None:
        return keys("run.yaml", *words)[0].buffer.total_steps

    assert explored("--max_steps", "500", "--num_train_epochs", "2") == 500
    assert explored("--max_steps", "500", "--num_iterations", "4") == 125
    again = ("--max_steps", "10", "--dynamic_sample", "true")  # a batch may take several steps
    assert explored(*again) == 40
    assert explored(*again, "--max_resample_times", "1") == 20
    assert explored("--max_steps", "500", "buffer.total_steps=7") == 7
    assert explored("--max_steps", "-1") is None


@pytest.mark.parametrize("iterations", ["1", "2"])
def test_no_limit_of_steps_is_none_and_has_no_shares(keys: Any, iterations: str) -> None:
    words = ("run.yaml", "--num_iterations", iterations, "--max_steps", "-1")
    assert keys(*words)[0].trainer.total_steps is None
    assert "--save_steps 0.5 is a share of the steps" in keys(*words, "--save_steps", "0.5")


def test_a_plug_in_of_ms_swift_that_judges_by_a_language_model_names_ours() -> None:
    with pytest.raises(ValueError, match=r"'genrm' asks a language model .* judge and rubric"):
        RM_PLUGINS.get("genrm")


def test_a_refusal_names_the_flag_that_set_the_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    words = ["check", str(file), "--num_train_epochs", "0.1", "--lr_scheduler_type", "up"]
    said = CliRunner().invoke(app, [*words, "trainer.grad_clip=-1"]).output
    assert "problem: --num_train_epochs: buffer.total_epochs is 0.1: expected a whole" in said
    assert "--lr_scheduler_type: algorithm.optimizer.lr_scheduler_type is 'up'" in said
    assert "problem: trainer.grad_clip is -1" in said
    words = ["run", str(file), "--num_train_epochs", "0.1"]
    result = CliRunner().invoke(app, words)
    assert "run.yaml: --num_train_epochs: buffer.total_epochs is 0.1" in result.output
    words = ["--model", "m", "--dataset", str(file), "--num_train_epochs", "0.1"]
    result = CliRunner().invoke(app, ["rlhf", *words, "--output_dir", str(tmp_path / "out")])
    assert "rlhf.yaml: --num_train_epochs: buffer.total_epochs is 0.1" in result.output


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--beta -1", "--beta: algorithm.kl_loss_fn 'k3': kl_coef is -1"),
        ("--epsilon -1", "--epsilon: algorithm.policy_loss_fn 'ppo': clip_range_low is -1"),
        ("--max_length 1", "--max_length: taskset_0: 8 of 8 prompts have more than 1 tokens"),
        ("--reward_funcs accurcy", f"--reward_funcs: {INPUT}.taskset.default_reward_fn_type"),
        ("--multi_turn_scheduler nope", "--multi_turn_scheduler: workflow_args.scheduler: unknown"),
        ("--gym_env nope --multi_turn_scheduler gym_scheduler", "--gym_env: workflow_args.env: "),
        ("--loss_scale nope", "--loss_scale: workflow_args.loss_scale: loss_scale 'nope' has the"),
        ("--dataset no.jsonl", f"--dataset: {INPUT}.tasksets[1].path (no.jsonl)"),
        ("--val_dataset no.jsonl", f"--val_dataset: {INPUT}.eval_tasksets[0].path (no.jsonl)"),
        ("buffer.batch_size=0", "rlhf.yaml: buffer.batch_size is 0"),
    ],
)
def test_a_refusal_names_the_flag_whose_value_became_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(Path("model"), ["What is 1 + 1?", "2"], seed=0)
    row = {"messages": "What is 1 + 1?", "solution": "2"}
    write_jsonl(Path("rows.jsonl"), [row] * 8)
    given = ["--model", "model", "--dataset", "rows.jsonl", "--reward_funcs", "accuracy"]
    result = CliRunner().invoke(app, ["rlhf", *given, *words.split()])
    assert result.exit_code == 2
    assert sentence in result.output
