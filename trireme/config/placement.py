"""Placement: decides who starts the parts of a run, on how many GPUs, and which engine generates.

A place is a GPU, or on machines without any a CPU process with one thread. Of the
`node_num * gpu_per_node` places an engine takes as many as its tensor, pipeline and data parallel
sizes make together, auxiliary models on GPUs take one, and the trainer has the rest.

vLLM lives in an environment of its own: `explorer.rollout_model.engine_python` names its Python,
else this interpreter where it has vLLM, else TRIREME_VLLM_PYTHON. Where none has it the embedded
engine generates. vLLM is not loaded to find out: its files are read.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

from trireme.config.lookup import adapter_facts, model_config
from trireme.config.schema_rollout import RolloutModelConfig
from trireme.config.section import fate_of
from trireme.config.stages import StageConfig
from trireme.registry import did_you_mean

Launcher = Literal["local", "ray"]
EngineKind = Literal["torch", "vllm"]
VARIABLE = "TRIREME_VLLM_PYTHON"
KEY = "explorer.rollout_model"
OLDEST = (0, 32)
"""Version of vLLM by whose weight transfer Trireme has been run."""
PROBE_S = 60
_ENDS = {"lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out"}
"""Names of heads and embeddings."""
_WITHOUT_LORA = {"gpt2"}
"""Models that vLLM holds no adapter beside."""
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
    "weight_transfer_config": "Trireme alone, since its trainer sends the weights",
}
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention on a CPU has kernels for."""
COLOCATED_SHARE = 0.25
"""Of a GPU's memory that vLLM takes beside a trainer at least, or where that GPU is not known."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM can make room for, of a LoRA adapter."""
PASSED = tuple(
    name
    for name, item in RolloutModelConfig.model_fields.items()
    if (fate := fate_of(item)) and fate.on == "vllm"
)
"""Keys that vLLM gets as they are."""


class Places(NamedTuple):
    """Who gets what; counted in places."""

    launcher: Launcher
    nodes: int
    per_node: int
    """0: the machine is not known, and nothing was asked for."""
    num_engines: int
    engine_size: int
    trainer_ranks: int
    auxiliary: int = 0
    """For the models that the explorer's process holds beside the engines: a GPU for all."""
    paired: bool = False
    """Each place is a rank's and an engine's, which take turns."""

    @property
    def total(self) -> int:
        """All that are asked for."""
        return self.nodes * self.per_node

    def split(self) -> str:
        """`4 for engines (2 x 2), 4 for the trainer`."""
        parts = []
        if self.paired:
            return f"{self.total} for pairs of a trainer's rank and an engine"
        if self.num_engines:
            taken = self.num_engines * self.engine_size
            parts.append(f"{taken} for engines ({self.num_engines} x {self.engine_size})")
        if self.auxiliary:
            parts.append(f"{self.auxiliary} for auxiliary models")
        if self.trainer_ranks:
            parts.append(f"{self.trainer_ranks} for the trainer")
        return ", ".join(parts)


def size_of(model: RolloutModelConfig) -> int:
    """Places of one engine."""
    if model.engine_type == "torch":  # where the others have no effect
        return model.tensor_parallel_size
    return math.prod((model.tensor_parallel_size, *further_sizes(model).values()))


def further_sizes(model: RolloutModelConfig) -> dict[str, int]:
    """Of one engine, beside tensor_parallel_size."""
    return {name: getattr(model, name) for name in ("pipeline_parallel_size", "data_parallel_size")}


def places_of(stage: StageConfig, present: int) -> Places:
    """The places of a stage on a machine with `present` GPUs. Problems are noted."""
    cluster, model = stage.config.cluster, stage.config.explorer.rollout_model
    launcher = _launcher(stage, present)
    if stage.colocated and launcher == "ray":
        return _pairs_of(stage, present)
    engines, size = model.engine_num, size_of(model)
    generates = stage.config.mode != "train" or stage.evaluates
    if stage.remote or stage.asks_api or not generates:
        engines = 0
    loaded = [
        other
        for other in stage.config.explorer.auxiliary_models
        if other.engine_type not in ("remote", "external")
    ]
    explores = generates and stage.config.mode != "serve"  # which has no explorer to hold them
    auxiliary = int(launcher == "ray" and present > 0 and explores and bool(loaded))
    nodes, per_node = max(cluster.node_num, 1), cluster.gpu_per_node
    if not per_node and launcher == "ray":
        trains = stage.config.mode in ("both", "train")
        per_node = present or engines * size + trains
    rest = max(nodes * per_node - engines * size - auxiliary, 0)
    ranks = rest if stage.config.mode in ("both", "train") else 0
    places = Places(launcher, nodes, per_node, engines, size, ranks, auxiliary)
    if places.total > 1 or launcher == "ray":
        _check_split(stage, places)
    here = cluster.ray_address in ("auto", "local") and nodes == 1
    if cluster.launcher == "auto" and here:
        _check_present(stage, places, present)
    return places


