"""Several optimizer steps on one batch: against a plain float64 loop, and what they leave alone."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from tests.trainer.samples import backend_of, of_groups, optimizer_of
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.experience import Experience
from trireme.trainer.learning import TrainState
from trireme.trainer.step import _over_iterations, train_step

LR = 0.3
SGD = optimizer_of(optimizer_type="sgd", lr=LR, weight_decay=0.0)


def _recipe(**given: Any) -> Recipe:
    return get_recipe(SimpleNamespace(**{"algorithm_type": "grpo", "kl_loss_fn": "none"} | given))


def _logprob(model: Any, e: Experience, t: int) -> Tensor:
    assert e.temperature is not None
    logits = model(e.tokens[None, :t]).logits[0, -1] / e.temperature
    return logits.log_softmax(-1)[e.tokens[t]]


def _clipped(now: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (now - old).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.minimum(loss, -advantage * 3.0) if advantage < 0 else loss


@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("bypass", [True, False])
def test_three_steps_on_a_batch_are_those_of_a_plain_float64_loop(
    bypass: bool, correction: bool, tmp_path: Path
) -> None:
    """SGD, token-mean. Old are the sampler's, or the trainer's own from before the first step; a
    correction weighs by the trainer's own from before the first step over the sampler's, cut at 2.
    """
    bypass = bypass and not correction
    path = make_model(tmp_path / "tiny", "qwen3")
    backend = backend_of(path, optimizer=SGD, grad_clip=1e9)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    begun = copy.deepcopy(plain)
    samples = of_groups()
    own = [(e, t) for e in samples for t in e.mask.nonzero().squeeze(1).tolist()]
    with torch.no_grad():
        sampled = [e.logprobs[t].double() for e, t in own if e.logprobs is not None]
        first = [_logprob(begun, e, t) for e, t in own]
    old = sampled if bypass else first
    factors = [(a - b).exp().clamp(max=2.0) for a, b in zip(first, sampled, strict=True)]
    for _ in range(3):
        total = torch.zeros((), dtype=torch.float64)
        for (e, t), before, factor in zip(own, old, factors, strict=True):
            assert e.advantages is not None
            loss = _clipped(_logprob(plain, e, t), before, e.advantages[t].double())
            total = total + loss * (factor if correction else 1.0) / len(own)
        plain.zero_grad()
        total.backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= LR * (p.grad if p.grad is not None else 0)
    given = {"rollout_correction": {"rollout_is": "token"}} if correction else {}
    recipe = _recipe(num_iterations=3, bypass_old_logprobs=bypass, **given)
    metrics = train_step(backend, recipe, samples, version=0)
    assert backend.optimizer.steps == 3
    assert metrics["actor/ppo_kl"] != 0 or not bypass
    expected, moved = dict(plain.named_parameters()), dict(begun.named_parameters())
    for name, p in backend.module.named_parameters():
        assert torch.allclose(p.double(), expected[name], atol=2e-6, rtol=1e-4), name
        # and one step alone would have been another model
        assert not torch.allclose(expected[name], moved[name], atol=1e-5) or "bias" in name


@pytest.mark.extension("more_losses")
@pytest.mark.parametrize("longest", [60, 10_000], ids=["cut", "whole"])
def test_real_learns_the_same_however_its_groups_are_cut(longest: int, tmp_path: Path) -> None:
    """SGD, two steps on a batch, against autograd of REAL's own formula in float64."""
    path = make_model(tmp_path / "tiny", "qwen3")
    backend = backend_of(path, optimizer=SGD, grad_clip=1e9, max_token_len=longest)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    samples = [e for e in of_groups() if bool(e.mask.any())]
    for n, e in enumerate(samples):
        e.advantages = e.mask * [1.2, -0.7, 0.0, 0.4][n % 4]
    groups = {e.eid.tid for e in samples}
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for group in groups:
            sides: dict[bool, list[Tensor]] = {True: [], False: []}
            for e in samples:
                own = e.mask.nonzero().squeeze(1).tolist()
                assert e.logprobs is not None and e.advantages is not None
                if e.eid.tid == group:
                    drifts = [_logprob(plain, e, t) - e.logprobs[t].double() for t in own]
                    s = torch.stack(drifts).mean() / 0.5
                    sides[bool(e.advantages.sum() > 0)].append(s)
            if sides[True] and sides[False]:
                total = total + torch.log1p(torch.stack(sides[True]).neg().exp().sum())
                total = total + torch.log1p(torch.stack(sides[False]).exp().sum())
        plain.zero_grad()
        (total / len(groups)).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= LR * (p.grad if p.grad is not None else 0)
    train_step(backend, _recipe(algorithm_type="real", num_iterations=2), samples, version=0)
    expected = dict(plain.named_parameters())
    for name, p in backend.module.named_parameters():
        assert torch.allclose(p.double(), expected[name], atol=2e-6, rtol=1e-4), name


