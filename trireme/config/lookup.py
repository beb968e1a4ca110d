"""Lookup: finds what a path or a name in the YAML stands for, without loading it.

A name is known when it is built in, registered (plug-ins are loaded before this is asked), or the
path of something in a module that can be found.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trireme.config.stages import Stage
from trireme.registry import (
    ADVANTAGES,
    ALGORITHMS,
    ENTROPIES,
    KLS,
    MULTI_TURNS,
    OPERATORS,
    ORMS,
    POLICY_LOSSES,
    REWARDS,
    SAMPLES,
    SELECTORS,
    TASK_OPERATORS,
    WORKFLOWS,
    did_you_mean,
)

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt", ".safetensors", ".gz")
INDEX = "model.safetensors.index.json"
Shape = tuple[int, ...]
_REGISTRIES = {
    "workflow": WORKFLOWS,
    "reward": REWARDS,
    "algorithm": ALGORITHMS,
    "advantage": ADVANTAGES,
    "policy loss": POLICY_LOSSES,
    "KL": KLS,
    "entropy": ENTROPIES,
    "sample strategy": SAMPLES,
    "multi-turn scheduler": MULTI_TURNS,
    "reward function": ORMS,
    "experience operator": OPERATORS,
    "task operator": TASK_OPERATORS,
    "data selector": SELECTORS,
}
"""Kind of name -> the registry that knows the names of that kind."""


def located(path: str, kind: Literal["models", "datasets"]) -> Path | None:
    """Where `path` lies on this machine; None where it is an id on the hub and not yet here.

    Raises ValueError for what looks like a local path and is not there.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    parent = local.parent
    if (
        not _HUB_ID.match(path)
        or path.endswith(_DATA_SUFFIXES)
        or (len(local.parts) > 1 and parent.is_dir())
    ):
        raise ValueError(f"is no file or folder here{_near(local)}")
    return _in_cache(path, kind)


def _near(path: Path) -> str:
    """A name beside the missing one that is nearly it, or the first folder that is missing."""
    missing = next((p for p in (*reversed(path.parents), path) if not p.exists()), path)
    beside = [p.name for p in missing.parent.iterdir()] if missing.parent.is_dir() else []
    if near := did_you_mean(missing.name, beside, "{}"):
        return f"; did you mean '{missing.parent / near}'?"
    return f" (the first part that is missing is '{missing}')" if missing != path else ""


def _in_cache(hub_id: str, kind: str) -> Path | None:
    """The newest snapshot of a hub repository in the local cache, if there is one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = root / f"{kind}--{hub_id.replace('/', '--')}" / "snapshots"
    snapshots = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
    return snapshots[-1] if snapshots else None


class ModelFacts(NamedTuple):
    """What is known before the model is loaded; None: not here to be looked at."""

    folder: Path | None
    max_positions: int | None = None
    has_chat_template: bool | None = None
    size: int = 0
    attention_heads: int | None = None


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


def model_shapes(folder: Path) -> dict[str, Shape]:
    """Name and shape of every tensor of a model.

    Raises ValueError where a file is not as long as its header says, or an index names a tensor
    that is not there.
    """
    shapes: dict[str, Shape] = {}
    for path in weight_files(folder):
        try:
            shapes |= read_shapes(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path.name}: {error}") from error
    index = folder / INDEX
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if missing := sorted(set(listed) - set(shapes)):
            raise ValueError(f"{listed[missing[0]]} with tensor {missing[0]} is missing")
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def read_shapes(path: Path) -> dict[str, Shape]:
    """Name and shape of every tensor of a file, from its header. Raises ValueError if it is cut."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(length) if 0 < length < 2**30 else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError("is no safetensors file, or a cut one") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != 8 + length + end:
        raise ValueError(f"has {os.path.getsize(path)} bytes instead of {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def known_names(kind: str) -> list[str]:
    """Built-in names, and those that are registered in this process, sorted."""
    return _REGISTRIES[kind].names()


def check_name(stage: Stage, kind: str, name: str, key: str, *, or_kind: str = "") -> None:
    """Notes a problem where `name` is nothing of this kind, or the other, that can be found."""
    known, plugins = known_names(kind), stage.config.plugins
    if or_kind:
        known = sorted({*known, *known_names(or_kind)})
    if name in known or not stage.plugins_loaded:
        return
    if ":" in name or "." in name:
        module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
        top = module.partition(".")[0]
        if not _is_there(top, plugins):
            stage.problem(
                key,
                f"is {name!r}: expected the {kind} of a module that can be found, and there is no "
                f"'{top}' (is its file in `plugins`?)",
            )
        return
    listed = ", ".join(known)
    hint = did_you_mean(name, known, "did you mean '{}'? ")
    stage.problem(key, f"is {name!r}, an unknown {kind}: {hint}Known: {listed}")


def plugin_files(plugins: Sequence[str]) -> list[Path]:
    """The Python files of `plugins` and of the folders in TRINITY_PLUGIN_DIRS."""
    places = [*plugins, *filter(None, os.environ.get("TRINITY_PLUGIN_DIRS", "").split(os.pathsep))]
    out: list[Path] = []
    for place in map(Path, places):
        out.extend(sorted(place.glob("*.py")) if place.is_dir() else [place])
    return out


def _is_there(module: str, plugins: Sequence[str]) -> bool:
    """Whether the file or package of a top-level module can be found."""
    files = plugin_files(plugins)
    folders = [*sys.path, os.getcwd(), *{str(path.parent) for path in files}]
    return (
        module in {path.stem for path in files}
        or module in sys.modules
        or PathFinder.find_spec(module, folders) is not None
    )
