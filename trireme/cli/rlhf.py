"""`trireme rlhf`: a run from ms-swift's flags alone, and the YAML that these stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from trireme.cli.flags import Given, WithFlags, overrides

FILE = "rlhf.yaml"
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


class WithAllFlags(WithFlags):
    """The command's flags are all there is to its configuration."""

    own_flags = ("dataset", "val_dataset", *_COUNTS)


def yaml_of(flags: Given, keys: Sequence[str]) -> Path:
    """Write the YAML of a run to the output folder; returns its path.

    One that is there and differs is kept beside it, as rlhf.yaml.bak.
    `keys` are KEY=VALUE words, which go before the flags. Raises BadParameter for flags that are
    missing or cannot be.
    """
    from trireme.config.load import with_overrides
    from trireme.files import write_text

    kind = flags.get("rlhf_type", ["grpo"])[0]
    if kind != "grpo":
        raise typer.BadParameter(
            f"--rlhf_type {kind}: expected grpo; other algorithms are named in a YAML "
            "(algorithm.algorithm_type) for trireme run"
        )
    for name in ("model", "dataset"):
        if name not in flags:
            raise typer.BadParameter(f"--{name} is not given: expected one")
    folder = Path(flags.get("output_dir", ["output"])[0])
    path = folder / FILE
    tree = _tree(flags, folder)
    read = (*WithAllFlags.own_flags, "generation_batch_size")
    rest = {name: values for name, values in flags.items() if name not in read}
    text = _dump(with_overrides(tree, [*overrides(rest, tree), *keys]))
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
    """One data set; `path#500` takes its first 500 rows."""
    path, _, rows = name.partition("#")
    if rows and not rows.isdigit():
        raise typer.BadParameter(f"--dataset {name}: expected a number of rows after #")
    split = {"split": f"train[:{rows}]"} if rows else {}
    return {"path": path, **split, "format": {"prompt_key": "messages", "response_key": "solution"}}


def _count(flags: Given, name: str, default: int) -> int:
    text = flags.get(name, [str(default)])[0]
    if not text.isdigit() or (name in flags and not int(text)):
        raise typer.BadParameter(f"--{name} {text}: expected a whole number of at least 1")
    return int(text)


def _dump(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
