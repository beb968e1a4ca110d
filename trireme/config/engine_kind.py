"""Engine kind: chooses the kind of engine for a stage, and declares the contract of a kind.

`explorer.rollout_model.engine_type` names a kind of ENGINES, a class that implements `EngineKind`.
Its checks import neither torch nor the engine itself: these are imported when an engine is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trireme.config import Findings, Problem
from trireme.config.lookup import adapter_facts, outside_blocks
from trireme.extensions import missing, needed_for
from trireme.registry import ENGINES, PROGRAMS, SERVERS, did_you_mean, is_path

if TYPE_CHECKING:
    from trireme.config.placement import Places
    from trireme.config.plan import Plan
    from trireme.config.schema import Config
    from trireme.config.schema_rollout import RolloutModelConfig
    from trireme.config.stages import StageFacts
    from trireme.engines.barrier import RolloutBarrier
    from trireme.engines.device import Device
    from trireme.engines.engine import Engine
    from trireme.engines.make import EngineSpec

KEY = "explorer.rollout_model"
EMBEDDED = "torch"
"""The kind that runs everywhere, in the run's own process."""
SERVER = "engine_server"
"""The program in PROGRAMS that serves an engine from a separate process."""
REMOTE = "remote"
"""The value of `engine_type` for the user's servers, and the name in SERVERS of their client."""
ELSEWHERE = (REMOTE, "external", "tinker")
"""Values of `engine_type` that name no kind, since the run does not start such engines."""
ROUTING = "records_routing"
"""The option of an engine's specification with which it records the experts that it chooses."""
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Keys that may multiply the places of one engine."""
LEAST_SHARE = 0.25
"""The smallest share of a GPU's memory for an engine that takes turns with the trainer, and the
share if that GPU's size is not known."""
FEWEST_RUNNERS = 8
ROLLOUTS = 512
"""Rollouts of an engine at once, for the default of runners."""


class EngineRequest(NamedTuple):
    """A stage that needs an engine, and the machine for it."""

    config: Config
    gpus: int
    spread: bool = False
    """Whether a launcher starts it, in a process with its own devices."""
    colocated: bool = False
    """Whether trainer and engine share a device."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine that generates, and where it runs."""

    kind: str = EMBEDDED
    python: str | None = None
    """The interpreter of its processes; None: that of the process that starts them."""
    hosts: int = 0
    """The number of engine processes that the launcher starts; 0: the engine is embedded, or
    remote."""
    shares: bool = True
    """Whether, embedded, it can read the trainer's own tensors."""
    sleeps: bool = False
    """Whether its processes free their memory while the trainer on their device works."""
    largest_adapter: int | None = None
    """The largest rank of a LoRA adapter that it can load besides its weights; None: any."""
    notes: Sequence[str] = ()
    problems: Sequence[Problem] = ()


@dataclass(frozen=True)
class EnginePlan:
    """The engine of a run, and how the run's parts reach it."""

    kind: str
    """Its kind, by its name in ENGINES."""
    python: str | None
    """The interpreter of its processes; None: that of the process that starts them."""
    hosts: int
    """The number of engine processes that a run without a launcher starts; 0: the engine is
    embedded, or remote."""
    urls: tuple[str, ...]
    """The rollout servers that generate; empty: the run has engines of its own."""
    key: str | None
    """The key that they require."""
    runners: int
    """Tasks that are tried at once."""
    shares: bool
    """Whether, embedded, it can read the trainer's own tensors."""
    sleeps: bool
    """Whether its processes free their memory while the trainer on their device works."""
    largest_adapter: int | None
    """The largest rank of a LoRA adapter that it can load besides its weights; None: any."""

    @property
    def served(self) -> bool:
        """Return True if it is in other processes: those that a run starts, or the user's own."""
        return self.hosts > 0 or bool(self.urls)


class Interpreter(NamedTuple):
    """A Python interpreter that has the engine."""

    python: str
    about: str
    """The engine's version, and its place."""


