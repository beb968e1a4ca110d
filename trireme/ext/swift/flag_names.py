"""Flag names: lists ms-swift's flags, each with the keys that it sets, or its replacement."""

from __future__ import annotations

from typing import Any

INPUT = "buffer.explorer_input"
ENGINE = "explorer.rollout_model"
LOSS = "algorithm.policy_loss_fn_args"
ADVANTAGE = "algorithm.advantage_fn_args"
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
"""Keys of every taskset; --columns and --dataset_shuffle set others of theirs."""
KEYS = {
    "model": "model.model_path",
    "dataset": f"{INPUT}.taskset.path",
    "output_dir": "checkpoint_root_dir",
    "seed": "seed",
    "run_name": "name",
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
    "freeze_vit": "model.freeze_vision_tower",
    "freeze_aligner": "model.freeze_projector",
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
    "enable_thinking": "model.enable_thinking",
    "callbacks": "trainer.callbacks",
    "sequence_parallel_size": "trainer.ulysses_sequence_parallel_size",
}
"""Keys of the whole run."""
IDLE = {
    "use_vllm": "explorer.rollout_model.engine_type names the engine",
    "vllm_mode": "without a --vllm_server_* flag the engine is this run's own",
    "use_async_engine": "every engine serves its requests one by one",
    "vllm_use_async_engine": "every engine serves its requests one by one",
    "vllm_server_timeout": "explorer.max_timeout limits a rollout",
    "vllm_server_group_port": "weights need no agreed port",
    "vllm_server_pass_dataset": "the columns of the data set always reach the scheduler",
    "vllm_enable_lora": "engines are set up for the adapter in model.lora_configs",
    "vllm_max_lora_rank": "engines are set up for the adapter in model.lora_configs",
    "vllm_limit_mm_per_prompt": "a prompt may show as many pictures as vLLM takes by default",
    "vllm_disable_custom_all_reduce": "give it in explorer.rollout_model.extra_engine_args",
    "sleep_level": "an engine that shares its device with the trainer takes turns with it",
    "offload_model": "see trainer.offload",
    "offload_optimizer": "see trainer.offload",
    "move_model_batches": "weights travel in buckets",
    "gc_collect_after_offload": "offloading leaves no garbage to collect",
    "log_completions": "all are in buffer/explorer_output.db",
    "logging_steps": "every step is logged",
    "attn_impl": "the trainer takes what the model and the device allow",
    "dataset_num_proc": "rows are read as they are",
    "dataloader_num_workers": "rows are read as they are",
    "dataloader_pin_memory": "rows are read as they are",
    "load_from_cache_file": "rows are read as they are",
    "split_dataset_ratio": "name rows to evaluate on in --val_dataset",
    "use_gym_env": "only the scheduler gym_scheduler plays an environment",
    "enable_flattened_weight_sync": "weights always travel in flat buckets",
    "padding_free": "samples are always packed, without padding",
    "deepspeed": "several ranks shard weights with FSDP2: cluster.gpu_per_node",
    "eval_strategy": "--eval_steps sets how often",
    "save_strategy": "--save_steps sets how often",
    "save_only_model": "a checkpoint holds all that a resume needs",
    "bf16": "see --torch_dtype",
    "log_entropy": "the entropy is always logged",
    "model_type": "the model's config.json determines it",
    "template": "the tokenizer's chat template is used",
    "num_infer_workers": "explorer.rollout_model.engine_num counts engines",
    "infer_backend": "--engine names it",
    "ddp_timeout": "trainer.collective_timeout",
    "per_device_eval_batch_size": "as many rollouts run at once as the engine accepts",
    "gradient_checkpointing_kwargs": "see trainer.enable_gradient_checkpointing",
    "dataloader_drop_last": "a train batch is always whole",
    "dataloader_prefetch_factor": "rows are read as they are",
    "dataloader_persistent_workers": "rows are read as they are",
    "teacher_deepspeed": "a teacher has an engine of its own: explorer.auxiliary_models",
    "offload_teacher_model": "a teacher has an engine of its own: explorer.auxiliary_models",
    "check_model": "a model's files are read as they are",
    "fsdp": "several ranks shard weights with FSDP2: cluster.gpu_per_node",
    "agent_template": "the tokenizer's chat template is used; explorer.rollout_model."
    "tool_call_parser reads calls",
    "use_hf": "HF_ENDPOINT sets the hub's address",
    "use_liger_kernel": "the loss never holds the logits of all tokens at once",
    "packing": "samples are always packed, without padding",
    "lora_dropout": "an adapter is trained without dropout",
    "data_seed": "--seed applies to everything",
    "vllm_max_num_seqs": "explorer.rollout_model.extra_engine_args has vLLM's max_num_seqs",
    "ddp_find_unused_parameters": "every weight is used",
    "save_safetensors": "weights are always safetensors",
    "average_tokens_across_devices": "averages are always over all ranks",
    "wandb_log_unique_prompts": "all completions are in buffer/explorer_output.db",
    "eval_on_start": "explorer.eval_on_startup sets it",
    "logging_first_step": "every step is logged",
    "fp16": "see --torch_dtype",
    "add_version": "--output_dir is the folder of the run, which the same command resumes",
    "ds3_gather_for_generation": "weights are sent in shards",
    "remove_unused_columns": "rewards and schedulers see every column",
    "logging_dir": "metrics lie in the run's folder, below monitor",
    "lazy_tokenize": "rows are read as they are",
    "strict": "a row that cannot be read is refused before the run",
    "create_checkpoint_symlink": "latest_checkpointed_iteration.txt names the newest one",
    "ddp_backend": "ranks talk by NCCL on GPUs, and by gloo on a CPU",
    "save_on_each_node": "a checkpoint is one folder",
    "disable_tqdm": "progress is a line every few seconds where there is no terminal",
    "use_logits_to_keep": "the loss never holds the logits of all tokens at once",
    "vllm_mm_processor_cache_gb": "vLLM gets pictures prepared, and needs no cache for that",
}
"""Flags that are accepted without effect, each with the reason."""
_LOSSES = {
    "grpo": ("ppo", "seq-mean-token-mean"),
    "bnpo": ("ppo", "token-mean"),
    "dapo": ("ppo", "token-mean"),
    "dr_grpo": ("ppo", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "real": ("real", "seq-mean-token-mean"),
    "fipo": ("fipo", "token-mean"),
}
"""`--loss_type` -> policy loss, and how it is averaged."""
_GSPO = {
    "policy_loss_fn": "gspo",
    "policy_loss_fn_args.clip_range_low": 0.2,
    "policy_loss_fn_args.clip_range_high": 0.2,
}
"""`--epsilon` is 0.2 there by default, whatever the ratio is of."""
_TINY = 1e-9
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "loss_type": {
        name: {"policy_loss_fn": loss, "loss_agg_mode": mode}
        for name, (loss, mode) in _LOSSES.items()
    },
    "importance_sampling_level": {"token": {}, "sequence": _GSPO, "sequence_token": _GSPO},
    "advantage_estimator": {
        "grpo": {"advantage_fn": "grpo"},
        "rloo": {"advantage_fn": "rloo"},
        "reinforce_plus_plus": {"advantage_fn": "reinforceplusplus_baseline"},
    },
    "scale_rewards": {
        "group": {"advantage_fn_args.std_cal_level": "group"},
        "batch": {"advantage_fn_args.std_cal_level": "batch"},
        "none": {"advantage_fn_args.norm_by_std": False},
        "true": {"advantage_fn_args.std_cal_level": "group"},  # of earlier versions
        "false": {"advantage_fn_args.norm_by_std": False},
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
        "token_mask": {
            "rollout_correction.rollout_is": "token",
            "rollout_correction.rollout_rs": "token",
            "rollout_correction.rollout_rs_threshold_lower": _TINY,
        },
        "sequence_truncate": {"rollout_correction.rollout_is": "geometric"},
        "sequence_mask": {
            "rollout_correction.rollout_is": "token",
            "rollout_correction.rollout_is_threshold": float("inf"),
            "rollout_correction.rollout_rs": "geometric",
            "rollout_correction.rollout_rs_threshold_lower": _TINY,
        },
    },
    "optim": {"adamw_torch": {}, "adamw_torch_fused": {}},
    "overlong_filter": {"true": {}, "false": {}},
    "async_generate": {"true": {}, "false": {}},
    "advantage_reweight": {"rlsd": {"advantage_fn": "rlsd"}},
    "kl_in_reward": {
        "true": {"kl_penalty_fn": "k1", "sample_strategy": "explore_step"},
        "false": {},
    },
    "truncation_strategy": {"left": {}, "delete": {}},
    "freeze_llm": {"false": {}},
}
"""Maps flags with few values to the settings of each in the `algorithm` section."""
NUMBERS = ("beta", "epsilon", "epsilon_high", "lora_rank")
NUMBERS += ("lora_alpha", "rollout_importance_sampling_threshold", "teacher_kl_coef")
NUMBERS += ("sdar_loss_coef", "max_resample_times", "off_policy_sequence_mask_delta")
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
LOSS_OPTIONS = {
    "top_entropy_quantile": "top_entropy_quantile",
    "tau_pos": "tau_pos",
    "tau_neg": "tau_neg",
    "delta": "clip_ratio_c",
    "real_tau": "tau",
    "fipo_decay_rate": "half_life",
    "fipo_clip_range": "influence_clip",
    "fipo_clip_high_only": "influence_clip_high_only",
    "fipo_safety_threshold": "safety_threshold",
}
"""Flags that are an option of the policy loss: its name here."""
REWEIGHT_OPTIONS = {
    "rlsd_lambda": "lam",
    "rlsd_reweight_clip_range": "weight_clip",
    "rlsd_lambda_warmup_steps": "lam_warmup_steps",
    "rlsd_lambda_decay_steps": "lam_decay_steps",
    "rlsd_negative_only": "negative_only",
}
"""Those of the advantage rlsd."""
ALSO_SETS: dict[str, tuple[str, ...]] = {
    "dataset": ("buffer.trainer_input.experience_buffer.path",),
    "val_dataset": (f"{INPUT}.eval_tasksets.path",),
    "chord_sft_dataset": ("buffer.trainer_input.auxiliary_buffers.sft_dataset.path",),
    "reward_funcs": tuple(
        f"{INPUT}.{kind}.default_reward_fn_type" for kind in ("taskset", "eval_tasksets")
    ),
    "beta": tuple(f"algorithm.{kind}_args.kl_coef" for kind in ("kl_loss_fn", "kl_penalty_fn")),
    "teacher_kl_coef": ("algorithm.teacher_kl_fn_args.kl_coef",),
    "sdar_loss_coef": ("algorithm.teacher_kl_fn_args.kl_coef",),
    "sdar_gate_beta": ("algorithm.teacher_kl_fn_args.gate_beta",),
    "max_resample_times": (f"{ADVANTAGE}.max_resample_times",),
    "epsilon": (f"{LOSS}.clip_range_low", f"{LOSS}.clip_range_high"),
    "epsilon_high": (f"{LOSS}.clip_range_high",),
    **{flag: (f"{LOSS}.{option}",) for flag, option in LOSS_OPTIONS.items()},
    **{flag: (f"{ADVANTAGE}.{option}",) for flag, option in REWEIGHT_OPTIONS.items()},
}
"""Keys that a problem names for a flag, next to those of KEYS and TASKSETS."""
REWARD_MODELS = ("reward_model", "reward_model_plugin")
TRANSLATED = (*CHOICES, *NUMBERS, *LOSS_OPTIONS, *REWEIGHT_OPTIONS, *REWARD_OPTIONS)
TRANSLATED += (*REWARD_MODELS, "teacher_model", "sdar_gate_beta", "target_modules", "columns")
"""Flags that become several keys, or another value."""
_MEGATRON = "the flags of swift rlhf: FSDP2 shards the trainer, and Megatron's flags are not here"
ELSEWHERE = {
    "chord_sft_dataset": "algorithm.algorithm_type=mix_chord, with the data set as "
    "buffer.trainer_input.auxiliary_buffers.sft_dataset={path: ...}; or take trireme rlhf",
    "chord_*": "algorithm.algorithm_type=mix_chord, with the options in policy_loss_fn_args; or "
    "take trireme rlhf",
    "context_manager": "workflow_args.context_manager of the taskset, with gym_scheduler",
    "dataset_shuffle": "data_selector.selector_type of the taskset: shuffle or sequential; or take "
    "trireme rlhf",
    "num_generations_eval": "repeat_times of each of buffer.explorer_input.eval_tasksets",
    "steps_per_generation": "buffer.batch_size (tasks) and buffer.train_batch_size",
    "val_dataset": "buffer.explorer_input.eval_tasksets",
    "per_device_train_batch_size": "buffer.batch_size (tasks) and buffer.train_batch_size",
    "gradient_accumulation_steps": "buffer.train_batch_size; micro-batches are cut by tokens",
    "ref_model": "model.model_path: the reference is the model that a stage begins with",
    "resume_from_checkpoint": "nothing: the same command resumes, and --output_dir says which run",
    **dict.fromkeys(
        ("quant_bits", "quant_method", "bnb_4bit_quant_type"),
        "model.lora_configs over the model as it is: nothing is quantized",
    ),
    "teacher_model_server": "--teacher_model: a teacher is an engine of this run",
    "use_ray": "cluster.launcher=ray, and the flags of swift rlhf in place of its YAML",
    "adam_beta*": "algorithm.optimizer.betas",
    "cached_dataset": "--dataset: rows are read as they are",
    "adapters": "model.lora_configs=[{path: FOLDER}]",
    "streaming": "--dataset with --max_steps: rows are read when they are needed",
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "train_iters"),
            *("expert_model_parallel_size", "context_parallel_size", "micro_batch_size"),
            *("global_batch_size", "lr_warmup_fraction", "sequence_parallel", "recompute_*"),
            *("moe_*", "mcore_*"),
        ),
        _MEGATRON,
    ),
    "router_replay_mode": "algorithm.enable_router_replay=true, which replays the engine's experts",
    "custom_register_path": "--external_plugins, for a file of your own",
    "vllm_engine_kwargs": "explorer.rollout_model.extra_engine_args",
    "vllm_quantization": "nothing: the engine samples with the weights that are trained",
    "use_rslora": "model.lora_configs=[{use_rslora: true}]",
    "use_dora": "model.lora_configs=[{use_dora: true}]",
    "modules_to_save": "nothing: only the adapter's matrices are trained",
    "lr_scheduler_kwargs": "algorithm.optimizer.min_lr_ratio, with --lr_scheduler_type cosine",
    "structured_outputs_regex": "nothing: replies are sampled without constraints",
    "push_to_hub": "nothing: trireme convert writes a folder to upload",
}
"""Unsupported flags, with their replacement; a name that ends in * stands for all that begin so."""
SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
SEVERAL = ("reward_funcs", "reward_weights", "external_plugins", "stop_words", "report_to")
SEVERAL += ("callbacks",)
SEVERAL += (*REWARD_MODELS, "target_modules", "loss_type", "loss_weights")
SEVERAL += SERVERS
"""Flags with several values."""
SWITCHES = ("gradient_checkpointing", "sync_ref_model", "freeze_vit", "freeze_aligner")
SWITCHES += ("vllm_enforce_eager", "vllm_enable_prefix_caching", "enable_thinking")
SWITCHES += ("fipo_clip_high_only", "rlsd_negative_only", "chord_enable_phi_function")
SWITCHES += ("dataset_shuffle", "freeze_llm")
SWITCHES += tuple(name for name, choices in CHOICES.items() if {*choices} == {"true", "false"})
"""Flags that are true or false."""


def elsewhere(name: str) -> str | None:
    """Return the replacement of a flag that Trireme does not have; None if the flag is unknown."""
    families = (key for key in ELSEWHERE if key.endswith("*") and name.startswith(key[:-1]))
    return ELSEWHERE.get(name) or ELSEWHERE.get(next(families, ""))
