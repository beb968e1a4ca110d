"""Engines: which engine a stage generates with, in which Python, and what it is told.

vLLM lives in an environment of its own: `explorer.rollout_model.engine_python` names its Python,
else this interpreter where it has vLLM, else TRIREME_VLLM_PYTHON. Where none has it the embedded
engine generates. vLLM is not loaded to find out: its files are read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trireme.config.located import located
from trireme.config.plan import EngineKind
from trireme.config.stages import Stage
from trireme.nearest import did_you_mean

VARIABLE = "TRIREME_VLLM_PYTHON"
KEY = "explorer.rollout_model"
PROBE_S = 60
_PROBE = """
import ast, importlib.util, json, pathlib, re
from importlib import metadata
spec = importlib.util.find_spec("vllm")
if spec is None or spec.origin is None:
    raise SystemExit("no vllm")
home = pathlib.Path(spec.origin).parent
tree = ast.parse((home / "engine/arg_utils.py").read_text())
kinds = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("EngineArgs")]
names = [f.target.id for n in kinds for f in n.body if isinstance(f, ast.AnnAssign)]
names = [n for n in names if not n.startswith("_")]
dists = metadata.packages_distributions().get("vllm", ["vllm"])
print(json.dumps({"version": metadata.version(dists[0]), "arguments": names, "dist": dists[0]}))
"""
_OURS = {
    "model": "model.model_path",
    "tokenizer": "model.model_path",
    "max_model_len": "model.max_model_len",
    "dtype": f"{KEY}.dtype",
    "seed": f"{KEY}.seed",
    "logprobs_mode": "Trireme alone, since log-probabilities are recorded in one way",
    "speculative_config": "nothing: speculated tokens have no log-probabilities of their own",
    "skip_tokenizer_init": "Trireme alone, since prompts and replies are ids",
}
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention on a CPU has kernels for."""
COLOCATED_SHARE = 0.25
"""Of a GPU's memory that vLLM takes beside a trainer."""
PASSED = (
    "tensor_parallel_size",
    "data_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "gpu_memory_utilization",
    "extra_engine_args",
)
"""Keys that vLLM gets as they are."""


@dataclass(frozen=True)
class Vllm:
    """An interpreter that has vLLM."""

    python: str
    version: str
    arguments: tuple[str, ...]
    """Of its engine."""


@dataclass(frozen=True)
class EngineChoice:
    """What generates."""

    kind: EngineKind = "torch"
    python: str = sys.executable
    hosts: int = 0
    """Processes with an engine each, that the launcher starts; 0: it is embedded, or remote."""


def choose_engine(stage: Stage, gpus: int, *, on_ray: bool) -> EngineChoice:
    """The engine of a stage. Problems and notes are the stage's."""
    model = stage.config.explorer.rollout_model
    _check_parsers(stage)
    if stage.colocated:
        _check_colocated(stage, gpus, on_ray)
    if stage.config.mode == "train" or stage.reads_file or stage.remote:
        return EngineChoice()
    kind = model.engine_type or ("vllm" if gpus and model.engine_python else "torch")
    if kind in ("vllm", "sglang"):
        found = _vllm_of(stage, gpus, on_ray) if kind == "vllm" else None
        if found is None:
            return EngineChoice()
        return EngineChoice("vllm", found.python, model.engine_num)
    several = model.engine_type == "torch" and model.engine_num > 1
    if several and stage.config.mode != "serve" and not on_ray:
        stage.notes.append(f"{KEY}.engine_num ({model.engine_num}): one process an engine")
        return EngineChoice(hosts=model.engine_num)
    return EngineChoice()


def _vllm_of(stage: Stage, gpus: int, on_ray: bool) -> Vllm | None:
    """The vLLM that generates; None with a note where the embedded engine has to."""
    model, mode = stage.config.explorer.rollout_model, stage.config.mode
    prefix, instead = (
        f"{KEY}.engine_type (vllm)",
        "the embedded torch engine generates in its place",
    )
    wanted = model.engine_num * model.tensor_parallel_size * model.pipeline_parallel_size
    try:
        found = find_vllm(model.engine_python)
    except ValueError as error:
        stage.problem(f"{KEY}.engine_python", f"is {model.engine_python!r}: {error}")
        return None
    why = None
    if found is None and gpus and not on_ray:
        stage.problem(
            f"{KEY}.engine_type",
            f"is vllm, and no Python with vLLM was found: install it in an environment of its own "
            f"(python -m venv vllm && vllm/bin/pip install vllm) and give {KEY}.engine_python or "
            f"{VARIABLE}, or set engine_type torch",
        )
        return None
    if found is None:
        why = f"no Python with vLLM was named ({KEY}.engine_python, or {VARIABLE})"
    elif mode == "serve":
        why = "mode serve generates in its own process"
    elif stage.colocated:
        sync = stage.config.synchronizer
        if (sync.sync_style, sync.sync_interval, sync.sync_offset) != ("fixed", 1, 0):
            why = (
                "in mode colocate it takes turns with the trainer, which needs sync_style fixed, "
                "sync_interval 1 and sync_offset 0"
            )
    elif gpus and not on_ray and mode == "both" and wanted >= gpus:
        why = f"it takes {wanted} GPUs beside the trainer's, of {gpus}"
    if why is not None or found is None:
        stage.notes.append(f"{prefix}: {instead}, since {why}")
        return None
    stage.notes.append(f"{prefix}: vLLM {found.version} of {found.python}")
    _check_arguments(stage, found)
    _check_heads(stage, gpus)
    if stage.colocated:
        rests = "it only pauses while the trainer works: on a CPU vLLM has no sleep mode"
        if gpus:
            rests = f"it sleeps while the trainer works, and takes {COLOCATED_SHARE} of the GPU"
        stage.notes.append(f"{prefix}: {rests}")
    if not gpus:
        stage.notes.append(
            f"{prefix}: on a CPU it runs eagerly, prefills in one go and keeps 1 GiB of keys and "
            f"values (extra_engine_args.kv_cache_memory_bytes), whatever enforce_eager, "
            f"enable_chunked_prefill and gpu_memory_utilization say"
        )
    return found


