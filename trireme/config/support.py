"""Support: what of the vocabulary this version does not do, and what it does about that.

Three kinds of key. Meaning: the run would not be what the user asked for, so it is refused.
Placement: the run is the same, on what is there; one line says how. Hint: it steers an engine or a
mode that is not used. Tables are keyed by `Class.field` of the schema; what is in none works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from trireme.config.engines import PASSED
from trireme.config.stages import Stage

REFUSED: dict[str, str] = {
    "AlgorithmConfig.enable_router_replay": "is not supported yet",
    "FormatConfig.image_key": "is not supported yet: prompts are text only",
    "FormatConfig.video_key": "is not supported yet: prompts are text only",
    "GenerationConfig.n": "has no meaning here: algorithm.repeat_times sets the number of rollouts",
    "LoraConfig.path": "is not supported yet: adapters start afresh",
    "ModelConfig.external_model": "is not supported yet",
    "ModelConfig.rope_scaling": "is not supported yet: set it in the model's config.json",
    "ModelConfig.rope_theta": "is not supported yet: set it in the model's config.json",
    "ModelConfig.tinker": "is not supported yet",
    "ModelConfig.trust_remote_code": "is refused: code that comes with a model runs unchecked",
    "OptimizerConfig.clip_grad": "is the older place of trainer.grad_clip: set that one",
    "OptimizerConfig.warmup_style": "is the older name of lr_scheduler_type: set that one",
    "RolloutModelConfig.chat_template": "is not read here: set model.custom_chat_template",
    "RolloutModelConfig.enable_thinking": "is not read here: set model.enable_thinking",
    "RolloutModelConfig.max_model_len": "is not read here: set model.max_model_len",
    "RolloutModelConfig.max_prompt_tokens": "is not read here: set model.max_prompt_tokens",
    "RolloutModelConfig.max_response_tokens": "is not read here: set model.max_response_tokens",
    "RolloutModelConfig.min_response_tokens": "is not read here: set model.min_response_tokens",
    "RolloutModelConfig.model_path": "has no meaning here: the rollout model is model.model_path",
    "RolloutModelConfig.reasoning_parser": "is not supported: a reply keeps its thinking",
    "ServiceConfig.data_juicer": "is not supported yet",
    "TaskPipelineConfig.inputs": "is not read here: the operators get the rows of the tasksets",
    "TaskPipelineConfig.output": "is not read here: what is left lies in the job folder",
    "TaskPipelineConfig.priority_weights": "is not supported yet: scoring is an operator's work",
    "TaskPipelineConfig.target_fields": "is not supported yet: operators get whole rows",
    "SynchronizerConfig.explorer_sync_interval": "is not supported yet: set sync_interval",
    "SynchronizerConfig.trainer_sync_interval": "is not supported yet: set sync_interval",
    "TrainerConfig.trainer_config": "is not supported yet: use the keys of the trainer section",
}
"""Meaning: refused where it differs from the default."""

OF_AUXILIARY = frozenset(
    f"RolloutModelConfig.{name}"
    for name in (
        *("model_path", "chat_template", "enable_thinking", "max_model_len"),
        *("max_prompt_tokens", "max_response_tokens", "enable_openai_api", "engine_type"),
    )
)
"""Keys that auxiliary models have a use for, and the rollout model has not."""

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "MonitorConfig.monitor_type": {
        name: "is not supported yet: expected tensorboard"
        for name in ("wandb", "mlflow", "swanlab")
    },
    "RolloutModelConfig.engine_type": {
        "external": "is for explorer.auxiliary_models alone, since an OpenAI API takes no new "
        "weights: expected torch, vllm or remote (a server of trireme rollout)",
        "tinker": "is not supported yet: expected torch, vllm or remote",
    },
    "TasksetConfig.storage_type": {"sql": "is not supported yet: expected file"},
    "TrainerConfig.trainer_type": {"tinker": "is not supported yet: expected torch or verl"},
}
"""Meaning: single values that are refused."""

PLACED: dict[str, str] = {
    "ClusterConfig.ray_address": "this run is one process and uses no Ray",
    "Config.ray_namespace": "this run is one process and uses no Ray",
    "ExplorerConfig.env_vars": "set for the whole process, which all runners share",
    "RolloutModelConfig.data_parallel_size": "one engine generates",
    "RolloutModelConfig.enable_auto_tool_choice": "a reply's tool calls are read wherever a "
    "request has tools, unless its tool_choice is none",
    "RolloutModelConfig.enable_expert_parallel": "one engine generates",
    "RolloutModelConfig.pipeline_parallel_size": "one engine generates",
    "RolloutModelConfig.tensor_parallel_size": "one engine generates, on one device",
    "TrainerConfig.save_strategy": "one process writes, one checkpoint at a time",
    "TrainerConfig.use_dynamic_bsz": "batches are always cut by tokens, with the same result",
    "TrainerConfig.collective_timeout": "one process trains, and waits for no other",
    "TrainerConfig.offload": "one process trains, so nothing is sharded",
    "TrainerConfig.trainer_strategy": "one process trains, so nothing is sharded",
    "TrainerConfig.ulysses_sequence_parallel_size": "one process trains, on whole sequences",
}
"""Placement: mapped where it differs from the default, with this line."""

WORKS_ON_RAY: frozenset[str] = frozenset(
    {
        "ClusterConfig.ray_address",
        "Config.ray_namespace",
        "TrainerConfig.collective_timeout",
        "TrainerConfig.offload",
        "TrainerConfig.trainer_strategy",
        "TrainerConfig.ulysses_sequence_parallel_size",
    }
)
"""What is mapped in one process alone."""

WORKS_ON_VLLM: frozenset[str] = frozenset(f"RolloutModelConfig.{name}" for name in PASSED)
"""What has a meaning for vLLM alone."""

HINTS: frozenset[str] = frozenset(
    {
        "Config.ignore_validator_suggestions",
        "ExplorerConfig.db_url",
        "ExplorerConfig.min_running_model_num",
        "LogConfig.group_by_node",
        "LoraConfig.base_model_name",
        "LoraConfig.lora_dtype",
        "LoraConfig.name",
        "MonitorConfig.detailed_stats",
        "MonitorConfig.enable_ray_timeline",
        "MonitorConfig.monitor_args",
        "RolloutModelConfig.base_port",
        "RolloutModelConfig.enable_chunked_prefill",
        "RolloutModelConfig.enable_history",
        "RolloutModelConfig.enable_openai_api",
        "RolloutModelConfig.enable_prefix_caching",
        "RolloutModelConfig.enforce_eager",
        "RolloutModelConfig.extra_engine_args",
        "RolloutModelConfig.gpu_memory_utilization",
        "RolloutModelConfig.use_v1",
        "SynchronizerConfig.wait_for_checkpoint",
        "TasksetConfig.enable_progress_bar",
        "TasksetConfig.max_retry_interval",
        "TasksetConfig.max_retry_times",
        "TrainerConfig.enable_preview",
        "TrainerConfig.fix_actor_microbatch_loss_scale",
    }
)
"""Hints: listed where they differ from the default, since they change nothing here."""


def given_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Full name, `Class.field` and value of every key that differs from its default."""
    plain = type(value)()
    for item in fields(value):
        held = getattr(value, item.name)
        key = f"{prefix}{item.name}"
        if held == getattr(plain, item.name):
            continue
        yield key, f"{type(value).__name__}.{item.name}", held
        inside = [(key, held)]
        if isinstance(held, list):
            inside = [(f"{key}[{index}]", part) for index, part in enumerate(held)]
        elif isinstance(held, dict):
            inside = [(f"{key}.{name}", part) for name, part in held.items()]
        for at, part in inside:
            if is_dataclass(part):
                yield from given_keys(part, f"{at}.")


