"""Stages: what each stage's configuration is, once laid over the global one.

Each stage merges onto the original file, key by key, never onto the stage before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from trireme.config.problem import Problem
from trireme.config.schema import Config
from trireme.config.typed import build

_OF_THE_DATA = ("storage_type", "format", "replay_buffer", "split", "subset_name")
_FILE_ALGORITHMS = ("sft", "dpo", "cpt")
_MIX_ALGORITHMS = ("mix", "mix_chord")


@dataclass
class Stage:
    """One stage: its whole configuration, and what was found out about it so far."""

    config: Config
    index: int = 0
    name: str | None = None
    model_from: int | None = None
    """The stage whose model it starts from; None: `model_path`."""
    colocated: bool = False
    """`mode: colocate`: as both, where trainer and engine have one device."""
    plugins_loaded: bool = True
    """Whether what users register is known; if not, no name is called unknown."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was mapped onto this machine, and what has no effect on it."""
    file_notes: list[str] = field(default_factory=list)
    """What is noted of model and data: these lines come last."""
    task_paths: list[str] = field(default_factory=list)
    workflows: set[str] = field(default_factory=set)
    """Where the tasks of training lie, and the workflows that try them."""
    task_rows: int | None = None
    train_rows: int | None = None
    """Rows of those tasks, and of a trainer's data; None: only loading will tell."""

    def problem(self, key: str, text: str) -> None:
        """Notes what is wrong: the key's full name and a sentence that follows it."""
        self.problems.append(Problem(key, text, self.name))

    @property
    def reads_file(self) -> bool:
        """Whether the trainer reads a data set instead of what an explorer makes."""
        return self.config.algorithm.algorithm_type in _FILE_ALGORITHMS

    @property
    def remote(self) -> bool:
        """Whether rollout servers generate; a stage that reads data evaluates in its process."""
        return self.config.explorer.rollout_model.engine_type == "remote" and not self.reads_file

    @property
    def evaluates(self) -> bool:
        """Whether evaluation tasksets are tried: not by a server, nor by a trainer that awaits
        explorers.
        """
        alone = self.config.mode in ("train", "serve") and not self.reads_file
        return not alone and bool(self.config.buffer.explorer_input.eval_tasksets)

    @property
    def whole_steps(self) -> bool:
        """Whether a train step learns from one whole explore step, whatever that left."""
        return self.config.algorithm.sample_strategy == "explore_step"

    @property
    def expert_ratio(self) -> float | None:
        """Which share of a train batch an expert's data set gives; None: it gives none."""
        algorithm = self.config.algorithm
        mixes = algorithm.algorithm_type in _MIX_ALGORITHMS
        if (algorithm.sample_strategy or ("mix" if mixes else None)) != "mix":
            return None
        ratio = (algorithm.sample_strategy_args or {}).get("expert_data_ratio", 0.5)
        return ratio if isinstance(ratio, float) and 0 < ratio < 1 else 0.5

    @property
    def rollouts(self) -> int:
        """Rollouts of an explore step."""
        return self.config.buffer.batch_size * self.config.algorithm.repeat_times


def stages_of(config: Config) -> list[Stage]:
    """The stages of a file, in order; a file without any is one stage without a name."""
    out: list[Stage] = []
    for index, stage in enumerate(config.stages):
        values = asdict(config) | {"stages": [], "mode": stage.mode or config.mode}
        for section in (f.name for f in fields(stage) if "partial" in f.metadata):
            values[section] = merge(values[section], getattr(stage, section) or {})
        trained = [s.index for s in out if s.config.mode in ("both", "train")]
        own_model = bool((stage.model or {}).get("model_path"))
        model_from = trained[-1] if trained and not own_model else None
        name = stage.stage_name or f"stage_{index}"
        out.append(_stage(build(Config, values), index, name, model_from))
    return out or [_stage(config)]


def _stage(config: Config, *rest: Any) -> Stage:
    """A stage whose mode says what runs, and not where."""
    if config.mode != "colocate":
        return Stage(config, *rest)
    stage = Stage(replace(config, mode="both"), *rest)
    stage.colocated = True
    return stage


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, key by key; lists are replaced.

    What describes something that `over` replaces does not stay: the format of other data, the
    parts of another algorithm, the options of another function.
    """
    out = {key: value for key, value in base.items() if key not in set(_outdated(base, over))}
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _outdated(base: dict[str, Any], over: dict[str, Any]) -> Iterator[str]:
    """Keys of `base` that are void once `over` is laid over it."""
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
