"""Formulas: every algorithm of the table once more, by plain loops over rollouts and tokens.

Written from the papers and from docs/algorithms.md, in Python's floats and float64 scalars, without
a line of `trireme.algorithms`. A new algorithm, or part of one, gets an entry here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass
class Token:
    """A trained token; log-probabilities are those at its rollout's temperature."""

    at: int
    """Its place in the rollout."""
    p: Tensor
    """log p now, with its graph."""
    entropy: Tensor
    distribution: list[float]
    """log p of every word."""
    old: float
    sampled: float
    """log p under the distribution that it was really drawn from."""
    ref: float
    teacher: float
    weight: float
    reward: float | None
    """Of its own; None: the rollout's is on its last one."""
    value: float = 0.0
    """A critic's, and what it learns in its place."""
    returns: float = 0.0
    a: float = 0.0
    penalty: float = 0.0
    """What the KL takes off its reward."""

    @property
    def now(self) -> float:
        """log p, a number."""
        return float(self.p.detach())


@dataclass
class Rollout:
    """What one experience is to a formula."""

    task: str
    run: int
    step: int
    length: int
    reward: float
    tokens: list[Token]
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    state: str | None = None
    step_reward: float | None = None
    expert: bool = False
    desirable: bool = False
    other: list[float] = field(default_factory=list)
    """log (p / p_ref) of the reply of the rollout before, after this prompt."""


