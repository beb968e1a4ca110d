"""Convert: makes checkpoints into folders that `from_pretrained` loads.

A checkpoint's files determine its form: this trainer's `model.safetensors`, or one that a reader
knows (reader.py). The headers of a folder's safetensors files show whether it already has a whole
model; no weights are loaded for that. Complete exports are left alone, and new ones are written
whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from trireme.checkpoint.export import DEFAULT_SHARD_BYTES, OwnFile
from trireme.checkpoint.layout import STEP_NAME, WEIGHTS
from trireme.checkpoint.manifest import Damaged, list_anew, listed, prove
from trireme.checkpoint.save import copy_model_files
from trireme.config.lookup import INDEX, Shape, model_shapes, read_shapes, weight_files
from trireme.ext.converters.reader import Weights, readers, weights_in
from trireme.ext.converters.write import Progress, Source, sizes_of, write_model
from trireme.files import naming, read_json, whole_file
from trireme.text import as_json


def incomplete(hf: Path, expected: dict[str, Shape] | None) -> str | None:
    """Describe why a folder's weights are incomplete; None if they are complete.

    Each file is as long as its header says, each shard of an index exists, and so does each
    expected tensor, in its shape. If the expected tensors are not known: as many layers as the
    configuration says, an embedding, and a head unless it is tied.
    """
    if not weight_files(hf):
        return "no weights there yet"
    try:
        shapes = model_shapes(hf)
    except ValueError as error:
        return str(error)
    for name, shape in (expected or {}).items():
        if shapes.get(name) != shape:
            has = f"is {list(shapes[name])}" if name in shapes else "is missing"
            return f"tensor {name} {has}; expected {list(shape)}"
    config = hf / "config.json"
    if expected is None and config.exists():
        return _against_config(list(shapes), read_json(config))
    return None


def expected_shapes(config: Path) -> dict[str, Shape] | None:
    """Return every tensor that the model of a config.json saves; tied ones once.

    None if transformers does not know the model, or stores it under other names.
    """
    return _shapes_of(as_json(read_json(config)))


@lru_cache(maxsize=4)  # a job's checkpoints have one configuration
def _shapes_of(text: str) -> dict[str, Shape] | None:
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    values: dict[str, Any] = json.loads(text)
    kind = values.pop("model_type", None)
    if (
        not isinstance(kind, str)
        or kind not in CONFIG_MAPPING
        or get_checkpoint_conversion_mapping(kind)
    ):
        return None
    try:
        config = CONFIG_MAPPING[kind](**values)
    except Exception as error:  # its validators raise errors of several libraries
        raise ValueError(f"config.json is not a configuration of {kind}: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = model.all_tied_weights_keys
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}


def _against_config(names: list[str], config: dict[str, Any]) -> str | None:
    """Describe what the configuration requires and the names lack, if anything."""
    layers = config.get("num_hidden_layers", 0)
    if not isinstance(layers, int):
        return f"its config.json has {layers!r:.60} as num_hidden_layers"
    for layer in range(layers):
        if not any(f"layers.{layer}." in name or f"h.{layer}." in name for name in names):
            return f"layer {layer} of {layers} is missing"
    if not any("embed" in name or "wte" in name for name in names):
        return "the embedding is missing"
    if config.get("tie_word_embeddings") is False and not any("lm_head" in name for name in names):
        return "the head is missing, and the configuration does not tie it"
    return None


Status = Literal["exported", "complete", "failed"]
Expected = dict[str, Shape]

OUTPUT_DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


_NAMES = {dtype: name for name, dtype in OUTPUT_DTYPES.items() if dtype is not None}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint."""

    root: Path
    """The path in reports."""
    actor: Path
    """The folder of the trainer's weights."""

    @property
    def hf(self) -> Path:
        """The folder from which transformers loads."""
        return self.actor / "huggingface"


@dataclass(frozen=True)
class Converted:
    """The result of converting one checkpoint."""

    step_dir: Path
    status: Status
    text: str