def _pairs_of(stage: StageConfig, present: int) -> Places:
    """Of `mode: colocate` on several devices: a trainer's rank and an engine on each."""
    cluster = stage.config.cluster
    nodes, per_node = max(cluster.node_num, 1), cluster.gpu_per_node or max(present, 1)
    total = nodes * per_node
    engines = 0 if stage.reads_file and not stage.evaluates else total
    places = Places("ray", nodes, per_node, engines, 1, total, paired=True)
    _check_ranks(stage, total)
    if nodes > 1:
        stage.problem("cluster.node_num", f"is {nodes}: expected 1 in mode colocate")
    if cluster.launcher == "auto" and cluster.ray_address in ("auto", "local"):
        _check_present(stage, places, present)
    return places


def gpus_of(places: Places, present: int) -> dict[str, int]:
    """The GPUs of each role; in one process they share one."""
    if places.launcher == "local":
        return {"explorer": min(present, 1), "trainer": min(present, 1)}
    engines = places.num_engines * places.engine_size + places.auxiliary
    return {"explorer": engines if present else 0, "trainer": places.trainer_ranks * bool(present)}


def note_places(stage: StageConfig, places: Places, present: int) -> None:
    """One line where the cluster section asks for other machines than the run uses."""
    asked, nodes = places.total, places.nodes
    if stage.asks_api:
        return
    if places.launcher == "ray":
        if not present:
            stage.notes.append(
                f"cluster: this machine has no GPU, so each of the {asked} places is a CPU process "
                f"with one thread"
            )
        if stage.config.trainer.trainer_strategy == "megatron" and places.trainer_ranks > 1:
            stage.notes.append(
                "trainer.trainer_strategy (megatron): FSDP2 shards the model in its place"
            )
    elif asked or nodes > 1:
        here = "on one GPU, which explorer and trainer share" if present else "on the CPU"
        wanted = f"{asked} GPUs" if asked else f"{nodes} nodes"
        split = f": {places.split()}" if places.trainer_ranks and places.num_engines else ""
        stage.notes.append(
            f"cluster asks for {wanted} ({nodes} node{'s' * (nodes > 1)} x {places.per_node}"
            f"{split}) and this machine has {present or 'none'}: the run is local, one process, "
            f"{here}"
        )


def _launcher(stage: StageConfig, present: int) -> Launcher:
    """`auto` is Ray where several GPUs are here and asked for, or a cluster is named."""
    cluster = stage.config.cluster
    if stage.asks_api:
        return "local"
    if cluster.ray_address.startswith("ray://"):
        stage.problem(
            "cluster.ray_address",
            f"is {cluster.ray_address}: expected auto, or HOST:PORT of the cluster's head, from a "
            f"machine of the cluster",
        )
    asked = max(cluster.node_num, 1) * cluster.gpu_per_node
    named = cluster.ray_address not in ("auto", "", "local")
    wanted = cluster.launcher == "ray" or (
        cluster.launcher == "auto" and (named or min(present, asked) > 1)
    )
    if wanted and find_spec("ray") is None:
        lacks = "the package ray is not installed: pip install 'trireme-rl[ray]'"
        if cluster.launcher == "ray" or named:
            stage.problem("cluster.launcher", f"is {cluster.launcher}, and {lacks}")
        else:
            stage.notes.append(f"cluster.launcher ({cluster.launcher}): one process, since {lacks}")
        return "local"
    return "ray" if wanted else "local"