def _std(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    tasks = dict.fromkeys(r.task for r in rollouts)
    return [[r for r in rollouts if r.task == task] for task in tasks]


def _counted(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those of a group that count: several that a run left with one reward are one."""
    counted: list[Rollout] = []
    for run in dict.fromkeys(r.run for r in rollouts):
        mine = [r for r in rollouts if r.run == run]
        counted += mine if len({r.reward for r in mine}) > 1 else mine[:1]
    return counted


def _score(rollout: Rollout, score: float) -> Rollout:
    for token in rollout.tokens:
        token.a = score
    return rollout


def nothing(rollouts: list[Rollout]) -> list[Rollout]:
    """No advantage."""
    return rollouts


def grpo(
    rollouts: list[Rollout],
    *,
    by_std: bool = True,
    of_batch: bool = False,
    least_std: float | None = None,
    rank: float = 0.0,
    epsilon: float = 1e-6,
) -> list[Rollout]:
    """(R - mean) / (std + epsilon)."""
    kept: list[Rollout] = []
    scored: dict[int, float] = {id(r): r.reward for r in rollouts}
    for group in _groups(rollouts) if rank else []:
        likely = {id(r): sum(t.old for t in r.tokens) / len(r.tokens) for r in group if r.tokens}
        counted = _counted(group)
        for r in group:  # one without a token is neither likely nor unlikely
            ranked = [id(o) for o in counted if id(o) in likely and id(r) in likely]
            below = sum(likely[other] < likely[id(r)] for other in ranked)
            scored[id(r)] = r.reward * (1 - rank * below / len(counted))
    everything = [scored[id(r)] for group in _groups(rollouts) for r in _counted(group)]
    for group in _groups(rollouts):
        rewards = [scored[id(r)] for r in _counted(group)]
        alone = len(rewards) == 1
        mean = 0.0 if alone else sum(rewards) / len(rewards)
        std = 1.0 if alone else _std(rewards)
        if least_std is not None and (alone or std <= least_std):
            continue
        scale = _std(everything) if of_batch else std
        for r in group:
            kept.append(_score(r, (scored[id(r)] - mean) / (scale + epsilon if by_std else 1.0)))
    return kept


def plus_baseline(rollouts: list[Rollout]) -> list[Rollout]:
    """R - mean of the group, over the std of these differences."""
    grpo(rollouts, by_std=False)
    differences: list[float] = []
    centre: dict[int, float] = {}
    for group in _groups(rollouts):
        rewards = [r.reward for r in _counted(group)]
        mean = 0.0 if len(rewards) == 1 else sum(rewards) / len(rewards)
        centre |= {id(r): r.reward - mean for r in group}
        differences += [centre[id(r)] for r in _counted(group)]
    std = _std(differences)
    return [_score(r, centre[id(r)] / (std + 1e-6)) for r in rollouts]


def gdpo(rollouts: list[Rollout]) -> list[Rollout]:
    """The weighted sum of each reward's own GRPO, whitened over the batch."""
    summed = {id(r): 0.0 for r in rollouts}
    names = dict.fromkeys(name for r in rollouts for name in r.parts)
    counted = [r for group in _groups(rollouts) for r in _counted(group)]
    for group in _groups(rollouts):
        for name in names:
            having = [r for r in group if name in r.parts]
            rewards = [r.parts[name][0] for r in _counted(having)]
            if len(rewards) > 1:
                mean, std = sum(rewards) / len(rewards), _std(rewards)
                for r in having:
                    value, weight = r.parts[name]
                    summed[id(r)] += weight * (value - mean) / (std + 1e-4)
    scores = [summed[id(r)] for r in counted]
    mean, std = sum(scores) / len(scores), _std(scores)
    return [_score(r, (summed[id(r)] - mean) / (std + 1e-4)) for r in rollouts]


def step_wise(rollouts: list[Rollout]) -> list[Rollout]:
    """GRPO of the runs' last steps, whose score all steps of the run have."""
    last: list[Rollout] = []
    for group in _groups(rollouts):
        for run in dict.fromkeys(r.run for r in group):
            last.append(max((r for r in group if r.run == run), key=lambda r: r.step))
    for group in _groups(last):
        rewards = [r.reward for r in group]
        alone = len(rewards) == 1
        mean, std = (0.0, 1.0) if alone else (sum(rewards) / len(rewards), _std(rewards))
        for end in group:
            for r in rollouts:
                if (r.task, r.run) == (end.task, end.run):
                    _score(r, (end.reward - mean) / (std + 1e-6))
    return rollouts


def gigpo(rollouts: list[Rollout], *, gamma: float = 1.0) -> list[Rollout]:
    """A_E of the episode's return plus A_S of what follows a step, among equal states."""
    earned: dict[int, float] = {}
    ahead: dict[int, float] = {}
    returns: dict[tuple[str, int], float] = {}
    for key in dict.fromkeys((r.task, r.run) for r in rollouts):
        mine = sorted((r for r in rollouts if (r.task, r.run) == key), key=lambda r: r.step)
        says = any(r.step_reward is not None for r in mine)
        for r in mine:
            own = r.step_reward or 0.0 if says else r.reward * (r is mine[-1])
            earned[id(r)] = own
        returns[key] = sum(earned[id(r)] for r in mine)
        for n, r in enumerate(mine):
            ahead[id(r)] = sum(gamma**k * earned[id(s)] for k, s in enumerate(mine[n:]))
    for r in rollouts:
        episodes = [value for (task, _), value in returns.items() if task == r.task]
        a = returns[r.task, r.run] - sum(episodes) / len(episodes)
        same = [ahead[id(s)] for s in rollouts if r.state is not None and s.state == r.state]
        a += ahead[id(r)] - sum(same) / len(same) if same else 0.0
        _score(r, a)
    return rollouts


def baseline(
    rollouts: list[Rollout], score: Callable[[float, list[float]], float]
) -> list[Rollout]:
    for group in _groups(rollouts):
        rewards = [r.reward for r in _counted(group)]
        for r in group:
            _score(r, score(r.reward, rewards))
    return rollouts


def leave_one_out(reward: float, rewards: list[float]) -> float:
    n = len(rewards)
    return reward if n == 1 else reward - (sum(rewards) - reward) / (n - 1)


def less_mean(reward: float, rewards: list[float], *, shift: float = 0.0) -> float:
    return reward if len(rewards) == 1 else reward - (sum(rewards) / len(rewards) + shift)


def less_log_mean_exp(reward: float, rewards: list[float], *, tau: float) -> float:
    if len(rewards) == 1:
        return reward
    return reward - tau * math.log(sum(math.exp(r / tau) for r in rewards) / len(rewards))


def less_own_mean(reward: float, rewards: list[float], *, by_std: bool = False) -> float:
    """REC's: a group of one has A = 0; the std is the population's."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return (reward - mean) / (std + 1e-6 if by_std else 1.0)


def penalized(
    rollouts: list[Rollout], *, of: Callable[[list[Rollout]], list[Rollout]]
) -> list[Rollout]:
    """An advantage of rewards that are less what the KL takes off the tokens of the whole run."""
    costs: dict[tuple[str, int], float] = {}
    for r in rollouts:
        costs[r.task, r.run] = costs.get((r.task, r.run), 0.0) + sum(t.penalty for t in r.tokens)
    for r in rollouts:
        r.reward -= costs[r.task, r.run]
    return of(rollouts)


def reinforce(rollouts: list[Rollout]) -> list[Rollout]:
    """A = R."""
    return [_score(r, r.reward) for r in rollouts]


def remax(rollouts: list[Rollout]) -> list[Rollout]:
    """R less the greedy rollout's."""
    kept: list[Rollout] = []
    for r in rollouts:
        greedy = [g.reward for g in rollouts if g.task == r.task and g.run == 0]
        if greedy:
            kept.append(_score(r, 0.0 if r.run == 0 else r.reward - greedy[-1]))
    return kept


def raft(rollouts: list[Rollout]) -> list[Rollout]:
    """A group's best ones, where they are above 0."""
    best = {group[0].task: max(r.reward for r in group) for group in _groups(rollouts)}
    return [r for r in rollouts if r.reward == best[r.task] > 0]


def _whiten(rollouts: list[Rollout]) -> list[Rollout]:
    values = [t.a for r in rollouts for t in r.tokens]
    mean, std = sum(values) / len(values), _std(values)
    for r in rollouts:
        for t in r.tokens:
            t.a = (t.a - mean) / math.sqrt(std**2 + 1e-8)
    return rollouts


def _rewards(rollout: Rollout) -> list[float]:
    """Of its trained tokens, less what the KL takes off."""
    out = [0.0 if t.reward is None else t.reward for t in rollout.tokens]
    if out and rollout.tokens[0].reward is None:
        out[-1] = rollout.reward
    return [reward - t.penalty for reward, t in zip(out, rollout.tokens, strict=True)]


def plus_plus(rollouts: list[Rollout], *, gamma: float = 1.0) -> list[Rollout]:
    """What follows a token, whitened over the batch."""
    for r in rollouts:
        rewards = _rewards(r)
        for n, t in enumerate(r.tokens):
            t.a = sum(gamma**k * reward for k, reward in enumerate(rewards[n:]))
    return _whiten(rollouts)


def gae(rollouts: list[Rollout], *, gamma: float = 1.0, lam: float = 1.0) -> list[Rollout]:
    """sum_k (gamma lam)^k (r + gamma V_next - V), whitened."""
    for r in rollouts:
        rewards = _rewards(r)
        values = [t.value for t in r.tokens] + [0.0]
        deltas = [x + gamma * values[n + 1] - values[n] for n, x in enumerate(rewards)]
        for n, t in enumerate(r.tokens):
            t.a = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[n:]))
            t.returns = t.a + t.value
    return _whiten(rollouts)


