"""Check: makes a stage's light parts, derives its Plan from them, and collects all that is wrong.

A data set, an algorithm, an operator or a workflow is validated by making it, so that a user's own
has the same checks, step counts and sentences as a built-in one. No model is loaded, and nothing
written. What has to be downloaded, asked over the network or encoded comes where all else is right.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from trireme.algorithms.recipes import PARTS, Recipe, get_recipe, row_of
from trireme.checkpoint.layout import JobFolder
from trireme.config import ConfigError, Findings, Plan, Problem
from trireme.config.check import (
    check_algorithm,
    check_api,
    check_attention,
    check_auxiliary_models,
    check_compiler,
    check_experts,
    check_folder,
    check_model,
    check_tasksets,
    job_folder,
)
from trireme.config.engine_kind import check_engine_types
from trireme.config.launcher import LOCAL, check_launcher, choose_launcher, launcher_named
from trireme.config.load import read_config
from trireme.config.lookup import ModelFacts, located, near_model, num_gpus
from trireme.config.plan import derive
from trireme.config.schema import Config
from trireme.config.schema_rollout import ExperienceBufferConfig, TasksetConfig
from trireme.config.stages import (
    StageFacts,
    UsedTaskset,
    stages_of,
    used_tasksets,
    with_inputs,
)
from trireme.data.kinds import FORMATS
from trireme.data.rows import NoRows, Rows, is_remote, load_rows
from trireme.data.tasksets import Mixture, Taskset
from trireme.extensions import missing
from trireme.launch.data import (
    OPERATORS_KEY,
    data_set,
    examine_taskset,
    make_buffer,
    make_eval_tasksets,
    make_taskset,
    make_text,
    make_training_taskset,
    rows_of,
    together,
)
from trireme.launch.engines import examine_auxiliary, teacher_len
from trireme.launch.listeners import examine_listener
from trireme.launch.prompts import (
    Prompts,
    check_teacher_prompts,
    first_messages,
    first_prompts,
    prompt_notes,
    prompt_problems,
)
from trireme.model.tool_calls import format_of
from trireme.pipeline.operators import make_operator
from trireme.pipeline.pipeline import task_operators
from trireme.processes import environment
from trireme.registry import LISTENERS, OPERATORS, REWARDS, STEERINGS, TASK_OPERATORS
from trireme.rewards.grouped import is_grouped, judge_of
from trireme.trainer.steering import examine_steering
from trireme.usercode import fault_of
from trireme.workflows.plugins import load_plugins
from trireme.workflows.workflow import resolve

T = TypeVar("T")


@dataclass
class Parts:
    """The light parts of one stage, with what they tell of it and what is wrong with it."""

    stage: StageFacts
    findings: Findings = field(default_factory=Findings)
    file_notes: list[str] = field(default_factory=list)
    """Notes on model and data: these lines come last."""
    recipe: Recipe | None = None
    training: Taskset | Mixture | None = None
    evaluation: list[Taskset | None] = field(default_factory=list)
    """None for one whose rows are not here."""
    rows: list[Rows] = field(default_factory=list)
    """What was read, so that a run of this process does not read it again."""
    prompts: list[tuple[str, Prompts]] = field(default_factory=list)
    """With the taskset's name; none where there are problems, or only workflows know them."""
    unread: str = ""
    """Why no prompt was encoded."""

    def tried(self, make: Callable[[], T], key: str = "") -> T | None:
        """What `make` returns; None where it fails, which is a problem of the key."""
        try:
            return make()
        except Exception as error:
            fault = fault_of(error)
            if fault is None and not isinstance(error, ValueError | ImportError | OSError):
                raise
            if key and isinstance(error, NoRows):
                self.findings.problem(f"{key}.path", f"({error.path}) {error.reason}")
            else:
                text = str(fault or error)
                self.findings.problem(key, f"cannot be used: {text}" if key else text)
            return None


def problems_of(stages: Sequence[Parts]) -> list[Problem]:
    """Every stage's problems; one that all stages have is of the global section, and said once."""
    out: dict[Problem, None] = {}
    times = Counter(problem for parts in stages for problem in {*parts.findings.problems})
    for parts in stages:
        for problem in parts.findings.problems:
            of_all = times[problem] == len(stages)
            out[problem if of_all else replace(problem, stage=parts.stage.name)] = None
    return list(out)