def _check_split(stage: StageConfig, places: Places) -> None:
    """Trinity's rules: each side has its places, and none is cut across machines."""
    model = stage.config.explorer.rollout_model
    taken = places.num_engines * places.engine_size + places.auxiliary
    trains = stage.config.mode in ("both", "train")
    have = f"{places.total} places ({places.nodes} x {places.per_node})"
    asked = f"({model.engine_num}) x tensor_parallel_size ({model.tensor_parallel_size})"
    if model.engine_type != "torch":
        more = {name: size for name, size in further_sizes(model).items() if size > 1}
        asked += "".join(f" x {name} ({size})" for name, size in more.items())
    asked += " and the auxiliary models' GPU" * bool(places.auxiliary)
    key = "explorer.rollout_model.engine_num"
    if places.num_engines and places.engine_size > places.per_node:
        sizes = {"tensor_parallel_size": model.tensor_parallel_size} | further_sizes(model)
        largest = max(sizes, key=lambda name: sizes[name])
        together = f" of {places.engine_size} places" * (sizes[largest] != places.engine_size)
        stage.problem(
            f"explorer.rollout_model.{largest}",
            f"is {sizes[largest]}: an engine{together} has to fit on one machine, which "
            f"has {places.per_node} places",
        )
    elif taken >= places.total and trains:
        stage.problem(
            key,
            f"{asked} takes {taken} of the cluster's {have} and leaves none for the trainer: "
            f"expected at most {places.total - 1 - places.auxiliary}",
        )
    elif taken > places.total:
        stage.problem(key, f"{asked} takes {taken} of the cluster's {have}")
    elif places.trainer_ranks > places.per_node and places.trainer_ranks % places.per_node:
        stage.problem(
            key,
            f"{asked} leaves {places.trainer_ranks} of the cluster's {have} for the trainer: "
            f"expected at most {places.per_node}, or whole machines",
        )
    if places.trainer_ranks:
        _check_ranks(stage, places.trainer_ranks)


def _check_ranks(stage: StageConfig, ranks: int) -> None:
    """Sizes that have to divide the ranks that train."""
    window = stage.config.trainer.ulysses_sequence_parallel_size
    if ranks % window:
        stage.problem(
            "trainer.ulysses_sequence_parallel_size",
            f"is {window}: expected a divisor of the trainer's {ranks} places",
        )
    shards = stage.config.trainer.fsdp_size
    if shards != -1 and (not shards or ranks % shards):
        text = f"expected a divisor of the trainer's {ranks} places, or -1 for all"
        stage.problem("trainer.fsdp_size", f"is {shards}: {text}")


def _check_present(stage: StageConfig, places: Places, present: int) -> None:
    """A machine with GPUs has to have those that are asked of each machine."""
    if 0 < present < places.per_node:
        stage.problem(
            "cluster.gpu_per_node",
            f"is {places.per_node} and this machine has {present}: expected at most {present}, or "
            f"cluster.launcher local to share what is here",
        )


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


def adapter_rank_of(stage: StageConfig, engine: EngineChoice, method: str) -> int:
    """Of the adapter that engines get alone; 0 where they get merged weights: by files, on a user's
    own servers, with DoRA, on head or embedding or layers that only a regular expression names, and
    where vLLM is told so, has no room or no adapters for the model.
    """
    config = stage.config
    if config.mode != "both" or method == "checkpoint" or stage.remote or stage.reads_file:
        return 0
    for lora in config.model.lora_configs or []:
        rank, dora, targets = lora.lora_rank, lora.use_dora, lora.target_modules
        if lora.path is not None:
            try:
                rank, dora, targets = adapter_facts(lora.path)
            except ValueError:  # `check_model` says what is wrong with it
                return 0
        model_type = model_config(config.model.model_path).get("model_type")
        fits = rank <= VLLM_RANKS[-1] and config.explorer.rollout_model.enable_lora
        fits = fits and model_type not in _WITHOUT_LORA
        if _inner(targets) and not dora and (engine.kind == "torch" or fits):
            return rank
    return 0


def _inner(targets: str | list[str]) -> bool:
    """Whether the layers are surely those of blocks: what an expression matches is not known."""
    if isinstance(targets, str):
        return targets.lower() == "all-linear"  # which leaves the head out
    return not _ENDS & {target.rpartition(".")[2] for target in targets}


def choose_engine(stage: StageConfig, gpus: int, *, on_ray: bool) -> EngineChoice:
    """The engine of a stage. Problems and notes are the stage's."""
    model = stage.config.explorer.rollout_model
    if stage.config.mode == "train" or stage.reads_file or stage.remote or stage.asks_api:
        return EngineChoice()
    kind = model.engine_type or ("vllm" if gpus and model.engine_python else "torch")
    if kind in ("vllm", "sglang"):
        vllm = _vllm_of(stage, kind, gpus, on_ray)
        if vllm is None:
            return EngineChoice()
        return EngineChoice("vllm", vllm.python, model.engine_num)
    several = model.engine_type == "torch" and model.engine_num > 1
    if several and not on_ray:
        trainers = int(stage.config.mode == "both")
        if gpus and model.engine_num > gpus - trainers:
            beside = " beside the trainer's" * trainers
            stage.notes.append(
                f"{KEY}.engine_num ({model.engine_num}): one embedded engine generates, since each "
                f"of several takes a GPU{beside}, and this machine has {gpus}"
            )
            return EngineChoice()
        stage.notes.append(f"{KEY}.engine_num ({model.engine_num}): one process an engine")
        return EngineChoice(hosts=model.engine_num)
    return EngineChoice()


