"""Flag names: lists ms-swift's flags, each with the keys that it sets, or what to set instead."""

from __future__ import annotations

from typing import Any

INPUT = "buffer.explorer_input"
ENGINE = "explorer.rollout_model"
TASKSETS = {
    "multi_turn_scheduler": "workflow_args.scheduler",
    "max_turns": "workflow_args.max_turns",
    "multi_turns": "workflow_args.max_turns",
    "loss_scale": "workflow_args.loss_scale",
    "system": "format.system_prompt",
    "stop_words": "rollout_args.stop",
    "reward_funcs": "reward_fn_args.funcs",
    "reward_weights": "reward_fn_args.weights",
    "gym_env": "workflow_args.env",
    "min_p": "rollout_args.min_p",
}
"""Keys of every taskset."""
KEYS = {
    "model": "model.model_path",
    "dataset": f"{INPUT}.taskset.path",
    "output_dir": "checkpoint_root_dir",
    "seed": "seed",
    "rlhf_type": "algorithm.algorithm_type",
    "num_iterations": "algorithm.num_iterations",
    "sync_ref_model": "algorithm.sync_ref_model",
    "ref_model_mixup_alpha": "algorithm.ref_model_mixup_alpha",
    "ref_model_sync_steps": "algorithm.ref_model_sync_steps",
    "num_generations": "algorithm.repeat_times",
    "generation_batch_size": "buffer.train_batch_size",
    "num_train_epochs": "buffer.total_epochs",
    "max_steps": "trainer.total_steps",
    "save_steps": "trainer.save_interval",
    "save_total_limit": "trainer.max_checkpoints_to_keep",
    "eval_steps": "explorer.eval_interval",
    "learning_rate": "algorithm.optimizer.lr",
    "lr_scheduler_type": "algorithm.optimizer.lr_scheduler_type",
    "warmup_ratio": "algorithm.optimizer.lr_warmup_steps_ratio",
    "weight_decay": "algorithm.optimizer.weight_decay",
    "warmup_steps": "algorithm.optimizer.lr_warmup_steps",
    "max_grad_norm": "trainer.grad_clip",
    "gradient_checkpointing": "trainer.enable_gradient_checkpointing",
    "report_to": "monitor.monitor_type",
    "max_length": "model.max_prompt_tokens",
    "max_completion_length": "model.max_response_tokens",
    "vllm_max_model_len": "model.max_model_len",
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "top_k": "model.top_k",
    "repetition_penalty": "model.repetition_penalty",
    "torch_dtype": f"{ENGINE}.dtype",
    "vllm_tensor_parallel_size": f"{ENGINE}.tensor_parallel_size",
    "vllm_data_parallel_size": f"{ENGINE}.data_parallel_size",
    "vllm_gpu_memory_utilization": f"{ENGINE}.gpu_memory_utilization",
    "vllm_enforce_eager": f"{ENGINE}.enforce_eager",
    "vllm_enable_prefix_caching": f"{ENGINE}.enable_prefix_caching",
    "vllm_server_base_url": f"{ENGINE}.base_urls",
    "vllm_server_host": f"{ENGINE}.base_urls",
    "vllm_server_port": f"{ENGINE}.base_urls",
    "external_plugins": "plugins",
}
"""Keys of the whole run."""
IDLE = {
    "use_vllm": "explorer.rollout_model.engine_type names the engine",
    "vllm_mode": "without a --vllm_server_* flag the engine is this run's own",
    "use_async_engine": "every engine serves its requests one by one",
    "vllm_use_async_engine": "every engine serves its requests one by one",
    "vllm_server_timeout": "explorer.max_timeout limits a rollout",
    "vllm_server_group_port": "weights need no port that is agreed on",
    "vllm_server_pass_dataset": "the columns of the data set always reach the scheduler",
    "vllm_enable_lora": "engines are set up for the adapter in model.lora_configs",
    "vllm_max_lora_rank": "engines are set up for the adapter in model.lora_configs",
    "vllm_limit_mm_per_prompt": "prompts are text",
    "vllm_disable_custom_all_reduce": "give it in explorer.rollout_model.extra_engine_args",
    "sleep_level": "an engine that shares its device with the trainer takes turns with it",
    "offload_model": "see trainer.offload",
    "offload_optimizer": "see trainer.offload",
    "move_model_batches": "weights travel in buckets",
    "gc_collect_after_offload": "nothing is kept that would have to be collected",
    "log_completions": "all are in buffer/explorer_output.db",
    "logging_steps": "every step is logged",
    "attn_impl": "the trainer takes what the model and the device allow",
    "dataset_num_proc": "rows are read as they are",
    "dataloader_num_workers": "rows are read as they are",
    "dataloader_pin_memory": "rows are read as they are",
    "load_from_cache_file": "rows are read as they are",
    "split_dataset_ratio": "name rows to evaluate on in --val_dataset",
    "use_gym_env": "the scheduler gym_scheduler plays an environment, the others none",
    "enable_flattened_weight_sync": "weights always travel in flat buckets",
    "padding_free": "samples are always laid end to end, without padding",
    "deepspeed": "several ranks share weights by FSDP2: cluster.gpu_per_node",
    "eval_strategy": "--eval_steps says how often",
    "save_strategy": "--save_steps says how often",
    "save_only_model": "a checkpoint holds all that a resume needs",
    "bf16": "see --torch_dtype",
    "log_entropy": "the entropy is always logged",
    "model_type": "the model's config.json says it",
    "template": "the tokenizer's chat template is used",
    "num_infer_workers": "explorer.rollout_model.engine_num counts engines",
    "infer_backend": "--engine names it",
    "ddp_timeout": "trainer.collective_timeout",
}
"""Accepted and said to be without effect, each with why."""
_LOSSES = {
    "grpo": ("ppo", "seq-mean-token-mean"),
    "bnpo": ("ppo", "token-mean"),
    "dapo": ("ppo", "token-mean"),
    "dr_grpo": ("ppo", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
"""`--loss_type` -> policy loss, and how it is averaged."""
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "loss_type": {
        name: {"policy_loss_fn": loss, "loss_agg_mode": mode}
        for name, (loss, mode) in _LOSSES.items()
    },
    "importance_sampling_level": {"token": {}, "sequence": {"policy_loss_fn": "gspo"}},
    "advantage_estimator": {
        "grpo": {"advantage_fn": "grpo"},
        "rloo": {"advantage_fn": "rloo"},
        "reinforce_plus_plus": {"advantage_fn": "reinforceplusplus"},
    },
    "scale_rewards": {
        "group": {"advantage_fn_args.std_cal_level": "group"},
        "batch": {"advantage_fn_args.std_cal_level": "batch"},
        "none": {"advantage_fn_args.norm_by_std": False},
        "gdpo": {"advantage_fn": "gdpo"},
    },
    "dynamic_sample": {
        "true": {
            "advantage_fn_args.std_threshold": 0.0,
            "advantage_fn_args.max_resample_times": 3,
        },
        "false": {},
    },
    "log_rollout_offpolicy_metrics": {
        "true": {"rollout_correction.rollout_is": None},  # measured, and nothing is corrected
        "false": {},
    },
    "completion_length_limit_scope": {"per_round": {}},
    "train_type": {"full": {}, "lora": {}},
    "tuner_type": {"full": {}, "lora": {}},
    "rollout_importance_sampling_mode": {
        "token_truncate": {"rollout_correction.rollout_is": "token"},
        "token_mask": {"rollout_correction.rollout_rs": "token"},
        "sequence_truncate": {"rollout_correction.rollout_is": "sequence"},
        "sequence_mask": {"rollout_correction.rollout_rs": "sequence"},
    },
    "overlong_filter": {"true": {}, "false": {}},
    "async_generate": {"true": {}, "false": {}},
}
"""Flags with few values -> what each sets in the `algorithm` section."""
NUMBERS = ("beta", "epsilon", "epsilon_high", "delta", "top_entropy_quantile", "lora_rank")
NUMBERS += ("lora_alpha", "rollout_importance_sampling_threshold", "teacher_kl_coef")
NUMBERS += ("max_resample_times", "tau_pos", "tau_neg", "off_policy_sequence_mask_delta")
REWARD_OPTIONS = {
    "soft_max_length": ("soft_overlong", "soft_max_length"),
    "soft_cache_length": ("soft_overlong", "soft_cache_length"),
    "cosine_max_len": ("cosine", "max_len"),
    "cosine_min_len_value_wrong": ("cosine", "min_len_value_wrong"),
    "cosine_max_len_value_wrong": ("cosine", "max_len_value_wrong"),
    "cosine_min_len_value_correct": ("cosine", "min_len_value_correct"),
    "cosine_max_len_value_correct": ("cosine", "max_len_value_correct"),
    "repetition_n_grams": ("repetition", "n_grams"),
    "repetition_max_penalty": ("repetition", "max_penalty"),
}
"""Numbers that are a reward's: its name in `--reward_funcs`, and the option's name here."""
REWARD_MODELS = ("reward_model", "reward_model_plugin")
TRANSLATED = (*CHOICES, *NUMBERS, *REWARD_OPTIONS, *REWARD_MODELS, "teacher_model")
"""Flags that become several keys, or another value."""
_NO_LOSS = "--loss_type, without the losses real and fipo, which are not here"
_NO_TEACHER = "--teacher_model with --teacher_kl_coef: RLSD and SDAR are not here"
ELSEWHERE = {
    "advantage_reweight": _NO_TEACHER,
    "sdar_loss_coef": _NO_TEACHER,
    "real_tau": _NO_LOSS,
    "fipo_*": _NO_LOSS,
    "chord_*": "algorithm.algorithm_type=mix_chord, with the options in policy_loss_fn_args",
    "context_manager": "workflow_args.context_manager of the taskset, with gym_scheduler",
    "dataset_shuffle": "data_selector.selector_type of the taskset: shuffle or sequential",
    "num_generations_eval": "repeat_times of each of buffer.explorer_input.eval_tasksets",
    "steps_per_generation": "buffer.batch_size (tasks) and buffer.train_batch_size",
    "truncation_strategy": "model.enable_prompt_truncation: what is too long is never trained",
    "val_dataset": "buffer.explorer_input.eval_tasksets",
    "per_device_train_batch_size": "buffer.batch_size (tasks) and buffer.train_batch_size",
    "gradient_accumulation_steps": "buffer.train_batch_size; micro-batches are cut by tokens",
    "kl_in_reward": "algorithm.kl_penalty_fn, where the trainer computes the advantages",
    "ref_model": "model.model_path: the reference is the model that a stage begins with",
    "resume_from_checkpoint": "nothing: the same command resumes, and --output_dir says which run",
    "quant_bits": "model.lora_configs over the model as it is: nothing is quantized",
    "push_to_hub": "nothing: trireme convert writes a folder to upload",
}
"""No flag here: what to set instead; a name that ends in * stands for all that begin so."""


def elsewhere(name: str) -> str | None:
    """What to set instead of a flag that is none here; None: it is not known."""
    family = f"{name.partition('_')[0]}_*"
    return ELSEWHERE.get(name) or ELSEWHERE.get(family)
