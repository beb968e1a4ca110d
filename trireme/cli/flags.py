"""Flags: reads ms-swift's flag names, several values behind one flag, and the YAML as a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.core import TyperCommand

from trireme.demo import YAML as DEMO

_INPUT = "buffer.explorer_input"
_ENGINE = "explorer.rollout_model"
_TASKSETS = {
    "multi_turn_scheduler": "workflow_args.scheduler",
    "max_turns": "workflow_args.max_turns",
    "multi_turns": "workflow_args.max_turns",
    "loss_scale": "workflow_args.loss_scale",
    "system": "format.system_prompt",
    "stop_words": "rollout_args.stop",
    "reward_funcs": "reward_fn_args.funcs",
    "reward_weights": "reward_fn_args.weights",
}
"""Keys of every taskset."""
KEYS = {
    "model": "model.model_path",
    "dataset": f"{_INPUT}.taskset.path",
    "output_dir": "checkpoint_root_dir",
    "seed": "seed",
    "rlhf_type": "algorithm.algorithm_type",
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
    "max_grad_norm": "trainer.grad_clip",
    "max_length": "model.max_prompt_tokens",
    "max_completion_length": "model.max_response_tokens",
    "vllm_max_model_len": "model.max_model_len",
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "top_k": "model.top_k",
    "repetition_penalty": "model.repetition_penalty",
    "torch_dtype": f"{_ENGINE}.dtype",
    "vllm_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "vllm_data_parallel_size": f"{_ENGINE}.data_parallel_size",
    "vllm_gpu_memory_utilization": f"{_ENGINE}.gpu_memory_utilization",
    "vllm_enforce_eager": f"{_ENGINE}.enforce_eager",
    "vllm_enable_prefix_caching": f"{_ENGINE}.enable_prefix_caching",
    "vllm_server_base_url": f"{_ENGINE}.base_urls",
    "vllm_server_host": f"{_ENGINE}.base_urls",
    "vllm_server_port": f"{_ENGINE}.base_urls",
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
    "vllm_enable_lora": "engines get merged weights",
    "vllm_max_lora_rank": "engines get merged weights",
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
}
"""Accepted and said to be without effect, each with why."""
ELSEWHERE = {
    "beta": "algorithm.kl_loss_fn_args={kl_coef: 0.04}; algorithm.kl_loss_fn=none for 0",
    "loss_type": "algorithm.algorithm_type (grpo, dapo, dr_grpo, cispo, sapo) or loss_agg_mode",
    "epsilon": "algorithm.policy_loss_fn_args={clip_range: 0.2}",
    "epsilon_high": "algorithm.policy_loss_fn_args={clip_range_low: 0.2, clip_range_high: 0.28}",
    "importance_sampling_level": "algorithm.algorithm_type=gspo for sequences",
    "advantage_estimator": "algorithm.advantage_fn=grpo, rloo or reinforceplusplus",
    "scale_rewards": "algorithm.advantage_fn_args={std_cal_level: batch}; dr_grpo for none",
    "dynamic_sample": "algorithm.algorithm_type=dapo",
    "train_type": "model.lora_configs=[{lora_rank: 8}] for lora",
    "tuner_type": "model.lora_configs=[{lora_rank: 8}] for lora",
    "lora_rank": "model.lora_configs=[{lora_rank: 8, lora_alpha: 32}]",
    "reward_model": "reward_funcs judge, or a reward of your own: docs/rewards.md",
    "per_device_train_batch_size": "buffer.batch_size (tasks) and buffer.train_batch_size",
    "gradient_accumulation_steps": "buffer.train_batch_size; micro-batches are cut by tokens",
    "report_to": "monitor.monitor_type",
    "deepspeed": "cluster.gpu_per_node: several ranks share weights by FSDP2",
}
"""No flag here: what to set instead."""
_SEVERAL = ("reward_funcs", "reward_weights", "external_plugins", "stop_words")
_SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")

Given = Mapping[str, list[str]]
"""Flag, without its dashes -> its values."""


class WithFlags(TyperCommand):
    """A command that also takes the flags; they are in its context's `obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the flags out, and what stands behind an option that may be repeated as its own."""
        options = {name.lstrip("-"): p for p in self.params for name in p.opts}
        ctx.obj, rest = _taken(args, options)
        for index, word in enumerate(rest):
            name, _, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or name in options:
                continue
            if name in ELSEWHERE:
                raise typer.BadParameter(f"no such option: --{name}. Set {ELSEWHERE[name]}")
            if "." in name:
                value = value or next(iter(rest[index + 1 :]), "VALUE")
                raise typer.BadParameter(
                    f"no such option: --{name}. Keys of the YAML are set as KEY=VALUE: "
                    f"{name}={value}"
                )
        return super().parse_args(ctx, rest)


