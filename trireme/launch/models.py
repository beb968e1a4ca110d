"""Models: loads the trained models, the policy and a critic, on one rank or several.

Whatever starts the processes of several ranks (a launcher of subprocesses, torchrun) passes
each only the plan, the model and its `RankSpec`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.config import Plan
from trireme.config.lookup import located, model_config
from trireme.engines.device import expand_segments
from trireme.launch.copies import make_trained_tokens
from trireme.launch.servers import engine_servers
from trireme.launch.stage import Stage
from trireme.sync.push import Pairs
from trireme.trainer.backend import Backend
from trireme.trainer.critic import Critic
from trireme.trainer.leader import Commands, Leader, follow
from trireme.trainer.learning import TrainState
from trireme.trainer.led import Led, LedModels, Models, commands
from trireme.trainer.lora import Lora, Part
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.settings import TrainSettings

logger = logging.getLogger(__name__)

SWITCH_S = 5e-4
"""Seconds after which Python's interpreter goes on with another thread. Torch's launches give it up
at each operator, and a thread that computes, such as one that reads JSON, takes Python's 5 ms each
time: the GPU would wait."""
FIXED_SUMS = {
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "cpu": {"MKL_CBWR": "AUTO"},
}
"""Variables of a device's matrix library, read at its first product: without them cuBLAS may choose
another order of a sum each time, and MKL by the addresses of the factors if one has few rows."""


def load_models(stage: Stage, spec: RankSpec | None = None) -> Models:
    """Load the trained models in the state of the checkpoint.

    `spec`: that of rank 0 if several ranks train; the others run `follow_plan`.
    """
    parts = stage.plan, stage.model_path, stage.recipe
    if spec is None:
        models = make_models(*parts)
    else:
        models, leader = lead_ranks(*parts, spec)
        stage.closing.callback(leader.close)
    if (saved := stage.resumed) is not None:
        models.backend.load(saved.actor)
        if state := saved.run_state.get("learning"):
            models.train_state.load_state(state)
        if models.train_state.critic is not None:
            models.load_critic(stage.folder.critic_dir(saved.step))
    tokens = models.train_state.tokens = make_trained_tokens(stage.plan, stage.folder)
    if tokens is not None:
        stage.closing.callback(tokens.close)
        tokens.rewind(saved.step if saved else 0)
    return models


def make_models(
    plan: Plan,
    model_path: str,
    recipe: Recipe,
    ranks: Ranks | None = None,
    make: Callable[..., Backend] = Backend,
) -> Models:
    """Make the policy with its optimizer, and its reference and value model if the recipe needs
    them. The value model begins at its own path, else at the policy's. `make` makes the policy's
    backend.
    """
    config, settings = plan.config, _settings(plan)
    if plan.device == "cuda":
        sys.setswitchinterval(SWITCH_S)
    if plan.device == "cuda" and not plan.places.spread:  # actors have it in the environment
        # CUDA cannot hand expandable segments to an engine
        expand_segments(not plan.sync.takes_turns)
    if plan.deterministic:
        for name, value in FIXED_SUMS.get(plan.device, {}).items():
            os.environ.setdefault(name, value)
    if not recipe.needs_critic:
        backend = make(model_path, settings, ranks, reference=recipe.needs_reference)
        return Models(backend, recipe, TrainState(recipe))
    options = config.algorithm.critic
    # its schedule ends with the run, though it makes no steps while the value model warms up
    waits = options.warmup_steps * config.algorithm.num_iterations
    total = settings.total_steps and max(settings.total_steps - waits, 1)
    policy = replace(settings, total_steps=total)
    backend = make(model_path, policy, ranks, reference=recipe.needs_reference)
    critic = Critic(
        config.model.critic_model_path or model_path,
        # trained in full; its routers choose by themselves
        replace(settings, optimizer=options.optimizer, lora=None, replays_routing=False),
        ranks,
        clip_range=options.cliprange_value,
    )
    return Models(backend, recipe, TrainState(recipe, critic, critic_warmup=options.warmup_steps))


def lead_ranks(
    plan: Plan, model_path: str, recipe: Recipe, spec: RankSpec
) -> tuple[Models, Leader]:
    """Make rank 0's models and, through their leader, those of all other ranks. Waits for them."""
    logger.info("%d trainer ranks connect at %s", spec.world, spec.address)
    ranks = Ranks(spec)
    leader = Leader(ranks)
    work = partial(make_models, plan, model_path, recipe, ranks, make=partial(Led, leader))
    own = leader.guarded(work, doing="loading")
    return LedModels(leader, own.backend, recipe, own.train_state), leader


