"""Walks: how many functions a reader passes from one place of the kernel to another.

    python scripts/walks.py          # the two walks of a small run, in order
    python scripts/walks.py --short  # their lengths only

A small job runs, and the functions on the call stack are noted whenever a function of a walk's
`WALKS` entry is called for the first time. The walk is all of these functions: those that lead to
the places worth seeing. A climb is a call from a lower layer of tests/test_layering.py to a higher
one. `run`: from the command to the end of a stage. `experience`: from a workflow's result to the
moved weights.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.job import small_config  # noqa: E402
from tests.test_layering import LAYERS  # noqa: E402

PACKAGE = f"{ROOT / 'trireme'}/"
WALKS = {
    "run": (
        "make_recipe",
        "make_tasksets",
        "derive",
        "complete_stage",
        "open_stage",
        "make_models",
        "make_engine",
        "TrainerSide.__init__",
        "ExplorerSide.__init__",
        "make_scheduler",
        "run_both",
        "Explorer.explore",
        "Trainer.train",
        "TrainerSide.final_push",
        "ExplorerSide.evaluate",
        "StageResult.add",
        "summarise",
        "Console.finish",
    ),
    "experience": (
        "check_experiences",
        "stamp",
        "Scheduler.results",
        "Pipeline.run",
        "grpo",
        "QueueBuffer.put",
        "QueueBuffer.take",
        "Trainer._train_on",
        "Device.run",
        "flatten",
        "prepare",
        "pack",
        "score_entries",
        "ppo",
        "ScheduledOptimizer.step",
    ),
}
"""The functions that a walk must reach."""
FROM = {"experience": ("explorer", "workflows", "pipeline", "trainer")}
"""The walk begins where a stack first enters one of these; without an entry, with the command."""


class Place(NamedTuple):
    """One function of the package."""

    file: str
    function: str

    @property
    def layer(self) -> int:
        """The layer's number from the top."""
        part = Path(self.file).parts[0].removesuffix(".py")
        return next((i for i, layer in enumerate(LAYERS) if part in layer), len(LAYERS))


class Walker:
    """Notes the call stacks of one run."""

    def __init__(self) -> None:
        self.stacks: dict[str, dict[str, list[Place]]] = {name: {} for name in WALKS}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note the stack of a call that a walk must reach. For `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        name = code.co_qualname
        for walk, goals in WALKS.items():
            stacks = self.stacks[walk]
            if name not in goals or name in stacks:
                continue
            stack = list(stack_of(frame))[::-1]
            inside = FROM.get(walk)
            if inside:
                begins = (i for i, one in enumerate(stack) if Path(one.file).parts[0] in inside)
                stack = stack[next(begins, 0) :]
                names = {one.function for one in stack}
                learning = goals.index(name) > goals.index("Device.run")
                if learning and "train_step" not in names:  # a proof, before the run
                    continue
                if name in ("pack", "score_entries") and "Backend.forward_backward" not in names:
                    continue  # a reference's pass
                if name == "Scheduler.results" and "Explorer._finish_step" not in names:
                    continue  # an evaluation
                if name == "Device.run" and "Trainer._train_on" not in names:
                    continue
            stacks[name] = stack


def stack_of(frame: FrameType | None) -> Iterator[Place]:
    """Yield the package's functions on a call stack, innermost first, without nested ones."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and "<" not in code.co_qualname:
            yield Place(code.co_filename.removeprefix(PACKAGE), code.co_qualname)
        frame = frame.f_back


def walk_once() -> Walker:
    """Run a small job and return the stacks."""
    from trireme.cli.run import run

    walker = Walker()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(small_config(Path(folder))), encoding="utf-8")
        sys.setprofile(walker)
        threading.setprofile(walker)
        try:
            code = run(config, ["buffer.total_steps=2"], [])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if code:
        raise SystemExit("the small job failed")
    return walker


def main() -> None:
    """Print the walks."""
    parser = argparse.ArgumentParser(description="Count the walks of a small run.")
    parser.add_argument("--short", action="store_true", help="print the lengths alone")
    short = parser.parse_args().short
    for walk, stacks in walk_once().stacks.items():
        missed = [name for name in WALKS[walk] if name not in stacks]
        stops = list(dict.fromkeys(one for stack in stacks.values() for one in stack))
        calls = {pair for stack in stacks.values() for pair in itertools.pairwise(stack)}
        climbs = sum(after.layer < before.layer for before, after in calls)
        files = len({one.file for one in stops})
        print(f"{walk}: {len(stops)} functions in {files} files, {climbs} climbs")
        if missed:
            print(f"  not reached: {', '.join(missed)}")
        for one in () if short else stops:
            print(f"  {one.file} {one.function}")


if __name__ == "__main__":
    main()
