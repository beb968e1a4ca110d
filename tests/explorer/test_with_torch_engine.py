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
from trireme.explorer.scheduler import OverRollout, Scheduler
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

    least, more, kinds = 2, 5, 4

    def __call__(self, task: Task, key: Any) -> Any:
        model = super().__call__(task, key)
        length = self.least + self.more * ((task.task_id + key[2]) % self.kinds)
        model.sampling = Sampling(max_tokens=length, min_tokens=length)
        return model


class Longer(Lengths):
    """Models whose replies take several advances, of unequal number."""

    least, more, kinds = 10, 13, 5


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[Any, int]]]:
    """Of each advance the keys of all rows, and how many tokens they have then."""
    seen: list[list[tuple[Any, int]]] = []
    advance = Decoder.advance

    def noted(decoder: Decoder, admitted: Any, **options: Any) -> Any:
        ended = advance(decoder, admitted, **options)
        seen.append(sorted((r.key[1:], len(r.out)) for r in (*decoder.active, *ended)))
        return ended

    monkeypatch.setattr(Decoder, "advance", noted)
    return seen


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
    tiny_dir: Path, runners: int, together: list[list[tuple[Any, int]]]
) -> None:
    """Some rewards fail, and their rollouts are tried again; tasks may wait for a free runner."""

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
    assert any(len(key) == 4 for rows in fast[1] for key, _ in rows), "some were tried again"
    for slow in (
        lambda number, nth: number == 0,
        lambda number, nth: number % 2 == 1,
        lambda number, nth: nth == 1,
        lambda number, nth: True,
    ):
        assert done(slow) == fast


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("runners", [1, 3])
def test_over_rollout_drops_a_task_whose_reward_hangs_after_it_has_left_its_runner(
    tiny_dir: Path, runners: int, most: int | None
) -> None:
    async def reward(task: Any, answer: str) -> float:
        if task.task_id == 2:
            await asyncio.sleep(10 * HANG_S)
        return 1.0

    async def main(engine: TorchEngine, barrier: RolloutBarrier) -> None:
        made = [make_runner(engine, Lengths(engine), barrier=barrier) for _ in range(runners)]
        over = OverRollout(ratio=0.25, wait_after_min=0.05)
        scheduler = Scheduler(made, max_repeats_per_runner=most, over_rollout=over)
        scheduler.start()
        for batch in (1, 2):
            await scheduler.submit(batch, [single_turn(reward, n) for n in range(4)])
        for batch in (1, 2):
            outcomes = await scheduler.results(batch)
            assert [o.task.task_id for o in outcomes] == [0, 1, 3]
            assert [len(o.experiences) for o in outcomes] == [2] * 3
        assert scheduler.dropped_tasks == 2
        while barrier.begun:  # what is cancelled ends a few turns of the loop later
            await asyncio.sleep(0)
        assert not barrier.live and not engine.health().running
        assert all(state.endswith("idle") for state in scheduler.states())
        await scheduler.close()

    with_engine(tiny_dir, main)


@pytest.mark.parametrize("runners", [1, 3])
def test_a_reward_that_takes_too_long_fails_its_rollout_alone_and_is_tried_again(
    tiny_dir: Path, runners: int
) -> None:
    """Its runner has long been given to another task, whose rollouts go on."""
    begun: dict[int, int] = {}

    async def reward(task: Any, answer: str) -> float:
        begun[task.task_id] = begun.get(task.task_id, 0) + 1
        if task.task_id == 1 and begun[1] <= 2:  # the first attempts of both rollouts
            await asyncio.sleep(10 * HANG_S)
        return float(begun[task.task_id])

    async def main(engine: TorchEngine, barrier: RolloutBarrier) -> list[Outcome]:
        limit = {"max_timeout": 2.0, "max_retries": 1}
        made = [
            make_runner(engine, Lengths(engine), barrier=barrier, **limit) for _ in range(runners)
        ]
        scheduler = Scheduler(made, max_repeats_per_runner=None)
        scheduler.start()
        await scheduler.submit(1, [single_turn(reward, n) for n in range(4)])
        outcomes = await scheduler.results(1)
        assert not barrier.begun and not barrier.live
        await scheduler.close()
        return outcomes

    outcomes = with_engine(tiny_dir, main)
    assert [len(o.experiences) for o in outcomes] == [2] * 4 and not any(
        o.failures for o in outcomes
    )
    assert sorted(e.reward or 0.0 for e in outcomes[1].experiences) == [3.0, 4.0]
    assert [o.retries for o in outcomes] == [0, 2, 0, 0]


