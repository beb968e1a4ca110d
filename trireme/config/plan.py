"""Plan: all decisions derived from one stage of a Config, made before anything starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from trireme.config import Findings
from trireme.config.check import note_idle
from trireme.config.engine_kind import adapter_rank_of, choose_engine, kind_named
from trireme.config.external import ExternalModel, external_of
from trireme.config.launcher import LOCAL
from trireme.config.lookup import gpu_bytes, num_gpus
from trireme.config.memory import MemoryRequest, plan_memory
from trireme.config.placement import gpus_of, note_places, places_of
from trireme.config.schema import Config
from trireme.config.stages import StageFacts, check_fates, lengths_of, steps_of
from trireme.config.store import store_of
from trireme.config.sync import (
    SyncMethod,
    SyncStyle,
    against_exactness,
    check_beat,
    check_colocated,
    method_of,
    style_of,
    takes_lock_step,
)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Plan:
    """One stage, ready to run. Every length, size, path and choice that the parts need is here."""

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
    max_model_len: int
    max_prompt_tokens: int
    max_response_tokens: int
    min_response_tokens: int
    batch_size: int
    repeat_times: int
    train_batch_size: int
    own_batch: int
    """Experiences of a train step that come from the explorer; the rest is an expert's."""
    whole_steps: bool
    """Whether a train step learns from exactly one explore step, whatever its size."""
    explore_steps: int | None
    """None: nothing is explored, or only the loaded data determines it."""
    train_steps: int | None
    """None: the data or the workflow determines the number of train steps."""
    schedule_steps: int | None
    """The train steps that a learning-rate schedule spans, assuming one experience per rollout."""
    steps_per_epoch: int | None
    runners: int
    engine_urls: tuple[str, ...]
    """The rollout servers that generate; empty: the engine is embedded."""
    engine_key: str | None
    """The key that they require."""
    eval_interval: int
    """Explore steps between evaluations, a multiple of `sync_interval`."""
    max_token_len: int
    """Tokens of a micro-batch."""
    gradient_checkpointing: bool
    """Whether activations are recomputed in the backward pass."""
    memory: dict[str, int]
    """Bytes of device memory of a trainer's rank, by purpose; empty: not known."""
    engine_share: float | None
    """The share of a GPU for an engine that takes turns with the trainer; None: a default."""
    sync_method: SyncMethod
    adapter_rank: int
    """The largest rank of the LoRA adapter that is pushed alone; 0: all weights are pushed."""
    sync_style: SyncStyle
    sync_interval: int
    sync_offset: int
    lock_step: bool
    """Whether explorer and trainer take turns: neither works while the other does."""
    share_tensors: bool
    """Whether the engine reads the trainer's own tensors: only in lock-step and in float32, since
    an engine in bfloat16 would multiply in float32 with them."""
    deterministic: bool
    """Whether equal seeds give byte-equal weights."""
    buffer_type: str
    buffer_path: str
    """A store's URL, a queue's copy (URL or .jsonl), or a data set's path."""
    listen_address: str
    """The address on which `mode: serve` listens."""
    launcher: str
    """The launcher of the parts: a name in LAUNCHERS, or `local` if they are in one process."""
    nodes: int
    places_per_node: int
    """Devices that a run takes of each machine: GPUs, or CPU processes if there are none."""
    num_engines: int
    engine_size: int
    """Places of one engine."""
    auxiliary_places: int
    """Places of the auxiliary models in the explorer's process."""
    engine_kind: str
    """The kind of the engine, by its name in ENGINES."""
    engine_python: str | None
    """The interpreter of engine processes; None: that of the process that starts them."""
    engine_hosts: int
    """The number of engine processes that the local launcher starts; 0: the engine is embedded, or
    remote."""
    takes_turns: bool
    """Whether each engine process shares a device with a trainer's rank, and one rests while the
    other works."""
    trainer_ranks: int
    gpus: dict[str, int]
    """The GPUs of each role."""
    notes: tuple[str, ...]
    """Notes on settings that were mapped onto this machine, or that have no effect on it."""

    @property
    def root_dir(self) -> Path:
        """Return the folder of the whole job: `job_dir`, or the parent of a stage's folder."""
        return self.job_dir if self.stage_name is None else self.job_dir.parent

    @property
    def spread(self) -> bool:
        """True if a launcher starts each part in a process of its own."""
        return self.launcher != LOCAL

    @property
    def has_adapter(self) -> bool:
        """True if the trained weights may start out different from those that engines load."""
        return bool(self.config.model.lora_configs)

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