def distill(rollouts: list[Rollout]) -> list[Rollout]:
    """log p_teacher - log p."""
    for t in (t for r in rollouts for t in r.tokens):
        t.a = t.teacher - t.old
    return rollouts


def jsd(rollouts: list[Rollout], *, b: float = 0.5) -> list[Rollout]:
    """(1 - b)(M - s), M = log((1 - b) e^s + b e^t)."""
    for t in (t for r in rollouts for t in r.tokens):
        mixture = math.log((1 - b) * math.exp(t.old) + b * math.exp(t.teacher))
        t.a = (1 - b) * (mixture - t.old)
    return rollouts


def rlsd(rollouts: list[Rollout], *, lam: float = 0.5, c: float = 0.2) -> list[Rollout]:
    """GRPO's A times 1 - l + l clip(e^(sign(A) d), 1 - c, 1 + c)."""
    for t in (t for r in grpo(rollouts) for t in r.tokens):
        sign = (t.a > 0) - (t.a < 0)
        evidence = math.exp(sign * (t.teacher - t.old))
        t.a *= 1 - lam + lam * min(max(evidence, 1 - c), 1 + c)
    return rollouts


def clip_by_entropy(
    rollouts: list[Rollout], *, mu: float, of_vocabulary: bool = False, share: float = 1.0
) -> list[Rollout]:
    """GRPO's A, 0 where A < 0 and what S = p (H + log p) is above its mean is below -mu std."""
    tokens = [t for r in grpo(rollouts) for t in r.tokens]
    surplus: list[float] = []
    for t in tokens:
        h = -sum(math.exp(x) * x for x in t.distribution)
        own = math.exp(t.now) * (h + t.now)
        mean = sum(math.exp(x) * math.exp(x) * (h + x) for x in t.distribution)
        surplus.append(own - mean if of_vocabulary else own)
    mean = sum(surplus) / len(surplus)
    std = math.sqrt(sum((s - mean) ** 2 for s in surplus) / len(surplus))
    centre = 0.0 if of_vocabulary else mean
    out = [
        (s, t) for s, t in zip(surplus, tokens, strict=True) if t.a < 0 and s - centre < -mu * std
    ]
    most = max(int(share * len(tokens)), 1)
    for _, t in sorted(out, key=lambda pair: pair[0])[:most]:
        t.a = 0.0
    return rollouts


