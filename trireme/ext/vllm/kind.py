"""vLLM as a kind of engine: finds it, checks its limits, and makes its start options.

It has a separate environment: `explorer.rollout_model.engine_python` names its Python, else this
interpreter if it has vLLM, else TRIREME_VLLM_PYTHON. If none has it, the embedded engine generates.
vLLM is not imported to find out: its files are read.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from trireme.config import Problem
from trireme.config.engine_kind import (
    KEY,
    ROUTING,
    SIZES,
    EngineChoice,
    EngineRequest,
    Interpreter,
    records_routing,
    size_of,
    sizes_of,
)
from trireme.config.gpus import oldest_capability
from trireme.config.lookup import LONG_ROPES, model_config, steady_positions
from trireme.config.memory import GIB
from trireme.config.section import of
from trireme.config.shape import shape_at
from trireme.config.stages import used_tasksets
from trireme.ext.vllm.keys import VllmModel
from trireme.ext.vllm.options import OTHER_TEMPERATURE, SEES, has_temperature
from trireme.registry import did_you_mean

if TYPE_CHECKING:
    from trireme.config.plan import Plan
    from trireme.config.schema import Config
    from trireme.engines.barrier import RolloutBarrier
    from trireme.engines.device import Device
    from trireme.engines.make import EngineSpec
    from trireme.ext.vllm.engine import VllmEngine

VARIABLE = "TRIREME_VLLM_PYTHON"
OLDEST = NEWEST = (0, 32)
"""The versions of vLLM whose weight transfer Trireme has been run with; newer ones are noted."""
INSTALL = "pip install 'vllm==0.32.0'"
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""The packages with NCCL that torch's builds need."""
PROBE_S = 60
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of a LoRA adapter that vLLM supports."""
_WITHOUT_LORA = {"gpt2"}
"""Models for which vLLM supports no adapter."""
_BFLOAT16 = (8, 0)
"""The compute capability from which on vLLM computes bfloat16."""
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention on a CPU has kernels for."""
_PROBE = """
import ast, importlib.util, json, pathlib, sys
from importlib import metadata
spec = importlib.util.find_spec("vllm")
if spec is None or spec.origin is None:
    raise SystemExit("no vllm")
home = pathlib.Path(spec.origin).parent
tree = ast.parse((home / "engine/arg_utils.py").read_text())
kinds = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("EngineArgs")]
names = [f.target.id for n in kinds for f in n.body if isinstance(f, ast.AnnAssign)]
names = [n for n in names if not n.startswith("_")]
tree = ast.parse((home / "model_executor/models/registry.py").read_text())
tables = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)]
known = [n.value.keys for n in tables if "PREVIOUSLY" not in n.targets[0].id]
models = [k.value for keys in known for k in keys if isinstance(k, ast.Constant)]
dists = metadata.packages_distributions().get("vllm", ["vllm"])
libraries = {"torch": version_of("torch"), "nccl": version_of(*sys.argv[1:])}
found = {"version": metadata.version(dists[0]), "arguments": names, "models": models}
print(json.dumps(found | libraries))
"""
_OURS = {
    "model": "model.model_path sets it",
    "tokenizer": "model.model_path sets it",
    "max_model_len": "model.max_model_len sets it",
    "dtype": f"{KEY}.dtype sets it",
    "seed": f"{KEY}.seed sets it",
    "logprobs_mode": "log-probabilities are recorded in one way",
    "speculative_config": "speculated tokens have no log-probabilities of their own",
    "skip_tokenizer_init": "prompts and replies are ids",
    "weight_transfer_config": "Trireme's trainer sends the weights",
}


@dataclass(frozen=True)
class Vllm:
    """An interpreter that has vLLM."""

    python: str
    version: str
    arguments: tuple[str, ...]
    """The arguments of its engine."""
    models: tuple[str, ...] = ()
    """The classes of models that it has code of its own for; empty: not known."""
    torch: str = ""
    nccl: str = ""
    """The versions of these in its environment; '': not known."""


