"""Modes: run trainer and explorer together, in one process or in several.

`run_both` is the whole main: two coroutines, `explore` and `train`, that meet in the buffer and at
the synchronizer.
"""

from __future__ import annotations

from trireme.aio import first_failure
from trireme.buffer.buffer import OtherSideFailed
from trireme.launch.explorer_side import ExplorerSide, load_own
from trireme.launch.results import StageResult
from trireme.launch.stage import Stage
from trireme.launch.trainer_side import TrainerSide


async def run_mode(
    stage: Stage, trainer: TrainerSide | None, explorer: ExplorerSide | None, *, measure_end: bool
) -> StageResult:
    """Run the plan's mode with the sides that it has. `measure_end`: see `run_train`."""
    if trainer is not None and stage.plan.mode == "train":
        return await run_train(stage, trainer, explorer, measure_end=measure_end)
    assert explorer is not None, "all other modes try tasks"
    if trainer is not None:
        return await run_both(stage, trainer, explorer)
    return await (run_bench if stage.plan.mode == "bench" else run_explore)(stage, explorer)


async def run_both(stage: Stage, trainer: TrainerSide, explorer: ExplorerSide) -> StageResult:
    """Run explorer and trainer, each in its coroutine."""

    async def explore() -> None:
        await explorer.explore()
        await trainer.explored()

    # engine processes of this run have loaded the same files; a user's own servers may still have
    # the weights of an earlier run or stage
    if stage.resumed is not None or stage.plan.engine.urls or stage.plan.has_adapter:
        await trainer.refresh()
    await trainer.calibrate()
    work = explore(), trainer.train()
    _, step = await first_failure(*work, consequence=OtherSideFailed)
    await trainer.final_push()
    await explorer.evaluate(step)
    return await result_of(stage, explorer, trainer)


async def run_train(
    stage: Stage, trainer: TrainerSide, explorer: ExplorerSide | None, *, measure_end: bool
) -> StageResult:
    """Run the trainer alone: on a data set (SFT, DPO), or on the experiences of other commands'
    explorers.

    An `explorer` evaluates a supervised stage: before the first one, and after the last one if
    `measure_end` is set.
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


async def run_explore(stage: Stage, explorer: ExplorerSide) -> StageResult:
    """Run the explorer alone: experiences go to the SQL store, weights come from the job folder."""
    await explorer.explore()
    await explorer.evaluate()
    return await result_of(stage, explorer)


async def run_bench(stage: Stage, explorer: ExplorerSide) -> StageResult:
    """Evaluate the base model and every checkpoint of the job, or only the newest; an API
    has none.
    """
    steps = [] if stage.plan.api else stage.folder.steps()
    if stage.plan.config.explorer.bench_on_latest_checkpoint:
        steps = steps[-1:]
    else:
        await load_own(stage, explorer.engine)
        await explorer.evaluate(0)
    for step in steps:
        await explorer.load(step)
        await explorer.evaluate(step)
    return await result_of(stage, explorer)


async def result_of(stage: Stage, *sides: ExplorerSide | TrainerSide | None) -> StageResult:
    """Merge the results of a stage's sides; the trainer's comes last."""
    result = stage.result()
    for side in filter(None, sides):
        result.add(await side.result())
    return result
