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
from trireme.engines.barrier import RolloutBarrier
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.decoder import Decoder
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.explorer.runner import Outcome
from trireme.explorer.scheduler import Scheduler
from trireme.task import Task
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
        while engine._decoder.active or engine.health().waiting:
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


class Lengths(Models):
    """Models whose replies have a length of their own for each rollout."""

    def __call__(self, task: Task, key: Any) -> Any:
        model = super().__call__(task, key)
        length = 2 + 5 * ((task.task_id + key[2]) % 4)
        model.sampling = Sampling(max_tokens=length, min_tokens=length)
        return model


def single_turn(reward: Any, number: int, repeats: int = 2) -> Task:
    row = {"prompt": f"{number} + 1?", "response": str(number + 1)}
    index = {"index": number}
    return Task(row, "simple_workflow", reward, repeat_times=repeats, task_id=number, index=index)


@pytest.mark.parametrize("runners", [1, 2, 4])
def test_the_engine_does_not_wait_for_rewards_of_rollouts_that_ask_once(
    tiny_dir: Path, runners: int
) -> None:
    """A reward that waits until all rollouts have their replies would otherwise never end."""
    waiting, all_replied = [0], asyncio.Event()

    async def patient(task: Any, answer: str) -> float:
        waiting[0] += 1
        if waiting[0] == 8:
            all_replied.set()
        await asyncio.wait_for(all_replied.wait(), HANG_S)
        return 1.0

    async def main(engine: TorchEngine, barrier: RolloutBarrier) -> list[Outcome]:
        made = [make_runner(engine, Lengths(engine), barrier=barrier) for _ in range(runners)]
        scheduler = Scheduler(made, max_repeats_per_runner=None)
        scheduler.start()
        await scheduler.submit(1, [single_turn(patient, n) for n in range(4)])
        outcomes = await scheduler.results(1)
        await scheduler.close()
        return outcomes

    outcomes = with_engine(tiny_dir, main)
    assert [len(outcome.experiences) for outcome in outcomes] == [2] * 4


@pytest.mark.parametrize("runners", [1, 2, 3, 6])
def test_what_is_computed_together_does_not_depend_on_how_long_rewards_take(
    tiny_dir: Path, runners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rewards fail, and their rollouts are tried again; tasks may wait for a free runner."""
    together: list[list[Any]] = []
    advance = Decoder.advance

    def noted(decoder: Decoder, admitted: Any, **options: Any) -> Any:
        ended = advance(decoder, admitted, **options)
        together.append(sorted(r.key[1:] for r in (*decoder.active, *ended)))
        return ended

    monkeypatch.setattr(Decoder, "advance", noted)

    def done(slow: Callable[[int, int], bool]) -> Any:
        failed, count = set[tuple[int, str]](), dict[int, int]()

        async def reward(task: Any, answer: str) -> float:
            number = task.task_id
            count[number] = count.get(number, 0) + 1
            if slow(number, count[number]):
                await asyncio.sleep(0.05)
            if number % 2 and (number, answer) not in failed:
                failed.add((number, answer))
                raise RuntimeError("the judge is away")
            return 1.0

        async def main(engine: TorchEngine, barrier: RolloutBarrier) -> Any:
            made = [
                make_runner(engine, Lengths(engine), barrier=barrier, max_retries=1)
                for _ in range(runners)
            ]
            scheduler = Scheduler(made, max_repeats_per_runner=None)
            scheduler.start()
            await scheduler.submit(1, [single_turn(reward, n) for n in range(6)])
            outcomes = await scheduler.results(1)
            await scheduler.close()
            return [(e.eid.uid, e.tokens.tolist()) for o in outcomes for e in o.experiences]

        together.clear()
        return with_engine(tiny_dir, main), list(together)

    fast = done(lambda number, nth: False)
    assert any(len(key) == 4 for keys in fast[1] for key in keys), "some were tried again"
    for slow in (
        lambda number, nth: number == 0,
        lambda number, nth: number % 2 == 1,
        lambda number, nth: nth == 1,
        lambda number, nth: True,
    ):
        assert done(slow) == fast
