"""Results: the result of a stage, or of one side of it, and the summary of all stages of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.explorer.explorer import Evaluation
from trireme.monitor.figures import Summary, values
from trireme.monitor.monitor import FILE_NAME, read_metrics
from trireme.registry import COMMANDS


@dataclass
class StageResult:
    """The result of a stage, or of one side of it."""

    name: str | None
    mode: str
    schema: str
    first: Evaluation | None = None
    """The evaluation at the start, by taskset."""
    last: Evaluation | None = None
    """The evaluation at the end."""
    first_examples: list[dict[str, Any]] = field(default_factory=list)
    """Held-out tasks and replies of the evaluation at the start."""
    last_examples: list[dict[str, Any]] = field(default_factory=list)
    """The same tasks in the evaluation at the end."""
    steps: int = 0
    resumed_from: int = 0
    """The steps of earlier attempts: `phases` has the seconds of this one."""
    ended_by: str = ""
    """The callback that ended the training, as a sentence."""
    idle: bool = False
    """Whether an earlier attempt had finished the stage: nothing was left to do."""
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds spent exploring, training and evaluating."""
    model_dir: str | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """The watchdog's warnings."""

    def add(self, side: StageResult) -> None:
        """Add the result of one side; the step count is that of the last side added."""
        self.first, self.last = side.first or self.first, side.last or self.last
        self.first_examples = side.first_examples or self.first_examples
        self.last_examples = side.last_examples or self.last_examples
        self.steps, self.phases = side.steps, self.phases | side.phases
        self.model_dir = side.model_dir or self.model_dir
        self.ended_by = side.ended_by or self.ended_by

    def whole_seconds(self, *phases: str) -> float:
        """Return the seconds that those phases took in all attempts, if the earlier ones were as
        fast as this one.
        """
        seconds, steps = sum(self.phases.get(name, 0.0) for name in phases), self.steps
        own = steps - self.resumed_from
        return seconds * steps / own if own > 0 and steps else seconds


def summarise(results: Sequence[StageResult], job: Path, plans: Sequence[Plan]) -> Summary:
    """Collect the accuracies before, after SFT and after RL, and the folder of the model."""
    summary, examples = Summary(), dict[str, Sequence[dict[str, Any]]]()
    firsts = [
        result.first or (evaluated_at_first(plan) if result.last else None)
        for result, plan in zip(results, plans, strict=True)
    ]
    lasts = [result.last for result in results]
    all_evaluations = [e for pair in zip(firsts, lasts, strict=True) for e in pair if e]
    taskset = summary.taskset = shared_taskset(all_evaluations)
    for result, plan, first in zip(results, plans, firsts, strict=True):
        fresh = plan.model_from_stage is None
        supervised = result.schema == "sft"
        summary.measure = measured(first or result.last, taskset)[0] or summary.measure
        if fresh:
            summary.accuracy_before = accuracy(first, taskset)
        if supervised:
            summary.accuracy_sft = accuracy(result.last, taskset)
        else:
            summary.accuracy_sft = summary.accuracy_sft if fresh else accuracy(first, taskset)
            summary.accuracy_rl = accuracy(result.last, taskset)
        for label, each in (
            ("before" if fresh else "after SFT", result.first_examples),
            ("after SFT" if supervised else "after RL", result.last_examples),
        ):
            if each:
                examples[label] = each
        name = f"{result.name} " if result.name else ""
        summary.phases |= {f"{name}{kind}": s for kind, s in result.phases.items() if s}
        summary.model_dir = result.model_dir or summary.model_dir
        summary.steps[result.name or "run"] = result.steps
        evaluations = {"first": first, "last": result.last or first}
        if first or result.last:
            summary.evaluations[result.name or "run"] = evaluations
        summary.warnings += [{"stage": result.name, **one} for one in result.warnings]
    summary.example = changed_example(examples)
    if summary.model_dir:
        stored = any(job.glob("buffer/*")) or any(job.glob("*/buffer/*"))
        if stored and "view" in COMMANDS:
            summary.next_command = f"trireme view {job}"
        elif "convert" in COMMANDS:
            summary.next_command = f"trireme convert --checkpoint-dir {job}"
    return summary


