"""`trireme rlhf`: a run from ms-swift's flags alone, and the YAML that these stand for.

`--rlhf_type` is grpo or kto. KTO's data set has labelled replies, and there are no rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from trireme.cli.flag_names import KEYS, REWARD_OPTIONS, TASKSETS, TRANSLATED
from trireme.cli.flags import Given, WithFlags, number_of, overrides

FILE = "rlhf.yaml"
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
_LOSS = ("beta", "desirable_weight", "undesirable_weight")
"""Options of KTO's loss."""
_LORA = ("train_type", "tuner_type", "lora_rank", "lora_alpha")
_SAMPLING = ("max_completion_length", "temperature", "top_p", "top_k", "repetition_penalty")
_ROLLOUTS = ("num_generations", "generation_batch_size", "steps_per_generation", "val_dataset")


class WithAllFlags(WithFlags):
    """The command's flags are all there is to its configuration."""

    own_flags = ("dataset", "val_dataset", *_COUNTS, *_LOSS[1:])


def yaml_of(flags: Given, keys: Sequence[str]) -> Path:
    """Write the YAML of a run to the output folder; returns its path.

    One that is there and differs is kept beside it, as rlhf.yaml.bak.
    `keys` are KEY=VALUE words, which go before the flags. Raises BadParameter for flags that are
    missing or cannot be.
    """
    from trireme.config.load import with_overrides
    from trireme.files import write_text

    kind = flags.get("rlhf_type", ["grpo"])[0]
    if kind not in ("grpo", "kto"):
        raise typer.BadParameter(
            f"--rlhf_type {kind}: expected grpo or kto; other algorithms are named in a YAML "
            "(algorithm.algorithm_type) for trireme run"
        )
    if kind == "kto":
        _refuse_rollouts(flags)
    elif only := next((name for name in _LOSS[1:] if name in flags), None):
        raise typer.BadParameter(f"--{only} has no effect on grpo: expected --rlhf_type kto")
    for name in ("model", "dataset"):
        if name not in flags:
            raise typer.BadParameter(f"--{name} is not given: expected one")
    folder = Path(flags.get("output_dir", ["output"])[0])
    path = folder / FILE
    tree = _labelled(flags, folder) if kind == "kto" else _tree(flags, folder)
    read = (*WithAllFlags.own_flags, "generation_batch_size")
    read += ("beta", "max_length") if kind == "kto" else ()
    rest = {name: values for name, values in flags.items() if name not in read}
    loss = _LOSS if kind == "kto" else ()
    options = [
        f"algorithm.policy_loss_fn_args.{name}={number_of(name, flags[name][0])}"
        for name in loss
        if name in flags
    ]
    text = _dump(with_overrides(tree, [*overrides(rest, tree), *options, *keys]))
    if path.is_file() and (before := path.read_text(encoding="utf-8")) != text:
        write_text(path.with_suffix(".yaml.bak"), before)  # it may have been edited by hand
    write_text(path, text)
    return path


def _tree(flags: Given, folder: Path) -> dict[str, Any]:
    """What the flags do not say, as ms-swift has it by default, and the data."""
    rollouts = _count(flags, "num_generations", 8)
    completions, of_a_step = _batches(flags, rollouts)
    tasksets = [_taskset(name) for name in flags["dataset"]]
    return {
        "project": "rlhf",
        "name": "grpo",
        "checkpoint_root_dir": str(folder),
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": rollouts,
            "loss_agg_mode": "seq-mean-token-mean",
            "kl_loss_fn": "k3",
            "kl_loss_fn_args": {"kl_coef": 0.04},
        },
        "model": {
            "model_path": flags["model"][0],
            **({} if "vllm_max_model_len" in flags else {"max_prompt_tokens": 2048}),
            "max_response_tokens": 512,
        },
        "buffer": {
            "batch_size": completions // rollouts,
            "train_batch_size": of_a_step,
            "explorer_input": {
                "default_workflow_type": "multi_turn_scheduler",
                **({"taskset": tasksets[0]} if len(tasksets) == 1 else {"tasksets": tasksets}),
                "eval_tasksets": [_taskset(name) for name in flags.get("val_dataset", ())],
            },
        },
        "trainer": {"save_interval": 500},
    }


def _labelled(flags: Given, folder: Path) -> dict[str, Any]:
    """The same of KTO, which reads labelled replies."""
    micro_batch = _count(flags, "per_device_train_batch_size", 1)
    accumulated = _count(flags, "gradient_accumulation_steps", max(16 // micro_batch, 1))
    if len(flags["dataset"]) > 1:
        raise typer.BadParameter(
            f"--dataset has {len(flags['dataset'])} names: expected one, which --rlhf_type kto "
            "reads"
        )
    length = {} if "vllm_max_model_len" in flags else {"max_model_len": 2048}
    length |= {"max_model_len": _count(flags, "max_length", 1)} if "max_length" in flags else {}
    return {
        "project": "rlhf",
        "name": "kto",
        "checkpoint_root_dir": str(folder),
        "mode": "train",
        "algorithm": {"algorithm_type": "kto"},
        "model": {"model_path": flags["model"][0], **length},
        "buffer": {
            "train_batch_size": micro_batch * accumulated,
            "trainer_input": {"experience_buffer": _rows_of(flags["dataset"][0])},
        },
        "trainer": {"save_interval": 500},
    }


def _refuse_rollouts(flags: Given) -> None:
    """Raise BadParameter for a flag about rollouts, which KTO does not have."""
    for name in flags:
        explores = KEYS.get(name, "").startswith(("explorer.", "buffer.explorer_input."))
        translated = name in TRANSLATED and name not in (*_LOSS, *_LORA)
        other = name in (*TASKSETS, *REWARD_OPTIONS, *_SAMPLING, *_ROLLOUTS)
        if name != "dataset" and (explores or translated or other):
            raise typer.BadParameter(
                f"--{name} has no effect with --rlhf_type kto, which learns from a data set and "
                "has no rollouts"
            )


def _batches(flags: Given, rollouts: int) -> tuple[int, int]:
    """Completions of a generation, and those of an optimizer step."""
    micro_batch = _count(flags, "per_device_train_batch_size", rollouts)
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
    if completions % of_a_step:
        raise typer.BadParameter(
            f"{completions} completions of a generation and {of_a_step} of an optimizer step "
            "(--per_device_train_batch_size x --gradient_accumulation_steps): expected a multiple"
        )
    return completions, of_a_step


def _taskset(name: str) -> dict[str, Any]:
    columns = {"prompt_key": "messages", "response_key": "solution"}
    return {**_rows_of(name), "format": columns}


def _rows_of(name: str) -> dict[str, Any]:
    """Where rows are; `path#500` takes the first 500."""
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
