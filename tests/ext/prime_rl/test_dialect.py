"""prime-rl's keys: each is answered with ours, in TOML, in YAML, and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trireme.cli.main import app
from trireme.config import ConfigError
from trireme.config.load import load_config

TOML = """
max_steps = 20
seq_len = 2048
output_dir = "outputs"

[model]
name = "Qwen/Qwen3-0.6B"

[deployment]
num_train_gpus = 1

[orchestrator]
batch_size = 128
rollouts_per_example = 16
max_off_policy_steps = 8

[orchestrator.train.sampling]
max_completion_tokens = 128

[[orchestrator.train.env]]
id = "reverse-text"

[orchestrator.concurrency]
max_inflight = 64

[orchestrator.buffer]
easy_threshold = 0.9

[trainer.optim]
lr = 3e-6

[trainer.model]
impl = "custom"

[trainer.model.ac]
freq = 1

[trainer.loss]
kl_tau = 0.01
token_mask_high = 8.0
geo_mask_low = 0.1
sequence_mask_high = 100.0
ratio_type = "token"

[ckpt]
interval = 5
skip_optimizer = true

[inference.vllm]
tensor_parallel_size = 2

[monitors.wandb]
project = "reverse-text"
"""
ANSWERS = {
    "max_steps": "did you mean 'trainer.total_steps'?",
    "seq_len": "did you mean 'model.max_model_len'?",
    "output_dir": "did you mean 'checkpoint_root_dir'?",
    "model.name": "did you mean 'model.model_path'?",
    "deployment.num_train_gpus": "use cluster.gpu_per_node, for trainer and engines together",
    "orchestrator.batch_size": "use buffer.batch_size, in tasks",
    "orchestrator.rollouts_per_example": "did you mean 'algorithm.repeat_times'?",
    "orchestrator.max_off_policy_steps": "use algorithm.sample_strategy: staleness_control",
    "orchestrator.train.sampling.max_completion_tokens": "did you mean 'model.max_response_tokens'",
    "orchestrator.train.env": "use buffer.explorer_input.taskset with default_workflow_type",
    "orchestrator.concurrency": "did you mean 'explorer.runner_per_model'?",
    "orchestrator.buffer.easy_threshold": "use the operator reward_std_filter in data_processor",
    "trainer.optim.lr": "did you mean 'algorithm.optimizer.lr'?",
    "trainer.model.ac": "did you mean 'trainer.enable_gradient_checkpointing'?",
    "trainer.model": "use Trireme's keys, which docs/migrate/prime_rl.md lists",
    "trainer.loss.kl_tau": "did you mean 'algorithm.policy_loss_fn_args.kl_tau'?",
    "trainer.loss.token_mask_high": "use algorithm.rollout_correction: {rollout_rs: token, rol",
    "trainer.loss.geo_mask_low": "use algorithm.rollout_correction: {rollout_rs: geometric, rollout"
    "_rs_threshold_lower}",
    # prime-rl's mask is of the largest ratio, and its ratio a product
    "trainer.loss.sequence_mask_high": "no key replaces it: a reply is left out for all of",
    "trainer.loss.ratio_type": "no key replaces it: ratios are of tokens; the nearest to sequence",
    "ckpt.interval": "did you mean 'trainer.save_interval'?",
    "ckpt.skip_optimizer": "no key replaces it: a checkpoint holds all that a resume needs",
    "inference.vllm.tensor_parallel_size": (
        "did you mean 'explorer.rollout_model.tensor_parallel_size'?"
    ),
    "monitors.wandb.project": "did you mean 'project'?",
}


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return [str(problem) for problem in raised.value.problems]


def test_each_key_of_a_toml_is_answered_with_ours(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(TOML)
    first, *rest = problems_of(file)
    assert first == f"{file} is TOML: expected a YAML"
    assert [text.split()[0] for text in rest] == [*ANSWERS]
    for text, (key, hint) in zip(rest, ANSWERS.items(), strict=True):
        assert text.startswith(f"{key} is not a known key; {hint}")


def test_the_command_line_takes_the_toml_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(TOML)
    for command in ("check", "run"):
        result = CliRunner().invoke(app, [command, str(file), "orchestrator.group_size=4"])
        said = " ".join(result.output.split())
        assert "orchestrator.group_size is not a known key; did you mean 'algorithm.rep" in said
        assert result.exit_code
    said = CliRunner().invoke(app, ["check", str(file), "--orchestrator.group-size", "4"]).output
    assert "'algorithm.repeat_times'?" in " ".join(said.split()).replace("│ │ ", "")


@pytest.mark.parametrize("head", ["", "orchestrator."])
def test_a_file_for_one_process_is_answered_too(tmp_path: Path, head: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{}")
    names = ("sampling.max_tokens", "rollouts_per_example", "eval.interval")
    said = problems_of(file, *(f"{head}{name}=4" for name in names))
    ours = ("model.max_response_tokens", "algorithm.repeat_times", "explorer.eval_interval")
    assert {text.rpartition("; ")[2] for text in said} == {f"did you mean '{o}'?" for o in ours}


def test_a_misspelt_key_of_ours_is_not_taken_for_one_of_theirs(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{trainer: {grad_clp: 1}, explorerr: {env_vars: {a: 1}}}")
    assert problems_of(file) == [
        "trainer.grad_clp is not a known key; did you mean 'trainer.grad_clip'?",
        "explorerr is not a known key; did you mean 'explorer'?",
    ]


def test_a_toml_that_cannot_be_read_says_where(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text("max_steps = [1\n")
    (said,) = problems_of(file)
    assert said.startswith(f"{file} cannot be read as TOML: Unclosed array")
