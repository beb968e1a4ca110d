"""RolloutBarrier: open exactly when every live rollout has a request at the engine."""

from __future__ import annotations

import pytest

from trireme.engines.device import RolloutBarrier

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
    monkeypatch.setattr("trireme.engines.device.time.monotonic", lambda: now[0])
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
