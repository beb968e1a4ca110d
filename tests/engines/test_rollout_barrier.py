"""RolloutBarrier: open exactly when every live rollout has a request at the engine."""

from __future__ import annotations

import asyncio

import pytest

from trireme.engines.barrier import RolloutBarrier

FIRST, SECOND = (1, 0, 0), (1, 0, 1)


def test_it_is_open_when_every_live_rollout_waits() -> None:
    barrier = RolloutBarrier()
    assert barrier.open([])
    with barrier.rollout(FIRST), barrier.rollout(SECOND):
        assert not barrier.open([])
        assert not barrier.open([(*FIRST, 3)])
        assert barrier.open([(*FIRST, 3), (*SECOND, 0)])
    assert barrier.open([])


def test_requests_of_nobodys_rollout_hold_nothing_up() -> None:
    barrier = RolloutBarrier()
    with barrier.rollout(FIRST):
        assert barrier.open([(*FIRST, 0), ((-1, 1),)])


def test_the_end_of_a_rollout_wakes_whoever_listens_however_it_ends() -> None:
    barrier, woken = RolloutBarrier(), []
    barrier.on_change(lambda: woken.append(set(barrier.live)))
    with pytest.raises(ValueError), barrier.rollout(FIRST):
        raise ValueError
    assert woken == [set()]


def test_only_time_that_a_request_is_held_for_others_counts_as_held(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("trireme.engines.barrier.time.monotonic", lambda: now[0])
    barrier = RolloutBarrier()
    with barrier.rollout(FIRST), barrier.rollout(SECOND):
        assert not barrier.open([FIRST])
        now[0] = 5.0
        assert (barrier.held(FIRST), barrier.held(SECOND)) == (5.0, 0.0)
        assert barrier.open([FIRST, SECOND])
        now[0] = 7.0
        assert barrier.held(FIRST) == 5.0
        assert not barrier.open([FIRST])
        now[0] = 8.0
        assert not barrier.open([])  # given up by the rollout itself
        now[0] = 9.0
        assert barrier.held(FIRST) == 6.0
    assert barrier.held(FIRST) == 0.0


def test_time_in_which_no_engine_may_compute_counts_as_its_wait(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("trireme.engines.barrier.time.monotonic", lambda: now[0])
    barrier = RolloutBarrier()
    with barrier.rollout(FIRST), barrier.rollout(SECOND):
        barrier.open([FIRST, SECOND])
        now[0] = 1.0  # it computes
        barrier.open([FIRST])
        now[0] = 3.0
        barrier.open([FIRST])
        assert barrier.waited == 2.0
        now[0] = 4.0
        barrier.open([FIRST, SECOND])
        now[0] = 9.0
        assert barrier.waited == 3.0
        barrier.open([])
        now[0] = 11.0
    barrier.open([])  # none is left to be waited for
    now[0] = 20.0
    assert barrier.waited == 5.0


def test_a_rollout_that_asks_once_is_waited_for_until_its_reply() -> None:
    barrier = RolloutBarrier()
    with barrier.rollout(FIRST), barrier.rollout(SECOND):
        barrier.asks_once(FIRST, lambda: None)
        assert not barrier.open([SECOND])
        barrier.answered(FIRST)
        assert barrier.open([SECOND])  # whatever the first does with its reply
        barrier.answered(SECOND)  # which may ask again
        assert not barrier.open([])
    assert barrier.open([]) and not barrier.begun


def test_one_that_asks_once_is_reported_when_it_has_its_reply_or_ends_without() -> None:
    barrier, settled = RolloutBarrier(), list[str]()
    with barrier.rollout(FIRST):
        barrier.asks_once(FIRST, lambda: settled.append("answered"))
        barrier.answered(FIRST)
        assert settled == ["answered"]
    with barrier.rollout(SECOND):
        barrier.asks_once(SECOND, lambda: settled.append("ended"))
    assert settled == ["answered", "ended"]


def test_one_that_asks_again_is_waited_for_from_then_on_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    barrier = RolloutBarrier()
    with barrier.rollout(FIRST), barrier.rollout(SECOND):
        for key in (FIRST, SECOND):
            barrier.asks_once(key, lambda: None)
            barrier.answered(key)
        assert barrier.open([(*FIRST, 1)]) and barrier.open([(*SECOND, 1)]) is False
        assert barrier.open([(*FIRST, 1), (*SECOND, 1)])
    (record,) = caplog.records
    assert "rollout 1/0/0 asked the model again" in record.message
    assert "expected `one_call = False`" in record.message


def test_those_that_are_tried_again_enter_together_when_all_others_have_ended() -> None:
    barrier, third = RolloutBarrier(), (1, 0, 2)
    begins, entered = [True], list[tuple[int, int, int]]()
    barrier.wait_while(lambda: begins[0])

    async def rollout(key: tuple[int, int, int], fails: asyncio.Event) -> None:
        with barrier.rollout(key):
            barrier.asks_once(key, lambda: None)
            barrier.answered(key)
            await fails.wait()
            await barrier.again(key)
            entered.append(key)
            assert barrier.live == {FIRST, SECOND}
            await asyncio.sleep(0)

    async def turn() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def main() -> None:
        fail = asyncio.Event(), asyncio.Event()
        with barrier.rollout(third):
            await barrier.again(third)  # still live: at once
            tasks = [
                asyncio.create_task(rollout(key, event))
                for key, event in zip((FIRST, SECOND), fail, strict=True)
            ]
            await turn()
            fail[1].set()
            await turn()
            assert barrier.is_trying(SECOND) and not barrier.is_trying(FIRST)
            fail[0].set()
            await turn()
            assert not entered  # the third is live
        await turn()
        assert not entered  # one is about to begin
        begins[0] = False
        barrier.wake()
        await asyncio.gather(*tasks)
        assert sorted(entered) == [FIRST, SECOND] and not barrier.begun

    asyncio.run(main())


def test_a_rollout_that_is_cancelled_while_it_waits_to_be_tried_again_holds_nothing_up() -> None:
    async def main() -> None:
        barrier = RolloutBarrier()

        async def rollout() -> None:
            with barrier.rollout(FIRST):
                barrier.asks_once(FIRST, lambda: None)
                barrier.answered(FIRST)
                await barrier.again(FIRST)

        with barrier.rollout(SECOND):
            waits = asyncio.create_task(rollout())
            await asyncio.sleep(0)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            assert barrier.begun == {SECOND} and barrier.open([SECOND])

    asyncio.run(main())