@dataclass(frozen=True)
class Options:
    """The options of a conversion."""

    base_model_dir: Path | None = None
    """Provides configuration and tokenizer if a checkpoint has none."""
    dtype: str | None = None
    """A key of OUTPUT_DTYPES. None: that of the export in the checkpoint's manifest; if it lists
    none, bfloat16 for shards, and this trainer's own file as it is."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """The size limit of a safetensors file."""


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Find the checkpoints that a path means: the one around it, or those below it in order of
    steps.

    Raises ValueError if there is none.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"--checkpoint-dir '{path}' does not exist")
    if path.resolve() == Path(path.resolve().anchor):
        raise ValueError(
            f"--checkpoint-dir '{path}' is the root of all files: expected a job's folder, or a "
            "step of it (is a variable in it unset?)"
        )
    for folder in (path.resolve(), *path.resolve().parents):
        if _is_step(folder):
            return [Checkpoint(folder, folder / "actor")]
    marks = [reader.mark for reader in readers() if reader.mark]
    for folder in (path.resolve(), *path.resolve().parents):
        if any((folder / mark).is_file() for mark in marks):
            return [Checkpoint(folder, folder)]
    try:
        steps = [p for p in path.rglob("global_step_*") if _is_step(p)]
        marked = [p for mark in marks for p in path.rglob(mark) if p.is_file()]
    except OSError as error:
        raise ValueError(
            f"--checkpoint-dir '{path}' cannot be searched: {error.filename}: {error.strerror}"
        ) from error
    checkpoints = [Checkpoint(p, p / "actor") for p in steps]
    checkpoints += [  # another trainer's own folders, such as iter_0000120
        Checkpoint(p.parent, p.parent)
        for p in marked
        if not any(step in p.parents for step in steps)
    ]
    if not checkpoints:
        raise ValueError(f"--checkpoint-dir '{path}' holds no global_step_* folder")
    return sorted(checkpoints, key=lambda p: (p.root.parent, len(p.root.name), p.root.name))


def convert_checkpoint(
    checkpoint: Checkpoint, options: Options | None = None, progress: Progress | None = None
) -> Converted:
    """Export one checkpoint's policy, unless it is complete; explains a failure."""
    try:
        return _convert(checkpoint, options or Options(), progress)
    except (OSError, ValueError) as error:
        return Converted(checkpoint.root, "failed", str(error))


def _convert(checkpoint: Checkpoint, options: Options, progress: Progress | None) -> Converted:
    hf, base = checkpoint.hf, options.base_model_dir
    weights_file = checkpoint.actor / WEIGHTS
    others = weights_in(checkpoint.actor, beside_own=weights_file.exists())
    own = weights_file.exists() and others is None
    to_export = own or others is not None
    if not to_export and not weight_files(hf):
        return Converted(checkpoint.root, "failed", _no_weights(checkpoint.actor))
    prove(weights_file, *(others.files if others is not None else ()), *weight_files(hf))
    lacks_config = not (hf / "config.json").exists()
    if lacks_config and base is None:
        text = f"{hf} has no config.json: give its model as --base-model-dir"
        return Converted(checkpoint.root, "failed", text)
    if lacks_config and base is not None:
        _copy_base(base, hf)
    expected = read_shapes(weights_file) if own else expected_shapes(hf / "config.json")
    problem = incomplete(hf, expected)
    if problem is None:
        done = not lacks_config
        text = _left_alone(hf, options.dtype, to_export) if done else str(hf)
        return Converted(checkpoint.root, "complete" if done else "exported", text)
    if not to_export:
        text = f"{problem}, and there are no weights in {checkpoint.actor.name} to export"
        return Converted(checkpoint.root, "failed", text)
    before = _weights_listed(checkpoint)
    source = _source(checkpoint, others, expected)
    names = _names(source, expected, hf)
    dtype, shard_bytes = OUTPUT_DTYPES[options.dtype or "auto"], options.shard_bytes
    if before:  # a deleted export of ours: its order and dtype match the list
        names, shard_bytes = sorted(names), max(shard_bytes, DEFAULT_SHARD_BYTES)
    if before and options.dtype is None:
        specs = {name: source.specs[name] for name in names}
        sizes = {kind: sum(sizes_of(specs, kind, shard_bytes).values()) for kind in _NAMES}
        dtype = min(sizes, key=lambda kind: abs(sizes[kind] - sum(before.values())))
    elif not own and options.dtype is None:
        dtype = torch.bfloat16
    if own and dtype is None:
        _copy_own(weights_file, hf)
    else:
        write_model(source, names, hf, dtype=dtype, shard_bytes=shard_bytes, progress=progress)
    problem = incomplete(hf, expected)
    if problem is not None:
        return Converted(checkpoint.root, "failed", problem)
    return Converted(checkpoint.root, "exported", f"{hf}{_proven(checkpoint, before)}")


