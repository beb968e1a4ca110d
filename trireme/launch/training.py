"""Training: makes a plan's backend and critic, on one rank or several, and the synchronizer.

Whatever starts the processes of several ranks (Ray, a launcher of subprocesses, torchrun) needs to
tell each only the plan, the model and its `RankSpec`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.buffer.buffer import Demand
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.lookup import located, model_config
from trireme.engines.device import Device
from trireme.engines.engine import Engine
from trireme.engines.remote import RemoteEngine
from trireme.engines.servers import Renew
from trireme.launch.data import make_trained_tokens
from trireme.launch.stage import Stage
from trireme.sync.checkpoint import PolledSync
from trireme.sync.colocated import ColocatedSync
from trireme.sync.probe import Probe, WeightSource
from trireme.sync.push import GroupSync, HttpSync, MemorySync
from trireme.sync.synchronizer import Push, Synchronizer
from trireme.trainer.backend import Backend, TrainSettings
from trireme.trainer.critic import Critic
from trireme.trainer.leader import Commands, Leader, follow
from trireme.trainer.learning import TrainState
from trireme.trainer.lora import AdapterSource, Lora
from trireme.trainer.pairs import EnginePairs
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.step import commands


@dataclass(frozen=True)
class Models:
    """What is trained: the policy, and what train steps share beside it."""

    backend: Backend
    train_state: TrainState


def load_models(stage: Stage, spec: RankSpec | None = None) -> Models:
    """The trained models, where the checkpoint left them.

    `spec`: that of rank 0, where several ranks train; the others run `follow_plan`.
    """
    parts = stage.plan, stage.model_path, stage.recipe
    if spec is not None:
        ranks = TrainerRanks(*parts, spec)
        stage.held.callback(ranks.close)
        models = Models(ranks.backend, ranks.train_state)
    else:
        models = Models(make_backend(*parts), make_learning(*parts))
    if (saved := stage.resumed) is not None:
        models.backend.load(saved.actor)
        if state := saved.run_state.get("learning"):
            models.train_state.load_state(state)
        if models.train_state.critic is not None:
            models.train_state.load_critic(models.backend, stage.folder.critic_dir(saved.step))
    tokens = models.train_state.tokens = make_trained_tokens(stage.plan, stage.folder)
    if tokens is not None:
        stage.held.callback(tokens.close)
        tokens.rewind(saved.step if saved else 0)
    return models


def make_backend(
    plan: Plan,
    model_path: str,
    recipe: Recipe,
    ranks: Ranks | None = None,
    leader: Leader | None = None,
) -> Backend:
    """The trained model with its optimizer, and the reference where the recipe needs one.

    `leader` on the first of several ranks.
    """
    settings = _settings(plan)
    return Backend(model_path, settings, ranks, reference=recipe.needs_reference, leader=leader)


def _settings(plan: Plan) -> TrainSettings:
    config = plan.config
    lora = None
    if loras := config.model.lora_configs or []:
        targets, excluded = loras[0].target_modules, loras[0].exclude_modules
        folder = loras[0].path and located(loras[0].path, "models")
        if loras[0].path and folder is None:  # on another machine than the one that checked it
            raise ValueError(f"model.lora_configs[0].path ({loras[0].path}) is no folder here")
        lora = Lora(
            rank=loras[0].lora_rank,
            alpha=loras[0].lora_alpha,
            rslora=loras[0].use_rslora,
            dora=loras[0].use_dora,
            path=str(folder) if folder else None,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            exclude_modules=tuple(excluded) if isinstance(excluded, list) else excluded,
        )
    return TrainSettings(
        optimizer=config.algorithm.optimizer,
        max_token_len=plan.max_token_len,
        grad_clip=config.trainer.grad_clip,
        total_steps=plan.schedule_steps and plan.schedule_steps * config.algorithm.num_iterations,
        device=plan.device,
        dtype=plan.dtype,
        lora=lora,
        gradient_checkpointing=plan.gradient_checkpointing,
        attn_implementation=config.trainer.attn_implementation,
        compile=config.trainer.use_torch_compile,
        offload=config.trainer.offload,
        trust_remote_code=config.model.trust_remote_code,
        seed=plan.seed,
        export_dtype=_export_dtype(plan),
        peak_tflops=config.trainer.peak_tflops,
    )


def _export_dtype(plan: Plan) -> torch.dtype:
    """Of the weights that others load: the model's own, by its config.json. In a file with stages
    as they are trained: the next stage goes on from them, and rounding would undo small steps.
    """
    facts = model_config(plan.model_path)
    facts = {**(facts.get("text_config") or {}), **facts}
    name = facts.get("dtype") or facts.get("torch_dtype")
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return torch.float32 if plan.stage_name is not None else known.get(str(name), torch.float32)


def make_learning(
    plan: Plan, model_path: str, recipe: Recipe, ranks: Ranks | None = None
) -> TrainState:
    """What train steps share; the value model, where the recipe has one, begins at its own path,
    else at the policy's.
    """
    config = plan.config
    if not recipe.needs_critic:
        return TrainState(recipe)
    critic_config = config.algorithm.critic
    critic = Critic(
        config.model.critic_model_path or model_path,
        replace(
            _settings(plan), optimizer=critic_config.optimizer, lora=None
        ),  # it is trained whole
        ranks,
        clip_range=critic_config.cliprange_value,
    )
    return TrainState(recipe, critic, critic_warmup=critic_config.warmup_steps)


def make_synchronizer(
    plan: Plan,
    push: Push,
    *,
    demand: Demand,
    version: int,
    step: int,
    pushed_step: int | None,
) -> Synchronizer:
    """Both sides in this process, or the trainer's side for explorers elsewhere; begins at
    `version`, `step` and `pushed_step`.
    """
    return Synchronizer(
        push,
        style="trainer_driven" if plan.mode == "train" else plan.sync_style,
        interval=plan.sync_interval,
        offset=plan.sync_offset,
        timeout=plan.config.synchronizer.sync_timeout,
        lock_step=plan.lock_step,
        demand=demand,
        version=version,
        step=step,
        pushed_step=pushed_step,
    )


def restarts_by(
    sync: Synchronizer | PolledSync, engine: Engine | None, renew: Renew | None = None
) -> None:
    """Engines that are started again get their weights by `renew`, that of `sync` without one."""
    if isinstance(engine, RemoteEngine):
        sync.persist = engine.servers.persist
        engine.servers.renew = renew or sync.renew


def make_polled_sync(plan: Plan, engine: Engine, folder: JobFolder) -> PolledSync:
    """The explorer's side, for a trainer of another process."""
    return PolledSync(
        engine,
        folder,
        style=plan.sync_style,
        interval=plan.sync_interval,
        offset=plan.sync_offset,
        timeout=plan.config.synchronizer.sync_timeout,
        dtype=plan.dtype,
    )


