"""The trainer's loss and gradient of every algorithm are those of its formula (formulas.py).

The formula sees log-probabilities of transformers' own forward pass in float64, and autograd gives
the gradient of all weights. The trainer's come by its real way: advantages of whole groups, batch,
packing, micro-batches, reduction. `python -m tests.trainer.test_formulas` prints how far apart they
are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from tests.trainer import formulas as f
from tests.trainer.formulas import FORMULAS, Formula, Rollout, Token
from tests.trainer.samples import (
    CRITIC,
    VOCABULARY,
    backend_of,
    critic_of,
    gap,
    gradients_of,
    move,
)
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.experience import EID, Experience
from trireme.extensions import extensions
from trireme.registry import ADVANTAGES, ALGORITHMS, ENTROPIES, KLS, POLICY_LOSSES
from trireme.trainer.backend import Backend
from trireme.trainer.learning import TrainState, split_pairs

LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {"share_prefix": True, "max_token_len": 10_000},
    "shared and cut": {"share_prefix": True, "max_token_len": 40},
    "cut": {"share_prefix": False, "max_token_len": 35},
}
"""With and without shared prefixes, in one micro-batch and in two ways in several."""
WITHIN = 1e-5
"""Float32 against float64, relative: the worst algorithm has a fifth of it."""
KL, ENTROPY = 0.3, 0.2
"""Coefficients that let these terms be seen."""


class Models(NamedTuple):
    """The policy and the model that it began as, and what trains the one, by layout."""

    policy: Any
    reference: Any
    backends: dict[str, Backend]
    folder: Path


@cache
def models() -> Models:
    """Made once for the file."""
    folder = make_model(Path(mkdtemp()) / "qwen3")
    backends = {name: backend_of(folder, reference=True, **it) for name, it in LAYOUTS.items()}
    for backend in backends.values():
        move(backend)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    policy = copy.deepcopy(plain)
    state = backends["cut"].module.state_dict()
    policy.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    return Models(policy, plain.requires_grad_(False), backends, folder)


def scores(model: Any, rows: Sequence[Tensor], temperatures: Sequence[float]) -> Tensor:
    """log p of every word after each token of the rows [N, T, V], which are padded behind."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    heat = torch.tensor(temperatures, dtype=torch.float64)[:, None, None]
    return (model(input_ids=ids, use_cache=False).logits / heat).log_softmax(-1)


@dataclass
class Draw:
    """Random numbers of a batch."""

    rng: torch.Generator

    def ids(self, n: int) -> list[int]:
        """So many tokens."""
        return torch.randint(3, VOCABULARY, (n,), generator=self.rng).tolist()

    def noise(self, n: int) -> Tensor:
        """So many numbers around 0."""
        return torch.randn(n, generator=self.rng)


SPREADS = (0.3, 1.0, 0.02, 1e-4)
"""How far apart policy and sampler are, rollout by rollout: within all clips, and beyond them."""


def rows() -> list[tuple[EID, list[int], list[bool], float, float]]:
    """Id, tokens, mask, temperature and reward of each experience."""
    draw = Draw(torch.Generator().manual_seed(7))
    out: list[tuple[EID, list[int], list[bool], float, float]] = []

    def add(
        task: int, run: int, tokens: list[int], start: int, reward: float, *, step: int = 0,
        segments: Sequence[tuple[int, int]] = (), trained: bool = True,
    ) -> None:  # fmt: skip
        mask = [t >= start and trained for t in range(len(tokens))]
        if segments:
            mask = [any(a <= t < b for a, b in segments) for t in range(len(tokens))]
        heat = 0.7 if task == 1 else 1.0
        out.append((EID(0, task, run, step), tokens, mask, heat, reward))

    prompt, begin = draw.ids(9), draw.ids(3)
    replies = [begin + draw.ids(5), begin + draw.ids(8), draw.ids(4)]
    for run, reward in enumerate((1.0, 0.0, 0.5, 1.0)):  # 0 and 3 are equal
        segments = [(9, 12), (14, 17)] if run in (0, 3) else ()
        reply = replies[run % 3]
        add(0, run, prompt + reply, 9, reward, segments=segments)
    context = draw.ids(6)  # conversations of several turns, each turn an experience
    for run, (turns, reward) in enumerate(((3, 1.0), (2, 0.0), (1, 0.5))):
        row = list(context)
        for step in range(turns):
            start, row = len(row), row + draw.ids(4)
            add(1, run, row, start, reward, step=step)
            row = row + draw.ids(2)
    add(
        2, 0, draw.ids(34), 11, 1.0, segments=[(11, 16), (22, 24), (30, 34)]
    )  # alone, several turns
    question = draw.ids(7)
    for run, reward in enumerate((1.0, 1.0, 0.0)):  # the second was too long, say
        add(3, run, question + draw.ids(3 + 2 * run), 7, reward, trained=run != 1)
    for run in range(3):  # nothing of this group is trained
        add(4, run, draw.ids(8), 4, 1.0 - run, trained=False)
    for run in range(2):  # nobody is better
        add(5, run, question + draw.ids(4), 7, 0.5)
    return out