class VllmKind:
    """The engine kind `vllm`."""

    name = "vllm"
    asked = "vllm"
    """The value of `engine_type` that notes name."""
    keys = (
        *SIZES,
        "enable_expert_parallel",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "gpu_memory_utilization",
        "extra_engine_args",
        SEES,
    )
    sizes = SIZES
    own_python = True
    sees_with = SEES
    reports_experts = True

    def examine(self, request: EngineRequest) -> EngineChoice:
        """Decide whether the run's engines are vLLM's, and list what prevents it."""
        config, gpus, _, colocated = request
        model = config.explorer.rollout_model
        try:
            vllm = find_vllm(model.engine_python)
        except ValueError as error:
            return _wrong("engine_python", f"is {model.engine_python!r}: {error}")
        if vllm is None and gpus and self.asked == self.name:
            return _wrong(
                "engine_type",
                f"is vllm, and no Python with vLLM was found: install it in an environment of its "
                f"own (python -m venv vllm && vllm/bin/{INSTALL}) and give "
                f"{KEY}.engine_python or {VARIABLE}, or set engine_type torch",
            )
        if vllm is None:
            why = f"no Python with vLLM was named ({KEY}.engine_python, or {VARIABLE})"
            return self.embedded(why)
        if (why := _against(request)) is not None:
            return self.embedded(why)
        prefix = f"{KEY}.engine_type ({self.asked})"
        in_place = "" if self.asked == self.name else " generates in its place"
        notes = [f"{prefix}: vLLM {vllm.version} of {vllm.python}{in_place}"]
        notes += _foreign(config, vllm, prefix)
        if _release(vllm.version) > NEWEST:
            notes.append(
                f"{prefix}: vLLM {vllm.version} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest "
                "that Trireme has been run with"
            )
        if colocated:
            rests = "it only pauses while the trainer works: on a CPU vLLM has no sleep mode"
            if gpus:
                rests = "it sleeps while the trainer works" + _copied(config)
            notes.append(f"{prefix}: {rests}")
        if not gpus:
            notes.append(
                f"{prefix}: on a CPU it runs eagerly, prefills in one go and keeps 1 GiB of keys "
                f"and values (extra_engine_args.kv_cache_memory_bytes), whatever enforce_eager, "
                f"enable_chunked_prefill and gpu_memory_utilization say"
            )
        elif records_routing(config) and not model.enforce_eager:
            notes.append(
                f"{prefix}: it runs without CUDA graphs, whatever enforce_eager says: the experts "
                "that they choose cannot be recorded"
            )
        return EngineChoice(
            self.name,
            vllm.python,
            model.engine_num,
            sleeps=True,
            largest_adapter=largest_adapter(config),
            notes=notes,
            problems=[
                *_check_arguments(config, vllm),
                *_check_heads(config, gpus),
                *_check_gpus(request),
                *_check_dtype(request),
                *_check_temperatures(config),
                *_check_routing(config),
                *_check_ropes(config),
                *(_check_libraries(request, vllm) if gpus else ()),
            ],
        )

    def embedded(self, why: str) -> EngineChoice:
        """Choose the embedded engine in place of vLLM, with the reason."""
        instead = "the embedded torch engine generates in its place"
        return EngineChoice(notes=(f"{KEY}.engine_type ({self.asked}): {instead}, since {why}",))

    def interpreter(self, asked: str | None) -> Interpreter:
        """Return the Python that has vLLM. Raises ValueError if there is none."""
        if (vllm := find_vllm(asked)) is None:
            raise ValueError(f"no Python here has vLLM: name one by --engine-python, or {VARIABLE}")
        return Interpreter(vllm.python, f"vLLM {vllm.version} of {vllm.python}")

    def options(self, plan: Plan) -> dict[str, Any]:
        """Return the engine's options from the plan."""
        from trireme.config.engine_kind import LEAST_SHARE

        model = plan.config.explorer.rollout_model
        options = {name: getattr(model, name) for name in self.keys}
        options["extra_engine_args"] = dict(options["extra_engine_args"])
        if plan.sync.adapter_rank:
            options["max_lora_rank"] = min(r for r in RANKS if r >= plan.sync.adapter_rank)
        if plan.sync.takes_turns:
            options["enable_sleep_mode"] = True
            options["sleep_level"] = of(model, VllmModel).sleep_level
            options["gpu_memory_utilization"] = plan.memory.engine_share or LEAST_SHARE
        if records_routing(plan.config):
            options[ROUTING] = True
        return options

    async def make(
        self,
        spec: EngineSpec,
        tokenizer: Any,
        device: Device,
        *,
        barrier: RolloutBarrier | None = None,
        share_with: Any = None,
    ) -> VllmEngine:
        """Make an engine; it shares nothing with a trainer."""
        from trireme.ext.vllm.engine import VllmEngine

        return await VllmEngine.start(
            spec.model,
            tokenizer=tokenizer,
            max_model_len=spec.max_model_len,
            dtype=spec.dtype,
            seed=spec.seed,
            options=spec.options,
        )


class SglangKind(VllmKind):
    """vLLM as a replacement for SGLang, on a machine with a GPU."""

    asked = "sglang"

    def examine(self, request: EngineRequest) -> EngineChoice:
        """Choose the embedded engine without a GPU, else vLLM."""
        if not request.gpus:
            return self.embedded("this machine has no GPU")
        return super().examine(request)