def find_vllm(asked: str | None) -> Vllm | None:
    """The first interpreter that has vLLM. Raises ValueError where the one asked for has not."""
    if asked is not None:
        return _probe(os.path.expanduser(asked))
    named = os.environ.get(VARIABLE)
    for python in (sys.executable, named) if named else (sys.executable,):
        try:
            return _probe(python)
        except ValueError:
            continue
    return None


@lru_cache(maxsize=8)
def _probe(python: str) -> Vllm:
    """Raises ValueError where it is no Python, or has no vLLM."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"it cannot be run: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise ValueError(f"expected a Python that has vLLM: {last[0]}")
    found = json.loads(done.stdout)
    return Vllm(python, found["version"], tuple(found["arguments"]))


def _check_arguments(stage: Stage, vllm: Vllm) -> None:
    for name in stage.config.explorer.rollout_model.extra_engine_args:
        key = f"{KEY}.extra_engine_args.{name}"
        if name in _OURS:
            stage.problem(key, f"is not set here: what sets it is {_OURS[name]}")
        elif name not in vllm.arguments:
            hint = did_you_mean(name, vllm.arguments, ": did you mean {}?")
            stage.problem(key, f"is no argument of vLLM {vllm.version}'s engine{hint}")


def _check_heads(stage: Stage, gpus: int) -> None:
    """What of the model's shape vLLM cannot do, by config.json."""
    facts = _model_config(stage)
    heads = facts.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    size = stage.config.explorer.rollout_model.tensor_parallel_size
    if heads % size:
        stage.problem(
            f"{KEY}.tensor_parallel_size",
            f"is {size}: expected a divisor of the model's {heads} attention heads",
        )
    width = facts.get("head_dim") or facts.get("hidden_size", 0) // heads
    if not gpus and width not in _CPU_HEADS:
        stage.problem(
            f"{KEY}.engine_type",
            f"is vllm, which has no attention on a CPU for heads of {width}: expected "
            f"{', '.join(map(str, _CPU_HEADS))}, or engine_type torch",
        )


def _model_config(stage: Stage) -> dict[str, Any]:
    """config.json of the model; empty where it is not here."""
    path = stage.config.model.model_path
    folder = located(path, "models") if path else None
    if folder is None or not (folder / "config.json").is_file():
        return {}
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _check_colocated(stage: Stage, gpus: int, on_ray: bool) -> None:
    """One device for both sides: the rules of `mode: colocate`."""
    explorer, key = stage.config.explorer, "mode"
    if gpus > 1 or on_ray:
        have = "a cluster" if on_ray else f"{gpus} GPUs"
        stage.problem(key, f"is colocate, on {have}: expected exactly one GPU, or the CPU")
    sizes = {
        f"{KEY}.engine_num": explorer.rollout_model.engine_num,
        f"{KEY}.tensor_parallel_size": explorer.rollout_model.tensor_parallel_size,
        "trainer.ulysses_sequence_parallel_size": (
            stage.config.trainer.ulysses_sequence_parallel_size
        ),
    }
    for name, size in sizes.items():
        if size != 1:
            stage.problem(name, f"is {size}: expected 1 in mode colocate")
    if explorer.auxiliary_models:
        stage.problem("explorer.auxiliary_models", "is given: expected none in mode colocate")
    if stage.remote:
        stage.problem(f"{KEY}.engine_type", "is remote: expected torch or vllm in mode colocate")


def _check_parsers(stage: Stage) -> None:
    """Replies are parsed by our own server, which knows one form of tool calls."""
    parser = stage.config.explorer.rollout_model.tool_call_parser
    if parser not in (None, "hermes"):
        stage.problem(
            f"{KEY}.tool_call_parser",
            f"is {parser!r}: expected hermes (<tool_call>{{json}}</tool_call>), the one form that "
            f"is read here",
        )
