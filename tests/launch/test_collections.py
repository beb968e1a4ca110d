"""A run collects garbage rarely, and the process is as before when it ends."""

from __future__ import annotations

import gc

import pytest

from trireme.launch import GC_THRESHOLDS
from trireme.launch.run import rare_collections


class Link:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_all_is_as_before_at_the_end_of_a_run_that_fails() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == GC_THRESHOLDS and gc.get_freeze_count() > frozen
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_a_run_makes_is_still_collected() -> None:
    with rare_collections():
        there = sum(isinstance(o, Link) for o in gc.get_objects())
        for _ in range(3 * GC_THRESHOLDS[0]):
            Link()
        assert sum(isinstance(o, Link) for o in gc.get_objects()) - there <= GC_THRESHOLDS[0]
