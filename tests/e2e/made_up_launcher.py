"""A launcher of a third party's package, which starts all parts in a thread and notes it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from trireme.config import Problem
from trireme.config.launcher import KEY, LauncherChoice


def note(text: str) -> None:
    with Path(os.environ["NOTED"]).open("a") as file:
        file.write(f"{text}\n")


class Threads:
    """See Launcher."""

    def examine(self, config: Any, gpus: int) -> LauncherChoice:
        cluster = config.cluster
        problems = []
        if cluster.node_num > 1:
            problems.append(Problem("cluster.node_num", "is too many for threads: expected 1"))
        return LauncherChoice(
            cluster.launcher == "threads", [f"{KEY} (threads): on {gpus} GPUs"], problems
        )

    def gpus_of(self, cluster: Any) -> None:
        return None

    async def run(self, stage: Any, stop: Any, measure_end: bool) -> Any:
        note("ran in a thread")
        return await asyncio.to_thread(lambda: asyncio.run(work(stage, measure_end)))

    async def evaluate(self, plan: Any, rollouts: int | None) -> list[Any]:
        note(f"evaluated {rollouts} rollouts")
        return []


async def work(stage: Any, measure_end: bool) -> Any:
    from trireme.launch.explorer_side import ExplorerSide
    from trireme.launch.models import load_models
    from trireme.launch.modes import run_mode
    from trireme.launch.trainer_side import TrainerSide

    models = load_models(stage)
    engine = await stage.embedded_engine(models.backend)
    trainer = TrainerSide(stage, models, engine)
    with stage.exploring():
        explorer = ExplorerSide(stage, engine, trainer.buffer, trainer.sync)
        trainer.explorer_state = explorer.explorer.state
        try:
            return await run_mode(stage, trainer, explorer, measure_end=measure_end)
        finally:
            await explorer.close()
            await engine.close()
