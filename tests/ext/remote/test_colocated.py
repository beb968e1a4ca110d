"""Colocated: the order of a push between a trainer and an engine on one device, and what each side
holds of its memory meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.ext.http.made import on_port, rollouts_over, torch_rollouts
from tests.limits import HANG_S
from tests.trainer.samples import settings
from trireme.engines.device import ColocationLock, Device
from trireme.engines.engine import Sampling
from trireme.engines.weights import fingerprint
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.group_engine import EmbeddedGroup
from trireme.ext.remote.pairs import EnginePairs
from trireme.ext.remote.push import ColocatedSync
from trireme.ext.remote.weight_group import Meeting
from trireme.sync.probe import Probe
from trireme.sync.push import Noted
from trireme.trainer.backend import Backend

STATES, ACTIVATIONS, WEIGHTS, BUCKET, CACHE = 40, 55, 20, 5, 38
CARD = 100
"""Each side fits beside what the other holds while it rests, and no two that work do:
40 + 55, 40 + 5 + 20 + 5 and 40 + 20 + 38 do; with a bucket more, or what a score leaves, none.
"""


class Card:
    """A device's memory: what each side holds after each message."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {"states": STATES, "weights": WEIGHTS, "cache": CACHE}
        self.timeline: list[tuple[str, int]] = []
        self.gave_up: list[bool] = []
        """Whether new weights were to follow, for each pause."""

    def after(self, message: str, **held: int) -> None:
        self.held |= held
        self.timeline.append((message, sum(self.held.values())))

    @property
    def order(self) -> list[str]:
        return [message for message, _ in self.timeline]


