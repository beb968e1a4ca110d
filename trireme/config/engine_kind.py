"""Engine kind: which kind of engine generates in a stage, and what every kind says of itself.

`explorer.rollout_model.engine_type` names a kind of ENGINES, a class that keeps the contract
`EngineKind`. Asking a kind loads neither torch nor the engine behind it: that is imported when an
engine is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trireme.config import Findings, Problem
from trireme.config.lookup import adapter_facts
from trireme.extensions import missing, needed_for
from trireme.registry import ENGINES, PROGRAMS, did_you_mean, is_path

if TYPE_CHECKING:
    from trireme.config.plan import Plan
    from trireme.config.schema import Config
    from trireme.config.schema_rollout import RolloutModelConfig
    from trireme.config.stages import StageFacts
    from trireme.engines.device import Device, RolloutBarrier
    from trireme.engines.engine import Engine
    from trireme.engines.make import EngineSpec

KEY = "explorer.rollout_model"
EMBEDDED = "torch"
"""The kind that runs anywhere, in the run's own process."""
SERVER = "engine_server"
"""The program of PROGRAMS that serves an engine from a process of its own."""
ELSEWHERE = ("remote", "external", "tinker")
"""Values of `engine_type` that name no kind: someone else runs the engine."""
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Keys that may multiply the places of one engine."""
LEAST_SHARE = 0.25
"""The share of a GPU's memory that an engine which takes turns with the trainer gets at least, or
where that GPU is not known.
"""
_ENDS = {"lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out"}
"""Names of heads and embeddings."""


class EngineRequest(NamedTuple):
    """A stage that needs an engine, and the machine that it runs on."""

    config: Config
    gpus: int
    spread: bool = False
    """A launcher starts it, in a process with devices of its own."""
    colocated: bool = False
    """Trainer and engine have one device."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine that generates, with what there is to say about it."""

    kind: str = EMBEDDED
    python: str | None = None
    """The interpreter of its processes; None: that of whoever starts them."""
    hosts: int = 0
    """Processes with an engine each, that the launcher starts; 0: it is embedded, or remote."""
    shares: bool = True
    """Embedded, it can read the trainer's own tensors."""
    sleeps: bool = False
    """Its processes free their memory while the trainer on their device works."""
    largest_adapter: int | None = None
    """Largest rank of a LoRA adapter that it holds beside its weights; None: any."""
    notes: Sequence[str] = ()
    problems: Sequence[Problem] = ()


class Interpreter(NamedTuple):
    """A Python that has the engine."""

    python: str
    about: str
    """The engine's version, and where it is."""


class EngineKind(Protocol):
    """A kind of engine, by its name in ENGINES; made without arguments."""

    name: str
    """The kind that generates: another's, where this one stands in for it."""
    keys: Sequence[str]
    """The keys of the rollout model that it gets as they are; others without effect are noted."""
    sizes: Sequence[str]
    """The keys of SIZES that multiply its places."""
    own_python: bool
    """Its processes may have an environment of their own, which `engine_python` names."""

    def examine(self, request: EngineRequest) -> EngineChoice:
        """Return where it runs on this machine, and what is wrong with the configuration. If it
        cannot run here, another kind is chosen, with a note.
        """
        ...

    def interpreter(self, asked: str | None) -> Interpreter:
        """The Python that has it: `asked`, or one found. Raises ValueError where there is none."""
        ...

    def options(self, plan: Plan) -> dict[str, Any]:
        """`EngineSpec.options` of a plan's engine."""
        ...

    async def make(
        self,
        spec: EngineSpec,
        tokenizer: Any,
        device: Device,
        *,
        barrier: RolloutBarrier | None = None,
        share_with: Any = None,
    ) -> Engine:
        """Load the model and return the engine. An embedded one may use what it shares with a
        trainer: the `barrier` between rollouts, and the tensors of the module `share_with`.
        """
        ...


