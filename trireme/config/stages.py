"""Stages: merges each stage's configuration, and decides the fate of its keys.

Each stage merges onto the original file, key by key, never onto the stage before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trireme.config import Findings
from trireme.config.dialect import options_in, unread
from trireme.config.engine_kind import kind_names
from trireme.config.hidden import without_secrets
from trireme.config.lookup import adapter_facts
from trireme.config.schema import Config, LoraConfig
from trireme.config.schema_rollout import TasksetConfig
from trireme.config.section import (
    Fate,
    Mapped,
    Moved,
    NoEffect,
    Refused,
    Section,
    fate_of,
)

ONE_REPLY = "simple_workflow"
"""The workflow of tasks that name a reward and no workflow: one prompt, one reply."""
_OF_THE_DATA = ("storage_type", "format", "replay_buffer", "split", "subset_name")


@dataclass(frozen=True)
class StageFacts:
    """One stage: its whole configuration, and the facts that its light parts give.

    `stages_of` reads the first six from the file; making an algorithm and opening data sets gives
    the others, each with `replace`, in launch/make.py.
    """

    config: Config
    name: str | None = None
    model_from: int | None = None
    """The stage whose model it starts from; None: `model_path`."""
    colocated: bool = False
    """Whether it is `mode: colocate`: as both, but trainer and engine share a device."""
    another_evaluates: bool = False
    """Whether another stage has evaluation tasksets, which global keys may refer to."""
    shares_save_interval: bool = False
    """Whether `trainer.save_interval` is global and another stage trains too."""
    reads_file: bool = False
    """Whether the trainer reads a data set instead of the explorer's experiences."""
    whole_steps: bool = False
    """Whether a train step learns from exactly one explore step, whatever its size."""
    expert_ratio: float | None = None
    """The share of a train batch that an expert's data set provides; None: it provides none."""
    has_reference: bool = False
    has_critic: bool = False
    """Whether the trainer also holds a reference model and a value model."""
    has_entropy: bool = False
    """Whether the loss has an entropy term."""
    needs_teacher: bool = False
    """Whether the first auxiliary model scores the sampled tokens."""
    resamples: int | None = None
    """Further explore steps that a train batch may take; None: any number."""
    one_experience: bool = False
    """Whether each training rollout leaves exactly one experience."""
    task_rows: int | None = None
    task_steps: int | None = None
    """Rows and explore steps of the training tasks; None: only the run knows."""
    train_rows: int | None = None
    """Experiences in the trainer's data; None: only the run knows."""

    @property
    def remote(self) -> bool:
        """True if rollout servers generate; a stage that reads data evaluates in its own
        process.
        """
        servers = self.config.explorer.rollout_model.engine_type == "remote"
        return servers and not self.reads_file and not self.asks_api

    @property
    def asks_api(self) -> bool:
        """True if a model behind an OpenAI API is evaluated, and no engine is started."""
        return self.config.mode == "bench" and self.config.model.external_model.enable

    @property
    def doras(self) -> list[str | None]:
        """The paths of the adapters that are DoRA; None for one that is made."""
        return [one.path for one in self.config.model.lora_configs or [] if _is_dora(one)]

    @property
    def evaluates(self) -> bool:
        """True if evaluation tasksets are run: not by a server, nor by a trainer that awaits
        explorers.
        """
        alone = self.config.mode in ("train", "serve") and not self.reads_file
        return not alone and bool(self.config.buffer.explorer_input.eval_tasksets)

    @property
    def prepares_tasks(self) -> bool:
        """True if rows go through operators, so that only the run knows the final rows."""
        tasks = self.config.data_processor.task_pipeline
        return tasks is not None and bool(tasks.operators)

    @property
    def rollouts(self) -> int:
        """Return the rollouts of an explore step."""
        return self.config.buffer.batch_size * self.config.algorithm.repeat_times


class UsedTaskset(NamedTuple):
    """A taskset with its key, and the defaults for keys that it does not set."""

    key: str
    config: TasksetConfig
    name: str
    number: int
    """Its index among the training tasksets, or among the evaluation tasksets."""
    is_eval: bool
    workflow: str | None
    reward: str | list[Any] | None
    reward_args: dict[str, Any]
    """Keyword arguments of the reward."""


def _is_dora(lora: LoraConfig) -> bool:
    """Return whether an adapter is DoRA, by its own file if it has a path."""
    if lora.path is None:
        return lora.use_dora
    try:
        return adapter_facts(lora.path).dora
    except ValueError:  # `check_model` reports the error
        return False


