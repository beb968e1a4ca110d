"""Step: turns a batch of experiences into a loss and its optimizer steps, with their metrics.

The loss is policy loss - entropy_coef * entropy + kl_coef * KL, to a reference, a teacher or both,
each weighted per token over the whole batch. There are `num_iterations` optimizer steps a batch,
one by default; the old log-probabilities are the sampler's in all of them. Other inputs of a recipe
are added to the batch before: the reference's scores, values, advantages of tokens (which a critic
learns from first).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.algorithms.policy_loss import sampler_measures
from trireme.algorithms.recipes import Recipe
from trireme.batch import Batch, Columns, flatten
from trireme.experience import Experience
from trireme.trainer.backend import Backend
from trireme.trainer.learning import TrainState, prepare, renewed, split_pairs
from trireme.trainer.measure import peak_memory, profiled
from trireme.trainer.ranks import NotFinite


def train_step(
    backend: Backend,
    recipe: Recipe,
    experiences: Sequence[Experience],
    *,
    version: int,
    moved: bool = False,
    skip_idle: bool = True,
    train_state: TrainState | None = None,
    profile: str | None = None,
) -> dict[str, float]:
    """Train on these experiences. `version` is that of the engine's current weights; returns
    metrics.

    All ranks make the same call. `train_state` is the shared state of a run's steps; None: this
    step is the first.

    `moved`: the trainer's weights are newer, so that the two cannot be compared.

    `skip_idle` leaves out samples whose gradient is 0 because all their advantages are (groups with
    equal rewards, mostly). They count in every average; metrics of single tokens are without them.

    `profile`: the prefix of the files with the profiler's trace of this step, one per rank.

    Raises ValueError if the recipe needs data that they lack, NotFinite for a broken loss.
    """
    train_state = train_state or TrainState(recipe)
    with profiled(profile, backend.rank, backend.device), backend.in_order():
        begun = time.monotonic()
        if recipe.schema == "dpo":
            experiences = split_pairs(experiences)
        batch = flatten(experiences, replays=backend.replays_routing)
        metrics = {"perf/trained_tokens": 0.0}
        if batch.num_tokens:
            metrics = _learn(
                backend, recipe, experiences, batch, train_state,
                version=version, moved=moved, skip_idle=skip_idle,
            )  # fmt: skip
        return metrics | _measured(backend, train_state, time.monotonic() - begun)


def _measured(backend: Backend, train_state: TrainState, seconds: float) -> dict[str, float]:
    """Return the metrics of all ranks' devices in a train step that took `seconds`."""
    counts = [backend.measures.arithmetic]
    if train_state.critic:
        counts.append(train_state.critic.arithmetic)
    flops = sum(count.take() for count in counts)
    readings = backend.gather([peak_memory(backend.device), flops], every=True)
    metrics: dict[str, float] = {"perf/peak_memory_gib": max(peak for peak, _ in readings)}
    # each of the ranks that share a sequence counts the whole of it
    same = backend.ranks.spec.sequence if backend.ranks else 1
    total = sum(flops for _, flops in readings[::same])
    if total and all(count.known for count in counts):
        rate = total / max(seconds, 1e-9) / backend.num_ranks
        metrics["perf/train_tflop"] = total / 1e12
        metrics["perf/tflops_per_device"] = rate / 1e12
        if backend.measures.peak is not None:
            metrics["perf/mfu"] = rate / backend.measures.peak
    return metrics | backend.measures.phases.take()


def _learn(
    backend: Backend,
    recipe: Recipe,
    experiences: Sequence[Experience],
    batch: Batch,
    train_state: TrainState,
    *,
    version: int,
    moved: bool,
    skip_idle: bool,
) -> dict[str, float]:
    sizes = _sizes(batch, version)
    with backend.measures.phases("time/train/prepare"):
        batch, prepared = prepare(backend, recipe, experiences, batch, train_state)
    if train_state.tokens is not None:
        train_state.tokens.begin(batch)
    steps: list[dict[str, float]] = []
    for iteration in range(recipe.num_iterations):
        reselected: dict[str, float] = {}
        if iteration:
            with backend.measures.phases("time/train/prepare"):
                batch, reselected = renewed(backend, recipe, experiences, batch)
        skips = skip_idle and recipe.idle_at_zero_advantage
        busy = _with_advantage(batch) if skips else batch
        sizes["perf/idle_experiences"] = sizes["perf/experiences"] - busy.num_samples
        if train_state.trains_policy:
            fresh = None if moved or iteration else version
            options = {"fresh": fresh, "iteration": iteration}
            made = _optimizer_step(backend, recipe, busy, train_state, **options)
            steps.append(prepared | reselected | made)
    metrics = _over_iterations(steps or [prepared]) | sizes
    metrics |= sampler_measures(metrics)
    # a target is one of a token's mean, whatever sum `loss_agg_mode` makes of the tokens
    weight = float(batch.fields["weights"].double().sum())
    for kind, (name, _) in recipe.divergences.items():
        metrics[f"actor/{name}_coef"] = train_state.coefficients[kind]
        if train_state.trains_policy and weight:  # otherwise nothing was measured
            mean = metrics[f"actor/{name}_loss"] / weight
            train_state.adapt(kind, mean, len(experiences))
    train_state.steps += 1
    return metrics


