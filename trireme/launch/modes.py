"""Modes: what trainer and explorer do together, whether they are in this process or on Ray.

`run_both` is the whole main: two coroutines, `explore` and `train`, that meet in the buffer and at
the synchronizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from trireme.buffer.buffer import OtherSideFailed
from trireme.launch.stage import Stage, StageResult

GRACE_S = 3.0
"""How long the cause of a failure may take to arrive after what came of it."""


class Trains(Protocol):
    """What a mode asks of the trainer's side: see `TrainerSide`."""

    async def refresh(self) -> None:
        """Give the engine the weights as they are, without a push."""
        ...

    async def train(self) -> int:
        """To the last step, which is returned."""
        ...

    async def explored(self) -> None:
        """The explorer has ended."""
        ...

    async def final_push(self) -> None:
        """Give the engine the last weights, for the evaluation at the end."""
        ...

    async def result(self) -> StageResult:
        """What the trainer came to."""
        ...


class Explores(Protocol):
    """What a mode asks of the explorer's side: see `ExplorerSide`."""

    async def explore(self) -> None:
        """Until there are no tasks left, or the trainer wants no more."""
        ...

    async def evaluate(self, step: int | None = None) -> None:
        """All evaluation tasksets; None: as of the explorer's own last step."""
        ...

    async def result(self) -> StageResult:
        """What the explorer came to."""
        ...


async def run_both(
    stage: Stage, trainer: Trains, explorer: Explores, *, refresh: bool
) -> StageResult:
    """Explorer and trainer, each in its coroutine. `refresh`: engines may have other weights."""

    async def explore() -> None:
        await explorer.explore()
        await trainer.explored()

    if refresh:
        await trainer.refresh()
    _, step = await first_failure(explore(), trainer.train())
    await trainer.final_push()
    await explorer.evaluate(step)
    return await result_of(stage, explorer, trainer)


async def run_train(
    stage: Stage, trainer: Trains, explorer: Explores | None, *, measure_end: bool
) -> StageResult:
    """The trainer alone: on a data set (SFT, DPO), or on what explorers of other commands put.

    An `explorer` evaluates a supervised stage: before the first one, and after the last one where
    `measure_end` says so.
    """
    if explorer is not None and stage.measures_start:
        await explorer.evaluate(0)
    step = await trainer.train()
    if explorer is not None and measure_end:
        await trainer.final_push()
        await explorer.evaluate(step)
    return await result_of(stage, explorer, trainer)


async def run_explore(stage: Stage, explorer: Explores) -> StageResult:
    """The explorer alone: experiences go into the SQL store, weights come from the job folder."""
    await explorer.explore()
    await explorer.evaluate()
    return await result_of(stage, explorer)


async def result_of(stage: Stage, *sides: Explores | Trains | None) -> StageResult:
    """What all sides of a stage came to; the trainer is the last."""
    result = stage.result()
    for side in filter(None, sides):
        result.add(await side.result())
    return result


async def first_failure(*work: Awaitable[Any]) -> list[Any]:
    """The results of all; the first that raises cancels the others and is raised.

    What one says only because the other has failed gives way to the other's own error: which of
    the two ends first is chance, and over processes the one may come without the other.
    """
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        follows = [error for task in done if isinstance(error := _error(task), OtherSideFailed)]
        for error in follows:
            if error.__cause__ is not None:
                raise error.__cause__ from None
        if follows and pending:
            await asyncio.wait(pending, timeout=GRACE_S)
        failures = [error for task in tasks if (error := _error(task)) is not None]
        for failure in sorted(failures, key=lambda error: isinstance(error, OtherSideFailed)):
            raise failure
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    """What an ended task has raised."""
    return task.exception() if task.done() and not task.cancelled() else None