TokenLoss = Callable[[Token], Tensor]


def _ratio(t: Token) -> Tensor:
    return (t.p - t.old).exp()


def ppo(t: Token, *, low: float = 0.2, high: float = 0.2, c: float = 3.0) -> Tensor:
    """-min(r A, clip(r) A), at most -c A where A < 0."""
    r = _ratio(t)
    gain = torch.minimum(r * t.a, r.clamp(1 - low, 1 + high) * t.a)
    return -(gain.clamp(min=c * t.a) if t.a < 0 else gain)


def sft(t: Token) -> Tensor:
    """-log p."""
    return -t.p


def sft_is(t: Token) -> Tensor:
    """-sg(p) log p."""
    return -math.exp(t.now) * t.p


def sft_phi(t: Token, *, cutoff: float = 1.0) -> Tensor:
    """-sg(p (1 - p)) log p."""
    p = math.exp(t.now)
    return -(p * (1 - p) if p <= cutoff else 0.0) * t.p


def opmd(t: Token, *, tau: float = 1.0) -> Tensor:
    """-A log p / (1 + tau)."""
    return -t.a * t.p / (1 + tau)


def importance_sampling(t: Token) -> Tensor:
    """-A r."""
    return -t.a * _ratio(t)


def dppo(t: Token, *, low: float = 0.2, high: float = 0.2, tau: float = 1e-3) -> Tensor:
    """-A r while p - p_old is within bounds, + tau (log r)^2."""
    moved = math.exp(t.now) - math.exp(t.old)
    out = moved > high if t.a > 0 else moved < -low
    return tau * (t.p - t.old) ** 2 - (0.0 if out else t.a) * _ratio(t)


def cispo(
    t: Token, *, low: float = 1.0, high: float = 0.28, mask: tuple[float, float] | None = None
) -> Tensor:
    """-A sg(clip(r)) log p."""
    r = math.exp(t.now - t.old)
    if mask and ((t.a > 0 and r > 1 + mask[1]) or (t.a < 0 and r < 1 - mask[0])):
        return 0 * t.p
    return -t.a * min(max(r, 1 - low), 1 + high) * t.p