def _optimizer_step(
    backend: Backend,
    recipe: Recipe,
    batch: Batch,
    train_state: TrainState,
    *,
    fresh: int | None,
    iteration: int,
) -> dict[str, float]:
    totals = MetricTotals()
    options = {"totals": totals, "fresh": fresh, "iteration": iteration}
    loss = partial(batch_loss, recipe=recipe, train_state=train_state, **options)
    with backend.measures.phases("time/train/gradient"):
        backend.forward_backward(batch, loss, entropy=recipe.entropy is not None)
    with backend.measures.phases("time/train/optimizer"):
        metrics = backend.step()
    if recipe.ref_sync_steps and backend.optimizer.steps % recipe.ref_sync_steps == 0:
        backend.move_reference(recipe.ref_mixup_alpha)
    return metrics_of(backend.gather(totals.read())) | metrics


def _over_iterations(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of all optimizer steps on one batch: means over the steps that have them,
    except for maxima, counts, and the learning rate, which is the last.
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics):
        values = [metrics[name] for metrics in steps if name in metrics]
        if name == "actor/lr":
            out[name] = values[-1]
        elif name == "perf/micro_batches":
            out[name] = sum(values)
        else:
            out[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return out


def batch_loss(
    batch: Batch,
    logprobs: Tensor,
    entropies: Tensor | None,
    *,
    recipe: Recipe,
    totals: MetricTotals,
    fresh: int | None,
    train_state: TrainState,
    iteration: int = 0,
) -> Tensor:
    """Return the part's contribution to the loss, a scalar; `totals` receives the metrics.

    `iteration`: optimizer steps on this batch so far.
    """
    given = {"logprobs": logprobs, "sample_ids": batch.sample_ids, "positions": batch.positions}
    given["step"] = train_state.step()
    if entropies is not None:
        given["entropies"] = entropies[0]
    before = batch.fields.get("trainer_logprobs", logprobs.detach())
    if not recipe.bypass_old_logprobs:
        given["old_logprobs"] = before
    columns = Columns(given, batch, device=logprobs.device)
    if train_state.tokens is not None and not iteration:
        train_state.tokens.add(batch, logprobs)
    weights = columns.get("weights")
    policy, reported = _split(recipe.policy_loss(columns))
    _check(policy, batch, recipe)
    if recipe.correction:
        # of sampler and trainer on equal weights: the policy's own change since then is not in it
        factors, corrected = recipe.correction(columns.replaced(logprobs=before))
        policy = policy * factors
        for name, values in corrected.items():
            totals.mean(f"rollout_correction/{name}", values)
    if "selected" in columns:
        policy = policy * columns.get("selected")
    total = policy
    # without a policy gradient the loss is named after its schema
    kind = "pg" if recipe.schema == "experience" else recipe.schema
    totals.sum(f"actor/{kind}_loss", policy * weights)
    for kind, (name, model) in recipe.divergences.items():
        part = recipe.parts[kind]
        theirs = columns.get(model, asked_by=part.label)
        divergence = part(columns.replaced(ref_logprobs=theirs))
        if part is recipe.teacher:
            totals.mean("actor/teacher_kl", logprobs - theirs)
        total = total + train_state.coefficients[kind] * divergence
        totals.sum(f"actor/{name}_loss", divergence * weights)
    if recipe.entropy:
        bonus, noted = _split(recipe.entropy(columns))
        total = total - recipe.entropy.coefficient * bonus
        averages = recipe.entropy.marked("averages")
        totals.mean("actor/entropy", _own(columns.get("entropies") if averages else bonus, columns))
        reported |= noted
    elif recipe.schema == "experience":
        # On tokens that the policy sampled itself, -log p is an unbiased estimate of its entropy.
        totals.mean("actor/entropy", _own(-logprobs, columns))
    for name, values in reported.items():
        totals.mean(f"actor/{name}", values)
    _compare_with_sampler(batch, logprobs, fresh, totals)
    loss = (total * weights).sum()
    totals.sum("actor/loss", loss)
    if not torch.isfinite(loss):
        _blame(total, batch, recipe)
    return loss


def _own(values: Tensor, columns: Columns) -> Tensor:
    """Return the values of the tokens that no expert wrote."""
    return values[~columns.get("expert")] if "expert" in columns else values


def _split(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Separate a part's result from its metrics."""
    return result if isinstance(result, tuple) else (result, {})


def _check(policy: Tensor, batch: Batch, recipe: Recipe) -> None:
    """Check a user's loss for the likeliest mistake: averaging by itself."""
    if policy.shape != batch.targets.shape:
        raise ValueError(
            f"algorithm.{recipe.policy_loss.label} gave {list(policy.shape)}: expected one "
            f"number per token, [{batch.num_tokens}], not averaged"
        )


def _blame(total: Tensor, batch: Batch, recipe: Recipe) -> None:
    broken = (~torch.isfinite(total)).nonzero()
    if len(broken):
        entry = int(broken[0])
        raise NotFinite(
            f"the loss of experience {batch.eid_of(entry)} is "
            f"{float(total[entry].detach())} at token {int(batch.positions[entry])} "
            f"(algorithm '{recipe.name}')"
        )
    raise NotFinite(f"the loss of a batch overflows (algorithm '{recipe.name}')")


def _compare_with_sampler(
    batch: Batch, logprobs: Tensor, fresh: int | None, totals: MetricTotals
) -> None:
    """Record |engine - trainer| on tokens that the current weights sampled: rounding,
    nothing else.
    """
    if fresh is None or "versions" not in batch.fields or "old_logprobs" not in batch.fields:
        return
    current = batch.fields["versions"] == fresh
    if not bool(current.any()):
        return
    difference = logprobs.detach().cpu() - batch.fields["old_logprobs"]
    difference = difference.masked_select(current).abs()
    totals.mean("rollout/logprob_diff_mean", difference)
    totals.max("rollout/logprob_diff_max", difference)


def _with_advantage(batch: Batch) -> Batch:
    advantages = batch.get("advantages", asked_by="the trainer")
    busy = batch.sample_ids.masked_select(advantages != 0).unique()
    return batch if len(busy) == batch.num_samples else batch.select(busy.tolist())


def _sizes(batch: Batch, version: int) -> dict[str, float]:
    metrics = {
        "perf/trained_tokens": float(batch.num_tokens),
        "perf/experiences": float(batch.num_samples),
    }
    versions = batch.fields.get("versions")
    if versions is not None and len(sampled := versions.masked_select(versions >= 0)):
        ages = (version - sampled).float()
        metrics["rollout/staleness_mean"] = float(ages.mean())
        metrics["rollout/staleness_max"] = float(ages.max())
    if batch.routed_experts:
        metrics["rollout/routing_recorded"] = _recorded(batch)
    return metrics


def _recorded(batch: Batch) -> float:
    """Return the share of entries whose predecessors have recorded experts."""
    each = np.split(batch.positions.numpy() - 1, np.cumsum(batch.counts)[:-1])
    count = 0
    for routing, predecessors in zip(batch.routed_experts, each, strict=True):
        if routing is not None:
            known = routing[predecessors, 0, 0] != np.iinfo(routing.dtype).max
            count += int(known.sum())
    return count / batch.num_tokens


Sums = dict[str, dict[str, Any]]
"""Sums, counts and maxima by name, as JSON."""


class MetricTotals:
    """Sums, means over tokens and maxima by name. Values are read once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, Tensor] = {}

    def sum(self, name: str, values: Tensor) -> None:
        """Add up all of `values`, quantities that are already weighted."""
        total = values.detach().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def mean(self, name: str, values: Tensor) -> None:
        """Report the mean over all values recorded under this name, if there are any."""
        if not values.numel():
            return
        self.sum(name, values)
        self._counts[name] = self._counts.get(name, 0) + values.numel()

    def max(self, name: str, values: Tensor) -> None:
        """Report the largest value recorded under this name."""
        largest = values.detach().max()
        known = self._maxima.get(name)
        self._maxima[name] = largest if known is None else largest.maximum(known)

    def read(self) -> Sums:
        """Everything gathered, as numbers."""
        return {
            "sums": {name: float(total) for name, total in self._sums.items()},
            "counts": dict(self._counts),
            "maxima": {name: float(value) for name, value in self._maxima.items()},
        }


def metrics_of(readings: Sequence[Sums]) -> dict[str, float]:
    """Combine the readings of all ranks into metrics, by name."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for reading in readings:
        for name, total in reading["sums"].items():
            sums[name] = sums.get(name, 0.0) + total
        for name, count in reading["counts"].items():
            counts[name] = counts.get(name, 0) + count
        for name, value in reading["maxima"].items():
            maxima[name] = max(maxima.get(name, value), value)
    return {name: total / counts.get(name, 1) for name, total in sums.items()} | maxima
