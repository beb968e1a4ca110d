"""Options: the arguments of vLLM's engine, from the YAML's keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

OURS = {
    "model": "model.model_path",
    "tokenizer": "model.model_path",
    "max_model_len": "model.max_model_len",
    "dtype": "explorer.rollout_model.dtype",
    "logprobs_mode": "nothing: log-probabilities are as Experience says",
    "speculative_config": "nothing: speculated tokens have no log-probabilities of their own here",
    "skip_tokenizer_init": "nothing: prompts and replies are ids",
}
"""Arguments that are set by other keys, or by us alone."""

WORKER = "trireme.engines.vllm.worker.TriremeWorker"


def refuse_unknown(extra: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for an extra argument that vLLM has not, or that another key sets."""
    names = sorted(known)
    for name in extra:
        if name in OURS:
            raise ValueError(f"'{name}' is not set here: what sets it is {OURS[name]}")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f": did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"'{name}' is no argument of this vLLM's engine{hint}")


CPU_CACHE_BYTES = 2**30
"""Keys and values on a CPU, where `gpu_memory_utilization` would be a share of all memory."""


def arguments(
    model: str,
    *,
    max_model_len: int,
    dtype: str,
    seed: int,
    options: Mapping[str, Any],
    on_cpu: bool,
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. `options`: keys of the YAML's `rollout_model`.

    On a CPU vLLM runs eagerly: compiling takes longer than most runs there.
    """
    given = dict(options)
    extra = given.pop("extra_engine_args", None) or {}
    if on_cpu:
        given.pop("gpu_memory_utilization", None)
        given |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return {
        "model": model,
        "max_model_len": max_model_len + 1,  # a row of full length is scored by one token more
        "dtype": dtype,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 64,
        "skip_tokenizer_init": True,
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
        **given,
        **extra,
    }