def _taken(args: Sequence[str], own: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """The flags with their values, and all other words."""
    chosen: dict[str, list[str]] = {}
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        mine = word.startswith("--") and name not in own
        known = mine and (name in KEYS or name in _TASKSETS or name in IDLE)
        several = name in _SEVERAL + _SERVERS if known else getattr(own.get(name), "multiple", 0)
        if not known and not (several and word.startswith("--")):
            rest.append(word)
            continue
        values = [value] if equals else words[:1]
        del words[: 0 if equals else 1]
        while several and words and not _is_other(words[0]):
            values.append(words.pop(0))
        if known and not values:
            raise typer.BadParameter(f"--{name} needs a value")
        if known:
            chosen[name] = [*chosen.get(name, []), *values] if several else values
        else:
            rest += [part for one in values for part in (f"--{name}", one)]
    return chosen, rest


def _is_other(word: str) -> bool:
    """Whether a word behind several values is not one more of them."""
    return word.startswith("-") or "=" in word or is_yaml(word)


def is_yaml(word: str) -> bool:
    """Whether a plain word names a configuration."""
    return word.endswith((".yaml", ".yml")) and "=" not in word


def yaml_and_keys(
    config: Path | None, words: Sequence[str] | None, flags: Given | None
) -> tuple[Path | None, list[str]]:
    """The configuration, which may be a plain word, and the keys to set, those of flags first.

    Raises BadParameter for other words.
    """
    keys: list[str] = []
    for word in words or ():
        if is_yaml(word) and config is None:
            config = Path(word)
        elif "=" in word and not is_yaml(word):
            keys.append(word)
        else:
            also = f"; the YAML is {config} already" if is_yaml(word) else ", or a YAML (*.yaml)"
            raise typer.BadParameter(f"{word}: expected KEY=VALUE{also}")
    return config, [*overrides(flags or {}, config), *keys]


def overrides(flags: Given, config: Path | None) -> list[str]:
    """`key=value` for each flag, and for every taskset of the file. A file that cannot be read
    gives the first's; loading it says why. What has no effect is said.
    """
    for name in flags:
        if name in IDLE:
            typer.echo(f"note: --{name} is without effect here: {IDLE[name]}", err=True)
    out = [
        f"{place}.{_TASKSETS[name]}={_value(name, values)}"
        for place in _tasksets(config)
        for name, values in flags.items()
        if name in _TASKSETS
    ]
    if "multi_turn_scheduler" in flags:
        out.append(f"{_INPUT}.default_workflow_type=multi_turn_scheduler")
    out += [
        f"{KEYS[name]}={_value(name, values)}"
        for name, values in flags.items()
        if name in KEYS and name not in _SERVERS
    ]
    if urls := list(_urls(flags)):
        out += [f"{_ENGINE}.engine_type=remote", f"{_ENGINE}.base_urls={_text(urls)}"]
    return out


def _value(name: str, values: Sequence[str]) -> str:
    if name in ("max_turns", "multi_turns") and not values[0].isdigit():
        raise typer.BadParameter(f"--{name} {values[0]}: expected a whole number; 0: no limit")
    if name == "reward_weights":
        return f"[{', '.join(values)}]"
    if name == "external_plugins":
        return _text([str(Path(value).resolve()) for value in values])
    return _text(list(values)) if name in _SEVERAL else values[0]


def _urls(flags: Given) -> Iterator[str]:
    """Of rollout servers: as they are, or made of hosts and ports (8000 where there is none)."""
    yield from flags.get("vllm_server_base_url", ())
    hosts, ports = flags.get("vllm_server_host", []), flags.get("vllm_server_port", [])
    if ports and len(ports) != max(len(hosts), 1):
        raise typer.BadParameter(
            f"--vllm_server_port has {len(ports)} values and --vllm_server_host {len(hosts)}: "
            "expected a port for each host"
        )
    pairs = zip(hosts or ["127.0.0.1"] * len(ports), ports or ["8000"] * len(hosts), strict=True)
    yield from (f"http://{host}:{port}" for host, port in pairs)


def _tasksets(config: Path | None) -> list[str]:
    """The keys of the file's tasksets."""
    try:
        tree = yaml.safe_load((config or DEMO).read_text(encoding="utf-8"))
        evals = tree["buffer"]["explorer_input"].get("eval_tasksets") or []
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        evals = []
    return [f"{_INPUT}.taskset", *(f"{_INPUT}.eval_tasksets[{i}]" for i in range(len(evals)))]


def _text(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).strip().removesuffix("...")
