"""Stages: runs the plans of a YAML one after the other, each from the model of the one before.

`stage_meta.json` in the job's folder holds what finished stages came to: they are not run again.

`trireme run --compare` asks what the reinforcement stage's time would have bought as more
supervised training. The supervised stage goes on from where it ended, for as many steps as take as
long, so that a rise by reinforcement cannot be a weak warm-up's.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from trireme.checkpoint.layout import JobFolder
from trireme.checkpoint.manifest import prove
from trireme.config import Plan
from trireme.explorer.explorer import Evaluation
from trireme.files import write_json
from trireme.launch import GC_THRESHOLDS
from trireme.launch.local import run_plan
from trireme.launch.stage import StageResult
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.monitor.figures import Summary, values
from trireme.monitor.monitor import FILE_NAME, read_metrics

NAME = "more_sft"


def more_supervised(
    plans: Sequence[Plan], results: Sequence[StageResult], console: Console, stop: Stop
) -> StageResult | None:
    """Run the comparison; None where a stage took no time, since all was done before."""
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


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have Python's garbage collector leave out all that is there now, and collect rarely.

    A full collection of what torch, transformers and a run's parts hold takes a quarter of a second
    and holds the interpreter's lock; with Python's own thresholds one comes every few steps.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def run_stages(
    plans: Sequence[Plan], *, console: Console, stop: Stop, compare_sft: bool = False
) -> Summary:
    """Run every stage that is not done; the summary is shown and written into the job's folder.

    `compare_sft` spends the reinforcement stage's time on more supervised training as well.
    """
    disable_progress_bar()  # the console shows progress; another bar would tear it
    started = time.monotonic()
    job = job_folder(plans)
    finished = finished_stages(job) if len(plans) > 1 else []
    results = list(finished)
    for plan in plans[len(finished) :]:
        trains = plan.mode in ("both", "train")
        # how many train steps an explore step makes only the workflow knows: count what is known
        by = "trainer" if trains and (plan.train_steps or not plan.explore_steps) else "explorer"
        total = plan.train_steps if by == "trainer" else plan.explore_steps
        console.stage(plan.stage_name, total, by=by)
        model, last = model_of(plan, results), plan is plans[-1]
        with rare_collections():
            work = run_plan(plan, model, console, stop=stop, measure_end=last)
            results.append(stop.run(work))
        if len(plans) > 1:
            rows = [dataclasses.asdict(result) for result in results]
            meta = {"latest_stage": len(results) - 1, "finished": rows}
            write_json(JobFolder(job).stage_meta, meta)
    if len(finished) == len(plans):
        console.note(f"nothing was left to do: all {len(plans)} stages are done ({job})")
    summary = summarise(results, job, plans)
    if compare_sft and (compared := more_supervised(plans, results, console, stop)):
        summary.accuracy_more_sft = accuracy(compared.last)
        summary.phases[f"{compared.name} train"] = compared.phases["train"]
    summary.wall_s = time.monotonic() - started
    explores = plans[-1].mode == "explore"  # the job's own summary is the trainer's
    summary.write(JobFolder(job, plans[-1].explorer_name).monitor if explores else job)
    console.finish(summary, rewards_of(plans[-1]), sampled(plans[-1]))
    if explores:
        console.note(explored(plans[-1], results[-1].steps))
    return summary


def refuse_comparison(plans: Sequence[Plan]) -> None:
    """Raise ValueError where `--compare` has nothing to compare."""
    kinds = [plan.config.algorithm.algorithm_type for plan in plans]
    explores = bool(plans) and plans[-1].mode == "both"
    if len(plans) != 2 or kinds[0] != "sft" or not explores:
        raise ValueError(
            "--compare needs two stages, first sft and then one that explores and trains; "
            f"this configuration has {', '.join(kinds)}"
        )


def rewards_of(plan: Plan) -> list[float]:
    """The mean reward of each explore step of a stage, starts before this one included."""
    folder = JobFolder(plan.job_dir, plan.explorer_name)
    rows = read_metrics(folder.monitor / FILE_NAME)
    return values(
        (row["metrics"] for row in rows if row["part"] == "explorer"), "rollout/reward/mean"
    )


def sampled(plan: Plan) -> str:
    """How the rollouts of training are drawn."""
    taskset = plan.config.buffer.explorer_input.taskset
    temperature = None if taskset is None else taskset.rollout_args.temperature
    return drawn(plan.config.model.temperature if temperature is None else temperature)


def drawn(temperature: float) -> str:
    """A temperature in words."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def explored(plan: Plan, steps: int) -> str:
    """How an explorer without a trainer beside it ended."""
    early = plan.explore_steps is not None and steps < plan.explore_steps
    why = ", and the trainer wants no more" if early else ": all that there were"
    return f"{plan.explorer_name or 'explorer'} has explored {steps} steps{why}"