class EngineKind(Protocol):
    """A kind of engine, by its name in ENGINES; made without arguments."""

    name: str
    """The kind that generates: another one's name if this kind only stands in for it."""
    keys: Sequence[str]
    """The rollout model's keys that it receives unchanged; others without effect are noted."""
    sizes: Sequence[str]
    """The keys of SIZES that multiply its places."""
    own_python: bool
    """Whether its processes may use another Python environment, which `engine_python` names."""
    sees_with: str | None
    """The rollout model's key with which it takes pictures in prompts; '': it always does; None:
    never."""
    reports_experts: bool
    """Whether it can record the experts that a mixture's routers choose."""

    def examine(self, request: EngineRequest) -> EngineChoice:
        """Return how it runs on this machine, and the problems of the configuration. If it cannot
        run here, another kind is chosen, with a note.
        """
        ...

    def interpreter(self, asked: str | None) -> Interpreter:
        """Find the Python that has it: `asked`, or another one. Raises ValueError if there
        is none.
        """
        ...

    def options(self, plan: Plan) -> dict[str, Any]:
        """Return `EngineSpec.options` of a plan's engine."""
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
        """Load the model and return the engine. An embedded one may share with a trainer: the
        `barrier` between rollouts, and the tensors of the module `share_with`.
        """
        ...


def kind_of(name: str | None) -> EngineKind | None:
    """Return the kind of this name; None if the name belongs to no known kind."""
    return ENGINES.get(name)() if name is not None and (name in ENGINES or is_path(name)) else None


def kind_named(name: str) -> EngineKind:
    """Return the kind of this name. Raises ValueError if there is none."""
    return ENGINES.get(name)()


def kind_names() -> list[str]:
    """Return the kinds that do not stand in for another one, in the order of the manifests."""
    names = dict.fromkeys([*ENGINES.built_in(), *ENGINES])
    return [name for name in names if kind_named(name).name == name]


def sizes_of(model: RolloutModelConfig) -> dict[str, int]:
    """Return the sizes that multiply the places of one engine, with their keys."""
    kind = kind_of(model.engine_type)
    return {name: getattr(model, name) for name in (SIZES if kind is None else kind.sizes)}


def size_of(model: RolloutModelConfig) -> int:
    """Return the places of one engine."""
    return math.prod(sizes_of(model).values())


def check_engine_types(stage: StageFacts) -> Findings:
    """Report engines of an unknown kind, the auxiliary models' included."""
    findings = Findings()
    explorer = stage.config.explorer
    models = {KEY: explorer.rollout_model}
    models |= {
        f"explorer.auxiliary_models[{i}]": m for i, m in enumerate(explorer.auxiliary_models)
    }
    for key, model in models.items():
        name = model.engine_type
        if name == REMOTE and (lacks := missing("servers", name)):
            findings.problem(f"{key}.engine_type", f"is {name!r}, which {lacks}")
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


def choose_engine(stage: StageFacts, places: Places) -> tuple[EnginePlan, Findings]:
    """Choose the engine of a stage that asks for these places."""
    findings, explorer = Findings(), stage.config.explorer
    choice = findings.take(_choose(stage, places.present, places.spread))
    model = explorer.rollout_model
    engine = EnginePlan(
        kind=choice.kind,
        python=choice.python,
        hosts=0 if places.spread else choice.hosts,
        urls=tuple(model.base_urls) if stage.remote else (),
        key=model.api_key,
        runners=runners_of(stage.config, max(places.num_engines, model.engine_num), places.present),
        shares=choice.shares,
        sleeps=choice.sleeps,
        largest_adapter=choice.largest_adapter,
    )
    findings.add(_check_routing(stage, engine))
    return engine, findings


def records_routing(config: Config) -> bool:
    """Return whether a run's engine records the experts that it chooses, for a trainer."""
    asked = config.explorer.rollout_model.enable_return_routed_experts
    asked = asked or config.algorithm.enable_router_replay
    return asked and config.mode in ("both", "explore", "serve")


