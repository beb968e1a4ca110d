"""Shared fixtures: one thread per process, and a tiny model made once a session."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a run on Ray starts a cluster of its own: without this it joins one of a test beside it
os.environ.setdefault("RAY_ADDRESS", "local")

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import Server, binaries, serving


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Tests and what they import are a million objects, and none of them is garbage: looking at all
    of them, again and again, takes a quarter of the collection, and half a second in a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker that dies fails one test: see schedule.py."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.schedule import FileScheduling

    return FileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, visibly, where torch has none; files begin with the longest:
    those that have a test marked `slow`, then the other whole runs. TRIREME_ONLY: a word of the
    reason for which the tests that are run would be skipped elsewhere.
    """
    if only := os.environ.get("TRIREME_ONLY"):
        others = [item for item in items if not _skips(item, only)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    _skip_without_extensions(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name != "e2e"))
    if wanted := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        if not torch.cuda.is_available():
            skip = pytest.mark.skip(reason="needs a GPU: make test-gpu where there is one")
            for item in wanted:
                item.add_marker(skip)


def _skip_without_extensions(items: list[pytest.Item]) -> None:
    """Skip what an extension is needed for that is deleted here (scripts/without.py)."""
    from trireme.extensions import KINDS, absent, extensions

    deleted = any(map(absent, KINDS))
    for item in items:
        needed = {name for mark in item.iter_markers("extension") for name in mark.args}
        if gone := sorted(needed - {*extensions()}):
            item.add_marker(pytest.mark.skip(reason=f"needs extensions: {', '.join(gone)}"))
        elif deleted and item.get_closest_marker("whole"):
            item.add_marker(pytest.mark.skip(reason="is about all of the repository"))


def _skips(item: pytest.Item, word: str) -> bool:
    """Whether a mark skips the test where what its reason names by this word is missing."""
    reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
    return any(word.lower() in reason.lower() for reason in reasons)


def _must_run(report: Any) -> None:
    """A skip whose reason holds a word of TRIREME_REQUIRE fails: what it needs was installed."""
    reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    required = [word for word in os.environ.get("TRIREME_REQUIRE", "").split(",") if word]
    if report.skipped and (named := [w for w in required if w.lower() in reason.lower()]):
        report.outcome = "failed"
        report.longrepr = f"TRIREME_REQUIRE has '{named[0]}', so this may not be left out: {reason}"


def _must_be_sent(report: Any) -> None:
    """What tests print and log of odd texts reaches the process that reports, over xdist's pipe."""
    from trireme.text import storable

    report.sections = [(name, storable(text)) for name, text in report.sections]
    if report.failed and storable(said := str(report.longrepr)) != said:
        report.longrepr = storable(said)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """See `_must_run` and `_must_be_sent`."""
    report = yield
    _must_run(report)
    _must_be_sent(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """See `_must_run`: a whole module that leaves itself out."""
    report = yield
    _must_run(report)
    return report


@pytest.fixture(autouse=True)
def same_folder() -> Iterator[None]:
    """What a test runs in this process may change its folder: the next one begins where it did."""
    folder = os.getcwd()
    yield
    os.chdir(folder)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with its tokenizer."""
    from tests.tiny import make_model

    return make_model(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server; skips where none is installed."""
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed here")
    with serving(programs) as server:
        yield server
