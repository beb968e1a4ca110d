"""Prefix sharing: how much less is computed when the steps of an episode share their beginning?

    OMP_NUM_THREADS=1 python benchmarks/prefix_sharing.py [--quick]

Episodes of 5, 15 and 30 steps, one experience a step, each step's prompt the whole history: 20
tokens of observation and 8 of reply a step, 8 rollouts of one task. Prints the tokens that one
train step computes with and without sharing, the seconds both take on a tiny model, and the largest
difference of the gradients. Exits 1 where sharing computes more than half of the tokens, or changes
the gradient by more than 1e-5 of its largest entry; both do not depend on the machine. `--quick`:
episodes of 5 steps alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from target import Target, judge

from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.config.schema import AlgorithmConfig, OptimizerConfig
from trireme.demo.tiny_model import make_tiny_model
from trireme.experience import EID, Experience
from trireme.registry import ALGORITHMS
from trireme.trainer.backend import Backend
from trireme.trainer.learning import TrainState
from trireme.trainer.pack import pack
from trireme.trainer.settings import TrainSettings
from trireme.trainer.step import MetricTotals, batch_loss

OBSERVATION, REPLY, ROLLOUTS, WORDS = 20, 8, 8, 80


def episodes(steps: int) -> list[Experience]:
    """Experiences of all steps of all rollouts, with advantages."""
    source = torch.Generator().manual_seed(0)

    def draw(size: int) -> list[int]:
        return torch.randint(6, WORDS, (size,), generator=source).tolist()

    first, found = draw(OBSERVATION), []
    for run in range(ROLLOUTS):
        history = list(first)
        for step in range(steps):
            tokens = history + draw(REPLY)
            found.append(
                Experience(
                    tokens,
                    prompt_length=len(history),
                    logprobs=[-2.0] * REPLY,
                    versions=[0] * REPLY,
                    eid=EID("1", "0", run, step),
                    reward=float(run % 2),
                )
            )
            history = tokens + draw(OBSERVATION)
    return ALGORITHMS.get("multi_step_grpo").advantages(found)[0]


def gradient(folder: Path, found: list[Experience], share: bool) -> tuple[torch.Tensor, float]:
    """The gradient of one train step, and the seconds that it took."""
    settings = TrainSettings(
        OptimizerConfig(), max_token_len=1 << 20, grad_clip=1.0, total_steps=1, share_prefix=share
    )
    backend = Backend(folder, settings)
    batch = flatten(found)
    batch = batch.with_fields(weights=ALGORITHMS.get("multi_step_grpo").weights(batch))
    recipe = get_recipe(AlgorithmConfig(algorithm_type="multi_step_grpo", kl_loss_fn="none"))
    loss = partial(
        batch_loss, recipe=recipe, totals=MetricTotals(), fresh=None, train_state=TrainState(recipe)
    )
    seconds = []
    for _ in range(2):  # the first one warms up
        backend.module.zero_grad()
        started = time.perf_counter()
        backend.forward_backward(batch, loss)
        seconds.append(time.perf_counter() - started)
    grads = [p.grad.flatten() for p in backend.module.parameters() if p.grad is not None]
    return torch.cat(grads), min(seconds)


def main() -> int:
    """One line for each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    lengths = (5,) if parser.parse_args().quick else (5, 15, 30)
    targets = []
    print(
        "steps  tokens apart  tokens shared  ratio  seconds apart  shared  ratio  gradient differs"
    )
    with tempfile.TemporaryDirectory() as name:
        words = " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(WORDS))
        folder = make_tiny_model(Path(name), [words], seed=0, max_len=1024)
        for steps in lengths:
            found = episodes(steps)
            batch = flatten(found)
            apart = len(pack(batch, share_prefix=False).tokens)
            shared = len(pack(batch).tokens)
            plain, plain_s = gradient(folder, found, False)
            packed, packed_s = gradient(folder, found, True)
            differs = float((plain - packed).abs().max() / plain.abs().max())
            print(
                f"{steps:5}{apart:14,}{shared:15,}{apart / shared:7.1f}{plain_s:15.2f}"
                f"{packed_s:8.2f}{plain_s / packed_s:7.1f}{differs:18.1e}",
                flush=True,
            )
            targets += [
                Target(f"tokens of {steps} steps, apart / shared", apart / shared, 2),
                Target(f"gradient of {steps} steps differs", differs, 1e-5, at_most=True),
            ]
    return judge(*targets)


if __name__ == "__main__":
    sys.exit(main())