def sapo(t: Token) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1))."""
    tau = 1.0 if t.a > 0 else 1.05
    return -t.a * 4 / tau / (1 + (-tau * (_ratio(t) - 1)).exp())


def topr(t: Token) -> Tensor:
    """-sg(a) A log p."""
    a = min(math.exp(t.now - t.old), 1.0) if t.a <= 0 else 1.0
    return -a * t.a * t.p


def sppo(t: Token, *, e: float = 0.3) -> Tensor:
    """-A log r within bounds."""
    inside = 1 / (1 + e) <= math.exp(t.now - t.old) <= 1 + e
    return -t.a * (t.p - t.old) * inside


def _mean_log_ratio(rollout: Rollout) -> float:
    return sum(t.now - t.old for t in rollout.tokens) / len(rollout.tokens)


def rec(
    rollout: Rollout, *, mode: str = "none", weight: str = "none", regularizer: str = "none"
) -> list[Tensor]:
    """-w A log p in range, + 0.1 times a regularizer; ranges 0.2, 0.2, 0.6 and 2."""
    out: list[Tensor] = []
    whole = math.exp(_mean_log_ratio(rollout)) if rollout.tokens else 1.0
    for t in rollout.tokens:
        r = math.exp(t.now - t.old)
        side = whole if mode == "gspo-one-side" else r
        one_side = side <= 1.2 if t.a >= 0 else side >= 0.8
        both = 0.8 <= r <= 1.2
        far = (t.a >= 0 and r <= 0.4) or (t.a <= 0 and r >= 3.0)
        ranges = {"none": True, "one-side": one_side, "gspo-one-side": one_side, "two-side": both}
        inside = (ranges | {"ring": both or far})[mode]
        w = {
            "none": 1.0,
            "importance_sampling": r,
            "gspo_importance_sampling": whole,
            "advantage": math.exp(t.a),
        }[weight]
        loss = -w * t.a * t.p if inside else 0 * t.p
        if regularizer == "k2":
            loss = loss + 0.1 * (t.p - t.old) ** 2
        if regularizer == "forward-kl":
            loss = loss - 0.1 * (t.p - t.old)
        out.append(loss)
    return out


def fipo(rollout: Rollout, *, half_life: float = 32.0) -> list[Tensor]:
    """sg(f) PPO, f = clip(exp(sum_k g^k log r_{t+k}), 1, 1.2), from 0.8 to 1 where it is unsafe."""
    out: list[Tensor] = []
    for n, t in enumerate(rollout.tokens):
        ahead = sum(2 ** (-(s.at - t.at) / half_life) * (s.now - s.old) for s in rollout.tokens[n:])
        f = min(max(math.exp(ahead), 1.0), 1.2)
        if t.a < 0 and math.exp(t.now - t.old) > 4:
            f = min(max(f, 0.8), 1.0)
        out.append(f * ppo(t, c=math.inf))
    return out


def masked_ppo(rollout: Rollout, *, delta: float = 0.1) -> list[Tensor]:
    """PPO without tokens of A < 0 of samples that the sampler drew far from the policy."""
    distances = [t.sampled - t.now for t in rollout.tokens]
    far = bool(distances) and sum(distances) / len(distances) > delta
    return [0 * t.p if far and t.a < 0 else ppo(t) for t in rollout.tokens]


def vespo(rollout: Rollout) -> list[Tensor]:
    """-sg(w^k exp(l (1 - w))) A log p, w of the whole sample."""
    log_w = min(max(sum(t.now - t.old for t in rollout.tokens), math.log(1e-8)), 20.0)
    out: list[Tensor] = []
    for t in rollout.tokens:
        k, scale = (2.0, 3.0) if t.a >= 0 else (3.0, 2.0)
        out.append(-math.exp(k * log_w + scale * (1 - math.exp(log_w))) * t.a * t.p)
    return out


def of_sample(loss: Callable[[Rollout], Tensor]) -> Callable[[Rollout], list[Tensor]]:
    """A loss of whole samples: each token has its part of it."""

    def each(rollout: Rollout) -> list[Tensor]:
        if not rollout.tokens:
            return []
        return [loss(rollout)] + [0 * t.p for t in rollout.tokens[1:]]

    return each


def gspo(rollout: Rollout, *, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """-n min(s A, clip(s) A), s = exp(mean log r): n, since the mean over tokens divides by it."""
    n, a = len(rollout.tokens), rollout.tokens[0].a
    s = (sum((t.p - t.old for t in rollout.tokens), torch.zeros(())) / n).exp()
    return -n * torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)


def geo_mean(rollout: Rollout, *, low: float = 0.4, high: float = 0.4) -> Tensor:
    """-n A exp(mean of log r, each clipped)."""
    n, a = len(rollout.tokens), rollout.tokens[0].a
    logs = [t.p - t.old for t in rollout.tokens]
    clipped = [x.clamp(max=high) if a > 0 else x.clamp(min=-low) for x in logs]
    return -n * a * (sum(clipped, torch.zeros(())) / n).exp()


def m2po(rollouts: list[Rollout], *, threshold: float = 0.04) -> dict[int, Tensor]:
    """-A r; of the tokens that a clip would touch the furthest go, until their mean (log r)^2 is at
    most the threshold.
    """
    tokens = [t for r in rollouts for t in r.tokens]
    touched = [t for t in tokens if (t.now - t.old) * t.a > 0]
    touched.sort(key=lambda t: (t.now - t.old) ** 2)
    while touched and sum((t.now - t.old) ** 2 for t in touched) / len(touched) > threshold:
        touched.pop()
    kept = {id(t) for t in touched}
    return {
        id(t): -t.a * _ratio(t) if id(t) in kept or (t.now - t.old) * t.a <= 0 else 0 * t.p
        for t in tokens
    }


def high_entropy(rollouts: list[Rollout], *, share: float) -> dict[int, Tensor]:
    """PPO of the tokens of the highest entropy."""
    tokens = [t for r in rollouts for t in r.tokens]
    ranked = sorted(tokens, key=lambda t: -float(t.entropy.detach()))
    chosen = {id(t) for t in ranked[: math.ceil(share * len(tokens))]}
    return {id(t): ppo(t) if id(t) in chosen else 0 * t.p for t in tokens}


Loss = Callable[[list[Rollout]], dict[int, Tensor]]


def by_token(loss: TokenLoss) -> Loss:
    """The loss of each token, by its id."""
    return lambda rollouts: {id(t): loss(t) for r in rollouts for t in r.tokens}


def by_sample(loss: Callable[[Rollout], list[Tensor]]) -> Loss:
    """The same of a loss that sees the sample."""
    return lambda rollouts: {
        id(t): x for r in rollouts for t, x in zip(r.tokens, loss(r), strict=True)
    }


def averaged(rollouts: list[Rollout], losses: dict[int, Tensor], mode: str) -> list[Tensor]:
    """What each token adds to the mean. Rollouts without a trained token count."""
    num_tokens = sum(len(r.tokens) for r in rollouts)
    width = max((r.length - r.tokens[0].at for r in rollouts if r.tokens), default=0)
    out: list[Tensor] = []
    for r in rollouts:
        for t in r.tokens:
            share = {
                "token-mean": 1 / num_tokens,
                "seq-mean-token-mean": 1 / (len(rollouts) * len(r.tokens)),
                "seq-mean-token-sum": 1 / len(rollouts),
                "seq-mean-token-sum-norm": 1 / width,
            }[mode]
            out.append(losses[id(t)] * t.weight * share)
    return out


def real(rollouts: list[Rollout], *, tau: float = 0.5) -> list[Tensor]:
    """The mean over groups of log(1 + sum_right e^(-s/tau)) + log(1 + sum_wrong e^(s/tau)), to
    first order: s times the slope, which the trainer reports.
    """
    groups = _groups(rollouts)
    out: list[Tensor] = []
    for group in groups:
        trained = [r for r in group if r.tokens]
        drifts = [
            sum((t.p - t.old for t in r.tokens), torch.zeros(())) / len(r.tokens) for r in trained
        ]
        scores = [s.detach().requires_grad_() for s in drifts]
        right = [s for s, r in zip(scores, trained, strict=True) if r.tokens[0].a > 0]
        wrong = [s for s, r in zip(scores, trained, strict=True) if r.tokens[0].a <= 0]
        if not (right and wrong):
            continue
        loss = torch.stack([(-s / tau).exp() for s in right]).sum().log1p()
        loss = loss + torch.stack([(s / tau).exp() for s in wrong]).sum().log1p()
        slopes = torch.autograd.grad(loss, scores)
        out += [s * slope / len(groups) for s, slope in zip(drifts, slopes, strict=True)]
    return out


def dpo(
    rollouts: list[Rollout], *, beta: float = 0.1, e: float = 0.0, rpo: float = 0.0
) -> list[Tensor]:
    """The mean over pairs of -(1 - e) log sigmoid(b D) - e log sigmoid(-b D) + rpo * NLL."""
    out: list[Tensor] = []
    pairs = list(zip(rollouts[::2], rollouts[1::2], strict=True))
    for better, worse in pairs:
        won = sum((t.p - t.ref for t in better.tokens), torch.zeros(()))
        lost = sum((t.p - t.ref for t in worse.tokens), torch.zeros(()))
        margin = beta * (won - lost)
        loss = -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)
        said = sum((t.p for t in better.tokens), torch.zeros(()))
        out.append((loss - rpo * said / len(better.tokens)) / len(pairs))
    return out


def kto(
    rollouts: list[Rollout], *, beta: float = 0.1, wanted: float = 1.0, unwanted: float = 1.0
) -> list[Tensor]:
    """The mean over replies of w (1 - sigmoid(+-b (R - z)))."""
    z = max(sum(sum(r.other) for r in rollouts) / len(rollouts), 0.0)
    out: list[Tensor] = []
    for r in rollouts:
        if not r.tokens:
            continue
        gain = sum((t.p - t.ref for t in r.tokens), torch.zeros(()))
        sign, w = (1, wanted) if r.desirable else (-1, unwanted)
        out.append(w * (1 - torch.sigmoid(beta * sign * (gain - z))) / len(rollouts))
    return out


KL: dict[str, Callable[[Token, float], Tensor]] = {
    "k1": lambda t, q: t.p - q,
    "k2": lambda t, q: (t.p - q) ** 2 / 2,
    "k3": lambda t, q: (q - t.p).exp() - 1 - (q - t.p),
    "low_var_kl": lambda t, q: ((q - t.p).exp() - 1 - (q - t.p)).clamp(max=10),
    "abs": lambda t, q: (t.p - q).abs(),
    "corrected_k3": lambda t, q: _ratio(t).clamp(max=2) * KL["k3"](t, q),
    "sdar": lambda t, q: (q - t.p) / (1 + math.exp(-5 * (q - t.now))),
}


def corrected(
    rollouts: list[Rollout],
    losses: dict[int, Tensor],
    *,
    truncated: str | None = None,
    masked: str | None = None,
) -> dict[int, Tensor]:
    """Each token's loss times min(p / p_sampler, 2), and 0 outside [1/2, 2]."""
    out = dict(losses)
    for r in rollouts:
        logs = [t.now - t.sampled for t in r.tokens]
        for n, t in enumerate(r.tokens):
            levels = {"token": logs[n], "sequence": sum(logs), "geometric": sum(logs) / len(logs)}
            if truncated:
                out[id(t)] = out[id(t)] * min(math.exp(levels[truncated]), 2.0)
            if masked and not 0.5 <= math.exp(levels[masked]) <= 2.0:
                out[id(t)] = 0 * t.p
    return out


