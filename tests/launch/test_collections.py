"""A run collects garbage rarely, frees what was left before, and the process is then as it was."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from trireme.launch import GC_THRESHOLDS
from trireme.launch.run import rare_collections


class Link:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """What these tests have frozen (tests/conftest.py) is thawed meanwhile."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_all_is_as_before_at_the_end_of_a_run_that_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == GC_THRESHOLDS and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_was_frozen_before_a_run_stays_frozen() -> None:
    gc.freeze()
    with rare_collections():
        pass
    assert gc.get_freeze_count() > 0


def test_what_a_run_makes_is_still_collected() -> None:
    with rare_collections():
        there = sum(isinstance(o, Link) for o in gc.get_objects())
        for _ in range(3 * GC_THRESHOLDS[0]):
            Link()
        assert sum(isinstance(o, Link) for o in gc.get_objects()) - there <= GC_THRESHOLDS[0]


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc, and Linux's /proc"
)
def test_what_an_ended_thread_has_freed_goes_back_to_the_system() -> None:
    """A supervised stage of SmolLM2 left 3 GB to its thread's heap; the next stage has another."""

    def work() -> torch.Tensor:
        # 128 MB, in blocks that are too small for mappings of their own
        return [torch.ones(2**14) for _ in range(2048)][-1]

    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(work).result()  # it lies above them, so that the heap cannot shrink
    held = _resident()
    with rare_collections():
        assert held - _resident() > 100 * 2**20 and last.sum() == 2**14


def test_a_gpus_memory_goes_back_when_the_models_of_an_earlier_stage_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `mode: colocate` vLLM takes its share of the GPU before the next trainer is loaded."""
    model = weakref.ref(Link())
    left: list[Link | None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(model()))
    with rare_collections():
        assert left == [None]


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
