"""Memory: how much does a train step take at a large vocabulary, and how much of it is padding?

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--vocabulary 151936] [--quick]

`memory`: one train step of 4 samples of 1,024 tokens on a model of one small layer, in a process of
its own, once as Trireme does it and once the plain way: logits of all tokens, log-softmax, gather,
backward. What counts is the peak of the process above what it took before the step.
`padding`: samples of 64 + 1 to 512 tokens in groups of 8, as the trainer lays them out. Padding are
places of the model's input that hold no token; the attention's own rows are counted beside it.
Asked: at least 4 times less memory, and padding under 3 % of the tokens; exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from scale_parts import made
from target import Target, judge
from transformers import AutoModelForCausalLM, Qwen3Config

from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.config.schema import AlgorithmConfig, OptimizerConfig
from trireme.experience import EID, Experience
from trireme.trainer.attention import Rows
from trireme.trainer.backend import Backend
from trireme.trainer.pack import pack
from trireme.trainer.settings import TrainSettings
from trireme.trainer.step import train_step

SAMPLES, LENGTH = 4, 1024


def peak_mib() -> float:
    """The most that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def step_mib(folder: Path, way: str, length: int) -> float:
    """MiB that a train step adds to the peak; to be called in a process of its own."""
    experiences = made(length, SAMPLES)
    if way == "trireme":
        backend = Backend(folder, TrainSettings(OptimizerConfig(), 1 << 20, grad_clip=1.0))
        recipe = get_recipe(AlgorithmConfig(algorithm_type="sft"))
        train_step(backend, recipe, made(16, SAMPLES), version=0)  # gradients, optimizer's state
        before = peak_mib()
        train_step(backend, recipe, experiences, version=0)
        return peak_mib() - before
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters())

    def plain(samples: list[Experience]) -> None:
        ids = torch.stack([e.tokens for e in samples])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        mask = torch.stack([e.mask for e in samples])[:, 1:]
        (-(logprobs * mask).sum() / mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    plain(made(16, SAMPLES))
    before = peak_mib()
    plain(experiences)
    return peak_mib() - before


def paddings() -> tuple[float, float]:
    """Padding's share of the model's input, and of the attention's queries, for ragged replies."""
    sizes = torch.randint(1, 513, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = torch.randint(0, 1000, (64, 576), generator=torch.Generator().manual_seed(1))
    ragged = [
        Experience(
            tokens[n, : 64 + size],
            prompt_length=64,
            logprobs=[-1.0] * size,
            eid=EID(0, n // 8, n),
        )
        for n, size in enumerate(sizes)
    ]
    layout = pack(flatten(ragged))
    assert isinstance(layout.attention, Rows)
    needed = sum(len(e.tokens) - 1 for e in ragged)  # the last token of a sample predicts nothing
    queries = sum(rows.queries.numel() for rows in layout.attention.buckets)
    return max(0.0, 1 - needed / len(layout.tokens)), 1 - len(layout.tokens) / queries


def main() -> int:
    """Print the table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    length = 256 if options.quick else LENGTH
    if options.one:
        print(json.dumps(step_mib(Path(options.one[0]), options.one[1], length)))
        return 0
    config = Qwen3Config(
        vocab_size=32_000 if options.quick else options.vocabulary, hidden_size=64,
        intermediate_size=128, num_hidden_layers=1, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        AutoModelForCausalLM.from_config(config).save_pretrained(name)
        for way in ("trireme", "plain"):
            command = [sys.executable, __file__, "--one", name, way]
            command += ["--quick"] if options.quick else []
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{way} failed:\n{done.stderr[-2000:]}")
            found[way] = json.loads(done.stdout.splitlines()[-1])
            print(f"{way:8} {found[way]:10,.0f} MiB for a step of {SAMPLES} x {length} tokens")
    tokens, queries = paddings()
    print(f"padding: {tokens:.1%} of the trained tokens; {queries:.1%} of the attention's queries")
    return judge(
        Target(
            "memory of the plain way / Trireme's", found["plain"] / max(found["trireme"], 1), 4.0
        ),
        Target("padding of the trained tokens", tokens, 0.03, at_most=True),
        quick=options.quick,
    )


if __name__ == "__main__":
    sys.exit(main())
