"""Convert: makes checkpoints of this trainer into folders that `from_pretrained` loads.

Whether a folder is complete is read from the headers of its safetensors files and compared with
what the weights' own file holds and the configuration says; no model is built for it. Nothing
that is complete is touched, and what is written is written whole.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trireme.checkpoint.layout import STEP_NAME
from trireme.checkpoint.save import WEIGHTS, copy_model_files
from trireme.files import naming, whole_file

Status = Literal["exported", "complete", "failed"]


@dataclass(frozen=True)
class Converted:
    """What became of one checkpoint."""

    step_dir: Path
    status: Status
    text: str


def convert(checkpoint_dir: Path, base_model_dir: Path | None = None) -> list[Converted]:
    """Every checkpoint in or under a folder, in order of steps, or the one that the path lies in.

    Raises ValueError where there is none.
    """
    return [convert_step(step, base_model_dir) for step in find_steps(checkpoint_dir)]


def find_steps(path: Path) -> list[Path]:
    """The `global_step_N` folders that a path means: those under it, or the one it lies in."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"--checkpoint-dir '{path}' does not exist")
    for place in (path.resolve(), *path.resolve().parents):
        if STEP_NAME.match(place.name) and place.is_dir():
            return [place]
    found = [p for p in path.rglob("global_step_*") if p.is_dir() and STEP_NAME.match(p.name)]
    if not found:
        raise ValueError(f"--checkpoint-dir '{path}' holds no global_step_* folder")
    return sorted(found, key=lambda p: (p.parent, int(p.name.removeprefix("global_step_"))))


def convert_step(step_dir: Path, base_model_dir: Path | None) -> Converted:
    """Export one checkpoint's policy, unless it is complete."""
    actor, hf = step_dir / "actor", step_dir / "actor" / "huggingface"
    try:
        own = actor / WEIGHTS
        if not own.exists() and not weight_files(hf):
            return Converted(step_dir, "failed", _no_weights(actor))
        lacks_config = not (hf / "config.json").exists()
        if lacks_config and base_model_dir is None:
            text = "actor/huggingface has no config.json: give its model as --base-model-dir"
            return Converted(step_dir, "failed", text)
        problem = None if weight_files(hf) else "no weights there yet"
        problem = problem or incomplete(hf, own if own.exists() else None)
        if not lacks_config and problem is None:
            return Converted(step_dir, "complete", "nothing to do")
        if problem is not None and not own.exists():
            return Converted(step_dir, "failed", f"{problem}, and no {WEIGHTS} in actor to export")
        if lacks_config and base_model_dir is not None:
            _copy_base(base_model_dir, hf)
        if problem is not None:
            _export(own, hf)
            problem = incomplete(hf, own)
            if problem is not None:
                return Converted(step_dir, "failed", problem)
    except (OSError, ValueError) as error:
        return Converted(step_dir, "failed", str(error))
    return Converted(step_dir, "exported", str(hf))


def incomplete(hf: Path, own: Path | None) -> str | None:
    """Why a folder's weights are not whole; None where they are.

    Each file is as long as its header says, each shard of an index is there, and the tensors are
    those of the trainer's file, or at least as many layers as the configuration names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(hf):
        try:
            shapes |= read_shapes(path)
        except (OSError, ValueError) as error:
            return f"{path.name}: {error}"
    index = hf / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(set(listed) - set(shapes))
        if missing:
            return f"{listed[missing[0]]} with tensor {missing[0]} is missing"
    if own is not None:
        wanted = read_shapes(own)
        odd = sorted(name for name in wanted if shapes.get(name) != wanted[name])
        return f"tensor {odd[0]} differs from the trainer's" if odd else None
    config = hf / "config.json"
    if config.exists():
        return _against_config(shapes, json.loads(config.read_text(encoding="utf-8")))
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(folder.glob("*.safetensors"))


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
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


def _against_config(shapes: Iterable[str], config: dict[str, Any]) -> str | None:
    """What a configuration promises and the names don't show."""
    names = list(shapes)
    layers = config.get("num_hidden_layers", 0)
    for layer in range(layers):
        if not any(f"layers.{layer}." in name or f"h.{layer}." in name for name in names):
            return f"layer {layer} of {layers} is missing"
    if not any("embed" in name or "wte" in name for name in names):
        return "the embedding is missing"
    if config.get("tie_word_embeddings") is False and not any("lm_head" in name for name in names):
        return "the head is missing, and the configuration does not tie it"
    return None


def _export(own: Path, hf: Path) -> None:
    """The trainer's file under the name that others look for."""
    index = hf / "model.safetensors.index.json"
    with whole_file(hf / WEIGHTS) as temporary:
        shutil.copyfile(own, temporary)
    for stale in [index, *(p for p in weight_files(hf) if p.name != WEIGHTS)]:
        stale.unlink(missing_ok=True)  # shards of an export that was never finished


def _copy_base(base: Path, hf: Path) -> None:
    """Configuration and tokenizer of the base model, where the checkpoint has none of its own."""
    if not (Path(base) / "config.json").exists():
        raise ValueError(f"--base-model-dir '{base}' has no config.json")
    with naming(hf):
        hf.mkdir(parents=True, exist_ok=True)
        there = {path.name: path.read_bytes() for path in hf.iterdir() if path.is_file()
                 and path.suffix != ".safetensors"}  # fmt: skip
    copy_model_files(base, hf)
    for name, data in there.items():
        (hf / name).write_bytes(data)


def _no_weights(actor: Path) -> str:
    """Why there is nothing to export."""
    if not actor.is_dir():
        return "there is no actor folder"
    if any(actor.glob("model_world_size_*_rank_*.pt")):
        return "its FSDP shards (model_world_size_*.pt) are not converted by this version"
    if (actor / "dist_ckpt").is_dir():
        return "its Megatron checkpoint (dist_ckpt) is not converted by this version"
    return f"there is no {WEIGHTS} in actor"
