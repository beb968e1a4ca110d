"""ColocationLock: who has the device, when the trainer works and requests come or wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ext.http.made import on_port, torch_rollouts, until
from tests.limits import HANG_S
from trireme.engines.device import ColocationLock, Device
from trireme.engines.engine import Engine, Health, Sampling
from trireme.ext.remote.engine import RemoteEngine

PROMPT = [5, 6, 7, 8]


def colocated(folder: Path, main: Callable[[Device, RemoteEngine, Engine], Awaitable[Any]]) -> None:
    """A trainer's device, its engine by HTTP, and the engine itself."""

    async def go() -> None:
        made = torch_rollouts(folder, max_model_len=2000)
        async with made as rollouts, on_port(rollouts) as url:
            device, engine = Device(), RemoteEngine([url])
            device.colocation = engine.colocation = ColocationLock(engine, timeout=HANG_S)
            try:
                await asyncio.wait_for(main(device, engine, rollouts.engine), HANG_S)
            finally:
                await engine.close()
                device.close()

    asyncio.run(go())


def test_the_engine_rests_from_the_trainers_work_until_it_is_asked(tiny_dir: Path) -> None:
    async def main(device: Device, engine: RemoteEngine, own: Engine) -> None:
        assert await device.run(lambda: own.health().paused)
        assert await device.run(lambda: own.health().paused) and own.health().paused
        await engine.generate(PROMPT, Sampling(max_tokens=2))
        assert not own.health().paused

    colocated(tiny_dir, main)


def test_what_is_asked_while_the_trainer_works_waits_for_it(tiny_dir: Path) -> None:
    async def main(device: Device, engine: RemoteEngine, own: Engine) -> None:
        work = asyncio.ensure_future(device.run(time.sleep, 0.5))
        await until(lambda: own.health().paused)
        ask = asyncio.ensure_future(engine.logprobs([PROMPT]))
        done, _ = await asyncio.wait({work, ask}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {work}
        assert len((await ask)[0]) == len(PROMPT)

    colocated(tiny_dir, main)


def test_requests_under_way_rest_too_and_go_on_afterwards(tiny_dir: Path) -> None:
    async def main(device: Device, engine: RemoteEngine, own: Engine) -> None:
        long = Sampling(max_tokens=300, ignore_eos=True)
        call = asyncio.ensure_future(engine.generate(PROMPT, long))
        await until(lambda: own.health().generated_tokens > 10)

        def count_twice() -> int:
            before = own.health().generated_tokens
            time.sleep(0.3)
            return own.health().generated_tokens - before

        assert await device.run(count_twice) == 0 and not call.done()
        assert len((await call)[0].ids) == 300

    colocated(tiny_dir, main)


class Obeys:
    """An engine that pauses and resumes, and has nothing to do."""

    def __init__(self) -> None:
        self.paused = False

    async def pause(self, *, weights_follow: bool = False) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    def health(self) -> Health:
        return Health(0, 0, 0, 0, 0, 0, paused=self.paused)


@pytest.mark.parametrize(
    ("works", "waits_for"), [(True, "end of the trainer's"), (False, "weights")]
)
def test_a_trainer_that_does_not_end_is_named_after_the_time_limit(
    works: bool, waits_for: str
) -> None:
    async def main() -> None:
        engine: Any = Obeys()
        lock = ColocationLock(engine, timeout=0.2)
        begun, over = asyncio.Event(), asyncio.Event()

        async def train() -> None:
            async with lock.for_trainer(weights_follow=not works):
                begun.set()
                if works:
                    await over.wait()

        trainer = asyncio.ensure_future(train())
        await begun.wait()
        with pytest.raises(TimeoutError, match=rf"0\.2 s \(synchronizer\.sync.*{waits_for}"):
            await lock.for_engine()
        over.set()
        lock.arrived()
        await trainer
        await lock.for_engine()  # a limit that has passed leaves nothing taken
        assert not engine.paused

    asyncio.run(main())
