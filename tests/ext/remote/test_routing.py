"""Routing: servers have even loads and keep their caches, by a simulation in virtual time."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from trireme.ext.remote.servers import Router

PROMPT = 300
SECONDS_A_TOKEN = 0.02


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing else is to be done."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self._now = max(self._now, loop._scheduled[0]._when)
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


def in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Simulation:
    """Tasks of 8 rollouts with replies of heavy-tailed lengths, on servers that take any number."""

    def __init__(self, servers: int, *, tasks: int, runners: int, turns: int, steps: int) -> None:
        self.urls = [f"http://server-{n}" for n in range(servers)]
        self.tasks, self.runners, self.turns, self.steps = tasks, runners, turns, steps
        self.router = Router()
        self.random = random.Random(servers * 1000 + tasks)
        self.tokens: list[Counter[str]] = []
        """Of each explore step, what each server computed: prompts that it had not, and replies."""
        self.requests = self.hits = 0
        self.seen: set[tuple[Any, ...]] = set()

    async def run(self) -> None:
        for step in range(self.steps):
            self.tokens.append(Counter())
            slots = asyncio.Semaphore(self.runners)
            tasks = [self.task((step, task), slots) for task in range(self.tasks)]
            await asyncio.gather(*tasks)

    async def task(self, key: tuple[int, int], slots: asyncio.Semaphore) -> None:
        async with slots:  # the scheduler gives a runner a task, whose rollouts go side by side
            difficulty = self.random.lognormvariate(6.0, 0.5)
            await asyncio.gather(*(self.rollout((*key, run), difficulty) for run in range(8)))

    async def rollout(self, key: tuple[int, int, int], difficulty: float) -> None:
        context = PROMPT
        for turn in range(self.random.randint(1, self.turns)):
            length = min(int(difficulty * self.random.lognormvariate(0, 0.7)), 8192)
            placed = self.router.place(
                (*key, turn), prompt=context, samples=1, ready=lambda: _all(self.urls)
            )
            async with placed as url:
                hit = (key if turn else key[:2], url) in self.seen
                self.requests, self.hits = self.requests + 1, self.hits + hit
                self.seen |= {(key, url), (key[:2], url)}
                self.tokens[-1][url] += length + (0 if hit else context)
                await asyncio.sleep(length * SECONDS_A_TOKEN)
            self.router.replied([length])
            context += length

    def fullest(self) -> float:
        """The tokens of the fullest server over the mean, averaged over explore steps."""
        ratios = [max(t.values()) * len(self.urls) / t.total() for t in self.tokens]
        return sum(ratios) / len(ratios)

    def hit_share(self) -> float:
        """Hits, as a share of those where each task keeps to one server: all but its first."""
        return self.hits / (self.requests - len({key for key, _ in self.seen if len(key) == 2}))


async def _all(urls: Sequence[str]) -> Sequence[str]:
    return urls


class Hashed(Router):
    """By the hash of the task alone."""

    def _choose(self, key: tuple[Any, ...], tokens: float, servers: Sequence[str]) -> str:
        return servers[zlib.crc32(repr(key[:2]).encode()) % len(servers)]


def simulated(turns: int, *sizes: int, router: Router | None = None) -> tuple[float, float]:
    """The fullest server over the mean, and the share of hits."""
    servers, tasks, runners = sizes
    made = Simulation(servers, tasks=tasks, runners=runners, turns=turns, steps=6)
    made.router = router or made.router
    in_virtual_time(made.run())
    return made.fullest(), made.hit_share()


@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("sizes", [(2, 32, 16), (4, 64, 32), (8, 128, 64)])
def test_servers_have_even_loads_and_keep_their_caches(sizes, turns):
    fullest, hits = simulated(turns, *sizes)
    assert fullest <= 1.15
    assert hits >= 0.95
    assert fullest < simulated(turns, *sizes, router=Hashed())[0]


def test_where_all_of_a_step_is_asked_for_at_once_it_is_still_better_than_a_hash():
    # nothing is known of the replies' lengths when the last request is placed
    fullest, hits = simulated(1, 8, 128, 128)
    assert fullest <= 1.2 and hits >= 0.95
    assert fullest < simulated(1, 8, 128, 128, router=Hashed())[0]


def placed(*asked: tuple[tuple[int, ...], int], owed: dict[str, float]) -> list[str]:
    """The servers of requests that are made one after the other, and stay."""

    async def main() -> list[str]:
        router, urls = Router(), []
        router.owed = owed
        async with AsyncExitStack() as held:
            for key, prompt in asked:
                place = router.place(key, prompt=prompt, samples=0, ready=lambda: _all(list(owed)))
                urls.append(await held.enter_async_context(place))
        return urls

    return in_virtual_time(main())


def test_a_new_task_goes_to_the_server_that_owes_least_and_its_rollouts_follow():
    asked = [((0, 0, 0, 0), 10), ((0, 0, 1, 0), 10), ((0, 0, 0, 1), 10), ((0, 1, 0, 0), 10)]
    assert placed(*asked, owed={"a": 100.0, "b": 99.0}) == ["b", "b", "b", "a"]


def test_a_rollout_leaves_a_server_that_owes_far_more_than_the_mean_and_stays_where_it_goes():
    asked = [((0, 0, 0, 0), 85), ((0, 0, 1, 0), 30), ((0, 0, 1, 1), 20), ((0, 0, 2, 0), 1)]
    assert placed(*asked, owed={"a": 50.0, "b": 49.0}) == ["b", "a", "a", "b"]


def test_requests_one_after_the_other_go_round_by_tasks():
    async def main() -> list[str]:
        router, urls = Router(), []
        for task in range(3):
            for run in range(2):
                place = router.place(
                    (0, task, run), prompt=9, samples=1, ready=lambda: _all(["a", "b"])
                )
                async with place as url:
                    urls.append(url)
        return urls

    assert in_virtual_time(main()) == ["a", "a", "b", "b", "a", "a"]


def test_requests_of_the_same_moment_count_in_the_mean():
    router = Router()
    urls = ["a", "b"]

    async def one(run: int) -> str:
        place = router.place((0, 0, run), prompt=10, samples=0, ready=lambda: _all(urls))
        async with place as url:
            await asyncio.sleep(1)
            return url

    async def main() -> list[str]:
        return await asyncio.gather(*(one(run) for run in range(10)))

    # one task alone: most of it shares a cache, and no server has more than 1.2 times the mean
    assert Counter(in_virtual_time(main())) == {"a": 7, "b": 3}
    assert router.owed == {"a": 0, "b": 0}
