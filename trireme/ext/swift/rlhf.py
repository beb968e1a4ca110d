"""`trireme rlhf`: runs from ms-swift's flags alone, and writes the equivalent YAML.

`--rlhf_type` is grpo, gkd, dpo or kto. The data sets of the latter two have replies, and there are
no rollouts. Settings without a flag have ms-swift's defaults. NPROC_PER_NODE and NNODES are read as
there: counts per device are multiplied by them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from trireme.cli.arguments import Given
from trireme.ext.swift.flag_names import (
    CHOICES,
    KEYS,
    REWARD_OPTIONS,
    REWEIGHT_OPTIONS,
    TASKSETS,
    TRANSLATED,
)
from trireme.ext.swift.flag_values import number_of, scalar, system_of
from trireme.ext.swift.flags import SDAR, in_effect, overrides

FILE = "rlhf.yaml"
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
_PROCESSES = ("NPROC_PER_NODE", "NNODES")
_INSTEAD = {
    "ppo": "a critic's PPO is algorithm_type ppo of a YAML, with the reward reward_model",
    "rm": "reward models are asked here, not trained (docs/rewards.md)",
    **dict.fromkeys(("cpo", "orpo", "simpo"), "the only loss on pairs is dpo"),
}
_LOSSES = {
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "dpo": ("beta", "label_smoothing", "rpo_alpha"),
}
"""Options of the losses of replies."""
_LOSS = tuple(dict.fromkeys(name for names in _LOSSES.values() for name in names))
_LORA = ("train_type", "tuner_type", "lora_rank", "lora_alpha", "target_modules")
_REPLIES: dict[str, dict[str, Any]] = {
    "kto": {},
    "dpo": {"format": {"chosen_key": "messages", "rejected_key": "rejected_response"}},
}
"""Columns of replies."""
_SAMPLING = ("max_completion_length", "temperature", "top_p", "top_k", "repetition_penalty")
_GKD = {
    "lmbda": (0.5, 1, "only the policy's own replies are distilled, and none of a data set"),
    "sft_alpha": (0, 0, "replies of a data set are not trained"),
}
"""Flags of --rlhf_type gkd: the default there, the expected value, and the reason."""
_CHORD = {
    "chord_mu_warmup_steps": "mu_warmup_steps",
    "chord_mu_decay_steps": "mu_decay_steps",
    "chord_mu_peak": "mu_peak",
    "chord_mu_valley": "mu_valley",
    "chord_enable_phi_function": "enable_phi_function",
}
"""Options of mix_chord."""
_EXPERTS = ("chord_sft_dataset", "chord_sft_per_device_train_batch_size")
_OTHERS = ("seq_kd", "gkd_logits_topk", "num_ppo_epochs", "cpo_alpha")
_OTHERS += ("simpo_gamma", "response_length", "loss_weights", "num_mini_batches", "kl_coef")
_OTHERS += ("whiten_rewards", "vf_coef", "teacher_model_server", "center_rewards_coefficient")
"""Flags of algorithms that this command does not have, which are refused by name."""
_REWARDS = ("reward_funcs", "reward_model", "gym_env", "use_gym_env")
_BESIDE_REWARDS = ("advantage_estimator", "advantage_reweight", *REWEIGHT_OPTIONS, SDAR)
_BESIDE_REWARDS += ("sdar_gate_beta", "kl_in_reward", "scale_rewards", "dynamic_sample")
_BESIDE_REWARDS += ("max_resample_times", "reward_weights", "reward_model_plugin", *REWARD_OPTIONS)
"""Flags about rewards: a teacher alone has none."""
_EVALUATION = ("eval_steps", "val_dataset")
_ROLLOUTS = ("num_generations", "generation_batch_size", "steps_per_generation", "val_dataset")
OWN_FLAGS = ("dataset", "val_dataset", "dataset_shuffle", *_COUNTS, *_LOSS[1:], *_OTHERS)
OWN_FLAGS += (*_GKD, *_CHORD, *_EXPERTS)
"""Flags of this command alone."""


def yaml_of(flags: Given, keys: Sequence[str]) -> Path:
    """Write the YAML of a run to the output folder; returns its path.

    An existing file that differs is renamed to rlhf.yaml.bak. `keys` are KEY=VALUE words, which
    override the flags. Raises BadParameter for missing or invalid flags.
    """
    from trireme.config.check import UNASKED_SAVE_INTERVAL
    from trireme.config.load import with_overrides
    from trireme.files import naming, write_text

    kind = flags.get("rlhf_type", ["grpo"])[0]
    replies = kind in _LOSSES
    if kind not in ("grpo", "gkd") and not replies:
        instead = _INSTEAD.get(kind, "other algorithms are named in a YAML for trireme run")
        raise typer.BadParameter(f"--rlhf_type {kind}: expected grpo, gkd, dpo or kto; {instead}")
    taken = _LOSSES.get(kind, ("beta",))
    if only := next((name for name in _LOSS if name in flags and name not in taken), None):
        others = " or ".join(name for name, options in _LOSSES.items() if only in options)
        raise typer.BadParameter(f"--{only} has no effect on {kind}: expected --rlhf_type {others}")
    others = (*_OTHERS, *(() if kind == "gkd" else _GKD))
    others += () if kind == "grpo" else (*_CHORD, *_EXPERTS)
    if other := next((name for name in others if name in flags), None):
        raise typer.BadParameter(f"--{other} has no effect on {kind}: expected it to be left out")
    if replies and not _shuffles(flags):
        raise typer.BadParameter(
            f"--dataset_shuffle false has no effect on {kind}, whose rows are shuffled: expected "
            "it to be left out"
        )
    flags = _of_teacher(flags) if kind == "gkd" else flags
    flags = _of_replies(flags, kind) if replies else _of_penalty(_of_lengths(in_effect(flags)))
    for name in ("model", "dataset"):
        if name not in flags:
            raise typer.BadParameter(f"--{name} is not given: expected one")
    folder = Path(flags.get("output_dir", ["output"])[0])
    path = folder / FILE
    if (count := _devices()) > 1:
        typer.echo(
            f"note: by {' and '.join(_PROCESSES)} the batch is that of {count} devices; "
            "cluster.gpu_per_node and cluster.node_num say how many there are",
            err=True,
        )
    tree = _with_replies(flags, folder, kind) if replies else _tree(flags, folder)
    read = (*OWN_FLAGS, "generation_batch_size", "rlhf_type")
    read += ("beta", "max_length") if replies else ()
    if kind == "gkd" or (not replies and _distils(flags)):
        tree = _distilled(tree, flags, kind)
        read += ("teacher_model", "teacher_kl_coef", *(("beta",) if kind == "gkd" else ()))
    if _EXPERTS[0] in flags:
        tree = _with_experts(tree, flags)
        read += ("loss_type",)
    elif only := next((name for name in (*_CHORD, *_EXPERTS) if name in flags), None):
        raise typer.BadParameter(
            f"--{only} has no effect by itself: expected --{_EXPERTS[0]} with it"
        )
    rest = {name: values for name, values in flags.items() if name not in read}
    if not replies and "val_dataset" in flags:
        rest["eval_steps"] = _eval_interval(flags)
    if not {"train_type", "tuner_type"} & rest.keys():
        rest["tuner_type"] = ["lora"]
    loss = _LOSSES.get(kind, ())
    options = [
        f"algorithm.policy_loss_fn_args.{name}={number_of(name, flags[name][0])}"
        for name in loss
        if name in flags
    ]
    tree["trainer"] = {"save_interval": UNASKED_SAVE_INTERVAL}
    made = with_overrides(tree, [*overrides(rest, tree), *options, *keys])
    algorithm = made["algorithm"]
    asked = any(key.startswith("algorithm.kl_loss_fn_args") for key in keys)
    if not asked and isinstance(algorithm, dict) and algorithm.get("kl_loss_fn") == "none":
        algorithm.pop("kl_loss_fn_args", None)  # the default of another --beta
    text = _dump(made)
    with naming(path):
        before = path.read_text(encoding="utf-8") if path.is_file() else text
    if before != text:
        write_text(path.with_suffix(".yaml.bak"), before)  # it may have been edited by hand
    write_text(path, text)
    return path


def _tree(flags: Given, folder: Path) -> dict[str, Any]:
    """Build the YAML's tree from ms-swift's defaults, for settings without flags, and from the
    data.
    """
    rollouts = _count(flags, "num_generations", 8)
    completions, of_a_step = _batches(flags, rollouts)
    size = {"train_batch_size": of_a_step}
    if "kl_in_reward" in flags:
        if completions != of_a_step:
            raise typer.BadParameter(
                f"--kl_in_reward true compares whole groups, and an optimizer step has {of_a_step} "
                f"of a generation's {completions} completions: expected all of them, or false"
            )
        size = {}  # it is the size of an explore step
    order = {"data_selector": {"selector_type": "shuffle"}} if _shuffles(flags) else {}
    tasksets = [_taskset(name) | order for name in flags["dataset"]]
    return {
        "project": "rlhf",
        "name": "grpo",
        "checkpoint_root_dir": str(folder),
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": rollouts,
            "optimizer": _optimizer(flags),
            **_arithmetic(flags, completions == of_a_step),
            "loss_agg_mode": "seq-mean-token-mean",
            "kl_loss_fn": "k3",
            "kl_loss_fn_args": {"kl_coef": 0.04},
        },
        "model": {
            "model_path": flags["model"][0],
            **({} if "vllm_max_model_len" in flags else {"max_prompt_tokens": 2048}),
            "max_response_tokens": 512,
            "temperature": 0.9,
        },
        "buffer": {
            "total_epochs": 3,
            "batch_size": completions // rollouts,
            **size,
            "explorer_input": {
                "default_workflow_type": "multi_turn_scheduler",
                **({"taskset": tasksets[0]} if len(tasksets) == 1 else {"tasksets": tasksets}),
                "eval_tasksets": [_taskset(name) for name in flags.get("val_dataset", ())],
            },
        },
    }


def _optimizer(flags: Given) -> dict[str, Any]:
    full = "full" in (*flags.get("train_type", ()), *flags.get("tuner_type", ()))
    return {
        "lr": 1e-5 if full else 1e-4,
        "lr_scheduler_type": "cosine",
        "min_lr_ratio": 0.0,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
    }


def _arithmetic(flags: Given, once: bool) -> dict[str, Any]:
    """Return options of the advantage and the loss. `once`: a generation is one optimizer step's,
    so that the old log-probabilities are the trainer's own from before it.
    """
    out: dict[str, Any] = {"bypass_old_logprobs": False} if once else {}
    if flags.get("scale_rewards", [""])[0] == "gdpo":
        out["advantage_fn_args"] = {"epsilon": 1e-8}
    elif flags.get("advantage_estimator", [""])[0] != "rloo":
        out["advantage_fn_args"] = {"epsilon": 1e-4}
    kind, level = (flags.get(name, [""])[0] for name in ("loss_type", "importance_sampling_level"))
    if kind in ("", "grpo", "bnpo", "dapo", "dr_grpo") and level in ("", "token"):
        out["policy_loss_fn_args"] = {"clip_ratio_c": float("inf")}  # no dual clip without --delta
    return out


def _with_replies(flags: Given, folder: Path, kind: str) -> dict[str, Any]:
    """Return the same for DPO and KTO, which read pairs of replies and labelled ones."""
    micro_batch = _count(flags, "per_device_train_batch_size", 1) * _devices()
    accumulated = _count(flags, "gradient_accumulation_steps", -(-16 // micro_batch))
    if len(flags["dataset"]) > 1:
        raise typer.BadParameter(
            f"--dataset has {len(flags['dataset'])} names: expected one, which --rlhf_type {kind} "
            "reads"
        )
    length = {} if "vllm_max_model_len" in flags else {"max_model_len": 2048}
    length |= {"max_model_len": _count(flags, "max_length", 1)} if "max_length" in flags else {}
    return {
        "project": "rlhf",
        "name": kind,
        "checkpoint_root_dir": str(folder),
        "mode": "train",
        "algorithm": {"algorithm_type": kind, "optimizer": _optimizer(flags)},
        "model": {"model_path": flags["model"][0], **length},
        "buffer": {
            "train_batch_size": micro_batch * accumulated,
            "total_epochs": 3,
            "trainer_input": {
                "experience_buffer": {**_rows_of(flags["dataset"][0]), **_REPLIES[kind]}
            },
        },
    }


def _of_replies(flags: Given, kind: str) -> Given:
    """Return the flags without those that only confirm the default. Raises BadParameter for one
    about rollouts, which DPO and KTO do not have, and for another loss of pairs.
    """
    loss = "sigmoid" if kind == "dpo" else "kto"
    if flags.get("loss_type", [loss]) != [loss]:
        raise typer.BadParameter(
            f"--loss_type {' '.join(flags['loss_type'])} with --rlhf_type {kind}: expected {loss}"
        )
    idle = ("loss_type", "truncation_strategy", *_EVALUATION)
    for name in _EVALUATION:
        if name in flags:
            typer.echo(f"note: --{name} has no effect here: trireme eval measures", err=True)
    flags = {name: values for name, values in flags.items() if name not in idle}
    for name in flags:
        explores = KEYS.get(name, "").startswith(("explorer.", "buffer.explorer_input."))
        translated = name in TRANSLATED and name not in (*_LOSS, *_LORA)
        other = name in (*TASKSETS, *REWARD_OPTIONS, *_SAMPLING, *_ROLLOUTS)
        if name not in ("dataset", "torch_dtype") and (explores or translated or other):
            raise typer.BadParameter(
                f"--{name} has no effect with --rlhf_type {kind}, which learns from a data set and "
                "has no rollouts"
            )
    return flags


def _of_lengths(flags: Given) -> Given:
    """Return the flags with lengths that fit --vllm_max_model_len, which a prompt and its reply
    share.
    """
    most = _count(flags, "vllm_max_model_len", 1) if "vllm_max_model_len" in flags else None
    reply = _count(flags, "max_completion_length", 512)
    if most is None or most > reply + _count(flags, "max_length", 1):
        return flags
    flags = {name: values for name, values in flags.items() if name != "max_length"}
    if reply >= most:
        flags["max_completion_length"] = [str(max(most // 2, 1))]
    typer.echo(
        f"note: a prompt and its reply have {most} tokens (--vllm_max_model_len): a reply has at "
        f"most {flags.get('max_completion_length', [reply])[0]}, a prompt what is left",
        err=True,
    )
    return flags


def _distils(flags: Given) -> bool:
    """Return whether there is no reward, so that only a teacher is learned from. Raises
    BadParameter for a flag that uses the teacher in addition to rewards.
    """
    rewards = (*_REWARDS, "multi_turn_scheduler")
    if "teacher_model" not in flags or any(name in flags for name in rewards):
        return False
    for name in _BESIDE_REWARDS:
        if name in flags and not _says_no(name, flags):
            raise typer.BadParameter(
                f"--{name} {flags[name][0]} needs a reward beside the teacher: expected "
                "--reward_funcs"
            )
    return True


def _of_teacher(flags: Given) -> Given:
    """Return the flags of a distillation, as those of GRPO with one rollout per prompt. Raises
    BadParameter for replies that the policy has not sampled, and for rewards.
    """
    for name, (default, expected, why) in _GKD.items():
        value = number_of(name, flags.get(name, [str(default)])[0])
        if value != expected:
            raise typer.BadParameter(f"--{name} {value:g}: expected {expected}, since {why}")
    if "teacher_model" not in flags:
        raise typer.BadParameter("--teacher_model is not given: expected one, for --rlhf_type gkd")
    flags = in_effect(flags)
    for name in (*_REWARDS, *_BESIDE_REWARDS, "loss_type", "teacher_kl_coef"):
        if name in flags and not _says_no(name, flags):
            raise typer.BadParameter(
                f"--{name} has no effect on gkd, whose teacher stands in the place of rewards: "
                "expected it to be left out, or --rlhf_type grpo"
            )
    micro_batch = _count(flags, "per_device_train_batch_size", 1) * _devices()
    defaults = {"num_generations": 1, "per_device_train_batch_size": 1}
    defaults["gradient_accumulation_steps"] = -(-16 // micro_batch)
    return {name: [str(value)] for name, value in defaults.items()} | dict(flags)


def _says_no(name: str, flags: Given) -> bool:
    """Return whether a switch of rewards is off, as it is without rewards."""
    return name in ("kl_in_reward", "dynamic_sample") and flags[name][0].lower() == "false"


def _of_penalty(flags: Given) -> Given:
    """Return the flags with the default of --kl_in_reward there, and without one for a KL of 0."""
    beta = number_of("beta", flags.get("beta", ["0.04"])[0])
    by_default = flags.get("advantage_estimator", ["grpo"])[0] in ("rloo", "reinforce_plus_plus")
    said = flags.get("kl_in_reward", [str(by_default)])[0]
    flags = {name: values for name, values in flags.items() if name != "kl_in_reward"}
    if said.lower() == "true" and beta:
        return flags | {"kl_in_reward": [said], "beta": [str(beta)]}
    return flags if said.lower() in ("true", "false") else flags | {"kl_in_reward": [said]}


def _with_experts(tree: dict[str, Any], flags: Given) -> dict[str, Any]:
    """Add an expert's rows to the rollouts of each optimizer step (CHORD). Raises BadParameter for
    flags that are missing or cannot be combined with them.
    """
    if "kl_in_reward" in flags:
        raise typer.BadParameter(
            f"--{_EXPERTS[0]} mixes an expert's rows in, and a KL in the reward compares whole "
            "groups: expected --kl_in_reward false"
        )
    if (level := flags.get("importance_sampling_level", ["token"])[0]) != "token":
        raise typer.BadParameter(
            f"--importance_sampling_level {level} with --{_EXPERTS[0]}: expected token"
        )
    for name in (*_CHORD, *_EXPERTS):
        if name not in flags and name != "chord_enable_phi_function":
            raise typer.BadParameter(f"--{name} is not given: expected one beside --{_EXPERTS[0]}")
    loss, losses = flags.get("loss_type", ["grpo"])[0], CHOICES["loss_type"]
    if losses.get(loss, {}).get("policy_loss_fn") != "ppo":
        known = ", ".join(name for name, keys in losses.items() if keys["policy_loss_fn"] == "ppo")
        raise typer.BadParameter(
            f"--loss_type {loss} with --{_EXPERTS[0]}: expected one of {known}"
        )
    if len(flags[_EXPERTS[0]]) > 1:
        raise typer.BadParameter(f"--{_EXPERTS[0]} has several names: expected one")
    batches = _count(flags, "gradient_accumulation_steps", 1) * _devices()
    rows = _count(flags, _EXPERTS[1], 1) * batches
    total = rows + tree["buffer"]["train_batch_size"]
    algorithm = tree["algorithm"]
    options = {
        option: scalar(name, flags.get(name, ["false"])[0]) for name, option in _CHORD.items()
    }
    options |= {"sft_loss_agg_mode": "token-mean", **algorithm["policy_loss_fn_args"]}
    algorithm = algorithm | {
        "algorithm_type": "mix_chord",
        "policy_loss_fn_args": options,
        "loss_agg_mode": losses[loss]["loss_agg_mode"],
        "sample_strategy_args": {"expert_data_ratio": (rows - 0.5) / total},  # is rounded up
    }
    system = {"system_prompt": system_of(flags["system"][0])} if "system" in flags else {}
    experts = _rows_of(flags[_EXPERTS[0]][0]) | {"format": {"messages_key": "messages", **system}}
    buffer = tree["buffer"] | {"train_batch_size": total}
    buffer["trainer_input"] = {"auxiliary_buffers": {"sft_dataset": experts}}
    return tree | {"algorithm": algorithm, "buffer": buffer}


def _distilled(tree: dict[str, Any], flags: Given, kind: str) -> dict[str, Any]:
    """Replace the rewards by the teacher: a divergence from it is the advantage of each token, for
    `gkd` the one between the two directions.
    """
    algorithm = tree["algorithm"]
    if kind == "gkd":
        beta = number_of("beta", flags.get("beta", ["0.5"])[0])
        # at its ends --beta means the direction opposite to lambda_coef
        share = 1 - beta if beta in (0, 1) else beta
        algorithm = algorithm | {"algorithm_type": "jsd", "loss_agg_mode": "token-mean"}
        algorithm["advantage_fn_args"] = {"lambda_coef": share}
        algorithm |= {"kl_loss_fn": "none", "kl_loss_fn_args": {}}
    else:
        weight = number_of("teacher_kl_coef", flags.get("teacher_kl_coef", ["1"])[0])
        algorithm = algorithm | {"algorithm_type": "on_policy_distill"}
        algorithm["advantage_fn_args"] = {"kl_coef": weight}
    teacher = {"model_path": flags["teacher_model"][0]}
    return tree | {"algorithm": algorithm, "explorer": {"auxiliary_models": [teacher]}}


def _devices() -> int:
    """Return the number of training processes, from the variables of ms-swift's launcher; 1 without
    them.
    """
    count = 1
    for name in _PROCESSES:
        text = os.environ.get(name) or "1"
        if not text.isdigit() or not int(text):
            raise typer.BadParameter(f"{name}={text}: expected a whole number of at least 1")
        count *= int(text)
    return count


def _batches(flags: Given, rollouts: int) -> tuple[int, int]:
    """Return the completions of a generation, and those of an optimizer step."""
    micro_batch = _count(flags, "per_device_train_batch_size", rollouts) * _devices()
    accumulated = _count(flags, "gradient_accumulation_steps", 1)
    completions = micro_batch * _count(flags, "steps_per_generation", accumulated)
    of_a_step = micro_batch * accumulated
    if "generation_batch_size" in flags:
        if "steps_per_generation" in flags:
            raise typer.BadParameter(
                "--generation_batch_size and --steps_per_generation both say how many completions "
                "a generation has: expected one of them"
            )
        completions = _count(flags, "generation_batch_size", 0)
        of_a_step = of_a_step if any(name in flags for name in _COUNTS) else completions
    if completions % rollouts:
        raise typer.BadParameter(
            f"{completions} completions of a generation: expected a multiple of --num_generations "
            f"({rollouts}), set by --generation_batch_size"
        )
    if not of_a_step % completions:
        completions = of_a_step  # several generations by the same weights are one
    if completions % of_a_step:
        raise typer.BadParameter(
            f"{completions} completions of a generation and {of_a_step} of an optimizer step "
            "(--per_device_train_batch_size x --gradient_accumulation_steps): expected a multiple"
        )
    return completions, of_a_step


def _shuffles(flags: Given) -> bool:
    """Return whether rows are shuffled in each epoch, ms-swift's default."""
    text = flags.get("dataset_shuffle", ["true"])[0]
    if text.lower() not in ("true", "false"):
        raise typer.BadParameter(f"--dataset_shuffle {text}: expected true or false")
    return text.lower() == "true"


