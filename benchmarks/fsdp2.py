"""FSDP2: is a train step faster on two ranks than in one process, and is it the same step?

    OMP_NUM_THREADS=1 python benchmarks/fsdp2.py [--quick]

A small model (4 layers, width 256) takes the same steps on one process with one thread, on two
gloo ranks with one thread each, and on two ranks that share each sequence (Ulysses); each with
prefix sharing and without. Prints the median seconds of a step, the ratio to one process, and the
largest difference of a weight after 4 steps. Exits 1 where a weight differs by more than 1e-5, or
two ranks are less than 1.6 times as fast as one process. `--quick`: two steps, without sharing
alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from target import Target, judge
from transformers import AutoModelForCausalLM, Qwen3Config

from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig, OptimizerConfig
from trireme.experience import EID, Experience
from trireme.trainer.backend import Backend
from trireme.trainer.ranks import Ranks, RankSpec, free_address
from trireme.trainer.settings import TrainSettings
from trireme.trainer.step import train_step

STEPS, COMPARED, QUICK = 7, 4, 2
TASKS, ROLLOUTS, PROMPT, REPLY = 4, 8, 96, 32
RECIPE = get_recipe(
    AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none", optimizer=OptimizerConfig())
)


def make_model(folder: Path) -> None:
    """Random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=32,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def batch() -> list[Experience]:
    """Rollouts of several prompts."""
    rng = torch.Generator().manual_seed(1)
    out = []
    for task in range(TASKS):
        prompt = torch.randint(3, 2000, (PROMPT,), generator=rng).tolist()
        for run in range(ROLLOUTS):
            reply = torch.randint(3, 2000, (REPLY,), generator=rng).tolist()
            out.append(
                Experience(
                    prompt + reply,
                    prompt_length=PROMPT,
                    logprobs=[-7.6] * REPLY,
                    versions=[0] * REPLY,
                    advantages=torch.randn(REPLY, generator=rng),
                    eid=EID(0, task, run),
                )
            )
    return out


def measure(model: Path, share: bool, place: RankSpec | None, out: Path, steps: int) -> None:
    """Median seconds of a step, and the weights after some, into `out` by rank 0."""
    torch.set_num_threads(1)
    settings = TrainSettings(OptimizerConfig(lr=1e-4), 4096, grad_clip=1.0, share_prefix=share)
    backend = Backend(model, settings, Ranks(place) if place else None)
    samples, seconds, weights = batch(), [], {}
    for step in range(steps):
        started = time.perf_counter()
        train_step(backend, RECIPE, samples, version=0)
        seconds.append(time.perf_counter() - started)
        if step + 1 == min(COMPARED, steps):
            weights = {name: tensor.clone() for name, tensor in backend.each_weight()}
    if place is None or place.rank == 0:
        torch.save({"seconds": statistics.median(seconds[1:]), "weights": weights}, out)


def run(model: Path, share: bool, world: int, sequence: int, out: Path, steps: int) -> dict:
    """One row of the table."""
    context = multiprocessing.get_context("forkserver")  # its processes share their imports
    context.set_forkserver_preload(["trireme.trainer.step"])
    first = RankSpec(0, world, free_address(), sequence, timeout=600, lost_after=600)
    places = [replace(first, rank=r) for r in range(world)] if world > 1 else [None]
    processes = [
        context.Process(target=measure, args=(model, share, p, out, steps)) for p in places
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return torch.load(out, weights_only=True)


def main() -> int:
    """The table; 1 where weights differ or two ranks are slow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    steps = QUICK if quick else STEPS
    worst, speeds = 0.0, []
    layouts = (("two ranks", 2, 1), ("two ranks, Ulysses", 2, 2))
    print("sharing  how                 s/step   to one process   weights differ by")
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder, "model"), Path(folder, "out.pt")
        make_model(model)
        for share in (False,) if quick else (True, False):
            alone = run(model, share, 1, 1, out, steps)
            for name, world, sequence in layouts[: 1 if quick else 2]:
                got = run(model, share, world, sequence, out, steps)
                differ = max(
                    float((got["weights"][n] - w).abs().max()) for n, w in alone["weights"].items()
                )
                worst = max(worst, differ)
                if sequence == 1:
                    print(f"{share!s:7}  one process        {alone['seconds']:7.2f}")
                ratio = alone["seconds"] / got["seconds"]
                speeds += [ratio] if sequence == 1 else []
                row = f"{share!s:7}  {name:18} {got['seconds']:7.2f}   {ratio:6.2f} x faster"
                print(f"{row}   {differ:.1e}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    exact = judge(Target("a weight differs", worst, 1e-5, at_most=True))
    return exact | judge(Target("two ranks / one process", min(speeds), 1.6), quick=quick)


if __name__ == "__main__":
    sys.exit(main())
