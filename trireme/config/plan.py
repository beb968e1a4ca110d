"""Plan: all decisions derived from one stage of a Config, made before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from trireme import machine
from trireme.config import Findings, Problem
from trireme.config.check import check_kernels, note_idle
from trireme.config.engine_kind import EnginePlan, choose_engine, kind_named, kind_of
from trireme.config.external import ExternalModel, external_of
from trireme.config.gpus import Gpus, gpu_bytes, num_gpus, why_no_gpu
from trireme.config.memory import MemoryPlan, fitting_tokens, plan_memory, request_of
from trireme.config.placement import Places, note_places, places_of
from trireme.config.schema import Config
from trireme.config.sizes import Lengths, Steps, lengths_of, steps_of
from trireme.config.stages import StageFacts, check_fates
from trireme.config.store import StorePlan, store_of
from trireme.config.sync import SyncPlan, check_beat, is_deterministic, sync_of

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Plan:
    """One stage, ready to run. Every length, size, path and choice that the parts need is here,
    each in the smaller plan of the module that decides it.
    """

    config: Config
    """The stage's whole configuration: the global one with the stage's keys applied."""
    stage_name: str | None
    """None if the file has no stages."""
    model_from_stage: int | None
    """The stage whose last checkpoint is this stage's model; None: `model_path`."""
    mode: str
    colocated: bool
    """Whether the file has `mode: colocate`; `mode` is the mode that runs."""
    job_dir: Path
    """The folder of this stage; the stages' folders are siblings in the job's folder."""
    seed: int
    device: str
    dtype: str
    model_path: str
    listen_address: str
    """The address on which `mode: serve` listens."""
    deterministic: bool
    """Whether equal seeds give byte-equal weights."""
    lengths: Lengths
    steps: Steps
    places: Places
    engine: EnginePlan
    sync: SyncPlan
    store: StorePlan
    memory: MemoryPlan
    notes: tuple[str, ...]
    """Notes on settings that were mapped onto this machine, or that have no effect on it."""

    @property
    def root_dir(self) -> Path:
        """Return the folder of the whole job: `job_dir`, or the parent of a stage's folder."""
        return self.job_dir if self.stage_name is None else self.job_dir.parent

    @property
    def counted(self) -> tuple[str, int | None]:
        """Return the part whose steps count as the run's, and their number; None: it ends with the
        data.
        """
        # only the workflow knows how many train steps an explore step makes: count the known ones
        trains = self.mode in ("both", "train")
        if trains and (self.steps.train or not self.steps.explore):
            return "trainer", self.steps.train
        return "explorer", self.steps.explore

    @property
    def until(self) -> str:
        """Describe the end of a run that has no number of steps."""
        if self.mode == "serve":
            return "until it is stopped"
        if self.mode != "bench":
            return "until the data ends"
        if self.api is not None:
            return "measures the model of the API"
        latest = self.config.explorer.bench_on_latest_checkpoint
        return "measures the " + ("latest checkpoint" if latest else "model and all checkpoints")

    @property
    def has_adapter(self) -> bool:
        """True if the trained weights may start out different from those that engines load."""
        return bool(self.config.model.lora_configs)

    @property
    def on_users_servers(self) -> bool:
        """True if rollout servers generate that the run has not started: they may have the weights
        of an earlier run or stage. A launcher's engines have addresses too, once they serve.
        """
        started = self.places.spread and self.places.num_engines > 0
        return bool(self.engine.urls) and not started

    @property
    def explorer_name(self) -> str:
        """Return the name of one of several explorers, used in its ids and the paths of its logs
        and figures; else ''.
        """
        name = self.config.explorer.name
        return name if self.mode == "explore" and name != "explorer" else ""

    @property
    def api(self) -> ExternalModel | None:
        """Return the model behind an API that bench evaluates in place of `model_path`."""
        return external_of(self.config) if self.mode == "bench" else None


def unmet(plan: Plan) -> list[Problem]:
    """Return what the YAML asks for by name and this machine lacks, an engine or GPUs, as problems
    for `--strict`.
    """
    cluster, model = plan.config.cluster, plan.config.explorer.rollout_model
    problems = list[Problem]()
    kind = None if plan.mode == "train" or plan.api else kind_of(model.engine_type)
    if kind is not None and kind.name != plan.engine.kind:
        key = "explorer.rollout_model.engine_type"
        because = [note for note in plan.notes if note.startswith(f"{key} (")]
        why = because[0].partition("): ")[2] if because else f"{plan.engine.kind} generates instead"
        problems.append(Problem(key, f"is {model.engine_type}, and --strict is given: {why}"))
    if cluster.gpu_per_node and plan.device == "cpu" and not plan.places.elsewhere:
        asked = f"is {cluster.gpu_per_node}, and --strict is given"
        text = f"{asked}: torch can use no GPU here, and the run would be on the CPU"
        problems.append(Problem("cluster.gpu_per_node", text))
    return problems


