"""Options: the arguments of vLLM's engine, from the YAML's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.engines.engine import MOST_ALTERNATIVES

WORKER = "trireme.ext.vllm.worker.TriremeWorker"
TRANSFER = "trireme"
"""The name of our weight transfer in vLLM."""
STREAM = "trireme_stream"
"""Name of a request's random stream among vLLM's `extra_args`."""
ROUTED = "trireme_routed"
"""Name there of the name by which a request's experts are asked for."""
ADAPTER = ("trireme", 1)
"""Name and number, for vLLM, of the one LoRA adapter."""
SEES = "enable_multimodal"
"""The option with which it loads the towers of its model."""
COLDEST, HOTTEST = 0.01, 2.0
"""The lowest and highest temperatures of vLLM's sampler; lower ones it raises to this one, with a
warning in its log."""
OTHER_TEMPERATURE = f"expected 0 (greedy), or {COLDEST:g} to {HOTTEST:g}, at which vLLM samples"
CPU_CACHE_BYTES = 2**30
"""Keys and values on a CPU, where `gpu_memory_utilization` would be a share of all memory."""


def has_temperature(temperature: float) -> bool:
    """Return whether vLLM samples at this temperature."""
    return temperature == 0 or COLDEST <= temperature <= HOTTEST


def arguments(
    model: str,
    *,
    max_model_len: int,
    dtype: str,
    seed: int,
    options: Mapping[str, Any],
    on_cpu: bool,
) -> dict[str, Any]:
    """Return keyword arguments of AsyncEngineArgs. `options`: keys of the YAML's `rollout_model`.

    On a CPU vLLM runs eagerly, since compiling takes longer than most runs there. It has no sleep
    mode there.
    """
    arguments = dict(options)
    extra = arguments.pop("extra_engine_args", None) or {}
    if "max_lora_rank" in arguments:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
    if on_cpu:
        arguments.pop("gpu_memory_utilization", None)
        arguments.pop("enable_sleep_mode", None)
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        }
    return {
        "model": model,
        "max_model_len": max_model_len + 1,  # a row of full length is scored by one token more
        "dtype": dtype,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1 + MOST_ALTERNATIVES,  # the first is the sampler's own, see worker.py
        "skip_tokenizer_init": True,
        "worker_extension_cls": WORKER,
        "weight_transfer_config": {"backend": TRANSFER},
        "disable_log_stats": True,
        **arguments,
        **extra,
    }