def _eval_interval(flags: Given) -> list[str]:
    """Convert `--eval_steps`, which counts optimizer steps and is `--save_steps` by default, to
    generations, of which each is an explore step.
    """
    from trireme.config.check import UNASKED_SAVE_INTERVAL

    given = flags.get("eval_steps") or flags.get("save_steps") or [str(UNASKED_SAVE_INTERVAL)]
    steps = number_of("eval_steps", given[0])
    completions, of_a_step = _batches(flags, _count(flags, "num_generations", 8))
    return [str(max(1, round(steps * of_a_step / completions)))]


def _taskset(name: str) -> dict[str, Any]:
    columns = {"prompt_key": "messages", "response_key": "solution"}
    return {**_rows_of(name), "format": columns}


def _rows_of(name: str) -> dict[str, Any]:
    """Return the path of the rows; `path#500` takes the first 500."""
    path, _, rows = name.partition("#")
    if rows and not rows.isdigit():
        raise typer.BadParameter(f"--dataset {name}: expected a number of rows after #")
    return {"path": path} | ({"split": f"train[:{rows}]"} if rows else {})


def _count(flags: Given, name: str, default: int) -> int:
    text = flags.get(name, [str(default)])[0]
    if not text.isdigit() or (name in flags and not int(text)):
        raise typer.BadParameter(f"--{name} {text}: expected a whole number of at least 1")
    return int(text)


def _dump(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