class Draft(NamedTuple):
    """The Plans of a file as far as they can be derived, with their parts."""

    plans: list[Plan]
    problems: list[Problem]
    parts: list[Parts]


def make_plans(config: Config) -> list[Plan]:
    """One Plan a stage (one where there are no stages). Raises ConfigError with all problems."""
    made = draft(config)
    if made.problems:
        raise ConfigError(made.problems)
    return made.plans


def checked(config: Config) -> Draft:
    """The Plans, with the parts that were made. Raises ConfigError for all that cannot run.

    The data that the first stage's trainer reads is encoded when that stage begins.
    """
    made = draft(config)
    problems = list(made.problems)
    if not problems:
        without_hub(made.plans, made.parts)
        for i, (plan, parts) in enumerate(zip(made.plans, made.parts, strict=True)):
            with environment(plan.config.explorer.env_vars):
                complete(plan, parts, data=i > 0)
            parts.findings.problems += prompt_problems(plan, parts.prompts)
        problems = problems_of(made.parts)
    if problems:
        raise ConfigError(problems)
    pairs = zip(made.plans, made.parts, strict=True)
    return made._replace(plans=[_with_prompt_notes(plan, parts) for plan, parts in pairs])


def _with_prompt_notes(plan: Plan, parts: Parts) -> Plan:
    notes = [note for name, prompts in parts.prompts for note in prompt_notes(plan, name, prompts)]
    return replace(plan, notes=(*plan.notes, *notes))


def examine(path: str | Path, overrides: Sequence[str] = ()) -> Draft:
    """The draft of a file with all that is wrong, but for what a wrong key's section lacks."""
    config, problems = read_config(path, overrides)
    made = draft(config)
    sections = tuple(f"{p.key.rpartition('.')[0]}." for p in problems if "." in p.key)
    rest = [problem for problem in made.problems if not problem.key.startswith(sections)]
    return made._replace(problems=list(dict.fromkeys(problems + rest)))


def draft(config: Config) -> Draft:
    """The Plans as far as they can be derived, and what is wrong with them."""
    root, stages = job_folder(config), stages_of(config)
    whole = check_folder(StageFacts(config), root)
    loaded = True
    try:
        with environment(config.explorer.env_vars):
            load_plugins(config.plugins)
    except ConfigError as error:
        whole.problems += error.problems
        loaded = False
    parts: list[Parts] = []
    for stage in stages:
        notes = () if parts else config._notes
        with environment(stage.config.explorer.env_vars):
            parts.append(make_parts(stage, notes, names_are_known=loaded))
    gpus = parts[0].findings.take(_gpus_elsewhere(stages))
    plans = [_plan_of(made, root, gpus) for made in parts]
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            whole.problem("stages", f"has {count} stages named {name!r}: expected one")
    return Draft(plans, whole.problems + problems_of(parts), parts)


def _plan_of(parts: Parts, root: Path, gpus: int | None) -> Plan:
    """The Plan of a stage, with every note on it; its problems join those of the parts."""
    stage = parts.stage
    plan = parts.findings.take(derive(stage, root, gpus))
    parts.findings.add(check_attention(stage, plan.device, plan.dtype))
    parts.findings.add(check_compiler(stage, plan.device, plan.trainer_ranks))
    return replace(plan, notes=(*parts.findings.notes, *parts.file_notes))


def _gpus_elsewhere(stages: Sequence[StageFacts]) -> tuple[int | None, Findings]:
    """GPUs of a named cluster's machine, where this one has none; None: they are counted here."""
    findings = Findings()
    if num_gpus() or all(stage.asks_api for stage in stages):
        return None, findings
    config = stages[0].config
    launcher, _ = choose_launcher(config, 0)  # its findings are those of the stages
    if launcher == LOCAL:
        return None, findings
    try:
        return launcher_named(launcher).gpus_of(config.cluster), findings
    except (TimeoutError, ValueError, RuntimeError) as error:  # a run ends of it, and says so too
        findings.note(f"cluster.ray_address: this plan counts no GPU, since {error}")
        return None, findings