def evaluated_at_first(plan: Plan) -> Evaluation | None:
    """Return the evaluation before a stage's first step, as an earlier attempt recorded it."""
    rows = read_metrics(JobFolder(plan.job_dir, plan.explorer_name).monitor / FILE_NAME)
    at_first = (row["metrics"] for row in rows if row["part"] == "eval" and row["step"] == 0)
    evaluation: Evaluation = {}
    for key, value in next(at_first, {}).items():
        part, _, rest = key.partition("/")
        name, _, metric = rest.partition("/")
        if part == "eval":  # a listener may have added metrics of its own
            evaluation.setdefault(name, {})[metric] = value
    return evaluation or None


def changed_example(examples: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Choose a held-out task that shows what the last stage has changed, with its reply after each
    stage: the first whose reward moved as the mean did, else the first whose reply changed.
    """
    by_task = [{one["task"]: one for one in each} for each in examples.values()]
    shared = [task for task in (by_task or [{}])[0] if all(task in each for each in by_task)]
    if not shared:
        return {}

    def gain(task: int) -> float:
        before, after = (each[task]["reward"] or 0.0 for each in by_task[-2:])
        return after - before

    def changed(task: int) -> bool:
        before, after = (each[task]["reply"] for each in by_task[-2:])
        return after != before

    chosen = shared[0]
    if len(by_task) > 1:
        mean = sum(map(gain, shared))
        moved = [task for task in shared if gain(task) * mean > 0]
        chosen = next(iter([*moved, *filter(changed, shared), chosen]))
    first = by_task[0][chosen]
    replies = zip(examples, (each[chosen] for each in by_task), strict=True)
    return {
        "prompt": first["prompt"],
        "truth": first["truth"],
        "drawn": drawn(first["temperature"]),
        "changed": len(by_task) > 1 and changed(chosen),
        "replies": {label: {"text": e["reply"], "reward": e["reward"]} for label, e in replies},
    }


def shared_taskset(evaluations: Sequence[Evaluation]) -> str | None:
    """Return the last evaluation's first taskset that all evaluations have, so that their
    accuracies can be compared; its first if they share none, None without evaluations.
    """
    last = evaluations[-1] if evaluations else {}
    names = [name for name in last if measured(last, name)[0]]
    shared = [name for name in names if all(name in each for each in evaluations)]
    return next(iter([*shared, *names]), None)


def accuracy(evaluation: Evaluation | None, taskset: str | None) -> float | None:
    """Return the mean accuracy on an evaluation taskset, or the mean reward; None without one."""
    return measured(evaluation, taskset)[1]


def measured(evaluation: Evaluation | None, taskset: str | None) -> tuple[str | None, float | None]:
    """Return the measure behind `accuracy` (accuracy or reward), and its value."""
    metrics = (evaluation or {}).get(taskset or "", {})
    for name in ("accuracy", "reward"):
        for key, value in metrics.items():
            if key.startswith(f"{name}/mean@"):
                return name, value
    return None, None


def rewards_of(plan: Plan) -> list[float]:
    """Return the mean reward of each explore step of a stage, earlier attempts included."""
    folder = JobFolder(plan.job_dir, plan.explorer_name)
    rows = read_metrics(folder.monitor / FILE_NAME)
    return values(
        (row["metrics"] for row in rows if row["part"] == "explorer"), "rollout/reward/mean"
    )


def sampled(plan: Plan) -> str:
    """Describe how training rollouts are sampled."""
    taskset = plan.config.buffer.explorer_input.taskset
    temperature = None if taskset is None else taskset.rollout_args.temperature
    return drawn(plan.config.model.temperature if temperature is None else temperature)


def drawn(temperature: float) -> str:
    """Describe a temperature."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def explored(plan: Plan, steps: int) -> str:
    """Describe how an explorer that runs without a trainer ended."""
    early = plan.steps.explore is not None and steps < plan.steps.explore
    why = ", and the trainer wants no more" if early else ": all that there were"
    return f"{plan.explorer_name or 'explorer'} has explored {steps} steps{why}"
