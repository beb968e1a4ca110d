"""ColocationLock: who has the device, when the trainer works and requests come or wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.ext.http.made import on_port, torch_rollouts, until
from tests.limits import HANG_S
from trireme.engines.device import ColocationLock, Device
from trireme.engines.engine import Engine, Health, Sampling
from trireme.ext.remote import engine_host
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineKeeper

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

    servers = None

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


class Mortal:
    """The process of an engine's server, as its keeper knows it."""

    name = "engine 1"

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, AsyncExitStack()
        self._ended, self.begins = asyncio.Event(), asyncio.Event()
        self.load = asyncio.Event()
        """Until it is set, the process is still loading its model."""
        self.load.set()
        self.engine: Engine | None = None
        self.url = ""

    def start(self) -> None:
        self._ended.clear()
        self.begins.set()

    async def ready(self) -> str:
        await self.load.wait()
        made = await self._stack.enter_async_context(torch_rollouts(self._folder))
        self.engine = made.engine
        self.url = await self._stack.enter_async_context(on_port(made))
        return self.url

    async def examine(self) -> None:
        if self._ended.is_set():
            raise RuntimeError("engine 1 has ended")

    async def watch(self) -> None:
        await self._ended.wait()
        raise RuntimeError("engine 1 has ended by signal 9")

    async def stop(self, grace: float = 0) -> None:
        await self._stack.aclose()

    async def die(self) -> None:
        self.begins.clear()
        self.load.clear()
        await self._stack.aclose()
        self._ended.set()


def beside_a_mortal_one(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    main: Callable[[Device, RemoteEngine, Mortal, list[str]], Awaitable[Any]],
) -> None:
    """A trainer's device, two engines that share it, and a keeper of the second; in which order the
    trainer makes room, is noted.
    """
    monkeypatch.setattr(engine_host, "DYING_S", 0.0)

    async def go() -> None:
        second = Mortal(folder)
        async with torch_rollouts(folder) as first, on_port(first) as url:
            second.start()
            device, engine = Device(), RemoteEngine([url, await second.ready()])
            lock = ColocationLock(engine, timeout=HANG_S)
            device.colocation = engine.colocation = engine.servers.colocation = lock
            engine.servers.restarted = True
            noted: list[str] = []

            async def make_room() -> None:
                noted.append("room")

            async def renew(lacking: Callable[[], bool]) -> None:
                engine.servers.complete(engine.servers.instances)

            lock.make_room, engine.servers.renew = make_room, renew
            hosts: list[Any] = [Alive(url), second]
            try:
                await engine.connect()
                keeper = EngineKeeper(hosts, engine.servers, restarts=3)
                work = main(device, engine, second, noted)
                await asyncio.wait_for(keeper.run(work), HANG_S)
            finally:
                await engine.close()
                device.close()
                await second.stop()

    asyncio.run(go())


class Alive:
    """A process that does not end."""

    name = "engine 0"

    def __init__(self, url: str) -> None:
        self.url = url

    async def watch(self) -> None:
        await asyncio.Event().wait()


def test_an_engine_that_ends_during_the_trainers_work_is_loaded_in_the_engines_turn(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is the trainer's until then: vLLM refuses to start on a GPU that is taken."""

    async def main(device: Device, engine: RemoteEngine, second: Mortal, noted: list[str]) -> None:
        async with device.turn():
            await second.die()
            await asyncio.sleep(0.3)
            assert not second.begins.is_set() and not noted
        await second.begins.wait()
        assert noted == ["room"]
        following = asyncio.ensure_future(device.run(lambda: second.engine))
        await asyncio.sleep(0.3)
        assert not following.done()  # the trainer works only when the engine has loaded
        second.load.set()
        loaded: Any = await following
        assert loaded.health().paused  # and rests, as the others do
        await engine.generate(PROMPT, Sampling(max_tokens=2))
        assert not loaded.health().paused

    beside_a_mortal_one(tiny_dir, monkeypatch, main)


@pytest.mark.parametrize("trains", [True, False])
def test_trainer_and_requests_wait_for_an_engine_that_has_ended(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """Neither a turn nor a request fails because one of several engines cannot pause or resume."""

    async def main(device: Device, engine: RemoteEngine, second: Mortal, noted: list[str]) -> None:
        if not trains:
            await device.run(int)
        await second.die()
        short = Sampling(max_tokens=2)
        call: Any = device.run(int) if trains else engine.generate(PROMPT, short)
        call = asyncio.ensure_future(call)
        await second.begins.wait()
        second.load.set()
        assert await call is not None
        assert second.engine is not None and second.engine.health().paused == trains

    beside_a_mortal_one(tiny_dir, monkeypatch, main)