def make_parts(
    stage: StageFacts, notes: Sequence[str] = (), *, names_are_known: bool = True
) -> Parts:
    """Make what this machine has of a stage's parts.

    `notes`: those on the file as a whole, if they are shown with this stage. `names_are_known`: the
    plug-ins are loaded; if not, nothing is made by its name.
    """
    stage, findings = with_inputs(stage)
    findings.notes += notes
    parts = Parts(stage, findings)
    if lacks := missing("mode", stage.config.mode):
        findings.problem("mode", f"is {stage.config.mode}, which {lacks}")
    if names_are_known:
        findings.add(check_launcher(stage.config.cluster.launcher))
        findings.add(check_engine_types(stage))
        _make_recipe(parts)
    stage = parts.stage
    findings.add(check_algorithm(stage))
    if stage.config.mode not in ("train", "serve") or stage.evaluates:
        findings.add(check_tasksets(stage))
        _make_tasksets(parts, names_are_known)
    _read_train_data(parts)
    findings.add(check_experts(stage))
    for name, data in stage.config.buffer.trainer_input.auxiliary_buffers.items():
        _read_data(parts, f"buffer.trainer_input.auxiliary_buffers.{name}", data, "sft")
    if names_are_known:
        _make_operators(parts)
    findings.add(check_api(stage))
    model, model_findings = check_model(stage)
    findings.problems += model_findings.problems
    parts.file_notes += model_findings.notes
    if model is not None:
        _check_template(parts, model)
    findings.add(check_auxiliary_models(stage))
    return parts


def _make_recipe(parts: Parts) -> None:
    """The algorithm, and what the Plan has to know of it."""
    stage, algorithm = parts.stage, parts.stage.config.algorithm
    if (row := parts.tried(lambda: row_of(algorithm.algorithm_type))) is None:
        return
    config, findings = stage.config, parts.findings
    if "repeat_times" not in algorithm.model_fields_set:
        algorithm = algorithm.model_copy(update={"repeat_times": row.group_size})
        config = config.model_copy(update={"algorithm": algorithm})
    parts.stage = stage = replace(
        stage,
        config=config,
        reads_file=row.from_data,
        whole_steps=(algorithm.sample_strategy or row.sample_strategy) == "explore_step",
    )
    before = len(findings.problems)
    for kind, registry in PARTS.items():
        parts.tried(partial(registry.get, getattr(algorithm, kind), kind=f"algorithm.{kind}"))
    if len(findings.problems) > before:
        return
    parser = stage.config.explorer.rollout_model.tool_call_parser
    parts.tried(partial(format_of, parser), "explorer.rollout_model.tool_call_parser")
    recipe = parts.recipe = parts.tried(lambda: get_recipe(algorithm))
    if recipe is None:
        return
    for kind in recipe.unused_options:
        findings.note(f"algorithm.{kind}_args: {kind} is none, and they change nothing")
    if recipe.weighs_by_length:
        findings.note(
            f"algorithm.loss_agg_mode ({recipe.loss_agg_mode}): {recipe.policy_loss.label} is a "
            "loss of whole samples, whose paper averages by 'seq-mean-token-mean'; here longer "
            "ones weigh more"
        )
    parts.stage = replace(
        stage,
        expert_ratio=parts.tried(lambda: recipe.expert_ratio),
        has_reference=recipe.needs_reference,
        has_critic=recipe.needs_critic,
        needs_teacher=recipe.needs_teacher,
        resamples=recipe.max_resample_times,
    )
    explores = stage.config.mode not in ("train", "serve")
    if recipe.needs_groups and algorithm.repeat_times < 2 and explores:
        findings.problem(
            "algorithm.repeat_times",
            f"is {algorithm.repeat_times}: expected at least 2, since {recipe.name} compares the "
            "rollouts of one task",
        )


def _make_tasksets(parts: Parts, names_are_known: bool) -> None:
    """The tasksets of which the rows are here, and of the others the names that they use."""
    stage = parts.stage
    used = used_tasksets(stage.config)
    mixed = sum(not item.is_eval for item in used) > 1
    training: list[Taskset | None] = []
    one_experience = True
    for item in used:
        rows = _read(parts, item.key, item.config)
        taskset = None
        if rows is not None and names_are_known and (item.is_eval or not _prepares_tasks(stage)):
            make = partial(make_taskset, stage.config, item, rows, mixed and not item.is_eval)
            taskset = parts.tried(make, item.key)
            if taskset is not None and (note := taskset.answers_note()) is not None:
                parts.file_notes.append(note)
        (parts.evaluation if item.is_eval else training).append(taskset)
        if names_are_known:
            one = _resolve(parts, item, taskset)
            one_experience = one_experience and (item.is_eval or one)
    here = [taskset for taskset in training if taskset is not None]
    if here and len(here) == len(training):
        parts.training = parts.tried(lambda: together(stage.config, here))
    tasks = parts.training
    parts.stage = replace(
        stage,
        one_experience=bool(training) and one_experience,
        task_rows=None if tasks is None else len(tasks),
        task_steps=None if tasks is None else tasks.total_steps,
    )