@cache
@torch.no_grad()
def batch(weighted: bool = False) -> tuple[Experience, ...]:
    """Rollouts as a sampler left them, with all that algorithms ask for."""
    draw, found = Draw(torch.Generator().manual_seed(11)), rows()
    now = scores(models().policy, [torch.tensor(r[1]) for r in found], [r[3] for r in found])
    out: list[Experience] = []
    for n, (eid, tokens, mask, heat, reward) in enumerate(found):
        ids = torch.tensor(tokens)
        p = now[n, : len(ids) - 1].detach().gather(1, ids[1:, None])[:, 0].float()
        p = torch.cat([torch.zeros(1), p])
        e = Experience(
            ids,
            mask=mask,
            logprobs=p + SPREADS[n % 4] * draw.noise(len(ids)),
            versions=[0 if own else -1 for own in mask],
            teacher_logprobs=p + 0.3 * draw.noise(len(ids)),
            temperature=heat,
            reward=reward,
            eid=eid,
        )
        if eid.task == 2 or eid.run == 1:  # rewards on the way, one of them on a tool's token
            e.token_rewards = 0.1 * (ids % 5).float()
        if weighted and n % 5 != 2:  # weights of 1 alone are not recorded
            e.loss_weight = torch.rand(len(ids), generator=draw.rng) * 2
        parts = {"a": (reward, 1.0), "b": ((n % 3) / 2, 0.5)}
        e.info["reward_parts"] = parts
        e.info["env_state_hash"] = f"{eid.step}"
        if eid.task == 1 and eid.run == 0:
            e.info["step_reward"] = 0.25 * eid.step
        e.info["desirable"] = n % 3 == 1
        out.append(e)
    first, equal = out[0], out[3]
    equal.logprobs, equal.teacher_logprobs = first.logprobs, first.teacher_logprobs
    equal.loss_weight = first.loss_weight
    return tuple(out)


def experts() -> list[Experience]:
    """An expert's replies, as the sample strategy brings them; the last one trains no token."""
    draw, out = Draw(torch.Generator().manual_seed(13)), []
    for n, size in enumerate((4, 9, 6)):
        tokens = draw.ids(5 + size)
        nothing = [0.0] * len(tokens)
        e = Experience(
            tokens,
            mask=[t >= 5 and n < 2 for t in range(len(tokens))],
            logprobs=nothing,
            advantages=nothing,
            versions=[-1] * len(tokens),
            reward=0.0,
            eid=EID(1, n),
        )
        e.info["is_expert"] = True
        out.append(e)
    return out