def _settings(plan: Plan) -> TrainSettings:
    config = plan.config
    lora = None
    if loras := config.model.lora_configs or []:
        targets, excluded = loras[0].target_modules, loras[0].exclude_modules
        folder = loras[0].path and located(loras[0].path, "models")
        if loras[0].path and folder is None:  # on another machine than the one that checked it
            raise ValueError(f"model.lora_configs[0].path ({loras[0].path}) is not a folder here")
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
        max_token_len=plan.lengths.max_token_len,
        grad_clip=config.trainer.grad_clip,
        total_steps=plan.steps.schedule and plan.steps.schedule * config.algorithm.num_iterations,
        device=plan.device,
        dtype=plan.dtype,
        lora=lora,
        gradient_checkpointing=plan.memory.gradient_checkpointing,
        attn_implementation=config.trainer.attn_implementation,
        compile=config.trainer.use_torch_compile,
        offload=config.trainer.offload,
        trust_remote_code=config.model.trust_remote_code,
        seed=plan.seed,
        deterministic=plan.deterministic,
        export_dtype=_export_dtype(plan),
        peak_tflops=config.trainer.peak_tflops,
        moves_reference=config.algorithm.sync_ref_model,
        trains_tower=not config.model.freeze_vision_tower,
        trains_projector=not config.model.freeze_projector,
        replays_routing=config.algorithm.enable_router_replay,
    )


def _export_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype of exported weights: the model's own, by its config.json. In a file with
    stages, the training dtype: the next stage resumes from them, and rounding would undo small
    steps.
    """
    facts = model_config(plan.model_path)
    facts = {**(facts.get("text_config") or {}), **facts}
    name = facts.get("dtype") or facts.get("torch_dtype")
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return torch.float32 if plan.stage_name is not None else known.get(str(name), torch.float32)


def pushed_part(plan: Plan, backend: Backend) -> Part:
    """Return the part of the weights that pushes send: engines that the run starts have the rest
    from the model's folder.
    """
    if plan.sync.adapter_rank:
        return "adapter"
    return "text" if backend.towers and not plan.on_users_servers else "merged"


def make_pairs(plan: Plan, models: Models) -> Pairs | None:
    """Make this rank's half of the pairs of ranks and engines; None if they share no device."""
    if not plan.sync.takes_turns:
        return None
    trainer = plan.config.trainer
    own = engine_servers().pair(
        models.backend,
        part=pushed_part(plan, models.backend),
        parks=trainer.park_optimizer and not trainer.offload,
    )
    return models.pairs(own)


def make_rank_spec(plan: Plan, rank: int, world: int, address: str) -> RankSpec:
    """Make the spec of one rank from the plan's keys; `address` is host:port of rank 0, a free
    port.
    """
    trainer = plan.config.trainer
    return RankSpec(
        rank,
        world,
        address,
        sequence=trainer.ulysses_sequence_parallel_size,
        shards=trainer.fsdp_size,
        device=plan.device,
        timeout=trainer.collective_timeout,
        lost_after=plan.config.cluster.heartbeat_timeout,
    )


def follow_plan(plan: Plan, model_path: str, spec: RankSpec) -> None:
    """Run as one of the other ranks until rank 0 stops it.

    The user's plugins must be loaded. Raises local errors after reporting them to rank 0.
    """
    recipe = get_recipe(plan.config.algorithm)

    def make(ranks: Ranks) -> Commands:
        models = make_models(plan, model_path, recipe, ranks)
        return commands(models, make_pairs(plan, models))

    follow(spec, make)