def _prepares_tasks(stage: StageFacts) -> bool:
    """Whether rows go through operators, so that only the run knows which there are."""
    tasks = stage.config.data_processor.task_pipeline
    return tasks is not None and bool(tasks.operators)


def _read(parts: Parts, key: str, data: TasksetConfig | ExperienceBufferConfig) -> Rows | None:
    """Rows of a data set; None where it is not here, which is noted, or no good."""
    path = data.path
    if not path:
        return None
    if is_remote(data_set(data)):
        note = f"{key}.path ({path}): not on this machine, will be downloaded"
        parts.file_notes.append(note)
        return None
    if isinstance(data, TasksetConfig):
        read = partial(rows_of, data)
    else:
        read = partial(load_rows, path, data.subset_name, data.split, on_error=data.on_error)
    rows = parts.tried(read, key)
    parts.rows += [] if rows is None else [rows]
    return rows


def _resolve(parts: Parts, used: UsedTaskset, taskset: Taskset | None) -> bool:
    """Whether each rollout of these tasks leaves one experience. A workflow or a reward that there
    is not is a problem.
    """
    named = [(used.workflow, used.reward)] if used.workflow else []
    if taskset is not None:
        named = [(task.workflow, task.reward_fn) for task in taskset.kinds()]
    one = bool(named)
    for workflow, reward in named:
        if workflow is None and not used.workflow:
            continue  # that none is given is said of the YAML
        key = f"{used.key}.default_reward_fn_type"
        spec = parts.tried(partial(resolve, workflow), f"{used.key}.default_workflow_type")
        recipe = parts.recipe
        if spec and recipe and recipe.asks("reward_parts") and not used.is_eval:
            parts.tried(partial(spec.refuse_no_parts, recipe.parts["advantage_fn"].label), key)
        reward = reward or getattr(getattr(spec, "code", None), "default_reward", None)
        parts.tried(partial(_resolve_reward, parts, reward, used.config.reward_fn_args), key)
        one = one and spec is not None and spec.one_experience
    return one


def _resolve_reward(parts: Parts, reward: Any, args: Mapping[str, Any]) -> None:
    """Raise ValueError for a reward that there is not, or that asks a model that there is not."""
    if is_grouped(reward, args):
        models = len(parts.stage.config.explorer.auxiliary_models)
        judge_of(reward, args).refuse_missing_models(models)
    elif isinstance(reward, str):
        REWARDS.get(reward)


def _read_train_data(parts: Parts) -> None:
    """The data set that a trainer reads by itself."""
    stage, recipe = parts.stage, parts.recipe
    data = stage.config.buffer.trainer_input.experience_buffer
    if recipe is None or not stage.reads_file or not data.path or "://" in data.path:
        return
    if recipe.schema == "kto" and stage.config.buffer.train_batch_size == 1:
        text = "is 1: KTO compares rows; expected at least 2"
        parts.findings.problem("buffer.train_batch_size", text)
    rows = _read_data(parts, "buffer.trainer_input.experience_buffer", data, recipe.schema)
    if rows is not None and FORMATS[recipe.schema].one_each:
        parts.stage = replace(stage, train_rows=len(rows))


def _read_data(parts: Parts, key: str, data: ExperienceBufferConfig, schema: str) -> Rows | None:
    """Rows of a data set whose columns are those of a schema."""
    rows = _read(parts, key, data)
    if rows is not None:
        parts.tried(lambda: FORMATS[schema].columns_of(rows, data.format.model_dump()), key)
    return rows


def _make_operators(parts: Parts) -> None:
    """The operators over experiences, and those over the tasks' rows, where the mode has them."""
    config = parts.stage.config
    data, mode = config.data_processor, config.mode
    experiences = data.experience_pipeline.operators if mode in ("both", "explore", "serve") else ()
    named = {f"{OPERATORS_KEY}[{i}]": item for i, item in enumerate(experiences)}
    sets = [(OPERATORS, named)]
    sets += [(TASK_OPERATORS, task_operators(config))] if mode in ("both", "explore") else []
    for registry, operators in sets:
        for key, item in operators.items():
            make = partial(make_operator, registry, item.name, item.args, key)
            made, recipe = parts.tried(make), parts.recipe
            if made and made.changes_reward and recipe and recipe.asks("reward_parts"):
                parts.findings.problem(
                    f"{key}.name",
                    f"is '{item.name}', which changes the reward and not its parts, and "
                    f"{recipe.parts['advantage_fn'].label} compares these one by one: expected the "
                    "same as one more reward function, such as soft_overlong, or advantage_fn grpo",
                )


