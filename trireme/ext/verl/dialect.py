"""verl dialect: translates verl's options, `trainer.trainer_config`, to our keys.

An option is read as another key (`Moved`), changes nothing here (`NoEffect`), or is refused. The
first pattern that an option's dotted path matches says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from trireme.config.dialect import Dialect
from trireme.config.section import Fate, Moved, NoEffect, Refused
from trireme.registry import did_you_mean

KEY = "trainer.trainer_config"
_OPTIM = {
    "lr": "lr",
    "lr_warmup_steps": "lr_warmup_steps",
    "lr_warmup_steps_ratio": "lr_warmup_steps_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "warmup_style": "lr_scheduler_type",
    "lr_scheduler_type": "lr_scheduler_type",
    "weight_decay": "weight_decay",
    "betas": "betas",
}
_ACTOR = "actor_rollout_ref.actor"
_ACTOR_EPOCHS, _CRITIC_EPOCHS = f"{_ACTOR}.ppo_epochs", "critic.ppo_epochs"
READ_AS = {
    **{f"{_ACTOR}.optim.{name}": f"algorithm.optimizer.{ours}" for name, ours in _OPTIM.items()},
    **{f"critic.optim.{name}": f"algorithm.critic.optimizer.{o}" for name, o in _OPTIM.items()},
    f"{_ACTOR}.optim.clip_grad": "trainer.grad_clip",
    f"{_ACTOR}.grad_clip": "trainer.grad_clip",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
    _ACTOR_EPOCHS: "algorithm.num_iterations",
    f"{_ACTOR}.use_dynamic_bsz": "trainer.use_dynamic_bsz",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "trainer.ulysses_sequence_parallel_size",
    f"{_ACTOR}.fsdp_config.fsdp_size": "trainer.fsdp_size",
    f"{_ACTOR}.fsdp_config.param_offload": "trainer.offload",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "trainer.offload",
    f"{_ACTOR}.fsdp_config.offload_policy": "trainer.offload",
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        "trainer.enable_gradient_checkpointing"
    ),
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "critic.cliprange_value": "algorithm.critic.cliprange_value",
    "critic.model.path": "model.critic_model_path",
    "algorithm.rollout_correction.rollout_is": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_is_threshold": (
        "algorithm.rollout_correction.rollout_is_threshold"
    ),
    "algorithm.rollout_correction.rollout_rs": "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "algorithm.rollout_correction.rollout_rs_threshold"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        "algorithm.rollout_correction.rollout_rs_threshold_lower"
    ),
    "algorithm.rollout_correction.bypass_mode": "algorithm.bypass_old_logprobs",
    "trainer.critic_warmup": "algorithm.critic.warmup_steps",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
}
"""Maps verl's options to our keys. The switches of offload count if they are true."""
_IDLE = (
    "*_micro_batch_size*",
    "*.checkpoint.*",
    "*.fsdp_config.*",
    "*.megatron.*",
    "*.profiler.*",
    "*profile*",
    "*.optim.*",
    "*log_prob_use_dynamic_bsz",
    "*log_prob_max_token_len_per_gpu",
    "*.use_torch_compile",
    "*.use_remove_padding",
    "*.use_fused_kernels",
    "*.fused_kernel_options.*",
    "*.entropy_*",
    "*.strategy",
    "*.shuffle",
    "*.data_loader_seed",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.*",
    "actor_rollout_ref.ref.*",
    *(f"{_ACTOR}.{name}" for name in ("ppo_mini_batch_size", "clip_ratio*", "entropy_coeff")),
    *(f"{_ACTOR}.{name}" for name in ("loss_agg_mode", "policy_loss.*", "use_kl_loss", "kl_loss*")),
    *(f"critic.{name}" for name in ("grad_clip", "ppo_*", "forward_*", "use_dynamic_bsz")),
    *(
        f"critic.{name}"
        for name in ("enable", "model.*", "loss_agg_mode", "rollout_n", "ulysses_*")
    ),
    *(
        f"algorithm.{name}"
        for name in ("adv_estimator", "gamma", "lam", "kl_*", "use_kl_in_reward")
    ),
    "algorithm.norm_adv_by_std_in_grpo",
    "data.*",
    "global_profiler.*",
    *(f"trainer.{name}" for name in ("balance_batch", "nnodes", "n_gpus_per_node", "device")),
    *(f"trainer.{name}" for name in ("project_name", "experiment_name", "group_name", "logger")),
    *(f"trainer.{name}" for name in ("total_*", "save_freq", "test_freq", "val_*", "log_val_*")),
    *(f"trainer.{name}" for name in ("default_local_dir", "remove_previous_ckpt_in_save")),
    *(f"trainer.{name}" for name in ("del_local_ckpt_after_load", "max_critic_ckpt_to_keep")),
    *(f"trainer.{name}" for name in ("ray_wait_register_center_timeout", "esi_redundant_time")),
)
"""Options that change nothing: Trireme's own keys set these things, or they are always so here."""
_PLAIN = {
    "trainer.resume_mode": "auto",
    "actor_rollout_ref.model.lora_rank": 0,
}
"""Options of which one value matches what a run here does."""
_MODEL = "actor_rollout_ref.model"
_SWITCHES = {
    "*.enable": "{path}",
    "trainer.resume_from_path": "{path}",
    "reward_model.model.*": "reward_model.enable",
    "custom_reward_function.*": "custom_reward_function.path",
    f"{_MODEL}.lora_*": f"{_MODEL}.lora_rank",
    f"{_MODEL}.target_modules": f"{_MODEL}.lora_rank",
    f"{_MODEL}.exclude_modules": f"{_MODEL}.lora_rank",
}
"""Maps options to the one that turns them off if it is set to null, false or 0."""
_INSTEAD = {
    "trainer.resume_*": "the same command resumes; continue_from_checkpoint=false starts over",
    "actor_rollout_ref.model.lora_*": "set model.lora_configs",
    "actor_rollout_ref.model.target_modules": "set model.lora_configs",
    "actor_rollout_ref.model.override_config*": "set it in the model's config.json",
    "custom_reward_function.*": "name the function in default_reward_fn_type",
    "reward_model.*": "name a reward in default_reward_fn_type",
}


