"""Python source, read from several threads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from trireme.rewards.math import value_of
from trireme.syntax import source_of


class Cycle:
    """Rubbish for the collector, whose finalizer lets other threads in."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(3))


@pytest.fixture
def busy_collector() -> Iterator[None]:
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_equations_are_valued_on_several_threads(busy_collector: None) -> None:
    """CPython 3.11 fails in some of these without a lock: its parser counts for all threads."""

    def values(_: int) -> set[Fraction | None]:
        found = set[Fraction | None]()
        for _ in range(3000):
            Cycle()
            found.add(value_of("(1+2)*(3-4/(5+6*7))-8 = 3"))
        return found

    with ThreadPoolExecutor(4) as pool:
        assert set.union(*pool.map(values, range(4))) == {Fraction(35, 47)}


def test_classes_are_read_on_several_threads(busy_collector: None) -> None:
    def lengths(_: int) -> set[int]:
        made = [(Cycle(), len(source_of(Cycle))) for _ in range(20)]
        return {length for _, length in made}

    with ThreadPoolExecutor(4) as pool:
        assert len(set.union(*pool.map(lengths, range(4)))) == 1
