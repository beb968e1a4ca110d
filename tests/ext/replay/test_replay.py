"""Priority replay: what comes first, what comes again and when, what is dropped."""

from __future__ import annotations

import random

import pytest

from tests.buffer.samples import JumpingClock, run, sample, step_of, uids
from trireme.buffer.buffer import Closed
from trireme.ext.replay.priority import decay_limit_randomization, linear_decay
from trireme.ext.replay.replay import ReplayBuffer


def test_the_newest_weights_come_first_and_groups_stay_together() -> None:
    async def main() -> None:
        buffer = ReplayBuffer("b")
        for version in (1, 3, 2):
            await buffer.put(step_of(version, tasks=1))
        taken = await buffer.take(3)
        assert uids(taken) == uids(step_of(3, tasks=1) + step_of(2, tasks=1)[:1])
        await buffer.put(step_of(9, tasks=1))  # what a batch began is finished first
        assert uids(await buffer.take(2)) == uids(step_of(2, tasks=1)[1:] + step_of(9, tasks=1)[:1])
        assert len(buffer) == 3

    run(main())


def test_a_group_of_two_versions_is_as_old_as_its_oldest_token() -> None:
    async def main() -> None:
        buffer = ReplayBuffer("b")
        mixed = step_of(1, tasks=1)
        assert mixed[1].versions is not None
        mixed[1].versions[2:] = 9
        await buffer.put(mixed)
        await buffer.put(step_of(2, tasks=1))
        assert [e.eid.batch for e in await buffer.take(4)] == [2, 2, 1, 1]

    run(main())


def test_without_a_cooldown_everything_comes_once() -> None:
    async def main() -> None:
        buffer = ReplayBuffer("b", clock=JumpingClock(), max_read_timeout=50)
        await buffer.put(step_of(1))
        await buffer.take(4)
        with pytest.raises(
            TimeoutError, match=r"requested 1 experiences of buffer 'b', which has 0"
        ):
            await buffer.take(1)
        await buffer.close()
        with pytest.raises(Closed):
            await buffer.take(1)

    run(main())


def test_a_used_group_comes_back_after_its_rest_with_a_lower_priority() -> None:
    async def main() -> None:
        clock = JumpingClock()
        buffer = ReplayBuffer("b", reuse_cooldown_time=10, clock=clock)
        await buffer.put([sample(5, 0, 0)])
        await buffer.put([sample(4, 0, 0)])
        assert [e.eid.batch for e in await buffer.take(1)] == [5]
        again = await buffer.take(2)  # waits for the rest; by now 5 - 2 * 1 is less than 4
        assert clock.now() == pytest.approx(10) and [e.eid.batch for e in again] == [4, 5]
        assert [e.info["use_count"] for e in again] == [1, 2]
        assert buffer.metrics()["buffer/resting"] == 2
        await buffer.close()
        with pytest.raises(Closed):
            await buffer.take(1)

    run(main())


def test_a_group_that_is_too_old_leaves_for_good_and_the_wait_for_others_ends() -> None:
    async def main() -> None:
        clock = JumpingClock()
        buffer = ReplayBuffer("b", reuse_cooldown_time=1, clock=clock, max_read_timeout=30)
        for version in (1, 5):
            await buffer.put(step_of(version, tasks=1))
        assert len(await buffer.take(3)) == 3  # both groups were begun, and will return
        taken = await buffer.take(2, oldest=5)
        # the rest of the older one, and all of it, when it returned
        assert [e.eid.batch for e in taken] == [5, 5, 1, 1, 1]
        await clock.sleep(2)
        assert [e.eid.batch for e in await buffer.take(2, oldest=5)] == [5, 5]
        said = r"requested 1 experiences of version 6 or later of buffer 'b', which has 0, and"
        with pytest.raises(TimeoutError, match=said):
            await buffer.take(1, oldest=6)
        assert buffer.metrics() == {"buffer/groups": 0, "buffer/resting": 0, "buffer/dropped": 0}

    run(main())