@dataclass(frozen=True)
class Formula:
    """An algorithm: what a batch of rollouts adds to the loss."""

    advantage: Callable[[list[Rollout]], list[Rollout]] = grpo
    loss: Loss = field(default_factory=lambda: by_token(ppo))
    average: str = "token-mean"
    kl: str = "none"
    entropy: bool = False
    correction: dict[str, Any] | None = None
    teacher: str = "none"
    penalty: str = "none"
    experts: Callable[[Token], Tensor] | None = None
    """The loss of an expert's tokens, which are averaged by themselves."""
    mu: float = 0.1
    expert_average: str | None = None
    whole: Callable[[list[Rollout]], list[Tensor]] | None = None
    """In place of a loss and an average: what is a mean over something else."""

    def terms(self, rollouts: list[Rollout], *, kl: float, entropy: float) -> list[Tensor]:
        """The numbers whose sum is the loss."""
        if self.penalty != "none":
            for t in (t for r in rollouts for t in r.tokens):
                estimate = Token(**{**vars(t), "p": torch.tensor(t.old, dtype=torch.float64)})
                t.penalty = kl * float(KL[self.penalty](estimate, t.ref))
        experts = [r for r in rollouts if r.expert]
        rollouts = self.advantage([r for r in rollouts if not r.expert])
        if self.whole is not None:
            return self.whole(rollouts)
        terms = self._averaged(
            rollouts, self.loss(rollouts), 1 - self.mu, self.average, kl, entropy
        )
        if self.experts is not None:
            losses = {id(t): self.experts(t) for r in experts for t in r.tokens}
            mode = self.expert_average or self.average
            terms += self._averaged(experts, losses, self.mu, mode, kl, 0.0)
        return terms

    def _averaged(
        self,
        rollouts: list[Rollout],
        losses: dict[int, Tensor],
        share: float,
        mode: str,
        kl: float,
        entropy: float,
    ) -> list[Tensor]:
        if self.correction:
            losses = corrected(rollouts, losses, **self.correction)
        for t in (t for r in rollouts for t in r.tokens):
            loss = losses[id(t)] * (share if self.experts is not None else 1.0)
            if self.kl != "none":
                loss = loss + kl * KL[self.kl](t, t.ref)
            if self.teacher != "none":
                loss = loss + KL[self.teacher](t, t.teacher)
            losses[id(t)] = loss - (entropy * t.entropy if self.entropy else 0.0)
        return averaged(rollouts, losses, mode)


