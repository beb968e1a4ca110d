"""Flags: reads ms-swift's flag names, and several values after one flag."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from trireme.cli.arguments import Given, Source
from trireme.demo import YAML as DEMO
from trireme.ext.swift.flag_names import (
    ADVANTAGE,
    ALSO_SETS,
    CHOICES,
    ENGINE,
    IDLE,
    INPUT,
    KEYS,
    LOSS,
    LOSS_OPTIONS,
    NUMBERS,
    REWARD_MODELS,
    REWARD_OPTIONS,
    REWEIGHT_OPTIONS,
    SERVERS,
    SEVERAL,
    SWITCHES,
    TASKSETS,
    TRANSLATED,
    elsewhere,
)
from trireme.ext.swift.flag_values import needs, number_of, scalar, system_of, text_of
from trireme.registry import WORKFLOWS

_DEFAULTS = (None, "ppo", "grpo")
"""Values that are defaults, which another flag may override."""
_NOTHING_CLIPPED = "1.0e+9"
"""`trainer.grad_clip` for `--max_grad_norm 0`."""
_RESAMPLES = f"{ADVANTAGE}.max_resample_times"
_LED = "multi_turn_scheduler"
"""The workflow whose turns a scheduler decides."""
SDAR = "sdar_loss_coef"


class SwiftFlags:
    """ms-swift's flags."""

    about = (
        "ms-swift's flags work too: --multi_turn_scheduler, --max_turns, --loss_scale, "
        "--reward_funcs A B, --external_plugins FILE, --vllm_server_base_url URL and others: "
        "docs/migrate/ms_swift.md"
    )
    names = (*KEYS, *TASKSETS, *TRANSLATED)
    idle = IDLE
    several = SEVERAL
    switches = SWITCHES

    def instead(self, name: str) -> str | None:
        """Return what to set in place of a flag that is not accepted."""
        return elsewhere(name)

    def sets(self, name: str, key: str) -> bool:
        """Return whether the flag sets the key: by a table, or by one of the flag's own name."""
        key = re.sub(r"\[\d+\]", "", key).replace(".tasksets.", ".taskset.")
        keys = {f"{section}.{name}" for section in ("model", "model.lora_configs", LOSS)}
        keys |= {KEYS.get(name, ""), *ALSO_SETS.get(name, ())}
        if name in TASKSETS:
            keys |= {f"{INPUT}.{kind}.{TASKSETS[name]}" for kind in ("taskset", "eval_tasksets")}
            keys.add(TASKSETS[name])  # as a workflow names it, which does not know its taskset
        return key in keys

    def overrides(self, flags: Given, config: Source) -> list[str]:
        """Return `key=value` for each flag."""
        return overrides(flags, config)


def overrides(flags: Given, config: Source) -> list[str]:
    """Return `key=value` for each flag, and for every taskset of the file. If the file cannot be
    read, one taskset is assumed; loading it reports why. Flags without effect are reported.
    """
    for name in flags:
        if name in IDLE:
            typer.echo(f"note: --{name} has no effect here: {IDLE[name]}", err=True)
    flags = {**in_effect(flags), **_rewards(flags)}
    out = [
        f"{section}.{TASKSETS[name]}={_value(name, values)}"
        for section in _tasksets(config)
        for name, values in flags.items()
        if name in TASKSETS
    ]
    out += [
        f"{section}.format.{key}={column}"
        for section in _tasksets(config)
        for key, column in _columns(flags)
    ]
    if "multi_turn_scheduler" in flags:
        _refuse_unled(flags["multi_turn_scheduler"][0], config)
        out.append(f"{INPUT}.default_workflow_type={_LED}")
    per_batch, keys = _in_train_steps(flags), _chosen(flags)
    out += [
        f"{KEYS[name]}={_value(name, per_batch.get(name, values))}"
        for name, values in flags.items()
        if name in KEYS and name not in SERVERS
    ]
    if steps := _explore_steps(flags, per_batch, keys.get(_RESAMPLES, 0)):
        out.append(f"buffer.total_steps={steps}")
    out += _translated(flags, config, keys)
    if urls := list(_urls(flags)):
        out += [f"{ENGINE}.engine_type=remote", f"{ENGINE}.base_urls={text_of(urls)}"]
    return out


