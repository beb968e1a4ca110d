"""Check model: whether the model is there and can chat, and whether checkpoints can be written."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from trireme.config.model_files import ModelFacts, model_facts
from trireme.config.problem import Problem
from trireme.config.schema import Config
from trireme.config.used import StageFacts, used_tasksets

_CHAT_WORKFLOWS = ("simple_workflow", "math_workflow", "math_boxed_workflow")


def check_folder(root: Path, size: int, problems: list[Problem]) -> None:
    """Whether the job's folder can be written and its disk holds a checkpoint of `size` bytes."""
    place = root
    while not place.exists() and place.parent != place:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        problems.append(
            Problem(
                "checkpoint_root_dir",
                f"gives the folder {root}, which cannot be written: {place}: {error.strerror}",
            )
        )
        return
    free = shutil.disk_usage(place).free
    if free < size:
        problems.append(
            Problem(
                "checkpoint_root_dir",
                f"gives the folder {root}, on a disk with {free / 1e9:.1f} GB left: expected room "
                f"for the model's {size / 1e9:.1f} GB",
            )
        )


def model_size(config: Config) -> int:
    """Bytes of the model's weights; 0 where they are not here."""
    try:
        return model_facts(config.model.model_path).size if config.model.model_path else 0
    except ValueError:
        return 0


def check_model(
    config: Config, facts: StageFacts, problems: list[Problem], *, exists: bool
) -> None:
    """Whether the model is there, and has a chat template where a workflow chats."""
    model = config.model
    if not model.model_path:
        problems.append(
            Problem("model.model_path", "is not given: expected a model's folder or hub id")
        )
        return
    try:
        found = model_facts(model.model_path)
    except ValueError as error:
        problems.append(Problem("model.model_path", f"({model.model_path}) {error}"))
        return
    if found.folder is None and not exists:
        facts.notes.append(
            f"model.model_path ({model.model_path}): not on this machine, will be downloaded"
        )
    wanted = model.max_model_len or 0
    if found.max_positions and wanted > found.max_positions:
        facts.notes.append(
            f"model.max_model_len ({wanted}): longer than the {found.max_positions} positions the "
            f"model was made for"
        )
    if model.chat_template_path and not Path(model.chat_template_path).is_file():
        problems.append(
            Problem.value("model.chat_template_path", model.chat_template_path, "a file")
        )
    _check_template(config, found, problems)


def _check_template(config: Config, found: ModelFacts, problems: list[Problem]) -> None:
    model = config.model
    if found.has_chat_template is not False:
        return
    given = model.custom_chat_template or model.chat_template_path
    if given:
        return
    for item in used_tasksets(config):
        chats = (item.workflow or "").removeprefix("async_") in _CHAT_WORKFLOWS
        if chats and not item.taskset.workflow_args.get("use_base"):
            problems.append(
                Problem(
                    "model.model_path",
                    f"({model.model_path}) has no chat template, which {item.workflow} needs: "
                    f"expected a chat model, or model.chat_template_path",
                )
            )
            return
