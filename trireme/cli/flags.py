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
    "vllm_enable_lora": "engines are set up for the adapter in model.lora_configs",
    "vllm_max_lora_rank": "engines are set up for the adapter in model.lora_configs",
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
    "dataloader_pin_memory": "rows are read as they are",
    "load_from_cache_file": "rows are read as they are",
    "split_dataset_ratio": "name rows to evaluate on in --val_dataset",
    "padding_free": "samples are always laid end to end, without padding",
    "deepspeed": "several ranks share weights by FSDP2: cluster.gpu_per_node",
    "eval_strategy": "--eval_steps says how often",
    "save_strategy": "--save_steps says how often",
    "save_only_model": "a checkpoint holds all that a resume needs",
    "bf16": "see --torch_dtype",
    "log_entropy": "the entropy is always logged",
    "model_type": "the model's config.json says it",
    "template": "the tokenizer's chat template is used",
    "num_infer_workers": "explorer.rollout_model.engine_num counts engines",
    "infer_backend": "--engine names it",
    "ddp_timeout": "trainer.collective_timeout",
}
"""Accepted and said to be without effect, each with why."""
_LOSSES = {
    "grpo": ("ppo", "seq-mean-token-mean"),
    "bnpo": ("ppo", "token-mean"),
    "dapo": ("ppo", "token-mean"),
    "dr_grpo": ("ppo", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
"""`--loss_type` -> policy loss, and how it is averaged."""
_CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "loss_type": {
        name: {"policy_loss_fn": loss, "loss_agg_mode": mode}
        for name, (loss, mode) in _LOSSES.items()
    },
    "importance_sampling_level": {"token": {}, "sequence": {"policy_loss_fn": "gspo"}},
    "advantage_estimator": {
        "grpo": {"advantage_fn": "grpo"},
        "rloo": {"advantage_fn": "rloo"},
        "reinforce_plus_plus": {"advantage_fn": "reinforceplusplus"},
    },
    "scale_rewards": {
        "group": {"advantage_fn_args.std_cal_level": "group"},
        "batch": {"advantage_fn_args.std_cal_level": "batch"},
        "none": {"advantage_fn_args.norm_by_std": False},
        "gdpo": {"advantage_fn": "gdpo"},
    },
    "dynamic_sample": {
        "true": {
            "advantage_fn_args.std_threshold": 0.0,
            "advantage_fn_args.max_resample_times": 3,
        },
        "false": {},
    },
    "train_type": {"full": {}, "lora": {}},
    "tuner_type": {"full": {}, "lora": {}},
    "rollout_importance_sampling_mode": {
        "token_truncate": {"rollout_correction.rollout_is": "token"},
        "token_mask": {"rollout_correction.rollout_rs": "token"},
        "sequence_truncate": {"rollout_correction.rollout_is": "sequence"},
        "sequence_mask": {"rollout_correction.rollout_rs": "sequence"},
    },
    "overlong_filter": {"true": {}, "false": {}},
    "async_generate": {"true": {}, "false": {}},
}
"""Flags with few values -> what each sets in the `algorithm` section."""
_NUMBERS = ("beta", "epsilon", "epsilon_high", "delta", "top_entropy_quantile", "lora_rank")
_NUMBERS += ("lora_alpha", "rollout_importance_sampling_threshold", "teacher_kl_coef")
_NUMBERS += ("max_resample_times",)
TRANSLATED = (*_CHOICES, *_NUMBERS, "teacher_model")
"""Flags that become several keys, or another value."""
ELSEWHERE = {
    "reward_model": "reward_funcs judge, or a reward of your own: docs/rewards.md",
    "per_device_train_batch_size": "buffer.batch_size (tasks) and buffer.train_batch_size",
    "gradient_accumulation_steps": "buffer.train_batch_size; micro-batches are cut by tokens",
    "kl_in_reward": "algorithm.kl_penalty_fn, where the trainer computes the advantages",
    "ref_model": "model.model_path: the reference is the model that a stage begins with",
    "reward_model_plugin": "reward_funcs, with a reward of your own: docs/rewards.md",
    "resume_from_checkpoint": "nothing: the same command resumes, and --output_dir says which run",
    "quant_bits": "model.lora_configs over the model as it is: nothing is quantized",
    "push_to_hub": "nothing: trireme convert writes a folder to upload",
}
"""No flag here: what to set instead."""
_VLLM = ("pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager")
_VLLM += ("enable_prefix_caching", "enable_expert_parallel", "max_num_seqs")
"""Options of vLLM's engine that `trireme rollout` passes on."""
_SEVERAL = ("reward_funcs", "reward_weights", "external_plugins", "stop_words", "report_to")
_RESAMPLES = "algorithm.advantage_fn_args.max_resample_times"
_SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")

Source = Path | Mapping[str, Any] | None
"""A configuration: its file, what a file would hold, or none: the demo's."""
Given = Mapping[str, list[str]]
"""Flag, without its dashes -> its values."""


class WithFlags(TyperCommand):
    """A command that also takes the flags; they are in its context's `obj`."""

    own_flags: Sequence[str] = ()
    """Flags of this command alone, each with any number of values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the flags out, and what stands behind an option that may be repeated as its own."""
        options = {name.lstrip("-"): p for p in self.params for name in p.opts}
        ctx.obj, rest = _taken(args, options, self.own_flags)
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


class WithEngineFlags(TyperCommand):
    """A command that also takes vLLM's options as ms-swift spells them; they are in its context's
    `obj`, by their keys in `explorer.rollout_model`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the flags out; what has no effect is said."""
        own = {name.lstrip("-") for p in self.params for name in p.opts}
        ctx.obj = {}
        rest: list[str] = []
        words = list(args)
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            key = name.removeprefix("vllm_")
            if not word.startswith("--") or name in own or (key not in _VLLM and name not in IDLE):
                rest.append(word)
                continue
            if not equals and not words:
                raise typer.BadParameter(f"--{name} needs a value")
            value = value if equals else words.pop(0)
            if key in _VLLM:
                ctx.obj[key] = yaml.safe_load(value)
            else:
                typer.echo(f"note: --{name} is without effect here: {IDLE[name]}", err=True)
        return super().parse_args(ctx, rest)


def _taken(
    args: Sequence[str], options: Mapping[str, Any], own_flags: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """The flags with their values, and all other words; `own_flags` are a command's own."""
    chosen: dict[str, list[str]] = {}
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        mine = word.startswith("--") and name not in options
        tables = (KEYS, _TASKSETS, IDLE, TRANSLATED, own_flags)
        known = mine and any(name in table for table in tables)
        several = (
            name in (*_SEVERAL, *_SERVERS, *own_flags)
            if known
            else getattr(options.get(name), "multiple", 0)
        )
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


def overrides(flags: Given, config: Source) -> list[str]:
    """`key=value` for each flag, and for every taskset of the file. A file that cannot be read
    gives the first's; loading it says why. What has no effect is said.
    """
    for name in flags:
        if name in IDLE:
            typer.echo(f"note: --{name} is without effect here: {IDLE[name]}", err=True)
    out = [
        f"{section}.{_TASKSETS[name]}={_value(name, values)}"
        for section in _tasksets(config)
        for name, values in flags.items()
        if name in _TASKSETS
    ]
    if "multi_turn_scheduler" in flags:
        out.append(f"{_INPUT}.default_workflow_type=multi_turn_scheduler")
    each = _each_batch(flags)
    out += [
        f"{KEYS[name]}={_value(name, each.get(name, values))}"
        for name, values in flags.items()
        if name in KEYS and name not in _SERVERS
    ]
    out += translated(flags, config)
    if urls := list(_urls(flags)):
        out += [f"{_ENGINE}.engine_type=remote", f"{_ENGINE}.base_urls={_text(urls)}"]
    return out


def translated(flags: Given, config: Source) -> list[str]:
    """`key=value` of the flags that become several keys. Raises BadParameter for other values."""
    keys: dict[str, Any] = {}
    for name, choices in _CHOICES.items():
        if name in flags:
            value = flags[name][0].lower()
            if value not in choices:
                expected = ", ".join(choices)
                raise typer.BadParameter(f"--{name} {flags[name][0]}: expected one of {expected}")
            keys |= {f"algorithm.{key}": item for key, item in choices[value].items()}
    number = {name: _number(name, flags[name][0]) for name in _NUMBERS if name in flags}
    loss = "algorithm.policy_loss_fn_args."
    if (beta := number.get("beta")) is not None:
        keys["algorithm.kl_loss_fn"] = "k3" if beta else "none"
        keys |= {"algorithm.kl_loss_fn_args.kl_coef": beta} if beta else {}
    low, high = number.get("epsilon"), number.get("epsilon_high", number.get("epsilon"))
    if keys.get("algorithm.policy_loss_fn") == "cispo":  # there the bound itself, not its distance
        low, high = None, None if high is None else high - 1
    keys |= {f"{loss}clip_range_low": low} if low is not None else {}
    keys |= {f"{loss}clip_range_high": high} if high is not None else {}
    for name, key in (("delta", "clip_ratio_c"), ("top_entropy_quantile", "top_entropy_quantile")):
        keys |= {f"{loss}{key}": number[name]} if name in number else {}
    if (most := number.get("rollout_importance_sampling_threshold")) is not None:
        mode = "rollout_importance_sampling_mode"
        correction = "algorithm.rollout_correction"
        _needs(flags, mode.replace("mode", "threshold"), mode, "token_truncate", correction)
        masks = flags[mode][0].endswith("mask")
        keys[f"algorithm.rollout_correction.rollout_{'rs' if masks else 'is'}_threshold"] = most
    if "lora" in (*flags.get("train_type", ()), *flags.get("tuner_type", ())):
        rank, alpha = number.get("lora_rank", 8), number.get("lora_alpha", 32)
        keys["model.lora_configs"] = [{"lora_rank": int(rank), "lora_alpha": int(alpha)}]
    elif "full" not in (*flags.get("train_type", ()), *flags.get("tuner_type", ())):
        for name in ("lora_rank", "lora_alpha"):
            _needs(flags, name, "train_type", "lora", "model.lora_configs")
    _needs(flags, "max_resample_times", "dynamic_sample", "true", f"{_RESAMPLES} with dapo")
    if _RESAMPLES in keys and "max_resample_times" in number:
        keys[_RESAMPLES] = int(number["max_resample_times"])
    keys |= _teacher(flags, config, number)
    if flags.get("overlong_filter", ["false"])[0].lower() == "true":
        key = "data_processor.experience_pipeline.operators"
        keys[key] = [*_operators(config), {"name": "mask_response_truncated"}]
    if flags.get("async_generate", ["false"])[0].lower() == "true":
        keys["synchronizer.sync_offset"] = 1
    return [f"{key}={_text(value)}" for key, value in keys.items()]


def _teacher(flags: Given, config: Source, number: Mapping[str, float]) -> dict[str, Any]:
    """A teacher beside the rewards. Raises BadParameter where the YAML has auxiliary models."""
    key, coefficient = "explorer.auxiliary_models", "teacher_kl_coef"
    _needs(flags, coefficient, "teacher_model", "MODEL", "algorithm.teacher_kl_fn_args.kl_coef")
    if "teacher_model" not in flags:
        return {}
    teacher = flags["teacher_model"][0]
    if _read(config, *key.split(".")):
        raise typer.BadParameter(
            f"--teacher_model {teacher}: the YAML has {key} already: expected the teacher there, "
            "before the others, and algorithm.teacher_kl_fn=k2 in place of this flag"
        )
    keys: dict[str, Any] = {key: [{"model_path": teacher}], "algorithm.teacher_kl_fn": "k2"}
    if coefficient in number:
        keys["algorithm.teacher_kl_fn_args.kl_coef"] = number[coefficient]
    return keys


def _each_batch(flags: Given) -> dict[str, list[str]]:
    """The flags that count optimizer steps, in train steps: several of these are one batch's.

    Shares, below 1, count none and stay; `--max_steps -1`, the default there, is no limit. Raises
    BadParameter for what is no multiple.
    """
    iterations = _number("num_iterations", flags.get("num_iterations", ["1"])[0])
    out: dict[str, list[str]] = {}
    if _number("max_steps", flags.get("max_steps", ["0"])[0]) < 0:
        out["max_steps"] = ["null"]
    for name in ("max_steps", "save_steps", "eval_steps") if iterations > 1 else ():
        steps = _number(name, flags.get(name, ["0"])[0])
        if steps < 1:
            continue
        if steps % iterations:
            raise typer.BadParameter(
                f"--{name} {flags[name][0]} counts optimizer steps, and a batch has "
                f"{iterations:.0f} (--num_iterations): expected a multiple"
            )
        out[name] = [f"{steps / iterations:.0f}"]
    return out


def _needs(flags: Given, name: str, beside: str, value: str, key: str) -> None:
    """Raise BadParameter for a flag that says nothing without `--beside value`."""
    if name in flags and beside not in flags:
        raise typer.BadParameter(
            f"--{name} {flags[name][0]} has no effect alone: expected --{beside} {value} beside "
            f"it, or {key} in its place"
        )


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"--{name} {text}: expected a number") from error


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


def _tasksets(config: Source) -> list[str]:
    """The keys of the file's tasksets."""
    several, evals = (
        [f"{_INPUT}.{name}[{i}]" for i in range(len(_read(config, *_INPUT.split("."), name)))]
        for name in ("tasksets", "eval_tasksets")
    )
    return [*(several or [f"{_INPUT}.taskset"]), *evals]


def _operators(config: Source) -> list[Any]:
    """The file's operators on experiences."""
    return _read(config, "data_processor", "experience_pipeline", "operators")


def _read(config: Source, *path: str) -> list[Any]:
    """A list of the file; empty where there is none, and where loading it will say why."""
    try:
        node: Any = config
        if not isinstance(config, Mapping):
            node = yaml.safe_load((config or DEMO).read_text(encoding="utf-8"))
        for name in path:
            node = node[name]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []
    return node if isinstance(node, list) else []


def _text(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).strip().removesuffix("...")