def derive(stage: StageFacts, root: Path, gpus: int | None = None) -> tuple[Plan, Findings]:
    """Derive the Plan of one stage whose files are in `root`; its notes are among the findings.

    `gpus` are those of a machine of the cluster; None: of this one.
    """
    findings = Findings()
    config, sync, explorer = stage.config, stage.config.synchronizer, stage.config.explorer
    counted, gpus = gpus, num_gpus() if gpus is None else gpus
    places = findings.take(places_of(stage, gpus))
    spread = places.spread
    named = config.cluster.ray_address not in ("auto", "", "local")
    elsewhere = counted is not None or (spread and named)
    engine = findings.take(choose_engine(stage, gpus, spread=spread))
    hosts = 0 if spread else engine.hosts
    findings.add(check_fates(stage, spread=spread, engine_keys=kind_named(engine.kind).keys))
    findings.add(note_places(stage, places, gpus))
    lengths, steps = findings.take(lengths_of(stage)), findings.take(steps_of(stage))
    style: SyncStyle = findings.take(style_of(stage, steps.own_batch))
    method: SyncMethod = findings.take(method_of(stage, spread, hosts))
    in_turns = takes_lock_step(stage, steps.own_batch, method)
    lock_step = in_turns and (places.paired or (not spread and not hosts))
    takes_turns = findings.take(
        check_colocated(stage, places, gpus, hosts=hosts, lock_step=lock_step)
    )
    inexact = against_exactness(stage, steps.own_batch, launcher=places.launcher, hosts=hosts)
    device, dtype = "cuda" if gpus else "cpu", findings.take(_dtype(stage, gpus))
    shares = lock_step and not spread and not config.model.lora_configs and dtype == "float32"
    shares = shares and engine.shares
    findings.add(check_beat(stage, steps, style, inexact))
    job_dir = root / stage.name if stage.name else root
    findings.add(_check_explorer(stage))
    buffer_type, buffer_path = findings.take(store_of(stage, job_dir))
    findings.add(_note_engine(stage, spread or hosts > 0))
    findings.add(note_idle(stage, steps))
    max_tokens = _max_tokens(stage, lengths.max_model_len)
    memory = findings.take(
        plan_memory(
            stage,
            places,
            MemoryRequest(
                tokens=max_tokens,
                length=lengths.max_model_len,
                device=device,
                half=dtype == "bfloat16",
                hosts=hosts or (places.num_engines if places.paired and engine.sleeps else 0),
                takes_turns=takes_turns,
                shared=shares,
                free=gpu_bytes() if gpus and not elsewhere else None,
            ),
        )
    )
    listen_address = findings.take(_listen_address(stage))
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
        batch_size=config.buffer.batch_size,
        repeat_times=config.algorithm.repeat_times,
        whole_steps=stage.whole_steps,
        runners=explorer.runner_per_model
        * max(places.num_engines, explorer.rollout_model.engine_num),
        engine_urls=tuple(explorer.rollout_model.base_urls) if stage.remote else (),
        engine_key=explorer.rollout_model.api_key,
        eval_interval=max(explorer.eval_interval // sync.sync_interval, 1) * sync.sync_interval,
        max_token_len=max_tokens,
        sync_method=method,
        adapter_rank=adapter_rank_of(stage, engine, method),
        sync_style=style,
        sync_interval=sync.sync_interval,
        sync_offset=sync.sync_offset,
        lock_step=lock_step,
        share_tensors=shares,
        deterministic=((lock_step and not inexact) or (stage.reads_file and not spread))
        and config.deterministic is not False,
        buffer_type=buffer_type,
        buffer_path=buffer_path,
        listen_address=listen_address,
        launcher=places.launcher,
        nodes=places.nodes if spread else 1,
        places_per_node=places.per_node if spread else 1,
        num_engines=places.num_engines if spread else max(hosts, 1),
        engine_size=places.engine_size if spread else 1,
        auxiliary_places=places.auxiliary,
        engine_kind=engine.kind,
        engine_python=engine.python,
        engine_hosts=hosts,
        takes_turns=takes_turns,
        trainer_ranks=places.trainer_ranks if spread else 1,
        gpus=gpus_of(places, gpus),
        notes=tuple(findings.notes),
        **lengths._asdict(),
        **steps._asdict(),
        **memory._asdict(),
    )
    return plan, findings


def _max_tokens(stage: StageFacts, longest: int) -> int:
    """Count the tokens of a rank's micro-batch: as requested, or two of the longest sequences."""
    trainer = stage.config.trainer
    asked, window = trainer.max_token_len_per_gpu, trainer.ulysses_sequence_parallel_size
    return asked or math.ceil(2 * longest / window)


def _dtype(stage: StageFacts, gpus: int) -> tuple[str, Findings]:
    """Choose float32 on a CPU, where smaller formats are slower; else the dtype requested for the
    engine.
    """
    findings = Findings()
    asked = stage.config.explorer.rollout_model.dtype
    if gpus:
        return ("bfloat16" if asked == "auto" else asked), findings
    if asked == "float16":
        findings.note(f"explorer.rollout_model.dtype ({asked}): a CPU computes in float32")
    return "float32", findings


def _note_engine(stage: StageFacts, several: bool) -> Findings:
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
            f"{model.engine_num} x {stage.config.explorer.runner_per_model}"
        )
    return findings


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
            f"{_LOOPBACK[0]}, for this machine alone"
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