def _check_routing(config: Config) -> Iterator[Problem]:
    """Yield what prevents vLLM from recording the experts that it chooses."""
    if not records_routing(config):
        return
    model = config.explorer.rollout_model
    extra = model.extra_engine_args  # which overrides the keys of the same names
    for key in ("pipeline_parallel_size", "data_parallel_size"):
        name = f"extra_engine_args.{key}" if key in extra else key
        if (size := extra.get(key, getattr(model, key))) != 1:
            text = f"is {size}, and the experts that vLLM chooses are recorded by one: expected 1"
            yield Problem(f"{KEY}.{name}", text)
    if not extra.get("enforce_eager", True):
        text = "is false, and CUDA graphs record none of the experts they choose: expected true"
        yield Problem(f"{KEY}.extra_engine_args.enforce_eager", text)


def _check_ropes(config: Config) -> Iterator[Problem]:
    """Find a longest sequence at which vLLM takes other rotary embeddings than transformers: it
    takes those for long sequences if it is started for one, and it is started with a token more.
    """
    model = config.model
    longest = model.max_model_len or (model.max_prompt_tokens or 0) + (
        model.max_response_tokens or 0
    )
    facts = model_config(model.model_path)
    facts |= facts.get("text_config") or {}
    if longest == steady_positions(facts.get, LONG_ROPES):
        yield Problem(
            "model.max_model_len",
            f"is {longest}: expected at most {longest - 1} with vLLM, which is started with one "
            "token more, to score the last one, and would take the rotary embeddings of longer "
            "sequences for all (rope_type longrope)",
        )


def _wrong(key: str, text: str) -> EngineChoice:
    return EngineChoice(problems=(Problem(f"{KEY}.{key}", text),))


def _copied(config: Config) -> str:
    """Return the rest of a sentence on the memory that sleeping engines' weights take, if their
    number is known: two bytes each.
    """
    if (shape := shape_at(config.model.model_path)) is None:
        return ""
    size = f"{2 * shape.weights / GIB:.1f} GiB for each engine"
    partial = config.model.lora_configs or "text_config" in model_config(config.model.model_path)
    if partial or of(config.explorer.rollout_model, VllmModel).sleep_level == 1:
        return f", its weights ({size}) in the machine's own memory meanwhile"
    return f", without its old weights ({size}) once new ones are to follow"


def _against(request: EngineRequest) -> str | None:
    """Return the reason why vLLM, though installed, cannot generate for this stage."""
    config, gpus, on_ray, colocated = request
    model, sync = config.explorer.rollout_model, config.synchronizer
    wanted = model.engine_num * size_of(model)
    if colocated:
        if (sync.sync_style, sync.sync_interval, sync.sync_offset) != ("fixed", 1, 0):
            return (
                "in mode colocate it takes turns with the trainer, which needs sync_style fixed, "
                "sync_interval 1 and sync_offset 0"
            )
    elif gpus and not on_ray and config.mode == "both" and wanted >= gpus:
        return f"it takes {wanted} GPUs in addition to the trainer's, of {gpus}"
    return None


