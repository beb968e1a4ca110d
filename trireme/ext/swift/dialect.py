"""Swift dialect: makes the modules that ms-swift's plug-ins import available without ms-swift."""

from __future__ import annotations

from trireme.config.dialect import Dialect

_STORED = "no key: all rollouts are stored, for `trireme view`"
_WITHOUT_PADDING = "no key: there is no padding, and batching is continuous"
_TRL = {
    **dict.fromkeys(
        ("device", "use_cpu"),
        "no key: a GPU is used where there is one, and none with CUDA_VISIBLE_DEVICES=",
    ),
    **dict.fromkeys(("bf16", "fp16"), "no key: the dtype follows the device"),
    "beta": "algorithm.kl_loss_fn_args.kl_coef",
    "bias": "no key: only the adapter's matrices are trained",
    **dict.fromkeys(
        ("cache_implementation", "pad_to_multiple_of", "use_transformers_paged"), _WITHOUT_PADDING
    ),
    "cast_lm_head_to_fp32": "no key: the output head's gradient is accumulated in float32",
    "chat_template_kwargs": "model.enable_thinking",
    "dataset_config": "buffer.explorer_input.taskset.subset_name",
    "dataset_name": "buffer.explorer_input.taskset.path",
    **dict.fromkeys(("dataset_test_split", "eval_dataset"), "buffer.explorer_input.eval_tasksets"),
    "dataset_train_split": "buffer.explorer_input.taskset.split",
    "delta": "algorithm.policy_loss_fn_args.clip_ratio_c",
    "disable_dropout": "no key: dropout is always off",
    "ds3_gather_for_generation": "no key: weights are sent in shards",
    "entropy_coef": "algorithm.entropy_loss_fn_args.entropy_coef",
    **dict.fromkeys(("environment_factory", "rollout_func"), "a workflow (docs/workflows.md)"),
    "epsilon": "algorithm.policy_loss_fn_args.clip_range",
    "epsilon_high": "algorithm.policy_loss_fn_args.clip_range_high",
    "eval_strategy": "explorer.eval_interval",
    "generation_kwargs": "buffer.explorer_input.taskset.rollout_args",
    "importance_sampling_level": "algorithm.algorithm_type: gspo, for sequence",
    **dict.fromkeys(
        (
            "log_completions",
            "log_completions_hub_repo",
            "log_unique_prompts",
            "num_completions_to_print",
        ),
        _STORED,
    ),
    "log_multimodal": "no key: the page shows pictures",
    "loss_type": "algorithm.loss_agg_mode",
    "mask_truncated_completions": "the operator mask_response_truncated in "
    "data_processor.experience_pipeline.operators",
    "max_prompt_length": "model.max_prompt_tokens",
    "max_tool_calling_iterations": "buffer.explorer_input.taskset.workflow_args.max_turns",
    "model_init_kwargs": "trainer.attn_implementation; the dtype follows the device",
    "model_name_or_path": "model.model_path",
    "modules_to_save": "no key: only the adapter's matrices are trained",
    "multi_objective_aggregation": "algorithm.advantage_fn: gdpo",
    "off_policy_mask_threshold": "algorithm.policy_loss_fn_args.delta_sequence_masking",
    "peft_config": "model.lora_configs",
    "push_to_hub": "no key: trireme convert writes a folder to upload",
    "remove_unused_columns": "no key: rewards and workflows see every column",
    "reward_processing_classes": "no key: a reward model has its own tokenizer",
    "resume_from_checkpoint": "no key: the same command resumes",
    "router_aux_loss_coef": "no key: there is no auxiliary loss",
    "run_name": "name",
    "sapo_temperature_neg": "algorithm.policy_loss_fn_args.tau_neg",
    "sapo_temperature_pos": "algorithm.policy_loss_fn_args.tau_pos",
    "save_strategy": "trainer.save_interval",
    "scale_rewards": "algorithm.advantage_fn_args.norm_by_std",
    "shuffle_dataset": "buffer.explorer_input.taskset.data_selector.selector_type",
    "tools": "buffer.explorer_input.taskset.workflow_args.tools, of the tool_call_scheduler",
    "top_entropy_quantile": "algorithm.policy_loss_fn_args.top_entropy_quantile",
    "train_dataset": "buffer.explorer_input.taskset.path",
    "trust_remote_code": "model.trust_remote_code",
    "use_bias_correction_kl": "algorithm.kl_loss_fn: corrected_k3",
    "use_liger_loss": "no key: the loss never holds the logits of all tokens at once",
    "use_peft": "model.lora_configs",
    "use_transformers_continuous_batching": _WITHOUT_PADDING,
    **{
        f"vespo_{name}": f"algorithm.policy_loss_fn_args.{name}"
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "vllm_enable_sleep_mode": "mode: colocate",
    "vllm_group_port": "synchronizer.sync_timeout, and no port: it is any free one",
    "vllm_mode": "explorer.rollout_model.engine_type: vllm, or remote for servers",
    "vllm_model_impl": "explorer.rollout_model.extra_engine_args",
    "vllm_structured_outputs_regex": "no key: replies are sampled without constraints",
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        "algorithm.rollout_correction",
    ),
    "vllm_max_model_length": "model.max_model_len",
}
"""Arguments of TRL that are no flags, or flags that become several keys."""


class Swift(Dialect):
    """The dialect of ms-swift, whose keys are flags: cli/flags.py."""

    def replacement(self, name: str) -> str:
        """Return the key of a flag's name; most of them are TRL's arguments, too."""
        from trireme.ext.swift.flag_names import IDLE, INPUT, KEYS, TASKSETS, elsewhere

        if name in TASKSETS:
            return f"{INPUT}.taskset.{TASKSETS[name]}"
        idle = f"no key: {IDLE[name]}" if name in IDLE else ""
        return KEYS.get(name) or _TRL.get(name) or elsewhere(name) or idle

    def stand_in(self) -> None:
        """Let `import swift` find Trireme's names."""
        from trireme.ext.swift.imports import stand_in

        stand_in()
