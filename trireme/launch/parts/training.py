"""Training: the algorithm of a plan, the models that it trains, and their optimizers."""

from __future__ import annotations

from typing import Any

from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.config import Plan
from trireme.trainer.backend import TorchBackend
from trireme.trainer.critic import Critic
from trireme.trainer.fsdp2 import Fsdp2Backend
from trireme.trainer.learning import Learning
from trireme.trainer.lora import Lora
from trireme.trainer.orders import Orders
from trireme.trainer.ranks import Ranks


def make_recipe(plan: Plan) -> Recipe:
    """The algorithm of the plan."""
    return get_recipe(plan.config.algorithm)


def make_backend(plan: Plan, model_path: str, recipe: Recipe) -> TorchBackend:
    """The trained model with its optimizer, and the reference where the recipe needs one."""
    return TorchBackend(model_path, device=plan.device, **_backend_options(plan, recipe))


def make_sharded_backend(
    plan: Plan, model_path: str, recipe: Recipe, ranks: Ranks, orders: Orders | None = None
) -> Fsdp2Backend:
    """The same over several ranks; `orders` on the first one."""
    return Fsdp2Backend(
        model_path,
        ranks=ranks,
        orders=orders,
        offload=plan.config.trainer.offload,
        **_backend_options(plan, recipe),
    )


def _backend_options(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """What every backend takes."""
    config = plan.config
    loras = config.model.lora_configs or []
    lora = None
    if loras:
        targets, excluded = loras[0].target_modules, loras[0].exclude_modules
        lora = Lora(
            rank=loras[0].lora_rank,
            alpha=loras[0].lora_alpha,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            exclude_modules=tuple(excluded) if isinstance(excluded, list) else excluded,
        )
    return {
        "optimizer": config.algorithm.optimizer,
        "max_token_len": plan.max_token_len,
        "total_steps": plan.schedule_steps,
        "dtype": plan.dtype,
        "grad_clip": config.trainer.grad_clip,
        "lora": lora,
        "gradient_checkpointing": config.trainer.enable_gradient_checkpointing,
        "reference": recipe.needs_reference,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": plan.seed,
    }


def make_learning(
    plan: Plan, model_path: str, recipe: Recipe, ranks: Ranks | None = None
) -> Learning:
    """What train steps share; the value model, where the recipe has one, begins at its own path,
    else at the policy's.
    """
    config = plan.config
    if not recipe.needs_critic:
        return Learning(recipe)
    critic = Critic(
        config.model.critic_model_path or model_path,
        optimizer=config.algorithm.critic.optimizer,
        max_token_len=plan.max_token_len,
        total_steps=plan.schedule_steps,
        device=plan.device,
        ranks=ranks,
        dtype=plan.dtype,
        grad_clip=config.trainer.grad_clip,
        clip_range=config.algorithm.critic.cliprange_value,
        gradient_checkpointing=config.trainer.enable_gradient_checkpointing,
        offload=config.trainer.offload,
        trust_remote_code=config.model.trust_remote_code,
    )
    return Learning(recipe, critic, critic_warmup=config.algorithm.critic.warmup_steps)
