"""Lookup: finds the files and models that the YAML names.

Nothing here loads torch.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from trireme.config.variables import variable
from trireme.registry import did_you_mean

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt", ".safetensors", ".gz")
INDEX = "model.safetensors.index.json"
NOT_HERE = "is not a file or folder here"
"""What is said of a local path that is missing."""
Shape = tuple[int, ...]


def located(path: str, kind: Literal["models", "datasets"]) -> Path | None:
    """Find `path` on this machine; None if it is an id on the hub that is not downloaded yet.

    Raises ValueError if it looks like a local path and does not exist.
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
        if path.startswith("$"):
            name = path.strip("${}")
            raise ValueError(f"{NOT_HERE}; did you mean '${{oc.env:{name}}}'?")
        raise ValueError(f"{NOT_HERE}{near_path(local)}")
    return _in_cache(path, kind)


def near_path(path: Path) -> str:
    """Return a similar name next to the missing one, the target of a dead link, or the first folder
    that is missing.
    """
    missing = next((p for p in (*reversed(path.parents), path) if not p.exists()), path)
    if missing.is_symlink():
        return f" ('{missing}' is a link to '{os.readlink(missing)}', which leads nowhere)"
    siblings = [p.name for p in missing.parent.iterdir()] if missing.parent.is_dir() else []
    if near := _near_name(missing.name, siblings):
        return f"; did you mean '{missing.parent / near}'?"
    return f" (the first part that is missing is '{missing}')" if missing != path else ""


def _near_name(name: str, names: Sequence[str]) -> str:
    """Return the nearest of the names of files or folders, '' if none is near. Names that are alike
    only in whole words, `retry_assets` and `arithmetic_assets`, are those of two things.
    """
    for near in get_close_matches(name, names):
        own, other = (re.split(r"[\W_]+", Path(one).stem.lower()) for one in (name, near))
        rest, other_rest = (
            "".join(word for word in words if word not in shared)
            for words, shared in ((own, other), (other, own))
        )
        if not (rest and other_rest) or get_close_matches(rest, [other_rest]):
            return near
    return ""


def near_model(path: str) -> str:
    """Return a local model folder whose first part resembles that of an apparent hub id."""
    first, *rest = Path(path).parts
    names = os.listdir()  # os.path accepts folders that may not be entered
    here = [name for name in names if os.path.isfile(Path(name, *rest, "config.json"))]
    near = did_you_mean(first, here, "{}")
    return f"; did you mean '{Path(near, *rest)}'?" if near else ""


def why_no_hub() -> str:
    """Return the reason why nothing can be downloaded; '' if the hub can be reached. If it cannot,
    this process does not try again.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return ""  # only the proxy can resolve the host
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True  # the variable was read at import
        return f"{hub.hostname} cannot be reached ({error})"
    return ""


def _in_cache(hub_id: str, kind: str) -> Path | None:
    """Return the newest snapshot of a hub repository in the local cache, if there is one."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = root / f"{kind}--{hub_id.replace('/', '--')}" / "snapshots"
    snapshots = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
    return snapshots[-1] if snapshots else None


class ModelFacts(NamedTuple):
    """The facts that are known before the model is loaded; all None: it is not on this machine."""

    folder: Path | None
    max_positions: int | None = None
    steady_positions: int | None = None
    """The length past which a sequence changes the rotary embeddings of all that are computed with
    it; None: none does."""
    has_chat_template: bool | None = None
    size: int = 0
    attention_heads: int | None = None
    has_states: bool = False
    """Whether layers have a state other than keys and values."""
    unknown_layers: tuple[str, ...] = ()
    """Kinds of layers that are not supported."""
    quantized: str | None = None
    """The format of weights that are stored as codes of few bits."""
    vocabulary: int | None = None
    """The number of token ids."""