def _refuse_unled(scheduler: str, config: Source) -> None:
    """Raise BadParameter for a taskset of the file with a workflow of its own that no scheduler
    leads. A user's own may be led by one.
    """
    for section in _tasksets(config):
        name = _node(config, *re.findall(r"[^.\[\]]+", section), "default_workflow_type")
        if name != _LED and name in WORKFLOWS.built_in():
            raise typer.BadParameter(
                f"--multi_turn_scheduler {scheduler}: {section}.default_workflow_type is {name}, "
                f"whose turns no scheduler decides: expected {_LED} there, or nothing"
            )


_COLUMNS = {"solution": "response_key", "messages": "prompt_key", "query": "prompt_key"}


def _columns(flags: Given) -> Iterator[tuple[str, str]]:
    """Yield keys of `format` with the columns that `--columns '{"answer": "solution"}'` renames.
    Raises BadParameter for invalid values, and for two columns that become one.
    """
    text = flags.get("columns", ["{}"])[0]
    try:
        renamed = json.loads(text)
    except ValueError:
        renamed = None
    if not isinstance(renamed, dict):
        raise typer.BadParameter(
            f'--columns {text}: expected JSON such as {{"answer": "solution"}}'
        )
    columns: dict[str, str] = {}
    for column, name in renamed.items():
        if name not in _COLUMNS:
            raise typer.BadParameter(
                f"--columns {text}: {column} becomes {name}: expected one of "
                f"{', '.join(_COLUMNS)}; rewards see every other column by its own name"
            )
        key = _COLUMNS[name]
        if key in columns:
            raise typer.BadParameter(
                f"--columns {text}: {columns[key]} and {column} both become format.{key}: expected "
                "one column for it"
            )
        columns[key] = column
    yield from columns.items()


def _translated(flags: Given, config: Source, chosen: Mapping[str, Any]) -> list[str]:
    """Return `key=value` for the flags that set several keys, after the `chosen` ones. Raises
    BadParameter for invalid values.
    """
    keys = dict(chosen)
    number = {name: number_of(name, flags[name][0]) for name in NUMBERS if name in flags}
    if in_reward := "algorithm.kl_penalty_fn" in keys:
        needs(flags, "kl_in_reward", "beta", "0.04", "algorithm.kl_penalty_fn=k1")
        keys["algorithm.kl_loss_fn"] = "none"
    if (beta := number.get("beta")) is not None:
        part = "algorithm.kl_penalty_fn" if in_reward else "algorithm.kl_loss_fn"
        if beta:
            keys[part] = "k1" if in_reward else "k3"
            keys[f"{part}_args.kl_coef"] = beta
        else:
            keys[part] = "none"
    low, high = number.get("epsilon"), number.get("epsilon_high", number.get("epsilon"))
    if keys.get("algorithm.policy_loss_fn") == "cispo":
        # CISPO's epsilon_high is the bound of the ratio itself, not its distance from 1
        low, high = None, number.get("epsilon_high")
        if high is not None and high < 1:
            raise typer.BadParameter(
                f"--epsilon_high {flags['epsilon_high'][0]} is the bound of CISPO's ratio: "
                "expected at least 1"
            )
        high = None if high is None else high - 1
    if low is not None:
        keys[f"{LOSS}.clip_range_low"] = low
    if high is not None:
        keys[f"{LOSS}.clip_range_high"] = high
    for name in (*LOSS_OPTIONS, *REWEIGHT_OPTIONS):
        if name in flags:
            option = LOSS_OPTIONS.get(name)
            key = f"{LOSS}.{option}" if option else f"{ADVANTAGE}.{REWEIGHT_OPTIONS[name]}"
            keys[key] = scalar(name, flags[name][0])
    if (delta := number.get("off_policy_sequence_mask_delta")) is not None:
        keys |= {f"{LOSS}.enable_sequence_masking": True, f"{LOSS}.delta_sequence_masking": delta}
    if (most := number.get("rollout_importance_sampling_threshold")) is not None:
        mode = "rollout_importance_sampling_mode"
        correction = "algorithm.rollout_correction"
        needs(flags, mode.replace("mode", "threshold"), mode, "token_truncate", correction)
        for kind in ("is", "rs"):
            if f"{correction}.rollout_{kind}" in keys:
                keys.setdefault(f"{correction}.rollout_{kind}_threshold", most)
    if "lora" in (*flags.get("train_type", ()), *flags.get("tuner_type", ())):
        rank, alpha = number.get("lora_rank", 8), number.get("lora_alpha", 32)
        adapter: dict[str, Any] = {"lora_rank": int(rank), "lora_alpha": int(alpha)}
        if modules := flags.get("target_modules", []):
            everywhere = modules == ["all-linear"]  # any other text is a regular expression
            adapter["target_modules"] = modules[0] if everywhere else modules
        keys["model.lora_configs"] = [adapter]
    elif "full" not in (*flags.get("train_type", ()), *flags.get("tuner_type", ())):
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            needs(flags, name, "train_type", "lora", "model.lora_configs")
    needs(flags, "max_resample_times", "dynamic_sample", "true", f"{_RESAMPLES} with dapo")
    keys |= _teacher(flags, config, number)
    if flags.get("truncation_strategy", ["left"])[0].lower() == "delete":
        keys["model.enable_prompt_truncation"] = False
    if flags.get("overlong_filter", ["false"])[0].lower() == "true":
        key = "data_processor.experience_pipeline.operators"
        keys[key] = [*_operators(config), {"name": "mask_response_truncated"}]
    if flags.get("async_generate", ["false"])[0].lower() == "true":
        keys["synchronizer.sync_offset"] = 1
    return [f"{key}={text_of(value)}" for key, value in keys.items()]