def check_support(stage: Stage, *, on_ray: bool = False, on_vllm: bool = False) -> None:
    """Notes what is mapped or without effect, and as a problem what is refused.

    Sections that the mode does not use are left aside.
    """
    idle = _idle(stage)
    works = {*(WORKS_ON_RAY if on_ray else ()), *(WORKS_ON_VLLM if on_vllm else ())}
    hints: list[str] = []
    for key, where, value in given_keys(stage.config):
        if key.startswith(tuple(f"{part}{end}" for part in idle for end in ".[")):
            continue
        refused = REFUSED_VALUES.get(where, {}).get(value if isinstance(value, str) else "")
        refused = refused or REFUSED.get(where)
        if key.startswith("explorer.auxiliary_models[") and where in OF_AUXILIARY:
            if value == "tinker":
                stage.problem(
                    key, "(tinker) is not supported yet: expected torch, external or remote"
                )
            continue
        if refused:
            idle += (key,)
            stage.problem(key, f"({_short(value)}) {refused}")
        elif where in works:
            continue
        elif where in PLACED:
            stage.notes.append(f"{key} ({_short(value)}): {PLACED[where]}")
        elif where in HINTS:
            hints.append(f"{key}={_short(value)}")
    if hints:
        stage.notes.append(f"without effect here: {', '.join(hints)}")


def _idle(stage: Stage) -> tuple[str, ...]:
    """Sections that the mode does not use."""
    if stage.config.mode == "train":
        return () if stage.evaluates else ("explorer", "buffer.explorer_input")
    if stage.config.mode == "serve":
        return ("trainer", "buffer.explorer_input")
    return () if stage.config.mode == "both" else ("trainer",)


def _short(value: Any) -> str:
    made = value[0] if isinstance(value, list) and value else value
    text = "given" if is_dataclass(made) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