def derive(stage: StageFacts, root: Path, gpus: Gpus | None = None) -> tuple[Plan, Findings]:
    """Derive the Plan of one stage whose files are in `root`; its notes are among the findings.

    `gpus` are those of a machine of the cluster; None: of this one.
    """
    findings, config = Findings(), stage.config
    present = num_gpus() if gpus is None else gpus.num
    if gpus is None and not present and not stage.asks_api and (why := why_no_gpu()):
        findings.note(f"device: the CPU, although this machine has a GPU: {why}")
    asked = findings.take(places_of(stage, present))
    engine = findings.take(choose_engine(stage, asked))
    places = asked.taken(engine.hosts)
    engine_keys = kind_named(engine.kind).keys
    findings.add(check_fates(stage, spread=places.spread, engine_keys=engine_keys))
    findings.add(note_places(stage, asked))
    lengths, steps = findings.take(lengths_of(stage)), findings.take(steps_of(stage))
    dtype = _dtype(stage, present)
    sync = findings.take(sync_of(stage, places, engine, steps, dtype))
    findings.add(_note_dtype(stage, dtype))
    findings.add(check_beat(stage, steps, sync.style))
    deterministic = findings.take(is_deterministic(stage, places, engine, steps, sync))
    findings.add(_check_explorer(stage))
    job_dir = root / stage.name if stage.name else root
    store = findings.take(store_of(stage, job_dir))
    findings.add(_note_engine(stage, places.spread or engine.hosts > 0, engine.runners))
    findings.add(note_idle(stage, steps))
    half = dtype == "bfloat16"
    free = gpus.memory if gpus else None
    if gpus is None and not places.elsewhere:
        free = gpu_bytes() if present else _memory_of_a_rank(places)
    request = request_of(lengths, places, engine, sync, half=half, free=free)
    if config.trainer.max_token_len_per_gpu is None:
        request = request._replace(tokens=fitting_tokens(stage, places, request))
        lengths = replace(lengths, max_token_len=request.tokens)
    memory = findings.take(plan_memory(stage, places, request))
    listen_address = findings.take(_listen_address(stage))
    device = "cuda" if present else "cpu"
    findings.add(check_kernels(stage, device, dtype, places.trainer_ranks))
    plan = Plan(
        config=config,
        stage_name=stage.name,
        model_from_stage=stage.model_from,
        mode=config.mode,
        colocated=stage.colocated,
        job_dir=job_dir,
        seed=config.seed,
        device=device,
        dtype=dtype,
        model_path=config.model.model_path,
        listen_address=listen_address,
        deterministic=deterministic,
        lengths=lengths,
        steps=steps,
        places=places,
        engine=engine,
        sync=sync,
        store=store,
        memory=memory,
        notes=tuple(findings.notes),
    )
    return plan, findings


def _dtype(stage: StageFacts, gpus: int) -> str:
    """Choose float32 on a CPU, where smaller formats are slower; else the dtype requested for the
    engine.
    """
    asked = stage.config.explorer.rollout_model.dtype
    if not gpus:
        return "float32"
    return "bfloat16" if asked == "auto" else asked


def _note_dtype(stage: StageFacts, dtype: str) -> Findings:
    """Note if a CPU, or the trainer, computes in another format than requested."""
    findings = Findings()
    asked = stage.config.explorer.rollout_model.dtype
    if asked == "float16" == dtype and stage.config.mode in ("both", "train"):
        findings.note(
            f"explorer.rollout_model.dtype ({asked}): the trainer computes in float32, since "
            "gradients of float16 overflow; with bfloat16 it needs half the memory and time"
        )
    if asked == "float16" != dtype:
        findings.note(f"explorer.rollout_model.dtype ({asked}): a CPU computes in float32")
    return findings


def _note_engine(stage: StageFacts, several: bool, runners: int) -> Findings:
    """Note if another engine is used than requested."""
    findings = Findings()
    key, model = "explorer.rollout_model", stage.config.explorer.rollout_model
    if stage.config.mode == "train" or stage.asks_api:
        return findings
    if model.engine_type == "remote" and not model.base_urls:
        findings.problem(
            f"{key}.base_urls",
            "is empty: engine_type remote needs the address of a server, such as "
            "[http://127.0.0.1:8000] (trireme rollout starts one)",
        )
    if model.base_urls and model.engine_type != "remote":
        findings.problem(f"{key}.engine_type", "is not remote, and base_urls is given")
    for url in model.base_urls:
        if not url.startswith(("http://", "https://")):
            findings.problem(f"{key}.base_urls", f"has {url!r}: expected http://HOST:PORT")
    if model.engine_num > 1 and not several:
        findings.note(
            f"{key}.engine_num ({model.engine_num}): one engine generates, and runners are "
            f"{model.engine_num} x {runners // model.engine_num}"
        )
    return findings


def _memory_of_a_rank(places: Places) -> int | None:
    """Return the share of each of the trainer's ranks, all on this machine, of its memory."""
    whole = machine.memory()
    return None if whole is None else whole // max(places.trainer_ranks, 1)


def _listen_address(stage: StageFacts) -> tuple[str, Findings]:
    """Choose the address of `mode: serve`: without a key only this machine may reach it."""
    findings = Findings()
    explorer = stage.config.explorer
    address, key = explorer.listen_address, "explorer.listen_address"
    if stage.config.mode != "serve" or explorer.rollout_model.api_key or address in _LOOPBACK:
        return address, findings
    if address == "0.0.0.0":
        findings.note(
            f"{key} ({address}): without explorer.rollout_model.api_key the server listens on "
            f"{_LOOPBACK[0]}, for this machine only"
        )
    else:
        findings.problem(
            key,
            f"is {address}: other machines need explorer.rollout_model.api_key, or {_LOOPBACK[0]}",
        )
    return _LOOPBACK[0], findings


def _check_explorer(stage: StageFacts) -> Findings:
    """Check the name of one of several explorers, which becomes part of ids and file names."""
    findings = Findings()
    name = stage.config.explorer.name
    fits = re.fullmatch(r"[\w-][\w.-]*", name) and name not in ("trainer", "stage")
    if stage.config.mode == "explore" and not fits:
        findings.problem(
            "explorer.name",
            f"is {name!r}: expected letters, digits, '_', '-' or '.', and neither trainer nor "
            "stage, since files are named after it",
        )
    return findings