def push_source(plan: Plan, backend: Backend) -> WeightSource:
    """What is pushed: all weights, or where the engine has the base, the adapter alone."""
    return AdapterSource(backend) if plan.adapter_rank else backend


def make_pairs(plan: Plan, backend: Backend) -> EnginePairs | None:
    """This rank's half of the pairs of ranks and engines; None where they share no device."""
    if not plan.takes_turns:
        return None
    trainer = plan.config.trainer
    return EnginePairs(
        backend,
        part="adapter" if plan.adapter_rank else "merged",
        parks=trainer.park_optimizer and not trainer.offload,
    )


def make_push(
    plan: Plan,
    source: WeightSource,
    engine: Engine,
    device: Device,
    host: str,
    probe: Probe,
    pairs: EnginePairs | None,
) -> Push:
    """Of `push_source`, from this process to its engine: through memory, by HTTP, over a process
    group that meets at `host`, or from each of the `pairs`' ranks to the engine on its device.
    """
    if pairs is not None:
        assert isinstance(engine, RemoteEngine)
        return ColocatedSync(source, pairs, engine, device, dtype=plan.dtype, probe=probe).push
    if plan.sync_method == "nccl":
        assert isinstance(engine, RemoteEngine)
        return GroupSync(
            source,
            engine,
            device,
            dtype=plan.dtype,
            probe=probe,
            transport="nccl" if plan.device == "cuda" else "gloo",
            host=host,
        ).push
    if isinstance(engine, RemoteEngine):
        return HttpSync(source, engine, device, dtype=plan.dtype, probe=probe).push
    return MemorySync(
        source,
        engine,
        device,
        shared=plan.share_tensors,
        lock_step=plan.lock_step,
        dtype=plan.dtype,
        probe=probe,
    ).push


logger = logging.getLogger(__name__)


class TrainerRanks:
    """Rank 0, and through it all others."""

    def __init__(self, plan: Plan, model_path: str, recipe: Recipe, spec: RankSpec) -> None:
        """Waits for the other ranks."""
        logger.info("%d trainer ranks meet at %s", spec.world, spec.address)
        self._group = Ranks(spec)
        self._leader = Leader(self._group)

        def load() -> tuple[Backend, TrainState]:
            group = self._group
            backend = make_backend(plan, model_path, recipe, group, self._leader)
            return backend, make_learning(plan, model_path, recipe, group)

        self.backend, self.train_state = self._leader.guarded(load, doing="loading")

    def close(self) -> None:
        """Send the others home."""
        self._leader.close()


def make_rank_spec(plan: Plan, rank: int, world: int, address: str) -> RankSpec:
    """The spec of one rank by the plan's keys; `address` is host:port of rank 0, free to take."""
    trainer = plan.config.trainer
    return RankSpec(
        rank,
        world,
        address,
        sequence=trainer.ulysses_sequence_parallel_size,
        shards=trainer.fsdp_size,
        device=plan.device,
        timeout=trainer.collective_timeout,
    )


def follow_plan(plan: Plan, model_path: str, spec: RankSpec) -> None:
    """Be one of the other ranks until rank 0 says stop.

    The user's plugins must be loaded. Raises what went wrong here, having told rank 0.
    """
    recipe = get_recipe(plan.config.algorithm)

    def make(ranks: Ranks) -> Commands:
        backend = make_backend(plan, model_path, recipe, ranks)
        steps = commands(backend, recipe, make_learning(plan, model_path, recipe, ranks))
        pairs = make_pairs(plan, backend)
        return {**steps, **pairs.commands()} if pairs else steps

    follow(spec, make)