def test_closing_ends_rollouts_that_wait_for_their_rewards_off_their_runners(
    tiny_dir: Path,
) -> None:
    ended: list[int] = []

    async def reward(task: Any, answer: str) -> float:
        try:
            await asyncio.sleep(10 * HANG_S)
        finally:
            ended.append(task.task_id)
        return 1.0

    async def main(engine: TorchEngine, barrier: RolloutBarrier) -> None:
        made = [make_runner(engine, Lengths(engine), barrier=barrier)]
        scheduler = Scheduler(made, max_repeats_per_runner=None)
        scheduler.start()
        await scheduler.submit(1, [single_turn(reward, n, 1) for n in range(3)])
        while not scheduler.states()[-1].startswith("3 tasks"):
            await asyncio.sleep(0.01)
        await scheduler.close()
        assert sorted(ended) == [0, 1, 2]
        assert not barrier.begun and not barrier.live

    with_engine(tiny_dir, main)


def test_what_is_computed_together_does_not_depend_on_when_a_reward_asks_for_logprobs(
    tiny_dir: Path, together: list[list[tuple[Any, int]]]
) -> None:
    """The engine does not wait for it, and an advance that ended for it would let others in
    earlier.
    """

    def done(late: float) -> Any:
        async def once(task: Any, model: Any) -> Any:
            reply = await model.chat([{"role": "user", "content": task.prompt}])
            for _ in range(5):
                await asyncio.sleep(late)
                await model.logprobs(reply.call.ids)
            return model.experiences(reward=1.0)

        once.one_call = True

        async def main(engine: TorchEngine, barrier: RolloutBarrier) -> Any:
            made = [make_runner(engine, Longer(engine), barrier=barrier) for _ in range(2)]
            scheduler = Scheduler(made, max_repeats_per_runner=None)
            scheduler.start()
            tasks = [task(once, task_id=n, repeat_times=2) for n in range(6)]
            await scheduler.submit(1, tasks)
            outcomes = await scheduler.results(1)
            await scheduler.close()
            return [(e.eid.uid, e.tokens.tolist()) for o in outcomes for e in o.experiences]

        together.clear()
        return with_engine(tiny_dir, main), list(together)

    at_once = done(0.0)
    assert len(at_once[0]) == 12
    for late in (0.0, 0.001, 0.004, 0.02):
        assert done(late) == at_once


def test_a_rollout_that_goes_on_with_one_of_two_calls_is_warned_of(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def at_once(task: Any, model: Any) -> Any:
        messages = [{"role": "user", "content": "?"}]
        calls = [model.chat(messages, max_tokens=n, min_tokens=n) for n in (4, 60)]
        await asyncio.gather(*calls)
        return model.experiences(reward=1.0)

    async def several(task: Any, model: Any) -> Any:
        messages = [{"role": "user", "content": "?"}]
        await model.chat_samples(messages, n=3, max_tokens=30)
        return model.experiences(reward=1.0)

    async def main(workflow: Any, engine: TorchEngine, barrier: RolloutBarrier) -> None:
        runner = make_runner(engine, barrier=barrier)
        outcome = await runner.run(task(workflow), resolve(workflow), [0, 1])
        assert outcome.experiences

    with_engine(tiny_dir, partial(main, several))
    assert not caplog.records
    with_engine(tiny_dir, partial(main, at_once))
    (record,) = caplog.records
    assert "calls the model again before all of its earlier calls have ended" in record.message