WITHOUT_STATE = {
    "full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"
}  # fmt: skip
"""Names in `layer_types` of layers that have no state other than keys and values."""
WITH_STATE = {"linear_attention", "mamba", "conv", "hybrid"}
"""Names of those that have one."""
_STATE_KEYS = ("state_size", "ssm_state_size", "mamba_d_state", "linear_num_key_heads", "lru_width")
"""Keys that configurations without a list of layers have for such a state."""


def has_states(read: Callable[[str], Any]) -> bool:
    """Return whether layers of a language model have a state other than keys and values; `read`
    gives what its configuration says under a key, None if nothing.
    """
    if kinds := read("layer_types"):
        return not WITHOUT_STATE.issuperset(kinds)
    return any(read(key) for key in _STATE_KEYS)


def unknown_layers(read: Callable[[str], Any]) -> tuple[str, ...]:
    """Return the names in `layer_types` of layers that are not supported."""
    return tuple(sorted({*(read("layer_types") or ())} - WITHOUT_STATE - WITH_STATE))


LONG_ROPES = ("longrope", "su")
"""Rotary embeddings of two kinds, for sequences up to a length and for longer ones."""


def steady_positions(
    read: Callable[[str], Any], ropes: Sequence[str] = (*LONG_ROPES, "dynamic")
) -> int | None:
    """Return the length up to which rotary embeddings do not depend on the longest sequence that is
    computed; None if they never do, or are none of `ropes`.
    """
    rope = read("rope_parameters") or read("rope_scaling") or {}
    kinds = [one for one in rope.values() if isinstance(one, dict)] or [rope]  # by kind of layer
    key = "original_max_position_embeddings"
    lengths = [
        read(key) or one.get(key) or read("max_position_embeddings")
        for one in kinds
        if one.get("rope_type", one.get("type")) in ropes
    ]
    return min((length for length in lengths if length), default=None)


def model_facts(model_path: str) -> ModelFacts:
    """Return the facts of a model's folder. Raises ValueError if it cannot be one."""
    folder = located(model_path, "models")
    if folder is None:
        return ModelFacts(None)
    if not (folder / "config.json").is_file():
        raise ValueError(no_model(folder))
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not weights:
        raise ValueError(f"holds no weights: {_weights_wanted(folder)}")
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
        steady_positions(config.get),
        has_chat_template=any(file.is_file() for file in files)
        or (settings.is_file() and bool(_json(settings).get("chat_template"))),
        size=sum(path.stat().st_size for path in weights),
        attention_heads=config.get("num_attention_heads"),
        has_states=has_states(config.get),
        unknown_layers=unknown_layers(config.get),
        quantized=(config.get("quantization_config") or {}).get("quant_method"),
        vocabulary=config.get("vocab_size"),
    )


def no_model(path: Path) -> str:
    """Describe a path that is no model's folder, with the nearest one that is: around a file, or
    the last checkpoint below the folder of a run.
    """
    if path.is_file():
        around = [path.parent] if (path.parent / "config.json").is_file() else []
        what = "is a file"
    else:
        below = [*path.glob("global_step_*"), *path.glob("*/global_step_*")]
        last = max(below, key=lambda step: step.stat().st_mtime, default=path)
        around = [f.parent for f in last.glob("actor/huggingface/config.json")]
        what = "holds no config.json"
    near = f"; did you mean '{around[0]}'?" if around else ""
    return f"{what}: expected a folder in the Hugging Face layout{near}"


def _weights_wanted(folder: Path) -> str:
    """Explain what a model's folder without weights needs: a checkpoint must be exported first."""
    if folder.match("global_step_*/actor/huggingface"):
        return f"export them first with `trireme convert -c {folder.parents[1]}`"
    return "expected model.safetensors (or its shards)"


def model_config(model_path: str | None) -> dict[str, Any]:
    """Return config.json of a model; empty if it is not here, or if `model_facts` rejects it."""
    try:
        folder = located(model_path, "models") if model_path else None
        if folder is None or not (folder / "config.json").is_file():
            return {}
        return _json(folder / "config.json")
    except ValueError:
        return {}


