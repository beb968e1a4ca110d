"""verl's options under `trainer.trainer_config`: read as other keys, without effect, or refused."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.test_trinity_corpus import base, documents, loaded
from trireme.config.load import read_config
from trireme.launch.check import examine

__all__ = ["base"]  # a fixture

DOCUMENTS = documents(Path(__file__).with_name("corpus.yaml"))
SCRIPT = Path(__file__).parents[3] / "scripts" / "verl_options.py"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_passes_check(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.merge(base, OmegaConf.create(DOCUMENTS[name])), path)
    assert [str(problem) for problem in examine(path).problems] == []


def test_options_of_verl_have_effect(base: dict[str, Any], tmp_path: Path) -> None:
    config, _ = loaded(base, tmp_path / "run.yaml", DOCUMENTS["gsm8k_verl_offload"])
    optimizer, trainer = config.algorithm.optimizer, config.trainer
    assert (optimizer.lr, optimizer.lr_scheduler_type) == (5e-7, "cosine")
    assert (optimizer.lr_warmup_steps_ratio, trainer.grad_clip) == (0.05, 0.5)
    assert trainer.offload and trainer.enable_gradient_checkpointing
    assert trainer.max_token_len_per_gpu == 16384
    config, _ = loaded(base, tmp_path / "run.yaml", DOCUMENTS["ppo_critic"])
    assert config.algorithm.critic.warmup_steps == 5
    assert config.algorithm.critic.cliprange_value == 0.4


def test_our_own_key_goes_before_an_option_of_verl(base: dict[str, Any], tmp_path: Path) -> None:
    text = (
        "{trainer: {grad_clip: 2.0, trainer_config: {actor_rollout_ref: {actor: {grad_clip: 3}}}}}"
    )
    config, problems = loaded(base, tmp_path / "run.yaml", text)
    assert (config.trainer.grad_clip, problems) == (2.0, [])
    notes = [note for plan in examine(tmp_path / "run.yaml").plans for note in plan.notes]
    key = "trainer.trainer_config.actor_rollout_ref.actor.grad_clip"
    assert f"read, where those are not given: {key}=3 as trainer.grad_clip" in notes


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("{actor_rollout_ref: {actor: {optimizer: {lr: 1}}}}", "did you mean"),
        ("{custom_reward_function: {path: x.py}}", "default_reward_fn_type"),
        ("{reward_model: {enable: true}}", "name a reward in default_reward_fn_type"),
        ("{actor_rollout_ref: {model: {lora_rank: 0, mtp: {enable: true}}}}", "not supported"),
        ("{actor_rollout_ref: {model: {lora_alpha: 16}}}", "set model.lora_configs"),
        (
            "{actor_rollout_ref: {actor: {ppo_epochs: 4, optim: {lr_warmup_steps: 20}}}}",
            "expected algorithm.optimizer.lr_warmup_steps: 80 in its place",
        ),
        ("{critic: {ppo_epochs: 4}}", "expected 1, as actor_rollout_ref.actor.ppo_epochs says"),
    ],
)
def test_an_option_of_verl_without_a_counterpart_is_refused(
    option: str, says: str, base: dict[str, Any], tmp_path: Path
) -> None:
    loaded(base, tmp_path / "run.yaml", f"{{trainer: {{trainer_config: {option}}}}}")
    [problem] = examine(tmp_path / "run.yaml").problems
    assert problem.key.startswith("trainer.trainer_config.") and says in problem.text


@pytest.mark.parametrize(
    "option",
    [
        "{reward_model: {enable: false, model: {path: some-rm}}}",
        "{custom_reward_function: {path: null, name: compute_score}}",
        "{actor_rollout_ref: {model: {lora_rank: 0, lora_alpha: 16, target_modules: all-linear}}}",
        "{actor_rollout_ref: {model: {mtp: {enable: false}}}}",
        "{actor_rollout_ref: {model: {fused_kernel_options: {impl_backend: torch}}}}",
        "{trainer: {resume_mode: auto, resume_from_path: false}}",
        "{critic: {enable: null, ppo_epochs: 1}}",
        "{critic: {ppo_epochs: 2}, actor_rollout_ref: {actor: {ppo_epochs: 2}}}",
    ],
)
def test_options_of_verl_that_are_switched_off_change_nothing(
    option: str, base: dict[str, Any], tmp_path: Path
) -> None:
    loaded(base, tmp_path / "run.yaml", f"{{trainer: {{trainer_config: {option}}}}}")
    assert examine(tmp_path / "run.yaml").problems == []


def test_the_table_of_its_page_is_up_to_date() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text(encoding="utf-8") == script["document"]()


COMMAND_LINE = """data.train_batch_size=8 actor_rollout_ref.model.path=x
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.clip_ratio=0.2
actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1
actor_rollout_ref.rollout.val_kwargs.n=4 reward_model.enable=true
ref.log_prob_micro_batch_size=4 engine_kwargs.vllm=null trainer.total_epochs=3
ray_kwargs.ray_init.num_cpus=4 reward.custom_reward_function.path=x.py trainer.val_only=true
trainer.rollout_data_dir=x +algorithm.filter_groups.enable=true trainer.resume_mode=disable
actor_rollout_ref.rollout.mode=async"""


def test_verls_own_command_line_is_answered_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{}")
    answers = {
        "data.train_batch_size": "did you mean 'buffer.batch_size'?",
        "actor_rollout_ref.model.path": "did you mean 'model.model_path'?",
        "actor_rollout_ref.actor.optim.lr": "did you mean 'algorithm.optimizer.lr'?",
        "actor_rollout_ref.actor.clip_ratio": "policy_loss_fn_args.clip_range'?",
        "actor_rollout_ref.rollout.n": "did you mean 'algorithm.repeat_times'?",
        "actor_rollout_ref.rollout.engine_kwargs": "explorer.rollout_model.extra_engine_args'?",
        "actor_rollout_ref.rollout.val_kwargs": "repeat_times in buffer.explorer_input.eval",
        "reward_model": "response_key: reward_model.ground_truth",
        "ref": "the reference is the model as it was loaded",
        "engine_kwargs": "did you mean 'explorer.rollout_model.extra_engine_args'?",
        "trainer.total_epochs": "did you mean 'buffer.total_epochs'?",
        "ray_kwargs": "use cluster.ray_address, or nothing: Trireme starts Ray itself",
        "reward": "use a reward in buffer.explorer_input.default_reward_fn_type",
        "trainer.val_only": "use the command: trireme eval",
        "trainer.rollout_data_dir": "no key replaces it: all rollouts are stored",
        "trainer.resume_mode": "use continue_from_checkpoint: false, for disable",
        "actor_rollout_ref.rollout.mode": "no key replaces it: every engine serves",
        "algorithm.filter_groups": "use algorithm.algorithm_type: dapo",
    }
    _, problems = read_config(file, COMMAND_LINE.split())
    said = {problem.key: problem.text for problem in problems}
    assert {*said} == {*answers}
    assert all(hint in said[key] for key, hint in answers.items())
    _, problems = read_config(file, ["actor_rollout_ref.actor.nothing=1", *COMMAND_LINE.split()])
    said = {problem.key: problem.text for problem in problems}
    assert {*said} == {*answers, "actor_rollout_ref"}
    assert "Trireme's keys, which docs/migrate/verl.md lists" in said["actor_rollout_ref"]