def find_vllm(asked: str | None) -> Vllm | None:
    """Return the first interpreter that has vLLM. Raises ValueError if the requested one
    does not.
    """
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
    """Inspect a Python. Raises ValueError if it is not one, or has no vLLM."""
    program = inspect.getsource(version_of) + _PROBE
    try:
        done = subprocess.run(
            [python, "-I", "-c", program, *_NCCL], capture_output=True, text=True, timeout=PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"it cannot be run: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise ValueError(f"expected a Python that has vLLM: {last[0]}")
    facts = json.loads(done.stdout)
    arguments, models = (tuple(facts.pop(name)) for name in ("arguments", "models"))
    return Vllm(python, arguments=arguments, models=models, **facts)


def version_of(*packages: str) -> str:
    """Return the version of the first of these packages that this interpreter has; '': none."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def largest_adapter(config: Config) -> int:
    """Return the largest rank of an adapter that vLLM supports for this model; 0: it
    supports none.
    """
    model_type = model_config(config.model.model_path).get("model_type")
    asked = config.explorer.rollout_model.enable_lora is not False
    holds = asked and model_type not in _WITHOUT_LORA
    return RANKS[-1] if holds else 0


def _foreign(config: Config, vllm: Vllm, prefix: str) -> Iterator[str]:
    """Note a class of models that this vLLM has no code of its own for."""
    named = model_config(config.model.model_path).get("architectures") or []
    if vllm.models and named and not {*vllm.models} & {*named}:
        hint = did_you_mean(named[0], vllm.models, " (it has {})")
        yield (
            f"{prefix}: vLLM {vllm.version} has no model {named[0]}{hint}: it will run the code of "
            "its environment's transformers, or refuse to start"
        )


def _check_arguments(config: Config, vllm: Vllm) -> Iterator[Problem]:
    if _release(vllm.version) < OLDEST:
        yield Problem(
            f"{KEY}.engine_type",
            f"is vllm, and vLLM {vllm.version} of {vllm.python} is too old: expected "
            f"{OLDEST[0]}.{OLDEST[1]} or later, for its weight transfer",
        )
    for name in config.explorer.rollout_model.extra_engine_args:
        key = f"{KEY}.extra_engine_args.{name}"
        if name in _OURS:
            yield Problem(key, f"cannot be set here: {_OURS[name]}")
        elif name not in vllm.arguments:
            hint = did_you_mean(name, vllm.arguments, ": did you mean {}?")
            yield Problem(key, f"is not an argument of vLLM {vllm.version}'s engine{hint}")


def _check_libraries(request: EngineRequest, vllm: Vllm) -> Iterator[Problem]:
    """Find a version that the engine's processes must share with the trainer's, and do not: NCCL
    refuses members of another version, and a handle of CUDA memory is taken apart by torch's
    private order of arguments.
    """
    config = request.config
    grouped = config.mode == "both" and config.synchronizer.sync_method in ("nccl", "online")
    if not (request.colocated or grouped):
        return
    names, theirs = ("NCCL", "torch"), (vllm.nccl, vllm.torch)
    ours = (version_of(*_NCCL), version_of("torch"))
    known = [
        (name, *(version.partition("+")[0] for version in pair))
        for name, *pair in zip(names, theirs, ours, strict=True)
        if all(pair) and not (name == "NCCL" and request.colocated)
    ]
    if known and known[0][1] != known[0][2]:
        name, other, mine = known[0]
        why = "they share CUDA memory" if request.colocated else "they join one group"
        instead = "engine_type torch" if request.colocated else "synchronizer.sync_method memory"
        yield Problem(
            f"{KEY}.engine_type",
            f"is vllm, and {vllm.python} has {name} {other} where the trainer has {mine}: expected "
            f"the same, since {why}. {INSTALL} there is the version that was tried; or set "
            f"{instead}",
        )


def _check_gpus(request: EngineRequest) -> Iterator[Problem]:
    """Find engines without a trainer that take more GPUs than this machine has. Beside a trainer
    `_against` looks, and on a cluster its places are counted.
    """
    config, gpus, on_ray, colocated = request
    model = config.explorer.rollout_model
    taken = model.engine_num * size_of(model)
    if not gpus or on_ray or colocated or config.mode == "both" or taken <= gpus:
        return
    sizes = (f" x {name} ({size})" for name, size in sizes_of(model).items() if size > 1)
    yield Problem(
        f"{KEY}.engine_num",
        f"({model.engine_num}){''.join(sizes)} takes {taken} GPUs: expected at most the {gpus} "
        "that can be used on this machine",
    )


def _check_dtype(request: EngineRequest) -> Iterator[Problem]:
    """Find bfloat16 on a GPU of this machine that vLLM does not compute it on."""
    asked = request.config.explorer.rollout_model.dtype
    if not request.gpus or request.spread or asked not in ("auto", "bfloat16"):
        return
    capability = oldest_capability()
    if capability is None or capability >= _BFLOAT16:
        return
    what = "auto, on a GPU bfloat16" if asked == "auto" else asked
    yield Problem(
        f"{KEY}.dtype",
        f"is {what}, which vLLM computes from compute capability {_BFLOAT16[0]}.{_BFLOAT16[1]} on, "
        f"and a GPU here has {capability[0]}.{capability[1]}: expected float16 or float32, or "
        "engine_type torch",
    )


def _check_temperatures(config: Config) -> Iterator[Problem]:
    """Find temperatures at which vLLM does not sample."""
    tasksets = (
        (f"{item.key}.rollout_args", item.config.rollout_args) for item in used_tasksets(config)
    )
    for key, asked in (("model", config.model), *tasksets):
        if (heat := asked.temperature) is not None and not has_temperature(heat):
            yield Problem(
                f"{key}.temperature", f"is {heat:g}: {OTHER_TEMPERATURE}, or engine_type torch"
            )


def _check_heads(config: Config, gpus: int) -> Iterator[Problem]:
    """Find limits of vLLM that the model's shape exceeds, by config.json."""
    facts = model_config(config.model.model_path)
    heads = facts.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    size = config.explorer.rollout_model.tensor_parallel_size
    if heads % size:
        yield Problem(
            f"{KEY}.tensor_parallel_size",
            f"is {size}: expected a divisor of the model's {heads} attention heads",
        )
    width = facts.get("head_dim") or facts.get("hidden_size", 0) // heads
    if not gpus and width not in _CPU_HEADS:
        yield Problem(
            f"{KEY}.engine_type",
            f"is vllm, which has no attention on a CPU for heads of {width}: expected "
            f"{', '.join(map(str, _CPU_HEADS))}, or engine_type torch",
        )