def used_tasksets(config: Config) -> list[UsedTaskset]:
    """Return the training sets, then the evaluation sets, as far as the mode runs them.

    A taskset with a reward and without a workflow gets one prompt and one reply.
    """
    inputs, mode = config.buffer.explorer_input, config.mode
    training = [("taskset", inputs.taskset)] if inputs.taskset else []
    training += [(f"tasksets[{i}]", one) for i, one in enumerate(inputs.tasksets)]
    evaluation = [(f"eval_tasksets[{i}]", one) for i, one in enumerate(inputs.eval_tasksets)]
    out: list[UsedTaskset] = []
    for is_eval, sets in ((False, training), (True, evaluation)):
        if mode == "serve" or (not is_eval and mode in ("bench", "train")):
            continue
        for number, (key, one) in enumerate(sets):
            fallback = inputs.default_eval_workflow_type if is_eval else None
            default = one.default_reward_fn_type or inputs.default_reward_fn_type
            reward, options = _with_its_options(default)
            options |= one.reward_fn_args
            scored = reward or options.get("funcs")
            out.append(
                UsedTaskset(
                    f"buffer.explorer_input.{key}",
                    one,
                    one.name or f"{'eval_' * is_eval}taskset_{number}",
                    number,
                    is_eval,
                    one.default_workflow_type
                    or fallback
                    or inputs.default_workflow_type
                    or (ONE_REPLY if scored else None),
                    reward,
                    options,
                )
            )
    return out


def _with_its_options(
    reward: str | dict[str, Any] | list[Any] | None,
) -> tuple[str | list[Any] | None, dict[str, Any]]:
    """Split a mapping of one reward; with a weight, or without a name, it is a list of itself."""
    if not isinstance(reward, dict):
        return reward, {}
    if isinstance(reward.get("name"), str) and "weight" not in reward:
        return reward["name"], {key: value for key, value in reward.items() if key != "name"}
    return [reward] if reward else None, {}


def stages_of(config: Config) -> list[StageFacts]:
    """Return the stages of a file, in order; a file without any is one stage without a name."""
    out: list[StageFacts] = []
    for index, stage in enumerate(config.stages):
        values = config.model_dump(exclude_unset=True)
        values |= {"stages": [], "mode": stage.mode or config.mode}
        for name, section in stage:
            if isinstance(section, Section):
                values[name] = merge(values.get(name, {}), section.model_dump(exclude_unset=True))
        trained = [i for i, other in enumerate(out) if other.config.mode in ("both", "train")]
        own_model = stage.model is not None and stage.model.model_path
        own_interval = stage.trainer and "save_interval" in stage.trainer.model_fields_set
        whole, colocated = _both_sides(Config.model_validate(values))
        out.append(
            StageFacts(
                whole,
                name=stage.stage_name or f"stage_{index}",
                model_from=trained[-1] if trained and not own_model else None,
                colocated=colocated,
                shares_save_interval=not own_interval,
            )
        )
    if not out:
        whole, colocated = _both_sides(config)
        return [StageFacts(whole, colocated=colocated)]
    return [_among(one, [other for other in out if other is not one]) for one in out]


def _both_sides(config: Config) -> tuple[Config, bool]:
    """Replace a mode that also says where the sides run by the mode that says what runs; the flag
    says whether on one device.
    """
    if config.mode != "colocate":
        return config, False
    return config.model_copy(update={"mode": "both"}), True


def _among(stage: StageFacts, others: Sequence[StageFacts]) -> StageFacts:
    """Return the same stage, with the facts that depend on the other stages of its file."""
    trains = any(other.config.mode in ("both", "train") for other in others)
    return replace(
        stage,
        another_evaluates=any(o.config.buffer.explorer_input.eval_tasksets for o in others),
        shares_save_interval=stage.shares_save_interval and trains,
    )


def with_inputs(stage: StageFacts) -> tuple[StageFacts, Findings]:
    """Return the stage with the rows that operators on rows read as its only training taskset."""
    findings = Findings()
    config, key = stage.config, "data_processor.task_pipeline"
    if (tasks := config.data_processor.task_pipeline) is None:
        return stage, findings
    if config.mode == "train" and (tasks.inputs or tasks.operators) and stage.name is None:
        what = "expected rows that are ready, as buffer.trainer_input.experience_buffer.path"
        findings.problem(key, f"is given in mode train, which has no tasks: {what}")
    if not tasks.inputs or config.mode not in ("both", "explore"):
        return stage, findings
    inputs, sets = config.buffer.explorer_input, config.buffer.explorer_input.tasksets
    if len(tasks.inputs) > 1 or len(sets) + (inputs.taskset is not None) != 1:
        text = "is given: expected one of them, and one training taskset"
        findings.problem(f"{key}.inputs", text)
        return stage, findings
    path = tasks.inputs[0]
    old = inputs.taskset or sets[0]
    new = old.model_copy(update={"path": path})
    named = {"taskset": new} if inputs.taskset else {"tasksets": [new]}
    buffer = config.buffer.model_copy(update={"explorer_input": inputs.model_copy(update=named)})
    if old.path not in ("", path):
        text = f"read in place of the taskset's path ({old.path}), to which nothing is written"
        findings.note(f"{key}.inputs ({path}): {text}")
    return replace(stage, config=config.model_copy(update={"buffer": buffer})), findings


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Apply `over` to `base`, key by key; lists are replaced.

    Settings that describe something replaced by `over` are dropped: the format of other data, the
    parts of another algorithm, the options of another function.
    """
    out = {key: value for key, value in base.items() if key not in set(_outdated(base, over))}
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _outdated(base: dict[str, Any], over: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of `base` that are void once `over` is applied."""
    new = {key for key in over if over[key] != base.get(key)}
    if "path" in new:
        yield from _OF_THE_DATA
    if "algorithm_type" in new:
        yield from (key for key in base if key.endswith(("_fn", "_args")))
        yield "sample_strategy"
    yield from (f"{key}_args" for key in new)
    if "taskset" in over:
        yield "tasksets"
    if "tasksets" in over:
        yield "taskset"


