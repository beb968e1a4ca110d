"""Synchronizer: who waits for whom in each style, and that nobody waits in vain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme.buffer.buffer import Demand
from trireme.sync.probe import BrokenWeights
from trireme.sync.synchronizer import Synchronizer, is_due


class Pushes:
    """Counts what was pushed."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def __call__(self, version: int) -> dict[str, float]:
        self.versions.append(version)
        return {}


def make(style: str, **options: Any) -> tuple[Synchronizer, Pushes]:
    pushes = Pushes()
    defaults: dict[str, Any] = {"interval": 1, "timeout": 1.0}
    return Synchronizer(pushes, style=style, **(defaults | options)), pushes


def test_borders_are_whole_intervals_past_the_offset() -> None:
    assert [step for step in range(1, 31) if is_due(step, 10, 0)] == [10, 20, 30]
    assert [step for step in range(1, 31) if is_due(step, 10, 3)] == [13, 23]


def test_fixed_waits_for_the_train_step_that_is_offset_behind() -> None:
    async def main() -> list[int]:
        sync, pushes = make("fixed", interval=2, offset=1)
        pull = asyncio.ensure_future(sync.pull(3))
        await sync.trained(1)
        await asyncio.sleep(0)
        assert not pull.done()
        await sync.trained(2)
        await asyncio.wait_for(pull, HANG_S)
        return pushes.versions

    assert asyncio.run(main()) == [1]


def test_lock_step_goes_on_only_when_the_trainer_has_nothing_left() -> None:
    async def main() -> None:
        demand = Demand()
        sync, pushes = make("fixed", lock_step=True, demand=demand)
        pull = asyncio.ensure_future(sync.pull(1))
        await asyncio.sleep(0)
        await sync.trained(1)
        await asyncio.sleep(0)
        assert not pull.done() and pushes.versions == []
        demand.set(True)
        await asyncio.wait_for(pull, HANG_S)
        assert pushes.versions == [1] and sync.version == 1

    asyncio.run(main())


def test_in_lock_step_a_batch_waits_until_the_explorer_has_ended_its_turn() -> None:
    async def main() -> None:
        demand = Demand()
        sync, _ = make("fixed", lock_step=True, demand=demand)
        for step in (1, 2, 3):
            train = asyncio.ensure_future(sync.trainers_turn())
            if step < 3:  # else both begin to wait in one go
                await asyncio.sleep(0.01)
            assert not train.done(), "the explorer generates"
            pull = asyncio.ensure_future(sync.pull(step))
            await asyncio.wait_for(train, HANG_S)
            await sync.trained(step)
            demand.set(True)
            await asyncio.wait_for(pull, HANG_S)
            demand.set(False)
        with pytest.raises(TimeoutError, match=r"with the batch of train step 4 for the explorer"):
            await sync.trainers_turn()
        sync.explored()
        await asyncio.wait_for(sync.trainers_turn(), HANG_S)

    asyncio.run(main())


@pytest.mark.parametrize(("trained", "since"), [(3, "step 3 "), (5, "step 3, or one up to 5 ")])
def test_broken_weights_are_dated_by_the_last_push_that_was_right(trained: int, since: str) -> None:
    async def push(version: int) -> dict[str, float]:
        raise BrokenWeights("lm_head.weight")

    sync = Synchronizer(push, style="fully_async", interval=1, step=2)
    with pytest.raises(BrokenWeights) as caught:
        asyncio.run(sync.trained(trained))
    sentence = "the trained weights hold NaN or an infinite number since train "
    assert str(caught.value).startswith(f"{sentence}{since}(lm_head.weight). The loss and the gr")


def test_a_resume_pushes_what_the_engine_did_not_have_yet() -> None:
    async def main() -> None:
        demand = Demand()
        demand.set(True)
        sync, pushes = make(
            "fixed", lock_step=True, demand=demand, version=4, step=5, pushed_step=4
        )
        await sync.pull(5)
        assert pushes.versions == [5] and sync.pushed_step == 5

    asyncio.run(main())


def test_a_starved_trainer_lets_the_explorer_go_on_with_the_old_weights() -> None:
    async def main() -> None:
        demand = Demand()
        sync, pushes = make("fixed", demand=demand)
        pull = asyncio.ensure_future(sync.pull(1))
        await asyncio.sleep(0)
        demand.set(True)
        await asyncio.wait_for(pull, HANG_S)
        assert pushes.versions == [] and sync.metrics()["sync/skipped"] == 1

    asyncio.run(main())


def test_explorer_driven_takes_the_newest_without_waiting() -> None:
    async def main() -> None:
        sync, pushes = make("explorer_driven", interval=2)
        assert not sync.due(1) and sync.due(2)
        await sync.pull(2)
        assert pushes.versions == []
        await sync.trained(1)
        await sync.trained(2)
        await sync.pull(4)
        assert pushes.versions == [1] and sync.pushed_step == 2

    asyncio.run(main())


def test_trainer_driven_pushes_every_interval_by_itself() -> None:
    async def main() -> None:
        sync, pushes = make("trainer_driven", interval=2)
        for step in range(1, 6):
            await sync.trained(step)
        assert pushes.versions == [1, 2] and sync.pushed_step == 4
        assert not any(sync.due(step) for step in range(1, 9))
        await sync.final_push()
        assert pushes.versions == [1, 2, 3]

    asyncio.run(main())


def test_a_stopped_trainer_wakes_the_explorer_and_a_dead_one_is_named() -> None:
    async def main() -> None:
        sync, _ = make("fixed")
        pull = asyncio.ensure_future(sync.pull(5))
        await asyncio.sleep(0)
        await sync.stopped(3)
        await asyncio.wait_for(pull, HANG_S)
        assert sync.finished
        slow, _ = make("fixed", timeout=0.02)
        with pytest.raises(TimeoutError, match=r"sync_timeout\) for the weights of train step 5"):
            await slow.pull(5)

    asyncio.run(main())


def test_an_engine_that_was_started_again_is_pushed_what_it_lacks_and_no_other() -> None:
    async def main() -> list[int]:
        sync, pushes = make("trainer_driven")
        await sync.trained(1)
        await sync.renew(lambda: False)
        assert pushes.versions == [1]
        await sync.renew(lambda: True)
        return pushes.versions

    assert asyncio.run(main()) == [1, 2]
