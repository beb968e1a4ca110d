"""Scale parts: what one process of ours can carry, for the plan in docs/scale.md.

    OMP_NUM_THREADS=1 python benchmarks/scale_parts.py [--length 2048] [--rollouts 64]

Experiences of GRPO's shape: groups of 8 with one prompt of a quarter of the length. One thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from trireme.batch import flatten
from trireme.engines.engine import Completion
from trireme.experience import EID, Experience
from trireme.serialize import decode, encode
from trireme.trainer.pack import pack


def made(length: int, rollouts: int) -> list[Experience]:
    """Random groups of 8."""
    generator = torch.Generator().manual_seed(0)
    prompt_length, prompt = length // 4, []
    out: list[Experience] = []
    for run in range(rollouts):
        if run % 8 == 0:
            prompt = torch.randint(0, 32_000, (prompt_length,), generator=generator).tolist()
        reply = torch.randint(0, 32_000, (length - prompt_length,), generator=generator).tolist()
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


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rollouts", type=int, default=64)
    options = parser.parse_args()
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
    print(f"{options.rollouts} rollouts of {options.length} tokens: {len(data) / 1e6:.1f} MB")
    print("| part | rollouts/s | tokens/s |\n|-|-|-|")
    for name, taken in rows:
        print(f"| {name} | {options.rollouts / taken:,.0f} | {tokens / taken:,.0f} |")


if __name__ == "__main__":
    main()
