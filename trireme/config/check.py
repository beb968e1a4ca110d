"""Check: what would fail later (missing files, unknown names) is found before anything slow.

Nothing is loaded and nothing is downloaded: files are looked at, names are looked up.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from trireme.config.check_data import (
    check_auxiliary_data,
    check_tasksets,
    check_train_data,
    used_tasksets,
)
from trireme.config.check_pipeline import check_pipelines
from trireme.config.located import located
from trireme.config.names import check_name
from trireme.config.sizes import ONE_CHAT_WORKFLOWS
from trireme.config.stages import Stage
from trireme.config.weights import model_shapes

_GROUP_ALGORITHMS = (
    *("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "remax", "opmd", "rec", "sppo"),
    *("multi_step_grpo", "gigpo", "mix", "mix_chord", "raft"),
)
_PART_KINDS = {
    "sample_strategy": "sample strategy",
    "advantage_fn": "advantage",
    "policy_loss_fn": "policy loss",
    "kl_penalty_fn": "KL",
    "kl_loss_fn": "KL",
    "entropy_loss_fn": "entropy",
}


class ModelFacts(NamedTuple):
    """What is known before the model is loaded; None: not here to be looked at."""

    folder: Path | None
    max_positions: int | None = None
    has_chat_template: bool | None = None
    size: int = 0
    attention_heads: int | None = None


def check_stage(stage: Stage) -> None:
    """Looks at all that a stage names; problems are noted, and what the files tell."""
    _check_algorithm(stage)
    if stage.config.mode not in ("train", "serve") or stage.evaluates:
        check_tasksets(stage)
    if stage.reads_file:
        check_train_data(stage)
    check_auxiliary_data(stage)
    check_pipelines(stage)
    _check_model(stage)
    _check_auxiliary(stage)


def _check_algorithm(stage: Stage) -> None:
    config, algorithm = stage.config, stage.config.algorithm
    name, repeats = algorithm.algorithm_type, algorithm.repeat_times
    betas = algorithm.optimizer.betas
    check_name(stage, "algorithm", name, "algorithm.algorithm_type")
    for key, kind in _PART_KINDS.items():
        part = getattr(algorithm, key)
        if part is not None:
            check_name(stage, kind, part, f"algorithm.{key}")
    if name in _GROUP_ALGORITHMS and repeats < 2 and config.mode not in ("train", "serve"):
        stage.problem(
            "algorithm.repeat_times",
            f"is {repeats}: expected at least 2, since {name} compares the rollouts of one task",
        )
    if stage.reads_file and config.mode != "train":
        stage.problem("mode", f"is {config.mode!r}: expected train, since {name} reads data")
    if len(betas) != 2:
        stage.problem("algorithm.optimizer.betas", f"is {betas!r}: expected two numbers")
    if len(config.model.lora_configs or []) > 1:
        stage.problem("model.lora_configs", "has several adapters: expected at most one")


def _check_critic(stage: Stage) -> None:
    path = stage.config.model.critic_model_path
    if path:
        try:
            model_facts(path)
        except ValueError as error:
            stage.problem("model.critic_model_path", f"({path}) {error}")


def _check_model(stage: Stage) -> None:
    """Whether the model is there, and has a chat template where a workflow chats."""
    model = stage.config.model
    if not model.model_path:
        stage.problem("model.model_path", "is not given: expected a model's folder or hub id")
        return
    try:
        found = model_facts(model.model_path)
    except ValueError as error:
        stage.problem("model.model_path", f"({model.model_path}) {error}")
        return
    _check_critic(stage)
    if found.folder is None and stage.model_from is None:
        stage.file_notes.append(
            f"model.model_path ({model.model_path}): not on this machine, will be downloaded"
        )
    wanted = model.max_model_len or 0
    if found.max_positions and wanted > found.max_positions:
        stage.file_notes.append(
            f"model.max_model_len ({wanted}): longer than the {found.max_positions} positions the "
            f"model was made for"
        )
    window, heads = stage.config.trainer.ulysses_sequence_parallel_size, found.attention_heads
    if heads and heads % window:
        stage.problem(
            "trainer.ulysses_sequence_parallel_size",
            f"is {window}: expected a divisor of the model's {heads} attention heads",
        )
    template = model.chat_template_path
    if template and not Path(template).is_file():
        stage.problem("model.chat_template_path", f"is {template!r}: expected a file")
    if found.has_chat_template is False and not (model.custom_chat_template or template):
        _check_chats(stage)


def _check_auxiliary(stage: Stage) -> None:
    """Whether the models beside the trained one are there, or their servers are named."""
    for place, model in enumerate(stage.config.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models[{place}]"
        if (model.engine_type in ("external", "remote")) != bool(model.base_urls):
            stage.problem(
                f"{key}.base_urls",
                f"is {model.base_urls}: expected the server's address with engine_type external "
                "(an OpenAI API) or remote (trireme rollout), and with no other",
            )
        if model.engine_type in ("sglang", "vllm"):
            text = "the embedded torch engine generates in its place"
            stage.notes.append(f"{key}.engine_type ({model.engine_type}): {text}")
        if not model.model_path:
            text = "is not given: expected the folder or hub id of its model and tokenizer"
            stage.problem(f"{key}.model_path", text)
        elif model.engine_type != "external":
            try:
                model_facts(model.model_path)
            except ValueError as error:
                stage.problem(f"{key}.model_path", f"({model.model_path}) {error}")


def _check_chats(stage: Stage) -> None:
    """Notes a problem where a workflow chats, for a model without a chat template."""
    for item in used_tasksets(stage):
        if item.workflow in ONE_CHAT_WORKFLOWS and not item.taskset.workflow_args.get("use_base"):
            stage.problem(
                "model.model_path",
                f"({stage.config.model.model_path}) has no chat template, which {item.workflow} "
                f"needs: expected a chat model, or model.chat_template_path",
            )
            return


def check_folder(stage: Stage, root: Path) -> None:
    """Whether the job's folder can be written, and its disk holds a checkpoint of the model."""
    place = next(path for path in (root, *root.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        stage.problem(
            "checkpoint_root_dir",
            f"gives the folder {root}, which cannot be written: {place}: {error.strerror}",
        )
        return
    try:
        model_path = stage.config.model.model_path
        size = model_facts(model_path).size if model_path else 0
    except ValueError:
        size = 0
    free = shutil.disk_usage(place).free
    if free < size:
        stage.problem(
            "checkpoint_root_dir",
            f"gives the folder {root}, on a disk with {free / 1e9:.1f} GB left: expected room "
            f"for the model's {size / 1e9:.1f} GB",
        )


def model_facts(model_path: str) -> ModelFacts:
    """Facts of a model's folder. Raises ValueError where it cannot be one."""
    folder = located(model_path, "models")
    if folder is None:
        return ModelFacts(None)
    if not (folder / "config.json").is_file():
        raise ValueError("holds no config.json: expected a folder in the Hugging Face layout")
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not weights:
        raise ValueError("holds no weights: expected model.safetensors (or its shards)")
    try:
        model_shapes(folder)
    except ValueError as error:
        raise ValueError(f"is damaged, or was not downloaded to its end: {error}") from error
    config = _json(folder / "config.json")
    config |= config.get("text_config") or {}
    files = [folder / f"chat_template.{kind}" for kind in ("jinja", "json")]
    settings = folder / "tokenizer_config.json"
    return ModelFacts(
        folder,
        config.get("max_position_embeddings"),
        has_chat_template=any(file.is_file() for file in files)
        or (settings.is_file() and bool(_json(settings).get("chat_template"))),
        size=sum(path.stat().st_size for path in weights),
        attention_heads=config.get("num_attention_heads"),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"has a {path.name} that cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