_KEYS = {
    "adv_estimator": "algorithm.algorithm_type",
    "norm_adv_by_std_in_grpo": "algorithm.advantage_fn_args.norm_by_std",
    **{name: f"algorithm.advantage_fn_args.{name}" for name in ("gamma", "lam")},
    **dict.fromkeys(("use_kl_in_reward", "kl_ctrl", "kl_penalty"), "algorithm.kl_penalty_fn"),
    "filter_groups": "algorithm.algorithm_type: dapo",
    **dict.fromkeys(("use_kl_loss", "kl_loss_type"), "algorithm.kl_loss_fn"),
    "kl_loss_coef": "algorithm.kl_loss_fn_args.kl_coef",
    "entropy_coeff": "algorithm.entropy_loss_fn_args.entropy_coef",
    "clip_ratio": "algorithm.policy_loss_fn_args.clip_range",
    "clip_ratio_low": "algorithm.policy_loss_fn_args.clip_range_low",
    "clip_ratio_high": "algorithm.policy_loss_fn_args.clip_range_high",
    "clip_ratio_c": "algorithm.policy_loss_fn_args.clip_ratio_c",
    "ppo_epochs": "algorithm.num_iterations",
    "router_replay": "algorithm.enable_router_replay",
    "logger": "monitor.monitor_type",
    "default_local_dir": "checkpoint_root_dir",
    "train_files": "buffer.explorer_input.taskset.path",
    "val_files": "buffer.explorer_input.eval_tasksets",
    "max_response_length": "model.max_response_tokens",
    "ppo_mini_batch_size": "buffer.train_batch_size, in completions",
    "custom_reward_function": "buffer.explorer_input.default_reward_fn_type: my_file:function",
    "experiment_name": "name",
    "project_name": "project",
    "n_gpus_per_node": "cluster.gpu_per_node",
    "nnodes": "cluster.node_num",
    "save_freq": "trainer.save_interval",
    "test_freq": "explorer.eval_interval",
    "val_before_train": "explorer.eval_on_startup",
    "total_training_steps": "buffer.total_steps",
    "total_epochs": "buffer.total_epochs",
    "engine_kwargs": "explorer.rollout_model.extra_engine_args",
    "reward_model": "a reward in buffer.explorer_input.default_reward_fn_type (docs/rewards.md); "
    "rows of verl have the reference answer at response_key: reward_model.ground_truth",
    "ref": "algorithm.kl_loss_fn or kl_penalty_fn: the reference is the model as it was loaded",
    "reward": "a reward in buffer.explorer_input.default_reward_fn_type (docs/rewards.md)",
    "compute_score": "buffer.explorer_input.default_reward_fn_type: my_file:function",
}
"""Our keys for names of verl's own command line, beyond those of `READ_AS`."""
_TASKSET = "buffer.explorer_input.taskset"
_ENGINE = "explorer.rollout_model"
_ROLLOUT = "actor_rollout_ref.rollout"
_PATHS = {
    "data.train_batch_size": "buffer.batch_size",
    "data.max_prompt_length": "model.max_prompt_tokens",
    "data.prompt_key": f"{_TASKSET}.format.prompt_key",
    "data.image_key": f"{_TASKSET}.format.image_key",
    "data.shuffle": f"{_TASKSET}.data_selector.selector_type",
    "data.seed": f"{_TASKSET}.data_selector.seed",
    "data.sampler": f"{_TASKSET}.data_selector.selector_type: my_file:function",
    "data.truncation": "model.enable_prompt_truncation",
    "data.filter_overlong_prompts": "no key: `trireme check` counts such prompts",
    "data.return_raw_chat": "no key: prompts are messages or text",
    f"{_MODEL}.path": "model.model_path",
    **dict.fromkeys(
        (f"{_MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")),
        "model.lora_configs",
    ),
    f"{_ACTOR}.loss_agg_mode": "algorithm.loss_agg_mode",
    f"{_ACTOR}.policy_loss.loss_mode": "algorithm.policy_loss_fn",
    f"{_ACTOR}.strategy": "trainer.trainer_strategy",
    f"{_ACTOR}.use_torch_compile": "trainer.use_torch_compile",
    f"{_ROLLOUT}.n": "algorithm.repeat_times",
    f"{_ROLLOUT}.name": f"{_ENGINE}.engine_type",
    f"{_ROLLOUT}.tensor_model_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    f"{_ROLLOUT}.expert_parallel_size": f"{_ENGINE}.enable_expert_parallel",
    **{
        f"{_ROLLOUT}.{name}": f"{_ENGINE}.{name}"
        for name in (
            *("data_parallel_size", "dtype", "enforce_eager", "enable_chunked_prefill"),
            *("enable_prefix_caching", "gpu_memory_utilization", "ignore_eos", "seed"),
        )
    },
    **{
        f"{_ROLLOUT}.{name}": f"{_ENGINE}.extra_engine_args"
        for name in ("max_num_batched_tokens", "max_num_seqs")
    },
    **{
        f"{_ROLLOUT}.{name}": f"{_TASKSET}.rollout_args.{name}"
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
    },
    f"{_ROLLOUT}.engine_kwargs": f"{_ENGINE}.extra_engine_args",
    f"{_ROLLOUT}.prompt_length": "model.max_prompt_tokens",
    f"{_ROLLOUT}.response_length": "model.max_response_tokens",
    f"{_ROLLOUT}.max_model_len": "model.max_model_len",
    f"{_ROLLOUT}.over_sample_rate": "explorer.over_rollout.ratio",
    f"{_ROLLOUT}.agent.num_workers": "explorer.runner_per_model",
    f"{_ROLLOUT}.multi_turn": "a workflow, or tool_call_scheduler (docs/multi_turn.md)",
    f"{_ROLLOUT}.val_kwargs": "rollout_args and repeat_times in "
    "buffer.explorer_input.eval_tasksets",
    f"{_ROLLOUT}.free_cache_engine": "mode: colocate",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    f"{_ACTOR}.checkpoint.save_contents": "trainer.save_hf_checkpoint",
    f"{_ACTOR}.freeze_vision_tower": "model.freeze_vision_tower",
    f"{_ACTOR}.megatron": "trainer.trainer_strategy: fsdp2",
    f"{_ACTOR}.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold",
    **dict.fromkeys(
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        "trainer.max_token_len_per_gpu: micro-batches are limited in tokens",
    ),
    "actor_rollout_ref.nccl_timeout": "trainer.collective_timeout",
    **dict.fromkeys(
        (f"{_MODEL}.{name}" for name in ("use_remove_padding", "use_fused_kernels")),
        "no key: there is no padding, and the output head works in chunks",
    ),
    f"{_ROLLOUT}.calculate_log_probs": "no key: every token's log-probability is recorded",
    **dict.fromkeys(
        ("ray_init", "ray_kwargs"), "cluster.ray_address, or nothing: Trireme starts Ray itself"
    ),
    "trainer.default_hdfs_dir": "checkpoint_root_dir",
    **dict.fromkeys(
        (
            f"trainer.{name}"
            for name in ("log_val_generations", "rollout_data_dir", "validation_data_dir")
        ),
        "no key: all rollouts are stored, for `trireme view`",
    ),
    "trainer.val_only": "the command: trireme eval",
    "trainer.resume_mode": "continue_from_checkpoint: false, for disable; the same command resumes",
    "trainer.resume_from_path": "no key: the same command resumes the run of its name",
    f"{_ROLLOUT}.mode": "no key: every engine serves its requests one by one",
    f"{_ROLLOUT}.load_format": "no key: engines load the model, and then what is trained",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": "no key: weights travel in buckets",
}
"""Our keys for dotted names, beyond those of `READ_AS`."""
_SECTIONS = ("actor_rollout_ref", "critic", "custom_reward_function", "data", "global_profiler")
_PAGE = "Trireme's keys, which docs/migrate/verl.md lists by verl's"


