"""Engine plan: the engine processes that a plan asks for, each with its model, options and GPUs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from trireme.config import Plan
from trireme.config.engines import COLOCATED_SHARE, PASSED
from trireme.launch.engine_host import EngineHost
from trireme.server.engine_spec import EngineSpec


def engine_hosts(plan: Plan, model_path: str, log_folder: Path) -> list[EngineHost]:
    """The processes that the local launcher starts, with one key for all; none: it is embedded."""
    key = plan.config.explorer.rollout_model.api_key or secrets.token_hex(16)
    first_port = plan.config.explorer.rollout_model.base_port
    return [
        EngineHost(
            engine_spec(plan, model_path),
            name=f"{plan.engine_kind} engine {index + 1} of {plan.engine_hosts}",
            log_file=log_folder / f"engine_{index}.log",
            python=plan.engine_python,
            port=0 if first_port is None else first_port + index,
            key=key,
            environment=_devices(plan, index),
        )
        for index in range(plan.engine_hosts)
    ]


def engine_spec(plan: Plan, model_path: str) -> EngineSpec:
    """What an engine process is told."""
    config = plan.config
    rollout = config.explorer.rollout_model
    template = config.model.custom_chat_template
    if template is None and config.model.chat_template_path:
        template = Path(config.model.chat_template_path).read_text()
    options: dict[str, Any] = {}
    if plan.engine_kind == "vllm":
        options = {name: getattr(rollout, name) for name in PASSED}
        options["extra_engine_args"] = dict(options["extra_engine_args"])
    if plan.takes_turns:
        options["enable_sleep_mode"] = True
        options["gpu_memory_utilization"] = COLOCATED_SHARE
    return EngineSpec(
        model_path,
        plan.max_model_len,
        kind=plan.engine_kind,
        dtype=plan.dtype,
        device=plan.device,
        seed=plan.seed if rollout.seed is None else rollout.seed,
        options=options,
        chat_template=template,
        enable_thinking=config.model.enable_thinking,
        trust_remote_code=config.model.trust_remote_code,
    )


def _devices(plan: Plan, index: int) -> dict[str, str]:
    """Its GPUs: the first is the trainer's where there is one, the engines have those after it."""
    if plan.device != "cuda":
        return {}
    rollout = plan.config.explorer.rollout_model
    size = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    begin = (plan.mode == "both" and not plan.takes_turns) + index * size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(begin + size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[begin : begin + size])}