def given_keys(value: Section, prefix: str = "") -> Iterator[tuple[str, Fate | None, Any]]:
    """Yield full name, fate and value of every key that differs from its default."""
    plain = type(value)()
    for name, item in type(value).model_fields.items():
        current = getattr(value, name)
        key = f"{prefix}{name}"
        if current == getattr(plain, name):
            continue
        need = unread(key)
        yield key, Refused(need) if need else fate_of(item), current
        yield from ((f"{key}.{at}", fate, part) for at, part, fate in options_in(key, current))
        inside = [(key, current)]
        if isinstance(current, list):
            inside = [(f"{key}[{index}]", part) for index, part in enumerate(current)]
        elif isinstance(current, dict):
            inside = [(f"{key}.{name}", part) for name, part in current.items()]
        for at, part in inside:
            if isinstance(part, Section):
                yield from given_keys(part, f"{at}.")


class MovedKey(NamedTuple):
    """A key that is read as another one."""

    key: str
    target: str
    """The other key's full name."""
    value: Any
    gives_way: bool
    """Whether a different value of the other key is accepted: it takes precedence."""


def moved_keys(config: Config) -> Iterator[MovedKey]:
    """Yield the keys that are read as others, in the whole file and in each stage."""
    for key, fate, value in given_keys(config):
        root, _, name = key.partition("].") if key.startswith("stages[") else ("", "", key)
        if isinstance(fate, Moved) and not name.startswith("explorer.auxiliary_models["):
            target = fate.target(key, root and f"{root}].")
            yield MovedKey(key, target, value, fate.gives_way)


def check_fates(
    stage: StageFacts, *, spread: bool = False, engine_keys: Collection[str] = ()
) -> Findings:
    """Note the keys that are mapped or without effect, and report refused ones as problems.

    `engine_keys`: the rollout model's keys that the engine receives. Sections that the mode does
    not use are skipped.
    """
    findings = Findings()
    idle = _idle(stage)
    moved: list[str] = []
    no_effect: list[str] = []
    for key, fate, value in given_keys(stage.config):
        if fate is None or key.startswith(tuple(f"{part}{end}" for part in idle for end in ".[")):
            continue
        if fate.on == "auxiliary" and key.startswith("explorer.auxiliary_models["):
            if value == "tinker":
                findings.problem(
                    key, "(tinker) is not supported yet: expected torch, external or remote"
                )
        elif isinstance(fate, Refused) and not _is_off(value):
            if refused := fate.values.get(value) if fate.values else fate.text:
                idle += (key,)
                text = refused.replace("{engines}", ", ".join(kind_names()))
                findings.problem(key, f"({_short(key, value)}) {text}")
        elif (spread and fate.on == "spread") or (
            fate.on == "engine" and key.rpartition(".")[2] in engine_keys
        ):
            continue
        elif isinstance(fate, Moved) and key.startswith("explorer.auxiliary_models["):
            findings.problem(key, f"({_short(key, value)}) is not supported for an auxiliary model")
        elif isinstance(fate, Moved):
            moved.append(f"{key}={_short(key, value)} as {fate.target(key)}")
        elif isinstance(fate, Mapped):
            findings.note(f"{key} ({_short(key, value)}): {fate.text}")
        elif isinstance(fate, NoEffect):
            no_effect.append(f"{key}={_short(key, value)}")
    if moved:
        findings.note(f"read, where those are not given: {', '.join(moved)}")
    if no_effect:
        findings.note(f"without effect here: {', '.join(no_effect)}")
    return findings


def note_among_ranks(config: Config) -> Findings:
    """Note the keys whose values several training ranks serve in another way."""
    findings = Findings()
    for key, fate, value in given_keys(config):
        among = fate.among_ranks if isinstance(fate, Mapped) else {}
        if isinstance(value, str) and value in among:
            findings.note(f"{key} ({value}): {among[value]}")
    return findings


def _idle(stage: StageFacts) -> tuple[str, ...]:
    if stage.config.mode == "train":
        return () if stage.evaluates else ("explorer", "buffer.explorer_input")
    if stage.config.mode == "serve":
        return ("trainer", "buffer.explorer_input")
    return () if stage.config.mode == "both" else ("trainer",)


def _is_off(value: Any) -> bool:
    """Return True if a section is empty, or marks itself as unused."""
    return isinstance(value, dict) and (not value or value.get("enable") is False)


def _short(key: str, value: Any) -> str:
    made = value[0] if isinstance(value, list) and value else value
    plain = made.model_dump(exclude_unset=True) if isinstance(made, Section) else value
    text = str(without_secrets(plain, key))
    return text if len(text) <= 40 else f"{text[:37]}..."
