"""Check: from a Config to one Plan a stage, with every problem of every stage found at once.

What would fail later (missing files, unknown names) is found before anything slow: nothing is
loaded and nothing is downloaded; files are looked at, names are looked up.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from trireme.config import ConfigError, Problem
from trireme.config.check_data import (
    check_auxiliary_data,
    check_pipelines,
    check_tasksets,
    check_train_data,
    used_tasksets,
)
from trireme.config.load import read_config
from trireme.config.lookup import check_name, model_facts
from trireme.config.plan import Plan, derive
from trireme.config.schema import Config
from trireme.config.stages import ONE_CHAT_WORKFLOWS, Stage, stages_of

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


def make_plans(config: Config) -> list[Plan]:
    """One Plan a stage (one where there are no stages). Raises ConfigError with all problems."""
    plans, problems = draft_plans(config)
    if problems:
        raise ConfigError(problems)
    return plans


def draft_plans(config: Config) -> tuple[list[Plan], list[Problem]]:
    """The Plans as far as they can be told, and what is wrong with them."""
    root, whole, stages = job_folder(config), Stage(config), stages_of(config)
    check_folder(whole, root)
    loaded = load_all_plugins(whole)
    plans: list[Plan] = []
    for stage in stages:
        stage.plugins_loaded = loaded
        check_stage(stage)
        plans.append(derive(stage, root))
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            whole.problem("stages", f"has {count} stages named {name!r}: expected one")
    return plans, whole.problems + _shared(stages)


def examine(path: str | Path, overrides: Sequence[str] = ()) -> tuple[list[Plan], list[Problem]]:
    """The Plans of a file as far as they can be told, and all that is wrong in it.

    What a wrong key's section lacks without it is not said as well.
    """
    config, problems = read_config(path, overrides)
    plans, found = draft_plans(config)
    sections = tuple(f"{p.key.rpartition('.')[0]}." for p in problems if "." in p.key)
    rest = [problem for problem in found if not problem.key.startswith(sections)]
    return plans, list(dict.fromkeys(problems + rest))


def load_all_plugins(stage: Stage) -> bool:
    """Import what users extend us with, so that its names are known; False where that fails."""
    # Imported here: it is light, and lies above config, as do the registries (see names.py).
    from trireme.workflows.plugins import load_plugins

    try:
        load_plugins(stage.config.plugins)
    except ConfigError as error:
        stage.problems += error.problems
        return False
    return True


def job_folder(config: Config) -> Path:
    """Where the job's files lie: root/project/group/name, anew where it shall not be continued."""
    parts = [part for part in (config.project, config.group, config.name) if part]
    root = Path(config.checkpoint_root_dir).expanduser()
    folder = (Path.cwd() / root).joinpath(*parts)
    anew = not config.continue_from_checkpoint and config.mode != "bench"
    if anew and folder.is_dir() and any(folder.iterdir()):
        began, now = folder, datetime.now()
        while folder.exists():  # two runs may begin in one second
            folder = began.with_name(f"{began.name}_{now:%Y%m%d%H%M%S}")
            now += timedelta(seconds=1)
    return folder


def _shared(stages: Sequence[Stage]) -> list[Problem]:
    """Every stage's problems; one of all stages is of the global section, and is said once."""
    problems = [problem for stage in stages for problem in dict.fromkeys(stage.problems)]
    times = Counter(replace(problem, stage=None) for problem in problems)
    out: dict[Problem, None] = {}
    for problem in problems:
        shared = replace(problem, stage=None)
        out[shared if times[shared] == len(stages) else problem] = None
    return list(out)