def test_a_batch_has_no_group_twice() -> None:
    async def main() -> None:
        clock, newest = JumpingClock(), linear_decay(decay=0)
        buffer = ReplayBuffer("b", priority=newest, reuse_cooldown_time=1, clock=clock)
        for version in (1, 2, 3):
            await buffer.put(step_of(version, tasks=1))
        assert [e.eid.batch for e in await buffer.take(3)] == [3, 3, 2]
        await clock.sleep(2)  # the second group could return, and its rest is not taken yet
        batch = uids(await buffer.take(5))
        assert len(batch) == len(set(batch)) == 5

    run(main())


def test_a_limit_of_uses_ends_the_reuse() -> None:
    async def main() -> None:
        clock = JumpingClock()
        priority = decay_limit_randomization(use_count_limit=2, sigma=0.5, seed=1)
        buffer = ReplayBuffer(
            "b", priority=priority, reuse_cooldown_time=1, clock=clock, max_read_timeout=30
        )
        await buffer.put([sample(1, 0, 0)])
        await buffer.take(1)
        await buffer.take(1)
        with pytest.raises(TimeoutError):
            await buffer.take(1)

    run(main())


def test_beyond_the_capacity_the_lowest_priority_is_dropped_and_counted() -> None:
    async def main() -> None:
        buffer = ReplayBuffer("b", capacity=2)
        for version in (2, 3, 1, 4):
            await buffer.put([sample(version, 0, 0)])
        assert buffer.metrics() == {
            "buffer/groups": 2,
            "buffer/resting": 0,
            "buffer/dropped": 2,
        }
        assert [e.eid.batch for e in await buffer.take(2)] == [4, 3]

    run(main())


def test_a_resumed_buffer_goes_on_as_the_other_would() -> None:
    async def main() -> None:
        def fresh() -> ReplayBuffer:
            return ReplayBuffer("b", reuse_cooldown_time=5, clock=JumpingClock())

        one, other = fresh(), fresh()
        for version in (1, 2, 3):
            await one.put(step_of(version))
        await one.take(5)
        other.load_state(one.state())
        for size in (3, 4, 6):
            assert uids(await one.take(size)) == uids(await other.take(size))

    run(main())


def test_a_failure_of_the_other_side_is_told() -> None:
    async def main() -> None:
        buffer = ReplayBuffer("b")
        await buffer.fail(RuntimeError("the explorer broke"))
        with pytest.raises(RuntimeError, match="the explorer broke"):
            await buffer.take(1)

    run(main())


def test_every_group_comes_as_often_as_it_may_and_none_is_lost() -> None:
    """Any order of puts and takes: with a limit of 2 uses, 30 groups of 2 come out twice each."""

    async def main() -> None:
        source = random.Random(3)
        clock = JumpingClock()
        buffer = ReplayBuffer(
            "b",
            priority=decay_limit_randomization(use_count_limit=2),
            reuse_cooldown_time=1,
            clock=clock,
            max_read_timeout=20,
        )
        seen: list[str] = []
        for version in range(30):
            await buffer.put(step_of(version, tasks=1))
            if len(buffer) > 5:
                seen += uids(await buffer.take(source.randint(1, 5)))
            await clock.sleep(source.random())
        with pytest.raises(TimeoutError):
            while True:
                seen += uids(await buffer.take(1))
        assert sorted(seen) == sorted(2 * uids([e for v in range(30) for e in step_of(v, tasks=1)]))

    run(main())


def test_priorities_are_those_of_the_formula() -> None:
    assert linear_decay(decay=2.0)(7, 3, "1/0") == (1.0, True)
    assert decay_limit_randomization(decay=0.5)(7, 3, "1/0") == (5.5, False)
    assert decay_limit_randomization(use_count_limit=0)(7, 30, "1/0")[1]


def test_a_groups_noise_is_the_same_after_a_resume_and_another_for_other_groups() -> None:
    noisy = [decay_limit_randomization(sigma=0.5, seed=3) for _ in range(2)]
    assert noisy[0](7, 1, "1/0") == noisy[1](7, 1, "1/0")
    assert noisy[0](7, 1, "1/0") != noisy[0](7, 1, "1/1")
