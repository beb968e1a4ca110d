"""Runners over the embedded engine: retries, time-outs and the barrier, on sampled tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.explorer.made import Models, make_runner, run, task
from tests.limits import HANG_S
from trireme.engines.device import Device, RolloutBarrier
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.explorer.runner import Outcome
from trireme.explorer.scheduler import Scheduler
from trireme.workflows.workflow import resolve


def with_engine(folder: Path, main: Callable[[TorchEngine, RolloutBarrier], Awaitable[Any]]) -> Any:
    """What `main` gives with a gated engine."""

    async def go() -> Any:
        device, barrier = Device(1), RolloutBarrier()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        engine = TorchEngine(
            folder,
            tokenizer=tokenizer,
            device=device,
            barrier=barrier,
            settings=TorchSettings(max_model_len=128),
        )
        try:
            return await main(engine, barrier)
        finally:
            await engine.close()
            device.close()

    return run(go())


async def say(task: Any, model: Any) -> Any:
    await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=1.0)


def test_a_retry_samples_other_tokens_and_the_same_ones_in_every_run(tiny_dir: Path) -> None:
    def tried() -> list[list[int]]:
        seen: list[list[int]] = []

        async def fails_once(task: Any, model: Any) -> Any:
            found = await say(task, model)
            seen.append(found[0].tokens.tolist())
            if len(seen) == 1:
                raise ValueError("a bad reply")
            return found

        async def main(engine: TorchEngine, barrier: RolloutBarrier) -> Outcome:
            runner = make_runner(engine, barrier=barrier, max_retries=1)
            return await runner.run(task(), resolve(fails_once), [0])

        (e,) = with_engine(tiny_dir, main).experiences
        assert e.tokens.tolist() == seen[1]
        return seen

    first, second = tried()
    assert first != second
    assert tried() == [first, second]


def test_a_hung_thread_holds_the_gate_until_its_time_out_and_no_longer(tiny_dir: Path) -> None:
    release = threading.Event()

    def hangs(task: Any, model: Any) -> Any:
        release.wait(HANG_S)

    async def main(engine: TorchEngine, barrier: RolloutBarrier) -> tuple[Outcome, Outcome]:
        hung = asyncio.ensure_future(
            make_runner(engine, barrier=barrier, max_timeout=0.2).run(
                task(hangs), resolve(hangs), [0]
            )
        )
        await asyncio.sleep(0)
        other = await make_runner(engine, barrier=barrier).run(
            task(say, task_id=1), resolve(say), [0]
        )
        release.set()
        return await hung, other

    hung, other = with_engine(tiny_dir, main)
    assert hung.failures[0].kind == "timeout"
    assert len(other.experiences) == 1 and other.seconds > 0.1


def test_a_time_out_in_the_middle_of_a_reply_frees_its_row(tiny_dir: Path) -> None:
    async def endless(task: Any, model: Any) -> Any:
        while True:
            await model.chat([{"role": "user", "content": "?"}], ignore_eos=True, max_tokens=100)

    async def main(engine: TorchEngine, barrier: RolloutBarrier) -> None:
        models = Models(engine)
        runner = make_runner(engine, models, barrier=barrier, max_timeout=0.2)
        outcome = await runner.run(task(endless), resolve(endless), [0])
        assert outcome.failures[0].kind == "timeout"
        while engine.health().running or engine.health().waiting:
            await asyncio.sleep(0.01)
        after = await make_runner(engine, barrier=barrier).run(task(say), resolve(say), [0])
        assert len(after.experiences) == 1
        health = engine.health()
        assert (health.running, health.waiting) == (0, 0)

    with_engine(tiny_dir, main)


def test_the_engine_waits_for_a_rollout_that_is_about_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the speed of a thread, such as one that reads pictures, would decide which requests
    are computed together, and with it the last bits of a run.
    """
    barrier, begin = RolloutBarrier(), asyncio.Event()

    async def ends(task: Any, model: Any) -> Any:
        return []

    async def go() -> None:
        runners = [make_runner(barrier=barrier) for _ in range(2)]
        for runner in runners:
            monkeypatch.setattr(runner, "run", partial(later, runner.run))
        scheduler = Scheduler(runners, max_repeats_per_runner=None)
        scheduler.start()
        await asyncio.sleep(0)
        assert barrier.open([])
        await scheduler.submit(1, [task(ends, task_id=n) for n in range(3)])
        assert not barrier.open([])  # two are free, and three wait
        await asyncio.sleep(0.05)
        assert not barrier.live and not barrier.open([])  # taken, and not begun
        begin.set()
        assert len(await scheduler.results(1)) == 3
        await asyncio.sleep(0)
        assert barrier.open([])
        await scheduler.submit(2, [task(ends, task_id=n) for n in range(3)])
        assert not barrier.open([])
        await scheduler.close()
        assert barrier.open([])  # nothing begins any more

    async def later(run: Any, *args: Any) -> Any:
        await begin.wait()
        return await run(*args)

    run(go())