def _check_template(parts: Parts, facts: ModelFacts) -> None:
    """Notes a problem where a workflow chats with a model that has no chat template."""
    model = parts.stage.config.model
    template = model.custom_chat_template or model.chat_template_path
    if facts.has_chat_template is not False or template:
        return
    for taskset in (parts.training, *parts.evaluation):
        for task in taskset.kinds() if taskset is not None else ():
            asked = parts.tried(lambda task=task: first_messages(task))
            if asked is not None:
                parts.findings.problem(
                    "model.model_path",
                    f"({model.model_path}) has no chat template, which {task.workflow} needs: "
                    "expected a chat model, or model.chat_template_path",
                )
                return


def without_hub(plans: Sequence[Plan], parts: Sequence[Parts]) -> str:
    """Why nothing can be downloaded, where something has to be: a missing model is a problem then.

    Where the hub does not answer, this process does not ask it again: that is a minute of retries.
    """
    if not any("will be downloaded" in note for plan in plans for note in plan.notes):
        return ""
    if not (away := _hub_is_away()):
        return ""
    for plan, made in zip(plans, parts, strict=True):
        path = plan.model_path
        if plan.spread or plan.api or plan.model_from_stage is not None:
            continue  # another machine may have the model
        if located(path, "models") is None:
            text = f"({path}) is not on this machine, and {away}{near_model(path)}"
            made.findings.problem("model.model_path", text)
    return away


def _hub_is_away() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return ""  # only the proxy knows
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True  # the variable was read when it was imported
        return f"{hub.hostname} cannot be reached ({error})"
    return ""


def complete(plan: Plan, parts: Parts, *, data: bool = True) -> None:
    """Make what the Plan needs from elsewhere, ask the models of others, and encode some prompts.

    `data`: also the rows that a trainer reads by itself, all of which are encoded for that. What is
    wrong is a problem of the stage.
    """
    recipe = parts.recipe
    assert recipe is not None, "a stage with problems"
    parts.tried(lambda: examine_auxiliary(plan, teacher=recipe.needs_teacher))
    for name in LISTENERS:
        parts.findings.problems += parts.tried(partial(examine_listener, name, plan)) or ()
    for name in STEERINGS:
        parts.findings.problems += parts.tried(partial(examine_steering, name, plan)) or ()
    if not _prepares_tasks(parts.stage):  # it would write
        if parts.training is None:
            parts.training = parts.tried(lambda: make_training_taskset(plan))
        if None in parts.evaluation:
            parts.evaluation = list(parts.tried(lambda: make_eval_tasksets(plan)) or ())
    tasksets = [one for one in (parts.training, *parts.evaluation) if one is not None]
    needs = {"greedy_run": recipe.greedy_run, "rewards_teach": recipe.rewards_teach}
    for taskset in tasksets:
        parts.tried(partial(examine_taskset, taskset, plan, **needs))
    if data and plan.buffer_type == "file":
        folder, read = JobFolder(plan.job_dir), partial(make_text, plan, plan.model_path)
        parts.tried(lambda: make_buffer(plan, folder, read(), schema=recipe.schema))
    if parts.findings.problems or plan.mode == "serve" or plan.api:
        return
    if located(plan.model_path, "models") is None:
        return
    each = [one for taskset in tasksets for one in getattr(taskset, "tasksets", [taskset])]
    if not each:
        return
    try:
        text = make_text(plan, plan.model_path)
        encoded = [(taskset.name, first_prompts(text, taskset)) for taskset in each]
    except (ValueError, OSError) as error:  # no tokenizer beside the model, say
        if (fault := fault_of(error)) is None:
            parts.unread = str(error)
        else:
            parts.findings.problem("", str(fault))
        return
    parts.prompts = [(name, prompts) for name, prompts in encoded if prompts is not None]
    if recipe.needs_teacher:
        for taskset in getattr(parts.training, "tasksets", [parts.training]):
            if taskset is not None:
                check = partial(check_teacher_prompts, text, taskset, teacher_len(plan))
                parts.tried(check)