class Sleeper:
    """An engine as vLLM is one: while it is paused it holds nothing, and it takes new weights into
    its old ones' place.
    """

    group_size = 1

    def __init__(self, engine: Any, card: Card) -> None:
        self._engine, self._card = engine, card
        self._group = EmbeddedGroup(engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def pause(self, *, weights_follow: bool = False) -> None:
        self._card.gave_up.append(weights_follow)
        await self._engine.pause()
        self._card.after("sleep", weights=0, cache=0)

    async def resume(self) -> None:
        self._card.after("wake whole", weights=WEIGHTS, cache=CACHE)
        await self._engine.resume()

    async def join_group(self, meeting: Meeting) -> None:
        await self._group.join_group(meeting)

    async def receive_weights(self) -> None:
        self._card.after("wake weights", weights=WEIGHTS)
        self._card.after("take buckets", copy=BUCKET)
        await self._group.receive_weights()

    async def commit_weights(self, version: int) -> None:
        self._card.after("commit", copy=0)
        await self._group.commit_weights(version)


class Watched(Backend):
    """A trainer whose forward passes leave memory behind, as torch's allocator does."""

    card: Card

    def score(self, *args: Any, **options: Any) -> Any:
        found = super().score(*args, **options)
        self.card.after("score", activations=ACTIVATIONS)
        return found


class WatchedPairs(EnginePairs):
    """Its half of the pair."""

    card: Card

    def make_room(self) -> None:
        super().make_room()
        self.card.after("make room", activations=0, bucket=0)

    def send(self, dtype: str, note: Noted = iter) -> None:
        self.card.after("lend buckets", bucket=BUCKET)
        super().send(dtype, note)


def colocated(
    folder: Path, main: Callable[[ColocatedSync, RemoteEngine, Device, Card], Awaitable[Any]]
) -> Card:
    """`main` with a trainer and an engine on one card."""
    card = Card()

    async def go() -> None:
        async with torch_rollouts(folder) as inner:
            sleeper: Any = Sleeper(inner.engine, card)
            served = rollouts_over(sleeper, AutoTokenizer.from_pretrained(folder))
            async with on_port(served) as url:
                engine, device = RemoteEngine([url]), Device(1)
                backend = Watched(folder, settings())
                pairs = WatchedPairs(backend)
                backend.card = pairs.card = card
                lock = ColocationLock(engine, timeout=HANG_S)
                device.colocation = engine.colocation = lock

                async def make_room() -> None:
                    await device.amid_turn(pairs.make_room)

                lock.make_room = make_room
                probe = Probe(backend.module.config.vocab_size, "float32")
                sync = ColocatedSync(backend, pairs, engine, device, dtype="float32", probe=probe)
                try:
                    await asyncio.wait_for(main(sync, engine, device, card), HANG_S)
                finally:
                    await engine.close()
                    device.close()

    asyncio.run(go())
    return card


def change(sync: ColocatedSync) -> dict[str, float]:
    """Train a little; fingerprints of the weights then."""
    backend: Any = sync.backend
    for parameter in backend.module.parameters():
        parameter.data.add_(0.01)
    return fingerprint(dict(backend.each_weight()), "float32")


def test_both_sides_fit_on_the_card_at_every_message_of_two_steps(tiny_dir: Path) -> None:
    async def main(sync: ColocatedSync, engine: RemoteEngine, device: Device, card: Card) -> None:
        for version in (1, 2):
            await engine.generate([5, 6, 7], Sampling(max_tokens=2))
            marks = await device.run(change, sync)
            await sync.push(version)
            assert marks.items() <= (await engine.fingerprint() or {}).items()

    card = colocated(tiny_dir, main)
    assert card.gave_up == [False, False]  # `run` promises no push
    assert max(held for _, held in card.timeline) <= CARD, card.timeline
    step = [
        "sleep", "score", "make room", "lend buckets", "wake weights", "take buckets",
        "make room", "commit", "make room", "wake whole",
    ]  # fmt: skip
    found = [sorted(step[3:6]) if m in step[3:6] else m for m in card.order]
    assert len(found) == 2 * len(step)
    assert card.order[:3] == step[:3] and card.order[6:10] == step[6:]
    assert sorted(card.order[3:6]) == sorted(step[3:6])  # both sides at once


def test_an_engine_that_gave_up_its_weights_waits_for_the_push(tiny_dir: Path) -> None:
    async def main(sync: ColocatedSync, engine: RemoteEngine, device: Device, card: Card) -> None:
        await engine.generate([5, 6, 7], Sampling(max_tokens=2))
        async with device.turn(weights_follow=True):
            marks = await device.amid_turn(change, sync)
            early = asyncio.create_task(engine.generate([5, 6, 7], Sampling(max_tokens=2)))
            await asyncio.sleep(0)
        await device.run(int)  # a turn without a promise wakes nobody either
        assert card.order == ["sleep"] and not early.done()
        await sync.push(1)
        assert marks.items() <= (await engine.fingerprint() or {}).items()
        [reply] = await early
        assert set(reply.versions) == {1}
        await device.run(int)

    card = colocated(tiny_dir, main)
    assert card.gave_up == [True, False]
    assert card.order.index("wake whole") > card.order.index("commit")


def test_an_engine_that_refuses_ends_the_push_and_the_next_one_meets_it_anew(
    tiny_dir: Path,
) -> None:
    async def main(sync: ColocatedSync, engine: RemoteEngine, device: Device, card: Card) -> None:
        call = engine.call_all
        paths: list[str] = []

        async def refuses(path: str, *bodies: Any, **options: Any) -> Any:
            paths.append(path)
            if path.endswith("receive") and paths.count(path) == 1:
                raise RuntimeError("the engine has no memory left")
            return await call(path, *bodies, **options)

        engine.call_all = refuses
        with pytest.raises(RuntimeError, match="no memory left"):
            await sync.push(1)
        marks = await device.run(change, sync)
        await sync.push(1)
        assert marks.items() <= (await engine.fingerprint() or {}).items()
        assert paths.count("/engine/group/join") == 2

    colocated(tiny_dir, main)