def _vllm_of(stage: StageConfig, asked: str, gpus: int, on_ray: bool) -> Vllm | None:
    """The vLLM that generates; None with a note where the embedded engine has to. SGLang, where
    that is asked for, is never the one that does.
    """
    model, mode = stage.config.explorer.rollout_model, stage.config.mode
    prefix, instead = (
        f"{KEY}.engine_type ({asked})",
        "the embedded torch engine generates in its place",
    )
    if asked != "vllm" and not gpus:
        stage.notes.append(f"{prefix}: {instead}, since this machine has no GPU")
        return None
    wanted = model.engine_num * size_of(model)
    try:
        vllm = find_vllm(model.engine_python)
    except ValueError as error:
        stage.problem(f"{KEY}.engine_python", f"is {model.engine_python!r}: {error}")
        return None
    why = None
    if vllm is None and gpus and not on_ray and asked == "vllm":
        stage.problem(
            f"{KEY}.engine_type",
            f"is vllm, and no Python with vLLM was found: install it in an environment of its own "
            f"(python -m venv vllm && vllm/bin/pip install vllm) and give {KEY}.engine_python or "
            f"{VARIABLE}, or set engine_type torch",
        )
        return None
    if vllm is None:
        why = f"no Python with vLLM was named ({KEY}.engine_python, or {VARIABLE})"
    elif stage.colocated:
        sync = stage.config.synchronizer
        if (sync.sync_style, sync.sync_interval, sync.sync_offset) != ("fixed", 1, 0):
            why = (
                "in mode colocate it takes turns with the trainer, which needs sync_style fixed, "
                "sync_interval 1 and sync_offset 0"
            )
    elif gpus and not on_ray and mode == "both" and wanted >= gpus:
        why = f"it takes {wanted} GPUs beside the trainer's, of {gpus}"
    if why is not None or vllm is None:
        stage.notes.append(f"{prefix}: {instead}, since {why}")
        return None
    in_place = " generates in its place" * (asked != "vllm")
    stage.notes.append(f"{prefix}: vLLM {vllm.version} of {vllm.python}{in_place}")
    _check_arguments(stage, vllm)
    _check_heads(stage, gpus)
    if stage.colocated:
        rests = "it only pauses while the trainer works: on a CPU vLLM has no sleep mode"
        if gpus:
            rests = "it sleeps while the trainer works"
        stage.notes.append(f"{prefix}: {rests}")
    if not gpus:
        stage.notes.append(
            f"{prefix}: on a CPU it runs eagerly, prefills in one go and keeps 1 GiB of keys and "
            f"values (extra_engine_args.kv_cache_memory_bytes), whatever enforce_eager, "
            f"enable_chunked_prefill and gpu_memory_utilization say"
        )
    return vllm


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
    facts = json.loads(done.stdout)
    return Vllm(python, facts["version"], tuple(facts["arguments"]))


def _check_arguments(stage: StageConfig, vllm: Vllm) -> None:
    if tuple(map(int, re.findall(r"\d+", vllm.version)[:2])) < OLDEST:
        stage.problem(
            f"{KEY}.engine_type",
            f"is vllm, and vLLM {vllm.version} of {vllm.python} is too old: expected "
            f"{OLDEST[0]}.{OLDEST[1]} or later, for its weight transfer",
        )
    for name in stage.config.explorer.rollout_model.extra_engine_args:
        key = f"{KEY}.extra_engine_args.{name}"
        if name in _OURS:
            stage.problem(key, f"is not set here: what sets it is {_OURS[name]}")
        elif name not in vllm.arguments:
            hint = did_you_mean(name, vllm.arguments, ": did you mean {}?")
            stage.problem(key, f"is no argument of vLLM {vllm.version}'s engine{hint}")


def _check_heads(stage: StageConfig, gpus: int) -> None:
    """What of the model's shape vLLM cannot do, by config.json."""
    facts = model_config(stage.config.model.model_path)
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
