"""Stages: what each stage's configuration is, once laid over the global one.

Each stage merges onto the original file, key by key, never onto the stage before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trireme.config.schema import Config
from trireme.config.typed import build

_SECTIONS = (
    "algorithm",
    "model",
    "buffer",
    "data_processor",
    "explorer",
    "synchronizer",
    "trainer",
)
_OF_THE_DATA = ("storage_type", "format", "replay_buffer", "split", "subset_name")
_FILE_ALGORITHMS = ("sft", "dpo", "cpt")


@dataclass(frozen=True)
class Stage:
    """One stage: its whole configuration, and whose model it starts from (None: `model_path`)."""

    index: int
    name: str | None
    config: Config
    model_from: int | None


def stages_of(config: Config) -> list[Stage]:
    """The stages of a file, in order; a file without any is one stage without a name."""
    if not config.stages:
        return [Stage(0, None, config, None)]
    out: list[Stage] = []
    for index, stage in enumerate(config.stages):
        values = asdict(config)
        values["stages"] = []
        values["mode"] = stage.mode or config.mode
        for name in _SECTIONS:
            values[name] = merge(values[name], getattr(stage, name) or {})
        trained = [s.index for s in out if s.config.mode in ("both", "train")]
        own_model = bool((stage.model or {}).get("model_path"))
        model_from = trained[-1] if trained and not own_model else None
        name = stage.stage_name or f"stage_{index}"
        out.append(Stage(index, name, build(Config, values), model_from))
    return out


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


def reads_file(config: Config) -> bool:
    """Whether the trainer reads a data set instead of what an explorer makes."""
    return config.algorithm.algorithm_type in _FILE_ALGORITHMS


def _outdated(base: dict[str, Any], over: dict[str, Any]) -> Iterator[str]:
    """Keys of `base` that are void once `over` is laid over it."""

    def new(key: str) -> bool:
        return key in over and over[key] != base.get(key)

    if new("path"):
        yield from _OF_THE_DATA
    if new("algorithm_type"):
        yield from (key for key in base if key.endswith(("_fn", "_args")))
        yield "sample_strategy"
    yield from (f"{key}_args" for key in over if new(key))
    if "taskset" in over:
        yield "tasksets"
    if "tasksets" in over:
        yield "taskset"