def _chosen(flags: Given) -> dict[str, Any]:
    """Return the keys of the flags that take one of a few values. Raises BadParameter for another
    value, and for two flags that set one key to different values.
    """
    keys: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    for name, choices in CHOICES.items():
        if name not in flags:
            continue
        choice = flags[name][0].lower()
        flag = f"--{name} {flags[name][0]}"
        if choice not in choices:
            raise typer.BadParameter(f"{flag}: expected one of {', '.join(choices)}")
        for key, value in choices[choice].items():
            if keys.get(key) not in (*_DEFAULTS, value):
                raise typer.BadParameter(
                    f"{set_by[key]} and {flag} both set algorithm.{key}, to {keys[key]} and "
                    f"{value}: expected one of them"
                )
            keys[key], set_by[key] = value, flag
    norm, level = "advantage_fn_args.norm_by_std", "advantage_fn_args.std_cal_level"
    estimator = keys.get("advantage_fn")
    if estimator == "rloo":
        keys.pop(norm, None)  # rloo never divides by a std
    elif estimator == "reinforceplusplus_baseline" and keys.get(level) == "batch":
        del keys[level]  # it uses the std of the batch anyway
    elif estimator == "reinforceplusplus_baseline" and (norm in keys or level in keys):
        keys["advantage_fn"] = "grpo"  # with such options the two are the same
    chosen = {f"algorithm.{key}": value for key, value in keys.items()}
    if _RESAMPLES in chosen and "max_resample_times" in flags:
        times = number_of("max_resample_times", flags["max_resample_times"][0])
        chosen[_RESAMPLES] = int(times)
    return chosen