def test_the_schedule_counts_optimizer_steps(tiny_dir: Path) -> None:
    optimizer = optimizer_of(lr=1.0, lr_warmup_steps=4, lr_scheduler_type="cosine")
    backend = backend_of(tiny_dir, optimizer=optimizer, total_steps=8)
    recipe, state = _recipe(num_iterations=2), TrainState(_recipe(num_iterations=2))
    lrs = [
        train_step(backend, recipe, of_groups(), version=0, train_state=state)["actor/lr"]
        for _ in range(4)
    ]
    # warm-up 1/4, 2/4, 3/4, 1, then half a cosine to 0.1: of each two steps the last is reported
    cosine = [0.1 + 0.9 * (1 + torch.tensor(torch.pi * k / 4).cos().item()) / 2 for k in range(4)]
    assert lrs == pytest.approx([0.5, 1.0, cosine[1], cosine[3]])
    assert (backend.optimizer.steps, state.steps) == (8, 4)


def test_the_comparison_with_the_sampler_is_of_the_first_step_alone(tiny_dir: Path) -> None:
    """On the engine's weights the two agree; after a step of the policy they differ by that."""
    scored = backend_of(tiny_dir)
    samples = of_groups()
    for e in samples:
        [row] = scored.score([e.tokens.tolist()], temperature=e.temperature or 1.0)
        e.logprobs = torch.tensor(row) * e.mask
        e.versions = torch.where(e.mask, 0, -1).int()
    backend = backend_of(tiny_dir, optimizer=SGD)
    metrics = train_step(backend, _recipe(num_iterations=3), samples, version=0)
    assert metrics["rollout/logprob_diff_max"] < 1e-4 < abs(metrics["actor/ppo_kl"])


@pytest.mark.extension("more_losses")
def test_tokens_are_chosen_anew_before_each_step(tiny_dir: Path) -> None:
    """M2PO leaves nothing out of the first step on samples of these weights, and some later."""
    samples = of_groups()
    for e in samples:
        [row] = backend_of(tiny_dir).score([e.tokens.tolist()], temperature=e.temperature or 1.0)
        e.logprobs = torch.tensor(row) * e.mask
    options = {"policy_loss_fn": "m2po", "policy_loss_fn_args": {"m2_threshold": 1e-9}}
    once = train_step(backend_of(tiny_dir, optimizer=SGD), _recipe(**options), samples, version=0)
    more = _recipe(num_iterations=3, **options)
    later = train_step(backend_of(tiny_dir, optimizer=SGD), more, samples, version=0)
    assert once["actor/unselected"] == 0 < later["actor/unselected"]


def test_tokens_left_out_by_entropy_and_by_a_loss_are_measured_apart(tiny_dir: Path) -> None:
    args = {"enable_sequence_masking": True, "top_entropy_quantile": 0.4}
    recipe = _recipe(policy_loss_fn="ppo", policy_loss_fn_args=args)
    metrics = train_step(backend_of(tiny_dir, optimizer=SGD), recipe, of_groups(), version=0)
    assert metrics["actor/unselected"] == pytest.approx(0.6, abs=0.1)
    with_all = _recipe(policy_loss_fn="ppo", policy_loss_fn_args=args | {"top_entropy_quantile": 1})
    alone = train_step(backend_of(tiny_dir, optimizer=SGD), with_all, of_groups(), version=0)
    assert metrics["actor/masked"] == alone["actor/masked"] and "actor/unselected" not in alone


def test_a_resumed_run_goes_on_as_one_that_was_not(tiny_dir: Path, tmp_path: Path) -> None:
    recipe = _recipe(num_iterations=2)
    backend, state = backend_of(tiny_dir), TrainState(recipe)
    train_step(backend, recipe, of_groups(), version=0, train_state=state)
    backend.save(tmp_path, hf=False)
    other, kept = backend_of(tiny_dir), TrainState(recipe)
    other.load(tmp_path)
    kept.load_state(state.state())
    for one, its in ((backend, state), (other, kept)):
        train_step(one, recipe, of_groups(), version=0, train_state=its)
    assert backend.optimizer.steps == other.optimizer.steps == 4
    theirs = other.weights()
    assert all(torch.equal(w, theirs[name]) for name, w in backend.weights().items())


def test_the_metrics_of_several_steps_are_means_but_for_what_is_none() -> None:
    steps = [
        {"actor/lr": 3.0, "perf/micro_batches": 2.0, "actor/ratio_max": 4.0, "actor/pg_loss": 1.0},
        {"actor/lr": 1.0, "perf/micro_batches": 3.0, "actor/ratio_max": 2.0, "actor/pg_loss": 4.0},
        {"actor/lr": 2.0, "perf/micro_batches": 4.0, "actor/ratio_max": 3.0, "actor/kept": 0.5},
    ]
    assert _over_iterations(steps) == {
        "actor/lr": 2.0,
        "perf/micro_batches": 9.0,
        "actor/ratio_max": 4.0,
        "actor/pg_loss": 2.5,
        "actor/kept": 0.5,
    }
