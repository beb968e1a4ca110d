"""Asynchronous rollouts: what is gained when no trajectory waits for the slowest of its batch?

    python benchmarks/async_rollout.py [--requests 64] [--repeats 3] [--quick]

The same requests through the same server code, with the asynchronous engine and in batch mode.
Trajectories have 1 to 8 turns, replies 1 to 256 tokens (about 40 on average); in every third turn a
tool answers after 50 ms. Prints seconds (the least of the repeats) and the ratio.
Asked: 1.8 times as fast as in batch mode, with the engine busy for 90 % of the time; exits 1 below.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from target import Target, judge
from transformers import AutoTokenizer

from trireme import MultiTurnScheduler, RolloutInferRequest, RolloutResponseChoice
from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.ext.http.rollouts import Rollouts
from trireme.ext.rollout_server.trajectories import infer
from trireme.model.chat_tokens import ChatTokens

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


class TimedDevice(Device):
    """Adds up how long it works."""

    busy = 0.0

    async def run(self, function: Any, *args: Any) -> Any:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.busy += time.perf_counter() - started

        return await super().run(timed, *args)


async def seconds(folder: Path, count: int, *, asynchronous: bool) -> tuple[float, float, int]:
    """Wall time of one batch of requests, the engine's share of it, and the tokens sampled."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    device = TimedDevice()
    engine = TorchEngine(
        folder,
        tokenizer=tokenizer,
        device=device,
        settings=TorchSettings(max_model_len=MAX_LEN, seed=0),
    )
    rollouts = Rollouts(
        engine,
        ChatTokens(tokenizer),
        str(folder),
        MAX_LEN,
        scheduler={"scheduler": Ragged, "max_turns": MAX_TURNS},
        use_async_engine=asynchronous,
    )
    started = time.perf_counter()
    outputs = await infer(rollouts, requests(count), SAMPLING)
    elapsed = time.perf_counter() - started
    busy = device.busy / elapsed
    await engine.close()
    device.close()
    return (
        elapsed,
        busy,
        sum(output["response"]["usage"]["completion_tokens"] for output in outputs),
    )


def main() -> int:
    """Print the table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.repeats = 4, 1
    with tempfile.TemporaryDirectory() as name:
        texts = [row["question"] + row["answer"] for row in make_problems(300, seed=0)]
        folder = make_tiny_model(
            Path(name) / "model", [*texts, "and then?"], seed=0, max_len=MAX_LEN
        )
        best: dict[bool, tuple[float, float, int]] = {}
        for _ in range(options.repeats):
            for mode in (True, False):
                found = asyncio.run(seconds(folder, options.requests, asynchronous=mode))
                best[mode] = min(best.get(mode, found), found)
    print(f"{'engine':<14}{'seconds':>9}{'busy':>9}{'tokens':>9}")
    for mode, label in ((True, "asynchronous"), (False, "batch")):
        took, busy, tokens = best[mode]
        print(f"{label:<14}{took:>9.2f}{busy:>9.0%}{tokens:>9}")
    return judge(
        Target("batch / asynchronous", best[False][0] / best[True][0], 1.8),
        Target("asynchronous: share of the time that the engine is busy", best[True][1], 0.9),
        quick=options.quick,
    )


if __name__ == "__main__":
    sys.exit(main())