def vocabulary_of(model_path: str | None) -> int | None:
    """Return the number of a model's token ids, by its config.json; None if it is not known."""
    config = model_config(model_path)
    return (config | (config.get("text_config") or {})).get("vocab_size")


def has_sinks(model_path: str | Path | None) -> bool:
    """Return whether attention of a model has sinks, by the names of its weights; false if they are
    not here, or if `model_facts` rejects them.
    """
    try:
        folder = located(str(model_path), "models") if model_path else None
        return folder is not None and any(n.endswith(".sinks") for n in model_shapes(folder))
    except ValueError:
        return False


_NOT_IN_BLOCKS = {"lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out"}
"""Names of layers outside the blocks: heads and embeddings."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NOT_TRAINED = {
    "modules_to_save": "also trains whole modules",
    "layer_replication": "repeats layers",
    "target_parameters": "adapts parameters that are not layers",
    "trainable_token_indices": "trains rows of the embedding",
    "lora_bias": "trains biases",
    "alora_invocation_tokens": "is switched on by tokens",
}


def check_adapter(folder: Path) -> None:
    """Raise ValueError for a folder without a LoRA adapter of peft's, or with one of a kind that is
    not trained here.
    """
    for name in _ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"holds no {name}: expected the folder of an adapter that peft saved")
    config = _json(folder / _ADAPTER_FILES[0])
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"is an adapter of type {kind}: expected LORA")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"trains biases (bias: {bias}): expected an adapter with bias none")
    for key, what in _NOT_TRAINED.items():
        if config.get(key):
            raise ValueError(f"{what} ({key} in {_ADAPTER_FILES[0]}): expected an adapter without")
    try:
        read_shapes(folder / _ADAPTER_FILES[1])
    except ValueError as error:
        raise ValueError(f"has an {_ADAPTER_FILES[1]} that {error}") from error


LEAVES_BASE = (True, False, "gaussian")
"""Values of peft's `init_lora_weights` that leave the base as it is: with others peft subtracts the
adapter's start from it."""


class AdapterFacts(NamedTuple):
    """Facts of a LoRA adapter that peft saved."""

    rank: int
    """The largest of its layers."""
    dora: bool
    leaves_base: bool
    """Whether it is trained on the base as it is."""
    targets: str | list[str]
    """The layers that it is on."""


def adapter_facts(path: str) -> AdapterFacts:
    """Return the facts of an adapter. Raises ValueError if it is not on this machine."""
    folder = located(path, "models")
    if folder is None:
        raise ValueError("is not on this machine")
    config = _json(folder / _ADAPTER_FILES[0])
    ranks = [config.get("r", 0), *(config.get("rank_pattern") or {}).values()]
    leaves = config.get("init_lora_weights", True) in LEAVES_BASE
    dora, targets = bool(config.get("use_dora")), config.get("target_modules") or []
    return AdapterFacts(max(ranks), dora, leaves, targets)


def adapter_files(path: str) -> list[Path]:
    """Return peft's files that make an adapter; empty if it is not on this machine."""
    folder = located(path, "models")
    return [folder / name for name in _ADAPTER_FILES] if folder else []


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"has a {path.name} that cannot be read: {error}") from error
    return parsed if isinstance(parsed, dict) else {}


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


