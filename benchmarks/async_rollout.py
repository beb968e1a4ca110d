"""Asynchronous rollouts: what is gained when no trajectory waits for the slowest of its batch?

    python benchmarks/async_rollout.py [--requests 64] [--repeats 3]

The same requests through the same server code, with the asynchronous engine and in batch mode.
Trajectories have 1 to 8 turns, replies 1 to 256 tokens (about 40 on average); in every third turn a
tool answers after 50 ms. Prints seconds (the least of the repeats) and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trireme import MultiTurnScheduler, RolloutInferRequest, RolloutResponseChoice
from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.model.chat_tokens import ChatTokens
from trireme.server.rollouts import Rollouts

MAX_TURNS, TOOL_SECONDS, MAX_LEN = 8, 0.05, 4096
SAMPLING = {"max_tokens": 256, "stop": [" has", " many", "How", ".", "?"]}
"""A random model says one of these after some 40 tokens, now and then after 200."""


class Ragged(MultiTurnScheduler):
    """As many turns as the row says; some with a slow tool."""

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        return current_turn >= infer_request.data_dict["turns"]

    async def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        if (current_turn + infer_request.data_dict["turns"]) % 3 == 0:
            await asyncio.sleep(TOOL_SECONDS)
        infer_request.messages.append({"role": "user", "content": "and then?"})
        return infer_request


def requests(count: int) -> list[RolloutInferRequest]:
    """The same for both."""
    source = random.Random(0)
    problems = make_problems(count, seed=0, number=7, largest=12)
    return [
        RolloutInferRequest(
            [{"role": "user", "content": row["question"]}],
            data_dict={"turns": source.randint(1, MAX_TURNS)},
            uuid=str(place),
        )
        for place, row in enumerate(problems)
    ]


async def seconds(folder: Path, count: int, *, asynchronous: bool) -> tuple[float, int]:
    """Wall time of one batch of requests, and the tokens that were sampled."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    device = Device()
    engine = TorchEngine(folder, tokenizer=tokenizer, device=device, max_model_len=MAX_LEN, seed=0)
    rollouts = Rollouts(
        engine,
        ChatTokens(tokenizer),
        str(folder),
        MAX_LEN,
        scheduler={"scheduler": Ragged, "max_turns": MAX_TURNS},
        use_async_engine=asynchronous,
    )
    started = time.perf_counter()
    outputs = await rollouts.infer(requests(count), SAMPLING)
    elapsed = time.perf_counter() - started
    await engine.close()
    device.close()
    return elapsed, sum(output["response"]["usage"]["completion_tokens"] for output in outputs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        texts = [row["question"] + row["answer"] for row in make_problems(300, seed=0)]
        folder = make_tiny_model(
            Path(name) / "model", [*texts, "and then?"], seed=0, max_len=MAX_LEN
        )
        best: dict[bool, tuple[float, int]] = {}
        for _ in range(options.repeats):
            for mode in (True, False):
                found = asyncio.run(seconds(folder, options.requests, asynchronous=mode))
                best[mode] = min(best.get(mode, found), found)
    print(f"{'engine':<14}{'seconds':>9}{'tokens':>9}")
    for mode, label in ((True, "asynchronous"), (False, "batch")):
        print(f"{label:<14}{best[mode][0]:>9.2f}{best[mode][1]:>9}")
    print(f"batch / asynchronous: {best[False][0] / best[True][0]:.2f}")


if __name__ == "__main__":
    main()