class Verl(Dialect):
    """verl's options under `trainer.trainer_config`."""

    def replacement(self, name: str) -> str:
        """Return the key for an option, with or without the sections above it; for another option
        of verl's sections, where to look.
        """
        section, _, rest = name.partition(".")
        if section in ("reward", "reward_model") and rest:
            return ""  # the sentence on the section says it
        if ours := READ_AS.get(name) or _PATHS.get(name) or _KEYS.get(name):
            return ours
        if section not in _SECTIONS:
            return ""
        above = name
        while above := above.rpartition(".")[0]:
            if above in _PATHS:
                return _PATHS[above]
        return _KEYS.get(name.rpartition(".")[2]) or _KEYS.get(section) or _PAGE

    def adapt(self, kind: str, name: str, thing: Any) -> Any:
        """Make a reward of a `compute_score`."""
        if kind != "reward":
            return None
        from trireme.ext.verl.rewards import as_reward

        return as_reward(thing)

    def options(self, key: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any, Fate]]:
        """Yield each option with its fate."""
        return options(values) if key.endswith(KEY) else ()


def options(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any, Fate]]:
    """Yield each option's dotted path, value and fate; an empty one is left out."""
    values = dict(_leaves(tree))
    for path, value in values.items():
        if value not in (None, "", []):
            yield path, value, _fate(path, value, values)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _fate(path: str, value: Any, values: Mapping[str, Any]) -> Fate:
    ours, epochs = READ_AS.get(path), values.get(_ACTOR_EPOCHS) or 1
    if path.endswith(".lr_warmup_steps") and ours is not None and value > 0 and epochs > 1:
        return Refused(
            f"counts batches, of {epochs} optimizer steps each ({_ACTOR_EPOCHS}): expected "
            f"{ours}: {value * epochs} in its place, which counts optimizer steps"
        )
    if ours is not None and not (ours == "trainer.offload" and value is False):
        text = f"is read as {ours}, where that is not given"
        return Moved(text, to=ours, gives_way=True)
    if path == _CRITIC_EPOCHS and value != epochs:
        return Refused(
            f"is not supported here: a batch has as many steps for the critic as for the policy; "
            f"expected {epochs}, as {_ACTOR_EPOCHS} says"
        )
    if ours is not None or _PLAIN.get(path) == value or _is_off(path, values):
        return NoEffect()
    for pattern, instead in _INSTEAD.items():
        if fnmatchcase(path, pattern):
            return Refused(f"is not supported here: {instead}")
    if any(fnmatchcase(path, pattern) for pattern in _IDLE):
        return NoEffect()
    hint = did_you_mean(path, [*READ_AS, *_PLAIN])
    return Refused(f"is not supported here{hint or ': docs/migrate/verl.md lists what is read'}")


def _is_off(path: str, values: Mapping[str, Any]) -> bool:
    """Return whether the option's switch is set, and off."""
    switches = (
        switch.format(path=path)
        for pattern, switch in _SWITCHES.items()
        if fnmatchcase(path, pattern)
    )
    return any(not values.get(switch, True) for switch in switches)