def _rewards(flags: Given) -> dict[str, list[Any]]:
    """Return the reward functions, with the options from flags. Raises BadParameter for options of
    a reward that is not used.
    """
    funcs: dict[str, dict[str, Any]] = {
        name: {"name": name} for name in flags.get("reward_funcs", ())
    }
    for flag, (reward, option) in REWARD_OPTIONS.items():
        text = flags.get(flag, [""])[0]
        if not text and option in ("soft_max_length", "max_len"):
            text = flags.get("max_completion_length", [""])[0]
        elif text and reward not in funcs:
            raise typer.BadParameter(
                f"--{flag} {text} belongs to the reward {reward}: expected that among "
                "--reward_funcs"
            )
        if text and reward in funcs:
            number = number_of(flag, text)
            funcs[reward][option] = int(number) if number.is_integer() else number
    given = flags.get("reward_funcs", ())
    rewards = [funcs[name] if len(funcs[name]) > 1 else name for name in given]
    rewards += _reward_models(flags)
    return {"reward_funcs": rewards} if rewards else {}


def _reward_models(flags: Given) -> Iterator[dict[str, str]]:
    """Yield the reward of each reward model. Raises BadParameter for another number of plug-ins."""
    models, plugins = (flags.get(name, []) for name in REWARD_MODELS)
    if plugins and len(plugins) != len(models):
        raise typer.BadParameter(
            f"--reward_model_plugin has {len(plugins)} values and --reward_model {len(models)}: "
            "expected a plug-in, or the word default, for each model"
        )
    for path, plugin in zip(models, plugins or ["default"] * len(models), strict=True):
        own = {} if plugin == "default" else {"plugin": plugin}
        yield {"name": "reward_model", "model_path": path, **own}


def in_effect(flags: Given) -> Given:
    """Return the flags without `--sdar_loss_coef 0`, which is ms-swift's default and means no SDAR,
    and, with another use of the teacher, without `--teacher_kl_coef 0`; intervals that are shares
    are counts.
    """
    for name in (SDAR, "teacher_kl_coef"):
        only_use = name != SDAR and not {"advantage_reweight", SDAR} & flags.keys()
        if name in flags and not only_use and number_of(name, flags[name][0]) == 0:
            flags = {other: values for other, values in flags.items() if other != name}
    return {**flags, **_of_shares(flags)}


def _of_shares(flags: Given) -> dict[str, list[str]]:
    """Return the intervals that are shares of `--max_steps`, as whole steps. Raises BadParameter
    without that flag.
    """
    most = number_of("max_steps", flags.get("max_steps", ["0"])[0])
    out: dict[str, list[str]] = {}
    for name in ("save_steps", "eval_steps"):
        share = number_of(name, flags.get(name, ["1"])[0])
        if not 0 < share < 1:
            continue
        if most < 1:
            raise typer.BadParameter(
                f"--{name} {flags[name][0]} is a share of the steps: expected --max_steps with it, "
                "or a number of steps"
            )
        out[name] = [str(math.ceil(most * share))]
    return out