def _check_routing(stage: StageFacts, engine: EnginePlan) -> Findings:
    """Check that the engine can record the experts that it chooses, if it has to."""
    findings, config = Findings(), stage.config
    if stage.reads_file or not records_routing(config):
        if config.explorer.rollout_model.enable_return_routed_experts:
            findings.note(
                f"{KEY}.enable_return_routed_experts (true): this stage has no engine that records "
                "experts for a trainer"
            )
        return findings
    replay = "algorithm.enable_router_replay"
    key = replay if config.algorithm.enable_router_replay else f"{KEY}.enable_return_routed_experts"
    if stage.asks_api:
        where = "the model of an API"
    elif engine.urls:
        where = f"the servers of {KEY}.base_urls"
    elif not kind_named(engine.kind).reports_experts:
        where = f"the engine {engine.kind}"
    else:
        return findings
    findings.problem(
        key,
        f"is true, and the experts that compute a token are not reported by {where}: expected "
        f"false, or {KEY}.engine_type {EMBEDDED}",
    )
    return findings


def runners_of(config: Config, engines: int, gpus: int) -> int:
    """Return the number of tasks that are tried at once: as requested for each engine; else 8, and
    on GPUs, whose engines are faster the more rows they have, up to the tasks of a step.
    """
    each = config.explorer.runner_per_model
    if each is None:
        tasks = math.ceil(config.buffer.batch_size / engines) if gpus and engines else 0
        each = max(min(tasks, ROLLOUTS // config.algorithm.repeat_times), FEWEST_RUNNERS)
    return each * engines


def _choose(stage: StageFacts, gpus: int, spread: bool) -> tuple[EngineChoice, Findings]:
    """Ask the engine's kind how it runs here; a stage without an engine has the default."""
    model = stage.config.explorer.rollout_model
    if stage.config.mode == "train" or stage.reads_file or stage.remote or stage.asks_api:
        return EngineChoice(), Findings()
    kind = kind_of(model.engine_type) or kind_named(_default_kind(model, gpus))
    choice = kind.examine(EngineRequest(stage.config, gpus, spread, stage.colocated))
    findings = Findings([*choice.problems], [*choice.notes])
    if choice.hosts and not spread and (lacks := _lacks_servers()):
        text = f"is {model.engine_num}: an engine in a process of its own {lacks}"
        findings.problem(f"{KEY}.engine_num", text)
    return choice, findings


def _lacks_servers() -> str:
    """Return the rest of a sentence on the extension that engine processes need and that is
    missing; else ''.
    """
    needed = (("program", SERVER, PROGRAMS), ("servers", REMOTE, SERVERS))
    for kind, name, registry in needed:
        if name not in registry:
            return missing(kind, name)
    return ""


def _default_kind(model: RolloutModelConfig, gpus: int) -> str:
    """Return the default kind; if a Python is named, the first kind with its own Python."""
    if model.engine_type is None and gpus and model.engine_python:
        return next((name for name in kind_names() if kind_named(name).own_python), EMBEDDED)
    return EMBEDDED


def adapter_rank_of(stage: StageFacts, method: str, largest: int | None = None) -> int:
    """Return the rank of the adapter that is pushed alone; 0 if merged weights are pushed: by
    files, to a user's own servers, and where it is no plain addition or exceeds the `largest` that
    the engine can load.
    """
    if stage.config.mode != "both" or method == "checkpoint" or stage.remote or stage.reads_file:
        return 0
    return plain_rank_of(stage.config, largest)


def plain_rank_of(config: Config, largest: int | None = None) -> int:
    """Return the rank of the adapter, if it is at most the `largest` and a plain addition in the
    blocks; 0 with DoRA, with a start that was taken from the base, on head or embedding, or on
    layers that only a regular expression names.
    """
    for lora in config.model.lora_configs or []:
        rank, plain, targets = lora.lora_rank, not lora.use_dora, lora.target_modules
        if lora.path is not None:
            try:
                facts = adapter_facts(lora.path)
            except ValueError:  # `check_model` reports the error
                return 0
            rank, targets = facts.rank, facts.targets
            plain = facts.leaves_base and not facts.dora
        fits = largest is None or rank <= largest
        if _only_in_blocks(targets) and plain and fits:
            return rank
    return 0


def _only_in_blocks(targets: str | list[str]) -> bool:
    """Return True if all these layers are known to be in blocks: what a regular expression matches
    is not known.
    """
    if isinstance(targets, str):
        return targets.lower() == "all-linear"  # the head is none of these
    return not outside_blocks(targets)
