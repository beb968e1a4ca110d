"""Modes: what trainer and explorer do together, whether they are in this process or on Ray.

`run_both` is the whole main: two coroutines, `explore` and `train`, that meet in the buffer and at
the synchronizer.
"""

from __future__ import annotations

from typing import Protocol

from trireme.aio import first_failure
from trireme.buffer.buffer import OtherSideFailed
from trireme.launch.stage import Stage, StageResult


class Trains(Protocol):
    """What a mode asks of the trainer's side: see `TrainerSide`."""

    async def refresh(self) -> None:
        """Give the engine the weights as they are, without a push."""
        ...

    async def calibrate(self) -> None:
        """Measure how far engine and trainer differ while both have the same weights."""
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

    async def load(self, step: int) -> None:
        """Give the engine a checkpoint's weights."""
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

    if refresh or stage.plan.has_adapter:
        await trainer.refresh()
    await trainer.calibrate()
    work = explore(), trainer.train()
    _, step = await first_failure(*work, consequence=OtherSideFailed)
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
        if stage.plan.has_adapter:
            await trainer.refresh()
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


async def run_bench(stage: Stage, explorer: Explores) -> StageResult:
    """Evaluate the base model and every checkpoint of the job, or its newest one alone; of an API
    there are none.
    """
    steps = [] if stage.plan.api else stage.folder.steps()
    if stage.plan.config.explorer.bench_on_latest_checkpoint:
        steps = steps[-1:]
    else:
        await explorer.evaluate(0)
    for step in steps:
        await explorer.load(step)
        await explorer.evaluate(step)
    return await result_of(stage, explorer)


async def result_of(stage: Stage, *sides: Explores | Trains | None) -> StageResult:
    """What all sides of a stage came to; the trainer is the last."""
    result = stage.result()
    for side in filter(None, sides):
        result.add(await side.result())
    return result
