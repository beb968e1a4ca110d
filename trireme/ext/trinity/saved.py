"""Saved: drops the values that Trinity-RFT has computed in a configuration that it saved.

Such a file contains every field of its classes, including those that its program fills in and
nobody sets: shares of GPUs, folders below the job's, values copied between sections. Here all of
these follow from the rest, so the keys are dropped, and one note names them. The file is recognized
by `checkpoint_job_dir`; in any other one such a key is as unknown as a misspelt one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MARK = "checkpoint_job_dir"
_STORE = ("index", "is_eval", "batch_size", "total_steps", "ray_namespace")
_TASKSET = (*_STORE, "total_epochs")
_BUFFER = (*_STORE, "tokenizer_path")
_ENGINE = (
    *("gpu_per_engine", "node_rank", "bundle_indices", "cuda_visible_devices", "engine_id"),
    *("ray_namespace", "ray_actor_name", "sync_method", "checkpoint_job_dir"),
    *("external_model_config", "lora_modules", "lora_kwargs", "enable_runtime_lora_updating"),
)
_SAMPLING = (
    *("temperature", "top_p", "top_k", "logprobs", "repetition_penalty", "min_response_tokens"),
    *("enable_prompt_truncation", "trust_remote_code", "rope_scaling", "rope_theta"),
)
_COMPUTED: Mapping[str, tuple[str, ...]] = {
    "": (_MARK,),
    "cluster": (
        *("total_gpu_num", "rollout_gpu_num", "auxiliary_model_gpu_num", "explorer_gpu_num"),
        *("trainer_gpu_num", "trainer_node_num", "trainer_gpu_num_per_node"),
    ),
    "buffer": ("explorer_output", "tokenizer_path", "cache_dir"),
    "buffer.explorer_input.taskset": _TASKSET,
    "buffer.explorer_input.tasksets.*": _TASKSET,
    "buffer.explorer_input.eval_tasksets.*": _TASKSET,
    "buffer.trainer_input.experience_buffer": _BUFFER,
    "buffer.trainer_input.auxiliary_buffers.*": _BUFFER,
    "explorer": ("runner_num",),
    "explorer.rollout_model": _ENGINE,
    "explorer.auxiliary_models.*": (*_ENGINE, *_SAMPLING),
    "trainer": ("trust_remote_code",),
    "monitor": ("cache_dir",),
    "synchronizer": ("explorer_world_size", "ray_namespace"),
    "log": ("save_dir",),
}
"""Maps a section to its keys; `*` stands for each item of a list, or value of a dictionary."""
_NO_KEY = "EMPTY"  # what Trinity-RFT has for an engine without an API key


def drop_computed(values: dict[str, Any]) -> list[str]:
    """Remove these keys from a saved file's values. Returns the note that names them, if any."""
    if _MARK not in values:
        return []
    dropped: dict[str, list[str]] = {}
    stages = values.get("stages")
    staged = enumerate(stages) if isinstance(stages, list) else ()
    for root, tree in (("", values), *((f"stages[{i}]", stage) for i, stage in staged)):
        for pattern, names in _COMPUTED.items():
            for key, section in _sections(tree, pattern, root):
                api_key = ("api_key",) if section.get("api_key") == _NO_KEY else ()
                here = [name for name in (*names, *api_key) if name in section]
                for name in here:
                    del section[name]
                if here:
                    dropped[key] = here
    count = sum(map(len, dropped.values()))
    which = "; ".join(f"{key or 'the file'}: {', '.join(names)}" for key, names in dropped.items())
    return [f"saved by Trinity-RFT: {count} keys that it computes itself are not read ({which})"]


def _sections(tree: Any, pattern: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections that a pattern means, by their full names."""
    name, _, rest = pattern.partition(".")
    if not name:
        if isinstance(tree, dict):
            yield key, tree
    elif name == "*":
        named = tree.items() if isinstance(tree, dict) else ()
        numbered = enumerate(tree) if isinstance(tree, list) else ()
        for at, item in (
            *((f".{at}", item) for at, item in named),
            *((f"[{at}]", item) for at, item in numbered),
        ):
            yield from _sections(item, rest, f"{key}{at}")
    elif isinstance(tree, dict) and name in tree:
        yield from _sections(tree[name], rest, f"{key}.{name}".lstrip("."))
