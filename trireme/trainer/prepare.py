"""Prepare: puts into a batch what a recipe's parts ask for, before the loss is taken.

In this order: experts and pairs, weights, the reference's scores, the trainer's own old
log-probabilities, values, token rewards less the KL penalty, advantages; then the critic learns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trireme.algorithms.part import Part
from trireme.algorithms.recipes import Recipe
from trireme.batch import Batch
from trireme.experience import Experience
from trireme.trainer.backend import TrainerBackend
from trireme.trainer.learning import Learning
from trireme.trainer.tokens import token_rewards, with_experts, with_pairs


def prepare(
    backend: TrainerBackend,
    recipe: Recipe,
    experiences: Sequence[Experience],
    batch: Batch,
    learning: Learning,
) -> tuple[Batch, dict[str, float]]:
    """The batch with all that its loss asks for, and metrics of what was done for it."""
    if recipe.schema == "dpo":
        batch = with_pairs(batch)
    if recipe.asks("expert"):
        batch = with_experts(batch, experiences)
    batch = batch.with_fields(weights=recipe.weights(batch))
    if recipe.needs_reference:
        batch = batch.with_fields(ref_logprobs=learning.reference(backend, batch))
    advantage = recipe.token_advantage
    if advantage is None:
        return batch, {}
    return _with_advantages(backend, recipe, advantage, experiences, batch, learning)


def _with_advantages(
    backend: TrainerBackend,
    recipe: Recipe,
    advantage: Part,
    experiences: Sequence[Experience],
    batch: Batch,
    learning: Learning,
) -> tuple[Batch, dict[str, float]]:
    """`advantages` and `returns`; the critic, where there is one, has learnt from them."""
    own: dict[str, Tensor] = {"sample_ids": batch.sample_ids}
    wanted = advantage.data()
    if not recipe.bypass_old_logprobs and ("old_logprobs" in wanted or recipe.penalty):
        own["old_logprobs"] = backend.logprobs(batch)
    metrics: dict[str, float] = {}
    if recipe.needs_critic:
        assert learning.critic is not None, "a recipe that asks for values gets a critic"
        own["values"] = learning.critic.values(batch)

    def lookup(name: str, asked_by: str) -> Tensor:
        return own[name] if name in own else batch.get(name, asked_by=asked_by)

    def has(name: str) -> bool:
        return name in own or name in batch.fields

    if "token_rewards" in wanted:
        own["token_rewards"] = token_rewards(experiences, batch, asked_by=advantage.label)
        if recipe.penalty:
            own["logprobs"] = lookup("old_logprobs", recipe.penalty.label)
            distance = recipe.penalty(lookup, has)
            coefficient = learning.coefficients["kl_penalty_fn"]
            own["token_rewards"] = own["token_rewards"] - coefficient * distance
            mean = float(distance.mean())
            metrics |= {"critic/kl_penalty": mean, "critic/kl_coef": coefficient}
            learning.adapt("kl_penalty_fn", mean, batch.num_samples)
    if "entropies" in wanted:
        names = ("logprobs", "entropies", "mean_discriminators")
        own |= dict(zip(names, backend.scores(batch), strict=True))
    found = advantage(lookup, has)
    advantages, returns = found if isinstance(found, tuple) else (found, found)
    if advantages.shape != batch.targets.shape:
        raise ValueError(
            f"algorithm.{advantage.label} gave {list(advantages.shape)}: expected one number per "
            f"token, [{batch.num_tokens}]"
        )
    batch = batch.with_fields(advantages=advantages, returns=returns)
    metrics["critic/advantage_abs_mean"] = float(advantages.abs().mean())
    if learning.critic is not None:
        metrics |= learning.critic.update(batch.with_fields(values=own["values"]))
    return batch, metrics
