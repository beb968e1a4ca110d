"""Comparison: what would the reinforcement stage's time have bought as more supervised training?

The supervised stage goes on from where it ended, for as many steps as take as long, so that a rise
by reinforcement cannot be a weak warm-up's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trireme.config import Plan
from trireme.launch.local import run_plan
from trireme.launch.stage_result import StageResult
from trireme.launch.stop import Stop
from trireme.monitor.console import Console

NAME = "more_sft"


def more_supervised(
    plans: Sequence[Plan], results: Sequence[StageResult], console: Console, stop: Stop
) -> StageResult | None:
    """Run the comparison; None where the job is not one supervised stage and one other."""
    if [result.schema for result in results] != ["sft", "experience"]:
        return None
    supervised, reinforced = results
    seconds = reinforced.phases.get("explore", 0.0) + reinforced.phases.get("train", 0.0)
    taken = supervised.phases.get("train", 0.0)
    if supervised.model_dir is None or not (taken and supervised.steps and seconds):
        return None
    steps = max(1, round(seconds * supervised.steps / taken))
    plan = dataclasses.replace(
        plans[0],
        stage_name=NAME,
        job_dir=plans[0].job_dir.parent / NAME,
        model_from_stage=0,
        train_steps=steps,
        schedule_steps=steps,
        notes=(),
    )
    console.stage("more SFT, for comparison", steps)
    return stop.run(run_plan(plan, supervised.model_dir, console, stop=stop))
