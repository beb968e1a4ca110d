"""Learning: prepares each batch before its loss, and stores the state that a run's train steps
share.

The shared state is the critic, adaptive coefficients, and the number of steps. A resume needs
`state`. The reference scores a data set's row again in every epoch: a score's last bits depend on
the batch, so that stored scores would make a resumed run differ from an uninterrupted one.

A batch gets, in this order: experts, pairs and labels, weights, the reference's scores, the
trainer's old log-probabilities, values, rewards less the KL penalty, advantages; then the critic
learns. Values that a loss selects or measures over the whole batch are renewed before each
optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trireme.algorithms.assign import scores_less
from trireme.algorithms.kl import adapted, top_entropy
from trireme.algorithms.part import Part
from trireme.algorithms.recipes import Recipe
from trireme.batch import Batch, Columns, flatten
from trireme.buffer.trained import TrainedTokens
from trireme.config.options import parameters_of
from trireme.experience import EID, Experience
from trireme.pictures import album
from trireme.trainer.backend import Backend
from trireme.trainer.critic import Critic


class TrainState:
    """The state that a run's train steps share and change."""

    def __init__(
        self, recipe: Recipe, critic: Critic | None = None, *, critic_warmup: int = 0
    ) -> None:
        """`critic` if `recipe.needs_critic`; for `critic_warmup` steps only the critic learns."""
        self.critic = critic
        self._critic_warmup = critic_warmup if critic is not None else 0
        self.steps = 0
        self.tokens: TrainedTokens | None = None
        """The tokens of the last step, for people to look at."""
        self.coefficients = {kind: part.coefficient for kind, part in recipe.parts.items()}
        self._settings = {kind: part.settings for kind, part in recipe.parts.items()}

    @property
    def trains_policy(self) -> bool:
        """True if the policy learns in this step, and not only the critic."""
        return self.steps >= self._critic_warmup

    def step(self) -> Tensor:
        """The number of steps before this one, for a loss or an advantage that asks for `step`."""
        return torch.tensor(self.steps)

    def adapt(self, kind: str, divergence: float, count: int) -> None:
        """Move a KL coefficient towards its target, if it is adaptive."""
        settings = self._settings[kind]
        if settings.get("adaptive"):
            self.coefficients[kind] = adapted(
                self.coefficients[kind],
                divergence,
                count,
                target_kl=float(settings["target_kl"]),
                horizon=float(settings["horizon"]),
            )

    def state(self) -> dict[str, Any]:
        """Return JSON values; the critic's tensors are in the checkpoint's own folder."""
        return {"steps": self.steps, "coefficients": dict(self.coefficients)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.steps = state["steps"]
        for kind, coefficient in state["coefficients"].items():
            if self._settings.get(kind, {}).get("adaptive"):  # others keep their settings
                self.coefficients[kind] = coefficient


def prepare(
    backend: Backend,
    recipe: Recipe,
    experiences: Sequence[Experience],
    batch: Batch,
    train_state: TrainState,
) -> tuple[Batch, dict[str, float]]:
    """Add all inputs of the loss to the batch; returns it with metrics of this work."""
    if recipe.schema == "dpo":
        batch = with_pairs(batch)
    experts = None
    if recipe.asks("expert"):
        experts = _flags(experiences, key="is_expert", default=False)
        batch = batch.with_fields(expert=experts.index_select(0, batch.sample_ids))
    if recipe.schema == "kto":
        desirable = _flags(experiences, key="desirable")
        batch = batch.with_fields(desirable=desirable.index_select(0, batch.sample_ids))
    batch = batch.with_fields(weights=recipe.weights(batch, experts))
    if recipe.needs_reference:
        batch = batch.with_fields(ref_logprobs=backend.logprobs(batch, reference=True))
    metrics: dict[str, float] = {}
    if advantage := recipe.token_advantage:
        batch, metrics = _with_advantages(
            backend, recipe, advantage, experiences, batch, train_state
        )
    elif recipe.penalty:  # of whole explore steps, in which no expert's samples are
        batch, metrics = _with_group_advantages(backend, recipe, experiences, batch, train_state)
    if recipe.keeps_old_logprobs:
        batch = batch.with_fields(trainer_logprobs=backend.logprobs(batch))
    batch, selected = renewed(backend, recipe, experiences, batch)
    return batch, metrics | selected


def renewed(
    backend: Backend, recipe: Recipe, experiences: Sequence[Experience], batch: Batch
) -> tuple[Batch, dict[str, float]]:
    """Update the inputs of the loss that depend on the weights, before each optimizer step."""
    if recipe.asks("reference_point"):
        point = reference_point(backend, experiences)
        batch = batch.with_fields(
            reference_point=torch.full((batch.num_tokens,), point, dtype=torch.float32)
        )
    return with_selected(backend, recipe, batch)


def reference_point(backend: Backend, experiences: Sequence[Experience]) -> float:
    """Compute KTO's z: the mean over prompts of sum log(p / p_ref) of the reply to the prompt
    before, the first prompt's being the last reply; at least 0. A single experience gives z = 0.

    A row is cut at the length of the longest one, which the model can read.
    """
    if len(experiences) < 2:
        return 0.0
    longest = max(len(e.tokens) for e in experiences)
    rows = []
    for e, other in zip(experiences, [*experiences[-1:], *experiences[:-1]], strict=True):
        begin, theirs = _first_trained(e), _first_trained(other)
        tokens = torch.cat([e.tokens[:begin], other.tokens[theirs:]])[:longest]
        mask = torch.cat([torch.zeros(begin, dtype=torch.bool), other.mask[theirs:]])[:longest]
        pictures = album([*e.pictures, *other.pictures]).values()
        rows.append(
            Experience(tokens, mask=mask, temperature=e.temperature, eid=e.eid, pictures=pictures)
        )
    batch = flatten(rows)
    if not batch.num_tokens:
        return 0.0
    gains = backend.logprobs(batch) - backend.logprobs(batch, reference=True)
    return max(float(gains.double().sum()) / batch.num_samples, 0.0)


def _first_trained(e: Experience) -> int:
    trained = e.mask.nonzero()
    return int(trained[0]) if len(trained) else len(e.tokens)


def with_selected(backend: Backend, recipe: Recipe, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """Add `selected` [M], the tokens that the policy learns from, if the recipe selects; the metric
    is the share that it leaves out.
    """
    if not recipe.selects:
        return batch, {}
    selected = _selected(backend, recipe, batch)
    unselected = float((selected == 0).float().mean())
    return batch.with_fields(selected=selected), {"actor/unselected": unselected}


def _selected(backend: Backend, recipe: Recipe, batch: Batch) -> Tensor:
    """Return the factors of each entry's policy loss [M], mostly 0 or 1. They are chosen from the
    whole batch, before its gradient: choosing per micro-batch would make the loss depend on how the
    batch is cut. An expert's tokens are not compared by entropy, and all stay.
    """
    selected = torch.ones(batch.num_tokens, dtype=torch.bool)
    if recipe.top_entropy < 1:
        logprobs, entropies, _ = backend.scores(batch)
        own = ~batch.fields.get("expert", torch.zeros_like(selected))
        if bool(own.any()):
            selected[own] = top_entropy(entropies[own], recipe.top_entropy)
    else:
        logprobs = backend.logprobs(batch)
    loss = recipe.policy_loss
    if not loss.marked("selects"):
        return selected
    given = {"logprobs": logprobs, "sample_ids": batch.sample_ids}
    groups = numbered(batch.groups)
    given["group_ids"] = torch.tensor(groups)[batch.sample_ids]
    given["samples_per_group"] = torch.tensor(len(groups) / len(set(groups)), dtype=torch.float32)
    if not recipe.bypass_old_logprobs:
        given["old_logprobs"] = batch.fields.get("trainer_logprobs", logprobs)
    choose = getattr(loss.function, "selects")  # noqa: B009 (an attribute of a function)
    known = parameters_of(choose)
    options = {name: value for name, value in loss.options.items() if name in known}
    chosen = replace(loss, function=choose, options=options)
    return selected * chosen(Columns(given, batch))


def numbered(names: Sequence[str]) -> list[int]:
    """Number the names; equal names get the number of the first of them."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _with_advantages(
    backend: Backend,
    recipe: Recipe,
    advantage: Part,
    experiences: Sequence[Experience],
    batch: Batch,
    train_state: TrainState,
) -> tuple[Batch, dict[str, float]]:
    """Add `advantages` and `returns`, which are 0 for an expert's samples: they have no reward, and
    neither a baseline nor a critic learns from them.
    """
    experts = _flags(experiences, key="is_expert", default=False)
    compute = partial(_own_advantages, backend, recipe, advantage, train_state=train_state)
    if not experts.any():
        return compute(experiences, batch)
    entries = ~experts[batch.sample_ids]
    names = "advantages", "returns"
    found = {name: torch.zeros(batch.num_tokens, dtype=torch.float32) for name in names}
    metrics: dict[str, float] = {}
    if bool(entries.any()):
        samples = (~experts).nonzero().squeeze(1).tolist()
        part, metrics = compute([experiences[i] for i in samples], batch.select(samples))
        for name, values in found.items():
            values[entries] = part.fields[name].float()
    return batch.with_fields(**found), metrics


def _own_advantages(
    backend: Backend,
    recipe: Recipe,
    advantage: Part,
    experiences: Sequence[Experience],
    batch: Batch,
    train_state: TrainState,
) -> tuple[Batch, dict[str, float]]:
    """Add `advantages` and `returns`; if there is a critic, it has learned from them."""
    given: dict[str, Tensor] = {"sample_ids": batch.sample_ids}
    given["step"] = train_state.step()
    wanted = advantage.data()
    if not recipe.bypass_old_logprobs and ("old_logprobs" in wanted or recipe.penalty):
        given["old_logprobs"] = backend.logprobs(batch)
    metrics: dict[str, float] = {}
    if recipe.needs_critic:
        assert train_state.critic is not None, "a recipe that asks for values gets a critic"
        given["values"] = train_state.critic.values(batch)

    if "token_rewards" in wanted:
        given["token_rewards"] = token_rewards(experiences, batch, asked_by=advantage.label)
        if recipe.penalty:
            penalties, measured = _penalties(recipe, batch, given, train_state)
            given["token_rewards"] = given["token_rewards"] - penalties
            metrics |= measured

    if "entropies" in wanted:
        names = ("logprobs", "entropies", "mean_discriminators")
        given |= dict(zip(names, backend.scores(batch), strict=True))
    computed = advantage(Columns(given, batch))
    advantages, returns = computed if isinstance(computed, tuple) else (computed, computed)
    if advantages.shape != batch.targets.shape:
        raise ValueError(
            f"algorithm.{advantage.label} gave {list(advantages.shape)}: expected one number per "
            f"token, [{batch.num_tokens}]"
        )
    for what, values in (("", advantages), ("returns of ", returns)):
        _refuse_not_finite(f"algorithm.{advantage.label} gave {what}", values, batch)
    batch = batch.with_fields(advantages=advantages, returns=returns)
    metrics["critic/advantage_abs_mean"] = float(advantages.abs().mean())
    if train_state.critic is not None:
        for _ in range(recipe.num_iterations):
            metrics |= train_state.critic.update(batch.with_fields(values=given["values"]))
    return batch, metrics


def _penalties(
    recipe: Recipe, batch: Batch, given: dict[str, Tensor], train_state: TrainState
) -> tuple[Tensor, dict[str, float]]:
    """Return the KL subtracted from the reward of each entry [M], and metrics. Columns of `given`
    take precedence over the batch's own.
    """
    part = recipe.penalty
    assert part is not None, "a recipe without one takes nothing off"
    old = given.get("old_logprobs")
    logprobs = batch.get("old_logprobs", asked_by=part.label) if old is None else old
    distance = part(Columns({"logprobs": logprobs}, batch))
    coefficient = train_state.coefficients["kl_penalty_fn"]
    mean = float(distance.mean())
    train_state.adapt("kl_penalty_fn", mean, batch.num_samples)
    return coefficient * distance, {"critic/kl_penalty": mean, "critic/kl_coef": coefficient}


def _with_group_advantages(
    backend: Backend,
    recipe: Recipe,
    experiences: Sequence[Experience],
    batch: Batch,
    train_state: TrainState,
) -> tuple[Batch, dict[str, float]]:
    """Recompute `advantages` of whole groups after the sum of the KL over a run is subtracted from
    their rewards.
    """
    own = {} if recipe.bypass_old_logprobs else {"old_logprobs": backend.logprobs(batch)}
    penalties, metrics = _penalties(recipe, batch, own, train_state)
    costs = torch.zeros(batch.num_samples, dtype=torch.float32)
    costs.index_add_(0, batch.sample_ids, penalties)
    part = recipe.parts["advantage_fn"]
    advantages = scores_less(part, experiences, costs)[batch.sample_ids]
    _refuse_not_finite(f"algorithm.{part.label} gave ", advantages, batch)
    batch = batch.with_fields(advantages=advantages, returns=advantages)
    return batch, metrics | {"critic/advantage_abs_mean": float(advantages.abs().mean())}


def _refuse_not_finite(whose: str, values: Tensor, batch: Batch) -> None:
    """Raise ValueError naming the first token without a finite number."""
    broken = (~values.isfinite()).nonzero()
    if len(broken):
        entry = int(broken[0])
        raise ValueError(
            f"{whose}{values[entry].item():g} for {len(broken)} of {batch.num_tokens} tokens, "
            f"first for token {int(batch.positions[entry])} of experience "
            f"{batch.eid_of(entry)}: expected finite numbers"
        )


def token_rewards(experiences: Sequence[Experience], batch: Batch, *, asked_by: str) -> Tensor:
    """Return the reward of each entry [M]: the workflow's own, else the scalar one on the last
    entry.

    A reward on a token that is not trained moves to the last trained one before it.
    """
    rows: list[Tensor] = []
    for e, count in zip(experiences, batch.counts.tolist(), strict=True):
        rewards = torch.zeros(count, dtype=torch.float32)
        if not count:
            continue
        if e.token_rewards is not None:
            mask = e.mask.clone()
            mask[0] = False
            entry = mask.long().cumsum(0) - 1
            rewards.index_add_(0, entry[entry >= 0], e.token_rewards[entry >= 0])
        elif e.reward is None:
            raise ValueError(
                f"{asked_by} asks for rewards, and experience {e.eid.uid} has none: its workflow "
                "must set one"
            )
        else:
            rewards[-1] = e.reward
        if not bool(rewards.isfinite().all()):
            raise ValueError(
                f"experience {e.eid.uid} has a reward that is not finite, which {asked_by} "
                "learns from: fix its division or logarithm, or leave such experiences out by the "
                "operator invalid_reward_filter"
            )
        rows.append(rewards)
    return torch.cat(rows)


def split_pairs(experiences: Sequence[Experience]) -> list[Experience]:
    """Split each pair into its chosen reply and, after it, the rejected one, both after the prompt.

    A pair's `tokens` are the prompt. Raises ValueError for an experience that is not a pair.
    """
    out: list[Experience] = []
    for e in experiences:
        if e.chosen is None or e.rejected is None:
            raise ValueError(
                f"experience {e.eid.uid} is not a pair: it needs `chosen` and `rejected` replies"
            )
        for n, reply in enumerate((e.chosen, e.rejected)):
            run = 2 * e.eid.run + n  # a task may have several pairs
            out.append(
                Experience(
                    torch.cat([e.tokens, reply]),
                    prompt_length=len(e.tokens),
                    temperature=e.temperature,
                    eid=EID(e.eid.batch, e.eid.task, run, e.eid.step, e.eid.suffix),
                    pictures=e.pictures,
                )
            )
    return out


def with_pairs(batch: Batch) -> Batch:
    """Add `pair_ids` and `chosen` [M] to a batch whose samples are `split_pairs`."""
    return batch.with_fields(pair_ids=batch.sample_ids // 2, chosen=batch.sample_ids % 2 == 0)


def _flags(experiences: Sequence[Experience], *, key: str, default: bool | None = None) -> Tensor:
    """Return `info[key]` of each experience as booleans [N]. Raises ValueError for one that lacks
    the key, unless there is a `default`.
    """
    flags = [e.info.get(key, default) for e in experiences]
    if None in flags:
        name = experiences[flags.index(None)].eid.uid
        raise ValueError(f"experience {name} has no info['{key}']: expected true or false")
    return torch.tensor([bool(one) for one in flags])
