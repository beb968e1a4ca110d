"""Swift dialect: makes the modules that ms-swift's plug-ins import available without ms-swift."""

from __future__ import annotations

from trireme.config.dialect import Dialect

_TRL = {
    **dict.fromkeys(
        ("device", "use_cpu"),
        "no key: a GPU is used where there is one, and none with CUDA_VISIBLE_DEVICES=",
    ),
    "beta": "algorithm.kl_loss_fn_args.kl_coef",
    "chat_template_kwargs": "model.enable_thinking",
    "delta": "algorithm.policy_loss_fn_args.clip_ratio_c",
    "entropy_coef": "algorithm.entropy_loss_fn_args.entropy_coef",
    **dict.fromkeys(("environment_factory", "rollout_func"), "a workflow (docs/workflows.md)"),
    "epsilon": "algorithm.policy_loss_fn_args.clip_range",
    "epsilon_high": "algorithm.policy_loss_fn_args.clip_range_high",
    "generation_kwargs": "buffer.explorer_input.taskset.rollout_args",
    "loss_type": "algorithm.loss_agg_mode",
    "mask_truncated_completions": "the operator mask_response_truncated in "
    "data_processor.experience_pipeline.operators",
    "max_prompt_length": "model.max_prompt_tokens",
    "max_tool_calling_iterations": "buffer.explorer_input.taskset.workflow_args.max_turns",
    "off_policy_mask_threshold": "algorithm.policy_loss_fn_args.delta_sequence_masking",
    "run_name": "name",
    "sapo_temperature_neg": "algorithm.policy_loss_fn_args.tau_neg",
    "sapo_temperature_pos": "algorithm.policy_loss_fn_args.tau_pos",
    "scale_rewards": "algorithm.advantage_fn_args.norm_by_std",
    "shuffle_dataset": "buffer.explorer_input.taskset.data_selector.selector_type",
    "top_entropy_quantile": "algorithm.policy_loss_fn_args.top_entropy_quantile",
    "train_dataset": "buffer.explorer_input.taskset.path",
    "use_bias_correction_kl": "algorithm.kl_loss_fn: corrected_k3",
    **{
        f"vespo_{name}": f"algorithm.policy_loss_fn_args.{name}"
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "vllm_enable_sleep_mode": "mode: colocate",
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
