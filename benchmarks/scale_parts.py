"""Scale parts: what one process of ours can carry, for the plan in docs/gpus.md.

    OMP_NUM_THREADS=1 python benchmarks/scale_parts.py [--length 2048] [--rollouts 64] [--quick]

Experiences of GRPO's shape: groups of 8 with one prompt of a quarter of the length. One thread.
The stores are put into and taken from once. Then two figures of a train step that do not depend on
the machine: how much of the attention's rows is padding where replies are ragged (asked: at most
15 %), and the largest tensor of a step over a vocabulary of 32,000 (asked: at most the 64 MiB that
logits may have, whatever the batch). Exits 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from target import Target, judge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.buffer.queue import QueueBuffer
from trireme.config.schema import AlgorithmConfig, OptimizerConfig
from trireme.engines.engine import Completion
from trireme.experience import EID, Experience
from trireme.ext.replay.replay import ReplayBuffer
from trireme.ext.sql.buffer import SqlBuffer
from trireme.serialize import decode, encode
from trireme.trainer.attention import Rows
from trireme.trainer.backend import Backend
from trireme.trainer.pack import pack
from trireme.trainer.settings import TrainSettings
from trireme.trainer.step import train_step

VOCABULARY = 32_000


def made(length: int, rollouts: int) -> list[Experience]:
    """Random groups of 8."""
    generator = torch.Generator().manual_seed(0)
    prompt_length, prompt = length // 4, []
    out: list[Experience] = []
    for run in range(rollouts):
        if run % 8 == 0:
            prompt = torch.randint(0, VOCABULARY, (prompt_length,), generator=generator).tolist()
        reply = torch.randint(
            0, VOCABULARY, (length - prompt_length,), generator=generator
        ).tolist()
        out.append(
            Experience(
                prompt + reply,
                prompt_length=prompt_length,
                logprobs=[-1.0] * len(reply),
                reward=float(run % 2),
                eid=EID(0, run // 8, run),
            )
        )
    return out


def json_both_ways(experiences: list[Experience]) -> None:
    """What engine and explorer do with each reply beside generating it."""
    for e in experiences:
        logprobs = [-1.2345678] * len(e.tokens)
        body = Completion(e.tokens.tolist(), logprobs, logprobs, [3] * len(e.tokens), "stop")
        Completion(**json.loads(json.dumps(vars(body))))


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The fastest of several."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


async def through(buffer: Any, experiences: list[Experience]) -> None:
    """Put group by group, taken in batches of 16."""
    for start in range(0, len(experiences), 8):
        await buffer.put(experiences[start : start + 8])
    for _ in range(0, len(experiences), 16):
        await buffer.take(16)
    await buffer.close()


def stores(folder: Path, experiences: list[Experience]) -> list[tuple[str, float]]:
    """Seconds of each store; every round has a store of its own."""
    numbers = itertools.count()
    makers: dict[str, Callable[[], Any]] = {
        "queue": lambda: QueueBuffer("queue"),
        "replay": lambda: ReplayBuffer("replay"),
        "sql": lambda: SqlBuffer("sql", f"sqlite:///{folder}/{next(numbers)}.db"),
    }
    return [
        (
            f"{name} buffer, put and take",
            seconds(lambda make=make: asyncio.run(through(make(), experiences)), times=3),
        )
        for name, make in makers.items()
    ]


def padding() -> float:
    """The share of the attention rows' queries that is padding, for replies of 1 to 512 tokens."""
    source = random.Random(0)
    ragged = [
        Experience(
            [source.randrange(VOCABULARY) for _ in range(64 + size)],
            prompt_length=64,
            logprobs=[-1.0] * size,
            eid=EID(0, n // 8, n),
        )
        for n, size in enumerate(source.randint(1, 512) for _ in range(64))
    ]
    layout = pack(flatten(ragged))
    assert isinstance(layout.attention, Rows)
    return 1 - len(layout.tokens) / sum(rows.queries.numel() for rows in layout.attention.buckets)


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.bytes = max(self.bytes, *sizes, 0)
        return out


def largest_tensor(folder: Path, experiences: list[Experience]) -> float:
    """MiB of the largest tensor that a train step of SFT makes."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        head_dim=8, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    backend = Backend(folder, TrainSettings(OptimizerConfig(), 1 << 20, grad_clip=1.0))
    recipe = get_recipe(AlgorithmConfig(algorithm_type="sft"))
    with Largest() as largest:
        train_step(backend, recipe, experiences, version=0)
    return largest.bytes / 2**20


def main() -> int:
    """Print one table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.length, options.rollouts = 64, 16
    experiences = made(options.length, options.rollouts)
    data = encode(experiences)
    batch = flatten(experiences)
    tokens = options.length * options.rollouts
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [
        ("copy of the same bytes (floor)", seconds(lambda: flat.clone())),
        ("encode for another process", seconds(lambda: encode(experiences))),
        ("decode", seconds(lambda: decode(data))),
        ("a reply from an engine, as JSON both ways", seconds(lambda: json_both_ways(experiences))),
        ("flatten to a batch", seconds(lambda: flatten(experiences))),
        ("pack with shared prefixes", seconds(lambda: pack(batch, share_prefix=True))),
    ]
    with tempfile.TemporaryDirectory() as name:
        rows += stores(Path(name), experiences)
        largest = largest_tensor(Path(name), made(1024, 8))
    print(f"{options.rollouts} rollouts of {options.length} tokens: {len(data) / 1e6:.1f} MB")
    print("| part | rollouts/s | tokens/s |\n|-|-|-|")
    for name, taken in rows:
        print(f"| {name} | {options.rollouts / taken:,.0f} | {tokens / taken:,.0f} |")
    return judge(
        Target("padding of the attention's rows", padding(), 0.15, at_most=True),
        Target("MiB of a train step's largest tensor", largest, 64, at_most=True),
    )


if __name__ == "__main__":
    sys.exit(main())