def pairs() -> list[Experience]:
    """Prompts with a better and a worse reply."""
    draw = Draw(torch.Generator().manual_seed(17))
    sizes = ((9, 3, 5), (6, 7, 2), (6, 1, 4), (11, 4, 4))
    out = []
    for n, (prompt, better, worse) in enumerate(sizes):
        shared = draw.ids(min(better, worse) // 2)
        rest = [shared + draw.ids(size - len(shared)) for size in (better, worse)]
        out.append(
            Experience(
                draw.ids(prompt), prompt_length=prompt, chosen=rest[0], rejected=rest[1],
                temperature=0.7 if n == 1 else 1.0, eid=EID(0, n),
            )
        )  # fmt: skip
    return out


def seen(experiences: Sequence[Experience], *, own_old: bool) -> list[Rollout]:
    """The experiences as formulas see them."""
    made, heats = models(), [e.temperature for e in experiences]
    rows = [e.tokens for e in experiences]
    now = scores(made.policy, rows, heats)
    with torch.no_grad():
        before = scores(made.reference, rows, heats)
    entropies = -(now.exp() * now).sum(-1)
    out = []
    for n, e in enumerate(experiences):
        trained = [t for t in e.mask.nonzero().flatten().tolist() if t]
        rollout = Rollout(
            task=e.eid.tid,
            run=e.eid.run,
            step=e.eid.step,
            length=len(e.tokens),
            reward=e.reward or 0.0,
            tokens=[],
            parts=e.info.get("reward_parts", {}),
            state=e.info.get("env_state_hash"),
            step_reward=e.info.get("step_reward"),
            expert=e.info.get("is_expert", False),
            desirable=e.info.get("desirable", False),
        )
        for t in trained:
            p = now[n, t - 1, e.tokens[t]]
            sampled = float(e.logprobs[t]) if e.logprobs is not None else 0.0
            drawn = sampled if e.sampler_logprobs is None else float(e.sampler_logprobs[t])
            rollout.tokens.append(
                Token(
                    at=t,
                    p=p,
                    entropy=entropies[n, t - 1],
                    distribution=now[n, t - 1].tolist(),
                    old=float(p.detach()) if own_old else sampled,
                    sampled=drawn,
                    ref=float(before[n, t - 1, e.tokens[t]]),
                    teacher=0.0 if e.teacher_logprobs is None else float(e.teacher_logprobs[t]),
                    weight=1.0 if e.loss_weight is None else float(e.loss_weight[t]),
                    reward=None if e.token_rewards is None else float(e.token_rewards[t]),
                )
            )
        if e.token_rewards is not None and trained:  # what tokens in between earned
            for t in set(range(trained[0], len(e.tokens))) - set(trained):
                last = max(own for own in trained if own < t)
                token = rollout.tokens[trained.index(last)]
                assert token.reward is not None
                token.reward += float(e.token_rewards[t])
        out.append(rollout)
    return out


def mismatched(experiences: Sequence[Experience], rollouts: Sequence[Rollout]) -> None:
    """KTO's: each prompt with the reply to the one before, no longer than the longest row."""
    made, longest = models(), max(len(e.tokens) for e in experiences)

    def begin(e: Experience) -> int:
        return min([*e.mask.nonzero().flatten().tolist(), len(e.tokens)])

    for n, (e, rollout) in enumerate(zip(experiences, rollouts, strict=True)):
        other = experiences[n - 1]
        head, tail = e.tokens[: begin(e)], other.tokens[begin(other) :]
        ids = torch.cat([head, tail])[:longest]
        mask = torch.cat([torch.zeros(len(head)), other.mask[begin(other) :]])[:longest]
        with torch.no_grad():
            gain = scores(made.policy, [ids], [e.temperature])
            gain = gain - scores(made.reference, [ids], [e.temperature])
        rollout.other = [float(gain[0, t - 1, ids[t]]) for t in mask.nonzero().flatten().tolist()]


class Expected(NamedTuple):
    """What a formula comes to."""

    loss: float
    size: float
    """The sum of its terms' sizes: they may cancel."""
    gradient: dict[str, Tensor]


def head() -> Tensor:
    """The critic's, which would begin at 0."""
    return torch.linspace(-1, 1, models().policy.config.hidden_size)[None]


def valued(experiences: Sequence[Experience], rollouts: Sequence[Rollout]) -> tuple[Any, Tensor]:
    """A critic in float64, its values of all tokens, of which the rollouts get the numbers."""
    model = copy.deepcopy(models().reference).requires_grad_(True)
    weight = head().double().requires_grad_()
    ids = torch.nn.utils.rnn.pad_sequence([e.tokens for e in experiences], batch_first=True)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    values = (hidden @ weight[0]).unbind()
    chosen = [values[n][t.at - 1] for n, r in enumerate(rollouts) for t in r.tokens]
    for token, value in zip((t for r in rollouts for t in r.tokens), chosen, strict=True):
        token.value = float(value.detach())
    named = {f"{CRITIC}{n}": p for n, p in model.named_parameters() if "lm_head" not in n}
    return {**named, f"{CRITIC}value_head.weight": weight}, torch.stack(chosen)


def expected(
    formula: Formula, recipe: Recipe, experiences: list[Experience], *, own_old: bool = False
) -> Expected:
    """The formula's loss, and its gradient by autograd."""
    if recipe.schema == "dpo":
        experiences = split_pairs(experiences)
    rollouts = seen(experiences, own_old=own_old)
    if recipe.schema == "kto":
        mismatched(experiences, rollouts)
    named = dict(models().policy.named_parameters())
    gradient: dict[str, Tensor] = {}
    critic, values = valued(experiences, rollouts) if recipe.needs_critic else ({}, None)
    terms = formula.terms(rollouts, kl=KL, entropy=ENTROPY)
    if values is not None:
        tokens = [t for r in rollouts for t in r.tokens]
        returns = torch.tensor([t.returns for t in tokens], dtype=torch.float64)
        worth = ((values - returns) ** 2 / 2).sum() / len(tokens)
        gradient = dict(zip(critic, torch.autograd.grad(worth, list(critic.values())), strict=True))
    total = torch.stack(terms).sum()
    of_policy = torch.autograd.grad(total, list(named.values()))
    gradient |= dict(zip(named, of_policy, strict=True))
    return Expected(float(total.detach()), float(sum(t.detach().abs() for t in terms)), gradient)


def got(
    recipe: Recipe, experiences: list[Experience], layout: str
) -> tuple[float, dict[str, Tensor]]:
    """The loss that the trainer reports, and the gradient that it leaves for the optimizer."""
    made = models()
    own = [e for e in experiences if not e.info.get("is_expert")]
    if not recipe.from_data:
        own, _ = recipe.advantages(own)
    others = [e for e in experiences if e.info.get("is_expert")]
    critic = None
    if recipe.needs_critic:
        critic = critic_of(made.folder, **LAYOUTS[layout])
        with torch.no_grad():
            critic.head.weight.copy_(head())
    state = TrainState(recipe, critic)
    kept, metrics = gradients_of(made.backends[layout], recipe, [*own, *others], train_state=state)
    return metrics["actor/loss"], kept


@dataclass(frozen=True)
class Case:
    """An algorithm with options, and its formula with them."""

    formula: Formula
    algorithm: str = "grpo"
    given: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    """Tokens have weights."""
    drawn: bool = False
    """Some were drawn from another distribution than the policy's own."""

    def recipe(self) -> Recipe:
        """With coefficients that let every term be seen."""
        row = get_recipe(SimpleNamespace(algorithm_type=self.algorithm, **self.given))
        options = {kind: {"kl_coef": KL} for kind in ("kl_loss_fn", "kl_penalty_fn")}
        options["teacher_kl_fn"] = {"kl_coef": 1.0}
        options["entropy_loss_fn"] = {"entropy_coef": ENTROPY}
        wanted = {k: o for k, o in options.items() if getattr(row, k) not in (None, "none")}
        if not self.formula.entropy:
            wanted.pop("entropy_loss_fn", None)
        args = {f"{k}_args": {**o, **self.given.get(f"{k}_args", {})} for k, o in wanted.items()}
        return get_recipe(SimpleNamespace(algorithm_type=self.algorithm, **self.given | args))

    def samples(self, recipe: Recipe) -> list[Experience]:
        """What there is before advantages."""
        if recipe.schema == "dpo":
            return pairs()
        found = copy.deepcopy(list(batch(self.weighted)))
        for n, e in enumerate(found):
            if recipe.advantage_fn == "gdpo":
                e.reward = sum(value * weight for value, weight in e.info["reward_parts"].values())
            if self.drawn and n % 2 and e.logprobs is not None:
                e.sampler_logprobs = e.logprobs * 0.6
        return [*found, *(experts() if recipe.asks("expert") else [])]

    def errors(self, layouts: Sequence[str] = tuple(LAYOUTS)) -> tuple[float, float]:
        """The largest relative ones of loss and gradient over these layouts."""
        recipe = self.recipe()
        own_old = not recipe.bypass_old_logprobs
        want = expected(self.formula, recipe, self.samples(recipe), own_old=own_old)
        assert max(float(tensor.abs().max()) for tensor in want.gradient.values()) > 1e-4
        of_loss, of_gradient = 0.0, 0.0
        for layout in layouts:
            loss, gradient = got(recipe, self.samples(recipe), layout)
            of_loss = max(of_loss, abs(loss - want.loss) / want.size)
            of_gradient = max(of_gradient, gap(gradient, want.gradient))
        return of_loss, of_gradient


@pytest.mark.parametrize("name", ALGORITHMS.built_in())
def test_an_algorithm_computes_its_formula(name: str) -> None:
    assert name in FORMULAS, f"tests/trainer/formulas.py has no formula of the algorithm '{name}'"
    of_loss, of_gradient = Case(FORMULAS[name], name).errors()
    assert of_loss < WITHIN and of_gradient < WITHIN


_RL: dict[str, Any] = {"kl": "k2", "entropy": True}
_SEQUENCES = "seq-mean-token-mean"
PARTS: dict[str, Case] = {
    **{
        f"grpo {mode}": Case(Formula(average=mode, **_RL), given={"loss_agg_mode": mode})
        for mode in (_SEQUENCES, "seq-mean-token-sum", "seq-mean-token-sum-norm")
    },
    **{
        f"kl {name}": Case(Formula(kl=name, entropy=True), given={"kl_loss_fn": name})
        for name in f.KL
        if name != "sdar"
    },
    "entropy none": Case(Formula(kl="k2"), given={"entropy_loss_fn": "none"}),
    "kl none": Case(Formula(entropy=True), given={"kl_loss_fn": "none"}),
    "weights": Case(Formula(**_RL), weighted=True),
    "weights of sequences": Case(
        Formula(average=_SEQUENCES, **_RL), given={"loss_agg_mode": _SEQUENCES}, weighted=True
    ),
    "idle samples": Case(Formula(), given={"kl_loss_fn": "none", "entropy_loss_fn": "none"}),
    "own old": Case(Formula(**_RL), given={"bypass_old_logprobs": False}),
    "teacher": Case(Formula(teacher="k3", **_RL), given={"teacher_kl_fn": "k3"}),
    **{
        f"truncated {level}": Case(
            Formula(correction={"truncated": level}, **_RL),
            given={"rollout_correction": {"rollout_is": level}},
        )
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"masked {level}": Case(
            Formula(correction={"masked": level}, **_RL),
            given={"rollout_correction": {"rollout_rs": level}},
        )
        for level in ("token", "sequence", "geometric")
    },
    "truncated and masked, of what was drawn from": Case(
        Formula(correction={"truncated": "token", "masked": "geometric"}, **_RL),
        given={"rollout_correction": {"rollout_is": "token", "rollout_rs": "geometric"}},
        drawn=True,
    ),
    "penalty of tokens": Case(
        Formula(f.plus_plus, penalty="k1", **_RL), "reinforceplusplus", {"kl_penalty_fn": "k1"}
    ),
    "penalty and critic": Case(
        Formula(partial(f.gae, gamma=0.9, lam=0.8), penalty="k2", **_RL),
        "ppo",
        {"kl_penalty_fn": "k2", "advantage_fn_args": {"gamma": 0.9, "lam": 0.8}},
    ),
    "penalty of rollouts": Case(
        Formula(partial(f.penalized, of=FORMULAS["rloo"].advantage), penalty="k1", **_RL),
        "rloo",
        {"kl_penalty_fn": "k1", "sample_strategy": "explore_step"},
    ),
    "high entropy": Case(
        Formula(loss=partial(f.high_entropy, share=0.4), **_RL),
        given={"policy_loss_fn_args": {"top_entropy_quantile": 0.4}},
    ),
    "loss importance_sampling": Case(
        Formula(loss=f.by_token(f.importance_sampling), **_RL),
        given={"policy_loss_fn": "importance_sampling"},
    ),
    "gspo's width": Case(
        Formula(
            loss=f.by_sample(f.of_sample(partial(f.gspo, low=0.1, high=0.2))),
            average=_SEQUENCES,
            **_RL,
        ),
        "gspo",
        {"policy_loss_fn_args": {"clip_range_low": 0.1, "clip_range_high": 0.2}},
    ),
    "masked sequences": Case(
        Formula(loss=f.by_sample(f.masked_ppo), **_RL),
        given={"policy_loss_fn_args": {"enable_sequence_masking": True}},
    ),
    "masked sequences, the trainer's own old ones": Case(
        Formula(loss=f.by_sample(f.masked_ppo), **_RL),
        given={
            "policy_loss_fn_args": {"enable_sequence_masking": True},
            "bypass_old_logprobs": False,
        },
    ),
    "masked clip": Case(
        Formula(loss=f.by_token(partial(f.cispo, mask=(0.2, 0.28))), **_RL),
        "cispo",
        {"policy_loss_fn_args": {"enable_mask_clip": True, "mask_clip_range_low": 0.2}},
    ),
    "dpo smoothed, with sft": Case(
        Formula(f.nothing, whole=partial(f.dpo, beta=0.3, e=0.2, rpo=0.5)),
        "dpo",
        {"policy_loss_fn_args": {"beta": 0.3, "label_smoothing": 0.2, "rpo_alpha": 0.5}},
    ),
    "kto weighed": Case(
        Formula(f.nothing, whole=partial(f.kto, beta=0.3, unwanted=2.0)),
        "kto",
        {"policy_loss_fn_args": {"beta": 0.3, "undesirable_weight": 2.0}},
    ),
    "mix of means over sequences": Case(
        Formula(
            experts=f.sft, mu=0.3, average="seq-mean-token-sum", expert_average=_SEQUENCES, **_RL
        ),
        "mix",
        {
            "loss_agg_mode": "seq-mean-token-sum",
            "policy_loss_fn_args": {"mu": 0.3, "sft_loss_agg_mode": _SEQUENCES},
        },
    ),
    **{
        f"advantage {name}": Case(
            Formula(advantage, **_RL), given={"advantage_fn": name, "advantage_fn_args": args}
        )
        for name, args, advantage in (
            ("grpo", {"std_threshold": 0.0}, partial(f.grpo, least_std=0.0)),
            ("grpo", {"std_cal_level": "batch"}, partial(f.grpo, of_batch=True)),
            ("reinforceplusplus_baseline", {}, f.plus_baseline),
        )
    },
    "advantage rank": Case(
        Formula(partial(f.grpo, rank=0.5), **_RL),
        given={"advantage_fn_args": {"rank_penalty": 0.5}},
    ),
}
"""Parts and options that no row of the table has."""
MORE_PARTS: dict[str, Case] = {
    "kl sdar": Case(Formula(kl="sdar", entropy=True), given={"kl_loss_fn": "sdar"}),
    **{
        f"loss {name}": Case(Formula(loss=loss, **_RL), given={"policy_loss_fn": name})
        for name, loss in {
            "sft_is": f.by_token(f.sft_is),
            "sft_phi": f.by_token(f.sft_phi),
            "dppo": f.by_token(f.dppo),
            "vespo": f.by_sample(f.vespo),
        }.items()
    },
    "loss geo_mean": Case(
        Formula(loss=f.by_sample(f.of_sample(f.geo_mean)), average=_SEQUENCES, **_RL),
        given={"policy_loss_fn": "geo_mean", "loss_agg_mode": _SEQUENCES},
    ),
    **{
        f"rec {mode} {weight} {regularizer}": Case(
            Formula(
                FORMULAS["rec"].advantage,
                f.by_sample(partial(f.rec, mode=mode, weight=weight, regularizer=regularizer)),
                **_RL,
            ),
            "rec",
            {
                "policy_loss_fn_args": {
                    "clip_mode": mode,
                    "weight": weight,
                    "regularizer": regularizer,
                    "regularizer_coef": 0.1,
                }
            },
        )
        for mode, weight, regularizer in (
            ("one-side", "importance_sampling", "none"),
            ("gspo-one-side", "gspo_importance_sampling", "k2"),
            ("two-side", "advantage", "forward-kl"),
            ("ring", "none", "none"),
        )
    },
    "real's width": Case(
        Formula(whole=partial(f.real, tau=0.2)), "real", {"policy_loss_fn_args": {"tau": 0.2}}
    ),
    **{
        f"advantage {name}": Case(
            Formula(advantage, **_RL), given={"advantage_fn": name, "advantage_fn_args": args}
        )
        for name, args, advantage in (
            ("opmd_verl", {}, FORMULAS["opmd"].advantage),
            ("asymre_verl", {}, FORMULAS["asymre"].advantage),
            ("jsd", {"lambda_coef": 0.9}, partial(f.jsd, b=0.9)),
            ("clipb", {"mu": 0.5}, partial(f.clip_by_entropy, mu=0.5)),
            (
                "clipv",
                {"mu": 0.5, "max_frac": 0.1},
                partial(f.clip_by_entropy, mu=0.5, of_vocabulary=True, share=0.1),
            ),
        )
    },
    "advantage logavgexp": Case(
        Formula(partial(f.baseline, score=partial(f.less_log_mean_exp, tau=0.5)), **_RL),
        given={
            "advantage_fn": "opmd",
            "advantage_fn_args": {"opmd_baseline": "logavgexp", "tau": 0.5},
        },
    ),
    "advantage rec": Case(
        Formula(partial(f.baseline, score=partial(f.less_own_mean, by_std=True)), **_RL),
        given={"advantage_fn": "rec", "advantage_fn_args": {"std_normalize": True}},
    ),
}
"""The same of the extension more_losses."""


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_an_algorithm_computes_its_formula(name: str) -> None:
    of_loss, of_gradient = PARTS[name].errors(["shared and cut"])
    assert of_loss < WITHIN and of_gradient < WITHIN


@pytest.mark.extension("more_losses")
@pytest.mark.parametrize("name", MORE_PARTS)
def test_a_part_of_the_extension_computes_its_formula(name: str) -> None:
    of_loss, of_gradient = MORE_PARTS[name].errors(["shared and cut"])
    assert of_loss < WITHIN and of_gradient < WITHIN


def test_every_part_has_a_formula() -> None:
    recipes = [Case(FORMULAS[n], n).recipe() for n in FORMULAS if n in ALGORITHMS.built_in()]
    cases = PARTS | MORE_PARTS if "more_losses" in extensions() else PARTS
    recipes += [case.recipe() for case in cases.values()]
    for kind, registry in (
        ("advantage_fn", ADVANTAGES),
        ("policy_loss_fn", POLICY_LOSSES),
        ("kl_loss_fn", KLS),
        ("entropy_loss_fn", ENTROPIES),
    ):
        without = {*registry.built_in()} - {getattr(recipe, kind) for recipe in recipes}
        assert without <= {"grpo_verl"}, f"no case of test_formulas.py has the {kind} {without}"


@pytest.mark.whole
def test_the_page_has_the_errors_of_every_algorithm() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "exactness.md").read_text()
    errors = dict(re.findall(r"^\| `(\w+)` \| \S+ \| (\S+) \|$", page, re.MULTILINE))
    assert list(errors) == ALGORITHMS.built_in()
    assert max(map(float, errors.values())) < WITHIN


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| algorithm | loss | gradient |")
    print("|-|-|-|")
    for algorithm in ALGORITHMS.built_in():
        print(
            "| `{}` | {:.0e} | {:.0e} |".format(
                algorithm, *Case(FORMULAS[algorithm], algorithm).errors()
            )
        )