def job_folder(plans: Sequence[Plan]) -> Path:
    """The folder of the whole job; the stages' folders lie in it."""
    first = plans[0]
    return first.job_dir if first.stage_name is None else first.job_dir.parent


def finished_stages(job: Path) -> list[StageResult]:
    """What the stages that are done came to."""
    path = JobFolder(job).stage_meta
    if not path.exists():
        return []
    return [StageResult(**row) for row in json.loads(path.read_text())["finished"]]


def model_of(plan: Plan, results: Sequence[StageResult]) -> str:
    """Where a stage's model lies: the plan's path, or the last checkpoint of an earlier stage."""
    if plan.model_from_stage is None:
        return plan.model_path
    model = results[plan.model_from_stage].model_dir
    if model is None:
        raise ValueError(
            f"stage '{plan.stage_name}' begins with the model of stage "
            f"'{results[plan.model_from_stage].name}', which saved none"
        )
    prove(Path(model))
    return model


def summarise(results: Sequence[StageResult], job: Path, plans: Sequence[Plan]) -> Summary:
    """Accuracies before, after SFT and after RL, and where the model lies."""
    summary = Summary()
    for result, plan in zip(results, plans, strict=True):
        fresh = plan.model_from_stage is None
        supervised = result.schema == "sft"
        first = result.first or (evaluated_at_first(plan) if result.last else None)
        summary.measure = measured(first or result.last)[0] or summary.measure
        if fresh:
            summary.accuracy_before = accuracy(first)
        if supervised:
            summary.accuracy_sft = accuracy(result.last)
        else:
            summary.accuracy_sft = summary.accuracy_sft if fresh else accuracy(first)
            summary.accuracy_rl = accuracy(result.last)
        add_example(summary, "before" if fresh else "after SFT", result.first_example)
        add_example(summary, "after SFT" if supervised else "after RL", result.last_example)
        name = f"{result.name} " if result.name else ""
        summary.phases |= {f"{name}{kind}": s for kind, s in result.phases.items() if s}
        summary.model_dir = result.model_dir or summary.model_dir
        summary.steps[result.name or "run"] = result.steps
        evaluations = {"first": first, "last": result.last or first}
        if first or result.last:
            summary.evaluations[result.name or "run"] = evaluations
        summary.warnings += [{"stage": result.name, **one} for one in result.warnings]
    if summary.model_dir:
        stored = any(job.glob("buffer/*")) or any(job.glob("*/buffer/*"))
        summary.next_command = f"trireme {'view' if stored else 'convert --checkpoint-dir'} {job}"
    return summary


def evaluated_at_first(plan: Plan) -> Evaluation | None:
    """The evaluation before a stage's first step, as an earlier start of the run recorded it."""
    rows = read_metrics(JobFolder(plan.job_dir, plan.explorer_name).monitor / FILE_NAME)
    at_first = (row["metrics"] for row in rows if row["part"] == "eval" and row["step"] == 0)
    evaluation: Evaluation = {}
    for key, value in next(at_first, {}).items():
        name, _, metric = key.removeprefix("eval/").partition("/")
        evaluation.setdefault(name, {})[metric] = value
    return evaluation or None


def add_example(summary: Summary, label: str, example: dict[str, Any] | None) -> None:
    """Put a reply to the first held-out task beside those of other stages."""
    if example is None:
        return
    shown = summary.example or {
        "prompt": example["prompt"],
        "truth": example["truth"],
        "drawn": drawn(example["temperature"]),
        "replies": {},
    }
    shown["replies"][label] = {"text": example["reply"], "reward": example["reward"]}
    summary.example = shown


def accuracy(evaluation: Evaluation | None) -> float | None:
    """Mean accuracy of the first evaluation taskset, or its mean reward; None without one."""
    return measured(evaluation)[1]


def measured(evaluation: Evaluation | None) -> tuple[str | None, float | None]:
    """What `accuracy` is of, accuracy or reward, and how much it is."""
    for metrics in (evaluation or {}).values():
        for name in ("accuracy", "reward"):
            for key, value in metrics.items():
                if key.startswith(f"{name}/mean@"):
                    return name, value
    return None, None