def _weights_listed(checkpoint: Checkpoint) -> dict[str, int]:
    """Return names and sizes of the exported weights in the checkpoint's manifest."""
    files = listed(checkpoint.root, checkpoint.hf) if checkpoint.actor != checkpoint.root else {}
    return {name: size for name, size in files.items() if name.endswith(".safetensors")}


def _proven(checkpoint: Checkpoint, before: Mapping[str, int]) -> str:
    """Describe the result for an export whose manifest lists another one: it is listed anew, since
    a resume would otherwise skip the step.
    """
    if not before:
        return ""
    hf = checkpoint.hf
    there = weight_files(hf)
    try:
        if {path.name for path in there} == before.keys():
            prove(*there)
            return ""
    except Damaged:
        pass
    list_anew(checkpoint.root, hf / INDEX, *(hf / name for name in before), *there)
    return ", which the checkpoint's manifest lists from now on instead of the previous export"


def _left_alone(hf: Path, dtype: str | None, to_export: bool) -> str:
    """Describe a complete folder, which is left alone. That holds in another dtype than the
    requested one too: a resume compares the checkpoint's files with their checksums.
    """
    wanted = OUTPUT_DTYPES[dtype or "auto"]
    found = {spec.dtype for file in weight_files(hf) for spec in OwnFile(file).specs.values()}
    others = sorted(_NAMES[kind] for kind in found & set(_NAMES) - {wanted})
    if wanted is None or not others:
        return "nothing to do"
    left = f"left as it is, in {' and '.join(others)}"
    if not to_export:
        return f"{left}: there are no other weights to convert to {dtype}"
    return (
        f"{left}: for {dtype} copy the checkpoint, remove "
        f"*.safetensors from huggingface/ there and convert the copy"
    )


def _source(checkpoint: Checkpoint, others: Weights | None, expected: Expected | None) -> Source:
    if others is None:
        return OwnFile(checkpoint.actor / WEIGHTS)
    config = json.loads((checkpoint.hf / "config.json").read_text(encoding="utf-8"))
    return others.reader.open(others.files, config, expected)


def _names(source: Source, expected: Expected | None, hf: Path) -> list[str]:
    """Return the names to write: all of the configuration's model, and no others."""
    specs = source.specs
    if expected is None:
        return list(specs)
    config = hf / "config.json"
    for name, shape in expected.items():
        if name not in specs or specs[name].shape != shape:
            has = f"is {list(specs[name].shape)}" if name in specs else "is missing"
            raise ValueError(f"{name} {has} in the checkpoint; {config} implies {list(shape)}")
    tied = read_json(config).get("tie_word_embeddings")
    left = sorted(specs.keys() - expected.keys() - ({"lm_head.weight"} if tied else set()))
    if left:
        raise ValueError(f"the checkpoint has {left[0]}, which the model of {config} does not have")
    return list(expected)


def _is_step(path: Path) -> bool:
    return STEP_NAME.match(path.name) is not None and path.is_dir()


def _copy_own(weights_file: Path, hf: Path) -> None:
    """Copy the trainer's file to the name that other programs expect."""
    with whole_file(hf / WEIGHTS) as temporary:
        shutil.copyfile(weights_file, temporary)
    for stale in [hf / INDEX, *(p for p in weight_files(hf) if p.name != WEIGHTS)]:
        stale.unlink(missing_ok=True)  # shards of an export that was never finished


def _copy_base(base: Path, hf: Path) -> None:
    """Copy configuration and tokenizer of the base model, if the checkpoint has none."""
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
    if not actor.is_dir():
        return "there is no actor folder"
    *first, last = [WEIGHTS, *(reader.form for reader in readers())]
    forms = f"{', no '.join(first)} and no {last}" if first else last
    return f"there is no {forms} in {actor}"
