"""Samples for trainer tests: shared prompts, equal rollouts, steps that extend others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trireme.experience import EID, Experience

VOCABULARY = 90


@dataclass
class Settings:
    """An optimizer section."""

    lr: float = 1e-3
    lr_warmup_steps: int = 0
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float | None = 0.1
    lr_scheduler_type: str = "constant"
    optimizer_type: str = "adam"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    weight_decay: float = 0.01


def experiences(seed: int = 0) -> list[Experience]:
    """Three tasks: rollouts of a prompt (two of them equal), a chain of steps, and a lone one.

    Advantages, temperatures, masks with holes and old log-probabilities all differ.
    """
    rng = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=rng).tolist()

    rows: list[tuple[EID, list[int], int]] = []
    prompt, shared = ids(9), ids(3)
    replies = [shared + ids(4), shared + ids(7), ids(5)]
    for run, reply in enumerate([*replies, replies[0]]):
        rows.append((EID(0, 0, run), prompt + reply, len(prompt)))
    step = ids(6)
    for number in range(3):
        rows.append((EID(0, 1, 0, number), [*step, *ids(4)], len(step)))
        step = [*rows[-1][1], *ids(2)]
    rows.append((EID(0, 2, 0), ids(30), 11))
    out = []
    for eid, tokens, start in rows:
        n = len(tokens) - start
        out.append(
            Experience(
                tokens,
                prompt_length=start,
                action_mask=torch.rand(n, generator=rng) < 0.8,
                logprobs=-4.5 + torch.randn(n, generator=rng) * 0.3,
                versions=[0] * n,
                advantages=torch.randn(n, generator=rng),
                temperature=0.7 if eid.task == 1 else 1.0,
                eid=eid,
            )
        )
    out[3].mask = out[0].mask.clone()
    return out
