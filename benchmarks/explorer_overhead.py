"""Explorer overhead: what a rollout costs beside the engine, and a conversation of many turns.

    OMP_NUM_THREADS=1 python benchmarks/explorer_overhead.py [--rollouts 2000] [--quick]

`rollouts`: so many at once, in groups of 8, on an engine that replies at once with 28 tokens, by
the real scheduler, runners, models, reward, metrics, advantages and copy. Printed are milliseconds
a rollout of the event loop's thread (its processor time: other programs do not count), those of all
threads, and how late the event loop was. Asked: at most 0.5 ms a rollout.

`conversation`: 128 turns, each of 32 sampled tokens, on the embedded engine with the demo's model,
8 at once. Asked: what renders and records, the event loop's thread, takes at most 2 % of the time
that it takes to generate.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from target import Target, judge
from transformers import AutoTokenizer

from trireme import Experience, Model, Task
from trireme.algorithms.recipes import get_recipe
from trireme.buffer.record import record_for
from trireme.config.schema import AlgorithmConfig
from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.device import Device
from trireme.engines.engine import Completion, Sampling
from trireme.engines.scripted import ScriptedEngine
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.explorer.metrics import rollout_metrics
from trireme.explorer.runner import Key, Runner, TimeLimit
from trireme.explorer.scheduler import Scheduler
from trireme.launch.run import rare_collections
from trireme.model.chat_tokens import ChatTokens
from trireme.pipeline.pipeline import Pipeline

GROUP, TOKENS, TURNS, CONVERSATIONS = 8, 28, 128, 8
TICK_S = 0.005


class AtOnce(ScriptedEngine):
    """Waits until all rollouts have asked, and replies to all of them in one turn of the loop."""

    def __init__(self, tokenizer: Any, expected: int) -> None:
        super().__init__([], tokenizer=tokenizer)
        self._expected, self._asked = expected, 0
        self._all = asyncio.Event()
        self.text = " has" * TOKENS
        self.ids = tokenizer.encode(self.text, add_special_tokens=False)

    async def generate(self, ids: Sequence[int], sampling: Sampling, **_: Any) -> list[Completion]:
        self._asked += 1
        if self._asked == self._expected:
            self._all.set()
        await self._all.wait()
        count = len(self.ids)
        logprobs = [-0.5] * count
        versions = [0] * count
        return [Completion(list(self.ids), logprobs, logprobs, versions, "stop", None, self.text)]


async def lateness(late: list[float]) -> None:
    """How late each tick of a clock on this event loop came, for ever."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - began - TICK_S)


async def rollouts(folder: Path, count: int) -> tuple[float, float, list[float]]:
    """Milliseconds a rollout of the loop's thread and of all threads; the loop's lateness."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    chat, engine = ChatTokens(tokenizer), AtOnce(tokenizer, count)
    pipeline = Pipeline(
        get_recipe(AlgorithmConfig(algorithm_type="grpo")),
        raw=record_for("copy.db", folder / f"{time.monotonic_ns()}"),
    )

    def make_model(_: Task, key: Key) -> Model:
        return Model(engine, chat, key=key, sampling=Sampling(max_tokens=TOKENS), max_model_len=256)

    limit = TimeLimit(600.0)
    runners = [
        Runner(make_model, engine, limit=limit, max_retries=0) for _ in range(count // GROUP)
    ]
    scheduler = Scheduler(runners, max_repeats_per_runner=None)
    tasks = [
        Task(
            raw_task={"prompt": row["question"], "response": row["answer"]},
            workflow="simple_workflow",
            reward_fn="accuracy_reward",
            repeat_times=GROUP,
            task_id=number,
        )
        for number, row in enumerate(make_problems(count // GROUP, seed=0))
    ]
    scheduler.start()
    late: list[float] = []
    clock = asyncio.ensure_future(lateness(late))
    mine, all_ = time.thread_time(), time.process_time()
    await scheduler.submit(1, tasks)
    outcomes = await scheduler.results(1)
    experiences = [e for outcome in outcomes for e in outcome.experiences]
    assert len(experiences) == count, f"{len(experiences)} of {count} rollouts came back"
    rollout_metrics(outcomes)
    await pipeline.run(experiences)
    mine = time.thread_time() - mine
    assert pipeline.raw is not None
    pipeline.raw.close()
    all_ = time.process_time() - all_
    clock.cancel()
    await scheduler.close()
    return 1000 * mine / count, 1000 * all_ / count, late


class TimedDevice(Device):
    """Adds up how long it works."""

    busy = 0.0

    async def run(self, function: Any, *args: Any) -> Any:
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self.busy += time.thread_time() - started

        return await super().run(timed, *args)


async def conversations(folder: Path, turns: int) -> tuple[float, float]:
    """Processor seconds of the event loop's thread, and of the engine's."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    device = TimedDevice()
    engine = TorchEngine(
        folder / "model",
        tokenizer=tokenizer,
        device=device,
        settings=TorchSettings(max_model_len=8192, seed=0),
    )
    chat = ChatTokens(tokenizer)

    async def talk(number: int) -> list[Experience]:
        sampling = Sampling(max_tokens=32, ignore_eos=True)
        model = Model(engine, chat, key=(0, number, 0), sampling=sampling, max_model_len=8192)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "How many apples?"}]
        for turn in range(turns):
            reply = await model.chat(messages)
            asked = f"You find {turn} more. How many books are there then?"  # never the same
            messages += [reply.message, {"role": "user", "content": asked}]
        return model.experiences(reward=1.0)

    began = time.thread_time()
    found = await asyncio.gather(*(talk(n) for n in range(CONVERSATIONS)))
    mine = time.thread_time() - began
    assert all(len(experiences) == 1 for experiences in found), "a conversation was split"
    await engine.close()
    device.close()
    return mine, device.busy


def main() -> int:
    """Print both; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    turns = TURNS
    if options.quick:
        options.rollouts, options.rounds, turns = 64, 1, 4
    texts = [row["question"] + row["answer"] for row in make_problems(300, seed=0)]
    with tempfile.TemporaryDirectory() as name, rare_collections():
        folder = Path(name)
        make_tiny_model(folder / "model", texts, seed=0, max_len=8192)
        rounds = []
        for _ in range(options.rounds):
            rounds.append(asyncio.run(rollouts(folder, options.rollouts)))
            gc.collect()
        each = statistics.median(mine for mine, _, _ in rounds)
        every = statistics.median(all_ for _, all_, _ in rounds)
        late = sorted(value for _, _, values in rounds for value in values)
        print(f"{options.rollouts} rollouts at once: {each:.3f} ms each on the event loop, "
              f"{every:.3f} ms with the copy's thread; the event loop was late by "
              f"{statistics.median(late):.3f} s (median), {late[-1]:.3f} s at most")  # fmt: skip
        mine, engine = asyncio.run(conversations(folder, turns))
    print(f"{CONVERSATIONS} conversations of {turns} turns: {mine:.2f} s on the event loop, "
          f"{engine:.2f} s in the engine")  # fmt: skip
    return judge(
        Target("ms of the event loop a rollout", each, 0.5, at_most=True),
        Target("rendering and recording / generating", mine / engine, 0.02, at_most=True),
        quick=options.quick,
    )


if __name__ == "__main__":
    sys.exit(main())