def unfit_target(model_path: str | None, targets: Sequence[str]) -> tuple[str, bool] | None:
    """Return a sentence about the first name in an adapter's targets that no adapter can be on, and
    whether any other fits: no module of the model ends in it, or it is a head that is the embedding
    as well. None if all fit, or if the model is not here.
    """
    folder = located(model_path, "models") if model_path and targets else None
    names = model_shapes(folder) if folder is not None else {}
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    ends = outside_blocks(targets)
    if ends and is_tied(model_config(model_path), folder):
        return (
            f"names '{ends[0]}', and this model's head is its embedding (tie_word_embeddings): an "
            "adapter on one of them cannot be merged, leave it out",
            False,
        )
    fits = {name: any(f".{m}".endswith(f".{name}") for m in modules) for name in targets}
    if not modules or all(fits.values()):
        return None
    missing = next(name for name, there in fits.items() if not there)
    known = sorted({module.rpartition(".")[2] for module in modules})
    hint = did_you_mean(missing, known) or f": expected names among {', '.join(known)}"
    text = f"names '{missing}', of which the model has no module{hint}"
    return text, any(fits.values())


def is_tied(facts: Mapping[str, Any], folder: Path | None) -> bool:
    """Return whether a model's head is its embedding, by its config.json and its weights."""
    tied = ({**facts, **(facts.get("text_config") or {})}).get("tie_word_embeddings")
    if tied is not None:
        return bool(tied)
    try:
        names = model_shapes(folder) if folder else {}
    except ValueError:  # `check_model` reports the error
        names = {}
    if names:
        return not any(name.endswith("lm_head.weight") for name in names)
    return str(facts.get("model_type")).startswith("gemma")  # this family's default


def outside_blocks(targets: Iterable[str]) -> list[str]:
    """Return those of these layers that are a head or an embedding."""
    return [target for target in targets if target.rpartition(".")[2] in _NOT_IN_BLOCKS]


def weight_files(path: Path) -> list[Path]:
    """Return the path of a safetensors file, or those in a folder by name."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.glob("*.safetensors") if file.is_file())


def tensor_files(path: str | Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor of a folder; empty if there are none."""
    return {name: file for file in weight_files(Path(path)) for name in read_shapes(file)}


def need_weight_files(path: str | Path) -> list[Path]:
    """Return `weight_files`. Raises FileNotFoundError if there is none."""
    if files := weight_files(Path(path)):
        return files
    raise FileNotFoundError(f"{path} holds no safetensors file to take weights from")


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return name and shape of every tensor of a file, from its header. Raises ValueError if it is
    cut.
    """
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        text = file.read(length) if 0 < length < 2**30 else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not a safetensors file, or is truncated") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != 8 + length + end:
        raise ValueError(f"has {os.path.getsize(path)} bytes instead of {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


_OF_AN_EXPERT = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""A layer's tensor of all experts, and the names of one expert's parts in files: Qwen's and
Mixtral's."""

_OLDER = (
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
)
"""Beginnings of names in composites, and those of the same tensors in files: many checkpoints were
written when the language model was the outer one, or was inside the other parts."""


def names_in(files: Container[str], name: str) -> str | list[list[str]]:
    """Return the names of a model's tensor in files: a tensor of all experts is stored as several
    of each expert, whose rows follow each other. The name itself if the files have no such tensor.
    """
    older = [was + name.removeprefix(now) for now, was in _OLDER if name.startswith(now)]
    for stored in (name, name.replace(".mlp.", ".block_sparse_moe."), *older):
        if stored in files:
            return stored
        prefix, _, last = stored.rpartition(".")
        for parts in _OF_AN_EXPERT.get(last, ()) if prefix.endswith(".experts") else ():
            each = ([f"{prefix}.{number}.{part}.weight" for part in parts] for number in count())
            experts = list(takewhile(lambda names: all(n in files for n in names), each))
            if experts:
                return experts
    return name


def plugin_files(plugins: Sequence[str]) -> list[Path]:
    """Return the Python files of `plugins` and of the folders in TRIREME_PLUGIN_DIRS."""
    places = [*plugins, *filter(None, variable("PLUGIN_DIRS").split(os.pathsep))]
    out: list[Path] = []
    for place in map(Path, places):
        out.extend(sorted(place.glob("*.py")) if place.is_dir() else [place])
    return out
