"""Resume: refuses to continue from a checkpoint that means nothing for the run of the YAML.

Each checkpoint records what it was made with: the store, the columns of an experience, the
optimizer, the LoRA adapter. A resume compares this, the shape of the model, and whether there is a
value model. Everything else may change between two starts; `continued` counts the steps again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.algorithms.recipes import Recipe
from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import Loaded, newest_state
from trireme.config import ConfigError, Plan, Problem
from trireme.config.lookup import adapter_files, located, model_config, weight_files
from trireme.config.schema import LoraConfig
from trireme.files import fingerprint, read_json

if TYPE_CHECKING:
    from trireme.launch.stage import Stage

_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
"""The keys of a model's config.json that must match for weights to fit."""
ADAPTER_BASE = "SHA-256 of the weights below the LoRA adapter"
"""The fact of `made_with` that only a run with an adapter has."""
_BEGUN_FROM = "SHA-256 of the adapter begun from"
_HASHES = (ADAPTER_BASE, _BEGUN_FROM)


def made_with(plan: Plan, model_path: str, recipe: Recipe) -> dict[str, str | None]:
    """Describe what a run's checkpoints mean something for; `model_path` is the model it begins
    with. A hash is None where its files are not on this machine.
    """
    buffer = plan.config.buffer.trainer_input.experience_buffer
    replay = buffer.replay_buffer.enable and plan.store.kind != "file"
    optimizer = plan.config.algorithm.optimizer.optimizer_type
    model = plan.config.model
    loras = model.lora_configs or []
    frozen = {"tower": model.freeze_vision_tower, "projector": model.freeze_projector}
    facts = {
        "store": f"{plan.store.kind}{' with replay' if replay else ''}",
        "schema": recipe.schema,
        "optimizer": "sgd" if optimizer == "sgd" else "adamw",
        "LoRA adapter": "; ".join(map(_scale, loras)) or "none",
        _BEGUN_FROM: _begun_from(loras),
        # an optimizer numbers the weights that it trains
        "trained vision parts": " and ".join(n for n in frozen if not frozen[n]) or "none",
    }
    if loras:
        folder = located(model_path, "models")
        facts[ADAPTER_BASE] = fingerprint(weight_files(folder)) if folder else None
    return facts


def _scale(lora: LoraConfig) -> str:
    """Describe the settings that change what an adapter's tensors add to the weights."""
    if lora.path is not None:
        return f"begun from {lora.path}"
    marks = [name for name in ("use_rslora", "use_dora") if getattr(lora, name)]
    return ", ".join((f"of rank {lora.lora_rank}", f"alpha {lora.lora_alpha}", *marks))


def _begun_from(loras: Iterable[LoraConfig]) -> str | None:
    """Fingerprint the adapters' files: a resume uses them as its reference model again."""
    files = [file for lora in loras if lora.path for file in adapter_files(lora.path)]
    return fingerprint(files) if files else None


def continued(plan: Plan) -> Plan:
    """Return the plan with the train steps that its data give from the newest checkpoint in its
    folder on, if batches before it had other sizes than they have now.
    """
    newest = newest_state(JobFolder(plan.job_dir))
    if newest is None or plan.steps.schedule is None:
        return plan
    step, state = newest
    if state.get("sizes") == plan.steps.sizes:
        return replace(plan, steps=plan.steps.after(state["earlier"]))
    left = _steps_left(plan, state)
    if left is None:
        return plan
    earlier = step + left - plan.steps.schedule
    if "sizes" not in state:  # of an earlier release: fewer may be due to experiences left out
        earlier = max(earlier, 0)
    return replace(plan, steps=plan.steps.after(earlier))


def _steps_left(plan: Plan, state: Mapping[str, Any]) -> int | None:
    """Count the train steps that the data give after the checkpoint of that state; None if they do
    not end the training, or are used again.
    """
    steps, buffer = plan.steps, state["buffer"]
    rows = None if steps.passes is None or steps.rows is None else steps.rows * steps.passes
    if plan.store.kind == "file":
        if rows is None:
            return None
        return max(rows - int(buffer.get("current_index", 0)), 0) // steps.train_batch_size
    replay = plan.config.buffer.trainer_input.experience_buffer.replay_buffer
    again = replay.enable and replay.reuse_cooldown_time is not None
    explorer = state.get("explorer")
    if plan.config.trainer.total_steps or steps.explore is None or explorer is None or again:
        return None
    explore = steps.explore - explorer["step"]
    if rows is not None:
        tasks = explorer["taskset"]
        used = sum(part["current_index"] for part in tasks.get("tasksets", [tasks]))
        explore = (rows - used) // steps.batch_size
    explored, trained = steps.sizes
    return math.ceil((buffer.get("waiting", 0) + max(explore, 0) * explored) / trained)


def refuse_other_run(stage: Stage, resumed: Loaded) -> None:
    """Raise ConfigError if the checkpoint is of another run than the stage's plan describes."""
    folder, step, model_path = stage.folder, resumed.step, stage.model_path
    other = _other_shape(folder.hf_dir(step) / "config.json", model_path)
    if other is not None:
        key, was, now = other
        raise _refused(
            f"model.model_path is {model_path}, whose {key} is {now}, and the checkpoint "
            f"{folder.step_dir(step)} has {was}"
        )
    if stage.recipe.needs_critic and not folder.critic_dir(step).is_dir():
        learner = stage.plan.config.algorithm.algorithm_type
        raise _refused(
            f"algorithm.algorithm_type is {learner}, which learns a value model, and the "
            f"checkpoint {folder.step_dir(step)} has none"
        )
    # a checkpoint of an earlier release does not say what it was made with
    refuse_meaningless(folder, step, resumed.run_state.get("made_with", {}), stage.made_with)


def refuse_meaningless(
    folder: JobFolder, step: int, old: dict[str, str | None], new: dict[str, str | None]
) -> None:
    """Raise ConfigError for the first fact of `old` that is another one in `new`.

    `old` is what the checkpoint of `step` was made with, `new` what the run is made with now. A
    hash that is None in either says nothing: the command's machine may lack what the trainer's has.
    """
    for key, was in old.items():
        now = new.get(key)
        if key in _HASHES and None in (was, now):
            continue
        if was != now and key == ADAPTER_BASE:
            raise _refused(
                f"the checkpoint {folder.step_dir(step)} has a LoRA adapter of other weights than "
                "those that model.model_path has now"
            )
        if was != now:
            raise _refused(
                f"the run in {folder.root} had {key} {was}, and now has {now}, for which its "
                f"checkpoint of step {step} means nothing"
            )


def _refused(text: str) -> ConfigError:
    """Make the error of an impossible resume, which says what makes it possible."""
    expected = "expected the former value, or another name (or continue_from_checkpoint: false)"
    return ConfigError([Problem("", f"{text}; {expected}")])


def _other_shape(saved: Path, model_path: str) -> tuple[str, Any, Any] | None:
    """Return the first key in which a model's configuration differs from the checkpoint's."""
    now = model_config(model_path)
    if not now or not saved.is_file():
        return None
    was = read_json(saved)
    differ = (key for key in _SHAPE if was.get(key) != now.get(key))
    key = next(differ, None)
    return None if key is None else (key, was.get(key), now.get(key))
