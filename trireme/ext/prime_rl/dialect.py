"""prime-rl dialect: the keys that replace those of its TOML files, of several releases.

Its files have a section for each process, `trainer`, `orchestrator` and `inference`, and sections
that these share. A file for one process has the same keys without the section's name.
"""

from __future__ import annotations

from itertools import accumulate

from trireme.config.dialect import Dialect

_TASKSET = "buffer.explorer_input.taskset"
_EVALUATION = "buffer.explorer_input.eval_tasksets"
_ENGINE = "explorer.rollout_model"
_LORA = "model.lora_configs"
_ENVIRONMENT = f"{_TASKSET} with default_workflow_type: verifiers_workflow (docs/environments.md)"
_WARMUP = "algorithm.optimizer.lr_warmup_steps"
_ALGORITHM = "algorithm.algorithm_type: grpo, on_policy_distill or sft"
_SHARES = (
    f"cluster.gpu_per_node, for trainer and engines together; {_ENGINE}.engine_num x "
    "tensor_parallel_size of them generate"
)
_SAVED = "no key: a checkpoint holds all that a resume needs"
_SENT = "synchronizer.sync_method"
_STALENESS = (
    "algorithm.sample_strategy: staleness_control, and "
    "algorithm.sample_strategy_args.max_staleness, with synchronizer.sync_style: fully_async"
)
_MASK = "algorithm.rollout_correction: {{rollout_rs: {level}, rollout_rs_threshold{end}}}"
_PATHS = {
    "max_steps": "trainer.total_steps",
    "seq_len": "model.max_model_len",
    "output_dir": "checkpoint_root_dir",
    "clean": "continue_from_checkpoint: false, or --fresh",
    "clean_output_dir": "continue_from_checkpoint: false, or --fresh",
    "dry_run": "the command: trireme check",
    "run.name": "name",
    "run.dir": "checkpoint_root_dir",
    "env_vars": "explorer.env_vars",
    # the model
    "model.name": "model.model_path",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.seq_len": "model.max_model_len",
    "model.max_model_len": "model.max_model_len",
    "model.lora": _LORA,
    "model.lora.rank": f"{_LORA}: [{{lora_rank: 16}}]",
    "model.lora.alpha": f"{_LORA}: [{{lora_alpha: 32}}]",
    "model.lora.target_modules": f"{_LORA}: [{{target_modules: [q_proj, v_proj]}}]",
    "model.attn": "trainer.attn_implementation",
    "model.compile": "trainer.use_torch_compile",
    "model.ac": "trainer.enable_gradient_checkpointing",
    "model.ac_offloading": "trainer.enable_gradient_checkpointing",
    **{
        f"model.{name}": "trainer.offload"
        for name in ("fsdp_cpu_offload", "optim_cpu_offload", "full_offload")
    },
    "model.dp_replicate": "trainer.fsdp_size, the ranks of one copy",
    "model.cp": "trainer.ulysses_sequence_parallel_size",
    "tokenizer.name": "no key: the tokenizer lies in the model's folder",
    "renderer": "model.custom_chat_template",
    "tokenizer.chat_template": "model.custom_chat_template",
    # the trainer
    "optim": "algorithm.optimizer",
    "optim.lr": "algorithm.optimizer.lr",
    "optim.type": "algorithm.optimizer.optimizer_type",
    "optim.weight_decay": "algorithm.optimizer.weight_decay",
    "optim.betas1": "algorithm.optimizer.betas",
    "optim.betas2": "algorithm.optimizer.betas",
    "optim.max_norm": "trainer.grad_clip",
    "scheduler.type": "algorithm.optimizer.lr_scheduler_type",
    "scheduler.warmup_steps": _WARMUP,
    "scheduler.min_lr": "algorithm.optimizer.min_lr_ratio, a share of the learning rate",
    "loss.type": "algorithm.policy_loss_fn, where dppo is prime-rl's default",
    "loss.import_path": "algorithm.policy_loss_fn: my_file:function",
    "loss.kwargs": "algorithm.policy_loss_fn_args",
    **{
        f"loss.{name}": f"algorithm.policy_loss_fn_args.{name}"
        for name in ("kl_tau", "dppo_mask_low", "dppo_mask_high")
    },
    **{
        f"loss.{name}_{side}": _MASK.format(level=level, end=end)
        for name, level in (
            ("token_mask", "token"),
            ("mask_ratio", "token"),
            ("geo_mask", "geometric"),
        )
        for side, end in (("high", ""), ("low", "_lower"))
    },
    **{
        f"loss.sequence_mask_{side}": "no key: a reply is left out for all of its ratios together "
        "(rollout_rs: geometric or sequence), not for the largest or smallest"
        for side in ("high", "low")
    },
    "loss.ratio_type": "no key: ratios are of tokens; the nearest to sequence, a reply's product "
    "of them, is its root, algorithm.policy_loss_fn: gspo",
    "loss.adv_tau": "no key: advantages have the weight 1",
    "enable_router_replay": "algorithm.enable_router_replay",
    "max_concurrent_runs": "a command for each run",
    "dist_timeout_seconds": "trainer.collective_timeout",
    "trace_path": "trainer.profile.steps",
    "memory_profiler_path": "trainer.profile.steps",
    # checkpoints
    "ckpt": "no key: a run saves a checkpoint at its end, whatever trainer.save_interval is",
    "ckpt.interval": "trainer.save_interval",
    "ckpt.keep_last": "trainer.max_checkpoints_to_keep",
    "ckpt.keep": "trainer.max_checkpoints_to_keep",
    "ckpt.resume_step": "no key: the same command resumes",
    "ckpt.output_dir": "checkpoint_root_dir",
    **{
        f"ckpt.skip_{name}": _SAVED
        for name in ("optimizer", "scheduler", "dataloader", "progress", "weights")
    },
    "resume": "no key: the same command resumes",
    "resume.step": "no key: the same command resumes",
    "resume.dir": "checkpoint_root_dir",
    # rollouts
    "orchestrator.batch_size": "buffer.batch_size, in tasks: rollouts / algorithm.repeat_times",
    "group_size": "algorithm.repeat_times",
    "rollouts_per_example": "algorithm.repeat_times",
    "rollouts_per_prompt": "algorithm.repeat_times",
    "oversampling_factor": "explorer.over_rollout.ratio",
    "max_off_policy_steps": _STALENESS,
    "max_async_level": _STALENESS,
    "async_level": _STALENESS,
    "max_concurrent": "explorer.runner_per_model",
    "max_inflight_rollouts": "explorer.runner_per_model",
    "orchestrator.concurrency": "explorer.runner_per_model",
    "algo.type": _ALGORITHM,
    "orchestrator.algorithms": _ALGORITHM,
    "algo.teacher": "explorer.auxiliary_models",
    "teacher_model": "explorer.auxiliary_models",
    "advantage.type": "algorithm.advantage_fn",
    "advantage.import_path": "algorithm.advantage_fn: my_file:function",
    "advantage.kwargs": "algorithm.advantage_fn_args",
    **{
        f"{section}sampling.{name}": f"{_TASKSET}.rollout_args.{name}"
        for section in ("", "train.")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    },
    **{
        f"{section}sampling.{name}": "model.max_response_tokens"
        for section in ("", "train.")
        for name in ("max_tokens", "max_completion_tokens")
    },
    "env": _ENVIRONMENT,
    "train.env": _ENVIRONMENT,
    "train.source": _ENVIRONMENT,
    "train.group_size": "algorithm.repeat_times",
    "train.filter_zero_advantages": "the operator reward_std_filter in "
    "data_processor.experience_pipeline.operators",
    "orchestrator.filters": "operators in data_processor.experience_pipeline.operators",
    "orchestrator.seed": "seed",
    **{
        f"buffer.{name}": "the operator reward_std_filter in "
        "data_processor.experience_pipeline.operators, or "
        f"{_TASKSET}.data_selector: {{selector_type: difficulty_based}}"
        for name in ("easy_threshold", "hard_threshold", "easy_fraction", "hard_fraction")
    },
    "buffer.online_difficulty_filtering": "the operator reward_std_filter in "
    "data_processor.experience_pipeline.operators",
    "buffer.seed": f"{_TASKSET}.data_selector.seed",
    # supervised fine-tuning
    "data.name": "buffer.trainer_input.experience_buffer.path, with algorithm_type: sft",
    "data.type": "buffer.trainer_input.experience_buffer.path, with algorithm_type: sft",
    "data.splits": "buffer.trainer_input.experience_buffer.split",
    "data.subsets": "buffer.trainer_input.experience_buffer.subset_name",
    "data.batch_size": "buffer.train_batch_size",
    "data.micro_batch_size": "trainer.max_token_len_per_gpu",
    "data.seq_len": "model.max_model_len",
    # evaluation
    "eval.env": _EVALUATION,
    "eval.source": _EVALUATION,
    "eval.interval": "explorer.eval_interval",
    "eval.skip_first_step": "explorer.eval_on_startup",
    "eval.eval_base_model": "explorer.eval_on_startup",
    "eval.num_examples": f"a shorter file in {_EVALUATION}",
    "eval.group_size": f"{_EVALUATION}: [{{repeat_times: 4}}]",
    "eval.rollouts_per_example": f"{_EVALUATION}: [{{repeat_times: 4}}]",
    **{
        f"eval.sampling.{name}": f"{_EVALUATION}: [{{rollout_args: {{{ours}: ...}}}}]"
        for name, ours in (
            *((name, name) for name in ("temperature", "top_p", "top_k", "min_p")),
            *((name, "max_tokens") for name in ("max_tokens", "max_completion_tokens")),
        )
    },
    # engines
    **{
        f"{section}.{name}": f"{_ENGINE}.{name}"
        for section in ("inference.vllm", "inference.model", "inference")
        for name in (
            *("dtype", "enforce_eager", "tool_call_parser", "reasoning_parser", "seed"),
            *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization"),
            *("enable_prefix_caching", "enable_expert_parallel", "enable_lora"),
            "enable_return_routed_experts",
        )
    },
    "inference": _ENGINE,
    "inference.vllm": _ENGINE,
    "inference.vllm.model": "model.model_path",
    "inference.vllm.max_model_len": "model.max_model_len",
    "inference.vllm.chat_template": "model.custom_chat_template",
    "inference.vllm.trust_remote_code": "model.trust_remote_code",
    "inference.parallel.tp": f"{_ENGINE}.tensor_parallel_size",
    "inference.parallel.dp": f"{_ENGINE}.data_parallel_size",
    "inference.server.port": f"{_ENGINE}.base_urls, of servers that run",
    "inference.server.host": f"{_ENGINE}.base_urls, of servers that run",
    "client.base_url": f"{_ENGINE}.base_urls",
    "model.client.base_url": f"{_ENGINE}.base_urls",
    # machines, and what is reported
    "deployment.gpus_per_node": "cluster.gpu_per_node",
    "deployment.type": "cluster.node_num",
    **{
        f"{section}num_{name}_{unit}": _SHARES
        for section in ("deployment.", "")
        for name in ("train", "infer")
        for unit in ("gpus", "nodes")
    },
    **dict.fromkeys(("inference_gpu_ids", "trainer_gpu_ids"), _SHARES),
    "deployment.num_infer_replicas": f"{_ENGINE}.engine_num",
    "weight_broadcast.type": _SENT,
    "weight_broadcast.timeout": "synchronizer.sync_timeout",
    "slurm": "Slurm's own commands, which start `trireme run` on the nodes",
    **{
        f"{section}wandb.{name}": ours
        for section in ("monitors.", "")
        for name, ours in (
            ("project", "project"),
            ("name", "name"),
            ("group", "group"),
            ("entity", "monitor.monitor_args"),
            ("tags", "monitor.monitor_args"),
            ("offline", "the environment variable WANDB_MODE=offline"),
        )
    },
    "wandb": "monitor.monitor_type: wandb",
    "monitors.wandb": "monitor.monitor_type: wandb",
    "trainer.log.level": "log.level",
    "orchestrator.log.level": "log.level",
}
"""Our keys for prime-rl's, without the section of the process."""
_SECTIONS = (
    *("orchestrator", "inference", "deployment", "ckpt", "optim", "loss", "scheduler", "sampling"),
    *("monitors", "tokenizer", "weight_broadcast", "rollout_transport"),
)
"""Sections that only prime-rl has."""
_PAGE = "Trireme's keys, which docs/migrate/prime_rl.md lists by prime-rl's"


class PrimeRL(Dialect):
    """prime-rl's keys."""

    def replacement(self, name: str) -> str:
        """Return the key for one of prime-rl's; for another key of its sections, where to look."""
        path = name.replace("-", "_")
        process, _, rest = path.partition(".")
        inner = rest if rest and process in ("orchestrator", "trainer", "inference") else path
        if ours := _PATHS.get(path) or _PATHS.get(inner):
            return ours
        above = (
            key
            for name in (path, inner)
            for key in accumulate(name.split("."), "{}.{}".format)
            if key in _PATHS and not _is_section(key)
        )
        if whole := next(above, ""):  # such as an environment, with all of its options
            return _PATHS[whole]
        known = process in _SECTIONS or (process == "trainer" and _is_section(inner))
        return _PAGE if known else ""


def _is_section(name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in _PATHS)