_RL: dict[str, Any] = {"kl": "k2", "entropy": True}
_SEQUENCES = "seq-mean-token-mean"

FORMULAS: dict[str, Formula] = {
    "sft": Formula(nothing, by_token(sft)),
    "cpt": Formula(nothing, by_token(sft)),
    "dpo": Formula(nothing, whole=dpo),
    "kto": Formula(nothing, whole=kto),
    "grpo": Formula(**_RL),
    "grpo_verl": Formula(**_RL),
    "ppo": Formula(gae, **_RL),
    "reinforceplusplus": Formula(plus_plus, **_RL),
    "multi_step_grpo": Formula(step_wise, **_RL),
    "gigpo": Formula(gigpo, **_RL),
    "dapo": Formula(partial(grpo, least_std=0.0), by_token(partial(ppo, high=0.28)), entropy=True),
    "dr_grpo": Formula(
        partial(grpo, by_std=False), average="seq-mean-token-sum-norm", entropy=True
    ),
    "gspo": Formula(loss=by_sample(of_sample(gspo)), average=_SEQUENCES, **_RL),
    "m2po": Formula(loss=m2po, entropy=True),
    "gdpo": Formula(gdpo, **_RL),
    "cispo": Formula(loss=by_token(cispo), **_RL),
    "sapo": Formula(loss=by_token(sapo), **_RL),
    "real": Formula(whole=real),
    "fipo": Formula(loss=by_sample(fipo), entropy=True),
    "rloo": Formula(partial(baseline, score=leave_one_out), **_RL),
    "remax": Formula(remax, entropy=True),
    "opmd": Formula(partial(baseline, score=less_mean), by_token(opmd), **_RL),
    "asymre": Formula(partial(baseline, score=partial(less_mean, shift=-0.1)), by_token(opmd)),
    "topr": Formula(reinforce, by_token(topr), **_RL),
    "sppo": Formula(partial(baseline, score=less_mean), by_token(sppo)),
    "rec": Formula(partial(baseline, score=less_own_mean), by_sample(rec), **_RL),
    "raft": Formula(raft, by_token(sft)),
    "mix": Formula(experts=sft, **_RL),
    "mix_chord": Formula(experts=sft_phi, **_RL),
    "on_policy_distill": Formula(distill),
    "rlsd": Formula(rlsd, entropy=True),
    "jsd": Formula(jsd),
}
"""Of each algorithm of the table."""