def _teacher(flags: Given, config: Source, number: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings of a teacher in addition to rewards. Raises BadParameter if the YAML has
    auxiliary models, and for two uses of one teacher.
    """
    key, coefficient = "explorer.auxiliary_models", "teacher_kl_coef"
    needs(flags, "sdar_gate_beta", SDAR, "above 0", "algorithm.teacher_kl_fn_args.gate_beta")
    needs(flags, coefficient, "teacher_model", "MODEL", "algorithm.teacher_kl_fn_args.kl_coef")
    for name in ("advantage_reweight", SDAR):
        needs(
            flags,
            name,
            "teacher_model",
            "MODEL (that of --model, too, which then stays as it is)",
            key,
        )
    uses = [name for name in ("advantage_reweight", SDAR, coefficient) if name in flags]
    if len(uses) > 1:
        words = " and ".join(f"--{name} {flags[name][0]}" for name in uses)
        raise typer.BadParameter(f"{words} are several uses of one teacher: expected one of them")
    if "teacher_model" not in flags:
        return {}
    teacher = flags["teacher_model"][0]
    if _read(config, *key.split(".")):
        raise typer.BadParameter(
            f"--teacher_model {teacher}: the YAML has {key} already: expected the teacher there, "
            "before the others, and algorithm.teacher_kl_fn=k2 in place of this flag"
        )
    keys: dict[str, Any] = {key: [{"model_path": teacher}]}
    if "advantage_reweight" in flags:
        return keys
    part = "algorithm.teacher_kl_fn"
    keys[part] = "sdar" if SDAR in flags else "k2"
    if (weight := number.get(SDAR, number.get(coefficient))) is not None:
        keys[f"{part}_args.kl_coef"] = weight
    if "sdar_gate_beta" in flags:
        keys[f"{part}_args.gate_beta"] = number_of("sdar_gate_beta", flags["sdar_gate_beta"][0])
    return keys


def _in_train_steps(flags: Given) -> dict[str, list[str]]:
    """Convert the flags that count optimizer steps to train steps, of which each has
    `--num_iterations` optimizer steps.

    `--max_steps -1`, ms-swift's default, is no limit. Raises BadParameter for a number that is not
    a multiple.
    """
    iterations = number_of("num_iterations", flags.get("num_iterations", ["1"])[0])
    out: dict[str, list[str]] = {}
    if number_of("max_steps", flags.get("max_steps", ["0"])[0]) < 0:
        out["max_steps"] = ["null"]
    for name in ("max_steps", "save_steps", "eval_steps") if iterations > 1 else ():
        steps = number_of(name, flags.get(name, ["0"])[0])
        if steps < 1:
            continue
        if name != "max_steps":
            steps = math.ceil(steps / iterations) * iterations  # at the next whole batch
        if steps % iterations:
            raise typer.BadParameter(
                f"--{name} {flags[name][0]} counts optimizer steps, and a batch has "
                f"{iterations:.0f} (--num_iterations): expected a multiple"
            )
        out[name] = [f"{steps / iterations:.0f}"]
    return out


def _explore_steps(flags: Given, per_batch: Given, resamples: int) -> int:
    """Return the most explore steps that `--max_steps` train steps take, which override the epochs;
    0: the flag sets no limit. `per_batch` are the flags in train steps, each of which may take
    `resamples` further explore steps.
    """
    text = per_batch.get("max_steps", flags.get("max_steps", ["0"]))[0]
    steps = 0.0 if text == "null" else number_of("max_steps", text)
    return int(steps * (1 + resamples)) if steps >= 1 else 0


def _value(name: str, values: Sequence[str]) -> str:
    if name in ("max_turns", "multi_turns") and not values[0].isdigit():
        raise typer.BadParameter(f"--{name} {values[0]}: expected a whole number; 0: no limit")
    if name == "reward_weights":
        return f"[{', '.join(values)}]"
    if name == "system":
        return text_of(system_of(values[0]))
    if name == "external_plugins":
        return text_of([str(Path(value).resolve()) for value in values])
    if name == "max_grad_norm" and number_of(name, values[0]) == 0:
        return _NOTHING_CLIPPED
    if name == "lr_scheduler_type":
        return values[0].removesuffix("_with_warmup")  # every schedule here has one
    return text_of(list(values)) if name in SEVERAL else values[0]


def _urls(flags: Given) -> Iterator[str]:
    """Yield the addresses of rollout servers: as given, or made of hosts and ports (8000 by
    default).
    """
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
    """Return the keys of the file's tasksets."""
    several, evals = (
        [f"{INPUT}.{name}[{i}]" for i in range(len(_read(config, *INPUT.split("."), name)))]
        for name in ("tasksets", "eval_tasksets")
    )
    return [*(several or [f"{INPUT}.taskset"]), *evals]


def _operators(config: Source) -> list[Any]:
    """Return the file's operators on experiences."""
    return _read(config, "data_processor", "experience_pipeline", "operators")


def _read(config: Source, *path: str) -> list[Any]:
    """Return a list of the file; empty if there is none."""
    node = _node(config, *path)
    return node if isinstance(node, list) else []


def _node(config: Source, *path: str) -> Any:
    """Return a value of the file; None if there is none, or if loading it will report why."""
    try:
        node: Any = config
        if not isinstance(config, Mapping):
            node = yaml.safe_load((config or DEMO).read_text(encoding="utf-8"))
        for name in path:
            node = node[int(name) if isinstance(node, list) else name]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return None
    return node