def kind_of(name: str | None) -> EngineKind | None:
    """The kind of this name; None where the name stands for no kind that is known."""
    return ENGINES.get(name)() if name is not None and (name in ENGINES or is_path(name)) else None


def kind_named(name: str) -> EngineKind:
    """The kind of this name. Raises ValueError where there is none."""
    return ENGINES.get(name)()


def kind_names() -> list[str]:
    """The kinds that generate themselves, in the order of the manifests."""
    names = dict.fromkeys([*ENGINES.built_in(), *ENGINES])
    return [name for name in names if kind_named(name).name == name]


def sizes_of(model: RolloutModelConfig) -> dict[str, int]:
    """The sizes that multiply the places of one engine, with their keys."""
    kind = kind_of(model.engine_type)
    return {name: getattr(model, name) for name in (SIZES if kind is None else kind.sizes)}


def size_of(model: RolloutModelConfig) -> int:
    """Places of one engine."""
    return math.prod(sizes_of(model).values())


def check_engine_types(stage: StageFacts) -> Findings:
    """Note as a problem each engine, also of an auxiliary model, whose kind is not known."""
    findings = Findings()
    explorer = stage.config.explorer
    models = {KEY: explorer.rollout_model}
    models |= {
        f"explorer.auxiliary_models[{i}]": m for i, m in enumerate(explorer.auxiliary_models)
    }
    for key, model in models.items():
        name = model.engine_type
        if name is None or name in ELSEWHERE or name in ENGINES:
            continue
        try:
            if is_path(name) or needed_for("engine", name):
                ENGINES.get(name, kind="" if is_path(name) else "engine")
                continue
        except ValueError as error:
            findings.problem(f"{key}.engine_type", f"is {name!r}: {error}")
            continue
        names = [*dict.fromkeys([*ENGINES.built_in(), *ENGINES]), *ELSEWHERE]
        expected = ", ".join(names) + did_you_mean(name, names)
        findings.problem(f"{key}.engine_type", f"is {name!r}: expected one of {expected}")
    return findings


def choose_engine(stage: StageFacts, gpus: int, *, spread: bool) -> tuple[EngineChoice, Findings]:
    """Choose the engine of a stage."""
    model = stage.config.explorer.rollout_model
    if stage.config.mode == "train" or stage.reads_file or stage.remote or stage.asks_api:
        return EngineChoice(), Findings()
    kind = kind_of(model.engine_type) or kind_named(_default_kind(model, gpus))
    choice = kind.examine(EngineRequest(stage.config, gpus, spread, stage.colocated))
    findings = Findings([*choice.problems], [*choice.notes])
    if choice.hosts and not spread and SERVER not in PROGRAMS:
        lacks = missing("program", SERVER)
        text = f"is {model.engine_num}: an engine in a process of its own {lacks}"
        findings.problem(f"{KEY}.engine_num", text)
    return choice, findings


def _default_kind(model: RolloutModelConfig, gpus: int) -> str:
    """The kind where the file names none: a Python that is named asks for the first that has one
    of its own.
    """
    if model.engine_type is None and gpus and model.engine_python:
        return next((name for name in kind_names() if kind_named(name).own_python), EMBEDDED)
    return EMBEDDED


def adapter_rank_of(stage: StageFacts, engine: EngineChoice, method: str) -> int:
    """The rank of the adapter that engines get alone; 0 where they get merged weights: by files, on
    a user's own servers, with DoRA, on head or embedding or layers that only a regular expression
    names, and where the engine holds no such adapter.
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
        fits = engine.largest_adapter is None or rank <= engine.largest_adapter
        if _inner(targets) and not dora and fits:
            return rank
    return 0


def _inner(targets: str | list[str]) -> bool:
    """Return whether the layers are surely those of blocks: the matches of an expression are
    unknown.
    """
    if isinstance(targets, str):
        return targets.lower() == "all-linear"  # which leaves the head out
    return not _ENDS & {target.rpartition(".")[2] for target in targets}
