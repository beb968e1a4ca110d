"""Metrics: computes a batch's rollout and evaluation metrics, failures by cause, and pass rates.

Invariant of the pass rates: a step's tasks are drawn with the pass rates of the steps up to the
last synchronization, never with those that happened to be there. So runs with a fixed
synchronization interval, and runs resumed from a checkpoint, draw the same tasks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.data.tasksets import PassRates, Taskset
from trireme.experience import REPORTED_TOKENS, Experience, group_by
from trireme.explorer.runner import Failed, Outcome
from trireme.explorer.scheduler import Scheduler
from trireme.usercode import Fault


def rollout_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Compute the metrics of a step's runs, experiences and failures."""
    metrics = run_metrics([e for outcome in outcomes for e in outcome.rollouts])
    failures = [failed for outcome in outcomes for failed in outcome.failures]
    for kind in ("error", "timeout", "empty"):
        metrics[f"rollout/failed/{kind}"] = sum(failed.kind == kind for failed in failures)
    metrics["rollout/failed"] = len(failures)
    metrics["rollout/retries"] = sum(outcome.retries for outcome in outcomes)
    metrics["rollout/tasks"] = len(outcomes)
    metrics["rollout/experiences"] = sum(len(outcome.experiences) for outcome in outcomes)
    if outcomes:
        seconds = [outcome.seconds for outcome in outcomes]
        metrics["time/task/mean"] = statistics.fmean(seconds)
        metrics["time/task/max"] = max(seconds)
    attempts = [attempt for outcome in outcomes for attempt in outcome.attempts]
    if attempts:  # time in the model, and in everything else that the workflow does
        metrics["time/model/mean"] = statistics.fmean(model for _, model in attempts)
        metrics["time/environment/mean"] = statistics.fmean(
            all_ - in_model for all_, in_model in attempts
        )
    return metrics


def run_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Compute mean, max and min over runs of the reward, lengths and the workflow's own metrics;
    also the standard deviation of the rewards, and the shares of runs whose prompt was too long or
    that train nothing.
    """
    values: dict[str, list[float]] = {}
    runs = runs_of(experiences)
    for run in runs:
        for key, value in run.items():
            values.setdefault(key, []).append(value)
    metrics: dict[str, float] = {}
    for key, numbers in values.items():
        metrics[f"rollout/{key}/mean"] = statistics.fmean(numbers)
        metrics[f"rollout/{key}/max"] = max(numbers)
        metrics[f"rollout/{key}/min"] = min(numbers)
    if rewards := values.get("reward"):
        metrics["rollout/reward/std"] = _std(rewards)
    groups = list(group_by(experiences, "run").values())
    too_long = [any(e.truncate_status == "prompt_truncated" for e in run) for run in groups]
    trained = [any(e.trained_tokens > 0 for e in run) for run in groups]
    if groups:
        metrics["rollout/prompt_truncated/mean"] = statistics.fmean(too_long)
        untrained = (not t and not long for t, long in zip(trained, too_long, strict=True))
        metrics["rollout/untrained/mean"] = statistics.fmean(untrained)
    metrics["rollout/runs"] = len(runs)
    return metrics


def runs_of(experiences: Iterable[Experience]) -> list[dict[str, float]]:
    """Return one dictionary per run: the last step's reward, the number of sampled tokens of all
    steps where known, whether a reply was cut, and the means of the workflow's own metrics, except
    for one with the name of these.
    """
    rows = []
    for steps in group_by(experiences, "run").values():
        last = max(steps, key=lambda e: e.eid.step)
        sizes = [e.info.get(REPORTED_TOKENS, e.trained_tokens) for e in steps]
        row: dict[str, float] = {
            key: statistics.fmean(e.metrics[key] for e in steps if key in e.metrics)
            for key in {key for e in steps for key in e.metrics}
        }
        # after the workflow's own: a part of a reward may be called `reward`
        if None not in sizes:
            row["response_length"] = float(sum(sizes))
        row["truncated"] = float(any(e.stop_reason == "length" for e in steps))
        if last.reward is not None:
            row["reward"] = last.reward
        rows.append(row)
    return rows


def _std(rewards: Sequence[float]) -> float:
    """Return the population standard deviation; NaN if a value is not finite or too large to
    square.
    """
    try:
        return statistics.pstdev(rewards)
    except (OverflowError, ValueError, AttributeError):
        return math.nan


def pass_metrics(per_task: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compute mean@n, std@n (population), best@k and worst@k for k = 2, 4, 8 .. n.

    `per_task`: for each task one value per run. best@k is the expected maximum of k runs drawn with
    replacement, averaged over tasks. The event loop waits for this: it is computed without drawing.
    """
    per_task = [sorted(values) for values in per_task if values]
    if not per_task:
        return {}
    n = max(len(values) for values in per_task)
    metrics = {f"mean@{n}": statistics.fmean(statistics.fmean(values) for values in per_task)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = statistics.fmean(statistics.pstdev(values) for values in per_task)
    for k in sorted({*(2**i for i in range(1, n.bit_length()) if 2**i < n), n}):
        chances = {size: _chances(size, k) for size in set(map(len, per_task))}
        best = (_weighted(v, chances[len(v)]) for v in per_task)
        metrics[f"best@{k}"] = statistics.fmean(best)
        worst = (_weighted(v[::-1], chances[len(v)]) for v in per_task)
        metrics[f"worst@{k}"] = statistics.fmean(worst)
    return metrics


def _chances(n: int, k: int) -> list[float]:
    """Return for each of n values in rising order the chance to be the largest of k draws."""
    below = [(i / n) ** k for i in range(n + 1)]
    return [upto - less for less, upto in itertools.pairwise(below)]


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True))


def evaluation_metrics(outcomes: Sequence[Outcome], *, repeat_times: int) -> dict[str, float]:
    """Compute `<metric>/mean@n` and so on of an evaluation, and how many rollouts failed.

    An evaluation must not look better because rollouts failed: their reward and accuracy are 0.
    """
    per_task = [runs_of(outcome.rollouts) for outcome in outcomes]
    keys = sorted({key for rows in per_task for row in rows for key in row})
    metrics: dict[str, float] = {}
    for key in keys:
        missing = 0.0 if key in ("reward", "accuracy") else None
        values = []
        for rows in per_task:
            present = [row[key] for row in rows if key in row]
            if missing is not None:
                present += [missing] * (repeat_times - len(present))
            values.append(present)
        metrics.update({f"{key}/{k}": v for k, v in pass_metrics(values).items()})
    metrics["tasks"] = len(outcomes)
    metrics["failed"] = sum(len(outcome.failures) for outcome in outcomes)
    return metrics


_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
Cause = tuple[str, ...]
"""Whose code, the kind of error, and its line. The message is left out: it may differ each time."""


@dataclass
class Lost:
    """The failed rollouts of a run so far, by cause."""

    wanted: int = 0
    causes: Counter[Cause] = field(default_factory=Counter)
    _first: dict[Cause, Failed] = field(default_factory=dict)

    def add(self, wanted: int, causes: Mapping[Cause, Sequence[Failed]]) -> None:
        """Add the failures among `wanted` more rollouts."""
        self.wanted += wanted
        for cause, failures in causes.items():
            self.causes[cause] += len(failures)
            self._first.setdefault(cause, failures[0])

    def __str__(self) -> str:
        """Return how many of how many rollouts failed, and why."""
        whys = [
            f"{count} x {self._first[cause].fault.what}: {self._first[cause].fault.text}"
            for cause, count in self.causes.most_common(3)
        ]
        more = [f"and {len(self.causes) - 3} other causes"] if len(self.causes) > 3 else []
        lost = f"{self.causes.total()} of {self.wanted} rollouts failed and were left out"
        return f"{lost}: {'; '.join([*whys, *more])}"


def by_cause(failures: Sequence[Failed]) -> dict[Cause, list[Failed]]:
    """Group failures by cause, in the order in which each cause first appears."""
    causes: dict[Cause, list[Failed]] = {}
    for failed in failures:
        fault = failed.fault
        key = (fault.what, failed.kind, _common_text(fault), fault.place)
        causes.setdefault(key, []).append(failed)
    return causes


def _common_text(fault: Fault) -> str:
    """Return the part of a fault's text that is the same each time: the kind of an error from a
    known line, else what was expected there, else all of it; without numbers and addresses.
    """
    kind = fault.text.partition(":")[0]
    if fault.place and kind.isidentifier():
        return kind
    expected = fault.text.rpartition(": expected ")[2] if fault.place else fault.text
    return _NUMBER.sub("0", expected)


def failure_sentence(failures: Sequence[Failed], wanted: int, when: str, more: str = "") -> str:
    """Return the sentence for failures of one cause, among `wanted` rollouts."""
    fault, count = failures[0].fault, len(failures)
    size = f"all {wanted}" if count == wanted else f"{count} of {wanted}"
    return f"{fault.what} failed in {size} rollouts of {when}{more}: {fault.text}"


class Feedback:
    """Holds back the pass rates of finished steps until the taskset may use them."""

    def __init__(self) -> None:
        self._rates: dict[int, PassRates] = {}
        self._taken: dict[int, tuple[int, PassRates]] = {}
        """Taken rates by their step, with the step whose draw was the first to use them."""
        self._upto = 0

    def add(self, step: int, rates: PassRates) -> None:
        """Add the pass rates of a finished step."""
        self._rates[step] = rates

    def release(self, step: int) -> None:
        """Allow draws from now on to use the rates of all steps up to this one."""
        self._upto = step

    def take(self, draw: int) -> list[PassRates]:
        """Return the rates that are released and not yet taken, in the order of their steps, for
        the draw of step `draw`.
        """
        steps = [step for step in sorted(self._rates) if step <= self._upto]
        self._taken |= {step: (draw, self._rates[step]) for step in steps}
        return [self._rates.pop(step) for step in steps]

    def forget(self, draw: int) -> None:
        """Forget rates that were taken for the draw of step `draw` or before: no state goes back
        before it.
        """
        self._taken = {step: taken for step, taken in self._taken.items() if taken[0] > draw}

    def state(self, draw: int | None = None) -> dict[str, Any]:
        """Return the state in a form that JSON accepts; with the rates that were taken after the
        draw of step `draw`, if the run is to go back to it.
        """
        taken = {
            step: rates
            for step, (at, rates) in self._taken.items()
            if draw is not None and at > draw
        }
        rates = [
            [step, taskset, row, rate]
            for step, tasksets in (taken | self._rates).items()
            for taskset, rows in tasksets.items()
            for row, rate in rows.items()
        ]
        return {"upto": self._upto, "rates": rates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._upto = state["upto"]
        self._rates = {}
        for step, taskset, row, rate in state["rates"]:
            tasksets: Any = self._rates.setdefault(step, {})
            tasksets.setdefault(taskset, {})[row] = rate


MEASURES = ("accuracy", "reward")
"""The measures of a rollout's worth: the first of these that the rollouts have counts."""


@dataclass
class Evaluated:
    """The values and failures of one model on one taskset."""

    taskset: str
    measure: str
    values: list[list[float]] = field(default_factory=list)
    """One list per task, one value per rollout; a failed rollout has 0."""
    failures: Counter[str] = field(default_factory=Counter)
    """The number of failures by cause."""


async def try_tasksets(
    scheduler: Scheduler, tasksets: Sequence[Taskset], rollouts: int | None, max_failures: float
) -> list[Evaluated]:
    """Run all tasks of each taskset; `rollouts` overrides the tasks' own number of rollouts."""
    names = [f"0/{taskset.name}" for taskset in tasksets]
    for name, taskset in zip(names, tasksets, strict=True):
        tasks = taskset.all()
        if rollouts is not None:
            tasks = [dataclasses.replace(task, repeat_times=rollouts) for task in tasks]
        await scheduler.submit(name, tasks)
    return [
        _evaluated(taskset.name, await scheduler.results(name), max_failures)
        for name, taskset in zip(names, tasksets, strict=True)
    ]


def _evaluated(name: str, outcomes: list[Outcome], limit: float) -> Evaluated:
    """Return the values of a taskset's rollouts. Raises RuntimeError if every rollout failed, or
    more than the share `limit`.
    """
    rows = [runs_of(outcome.rollouts) for outcome in outcomes]
    failures = Counter[str]()
    for alike in by_cause([one for outcome in outcomes for one in outcome.failures]).values():
        failures[str(alike[0].fault)] += len(alike)
    known = {key for runs in rows for run in runs for key in run}
    if not known:
        raise RuntimeError(f"{name}: every rollout failed: {failures.most_common(1)[0][0]}")
    wanted = sum(outcome.task.repeat_times for outcome in outcomes)
    if failures.total() > limit * wanted:
        worst = failures.most_common(1)[0][0]
        raise RuntimeError(
            f"{name}: {failures.total()} of {wanted} rollouts failed "
            f"(explorer.max_failures is {limit:g}): {worst}"
        )
    measure = next((key for key in MEASURES if key in known), None)
    if measure is None:
        raise RuntimeError(f"{name}: the workflow gives neither accuracy nor reward")
    values = []
    for outcome, runs in zip(outcomes, rows, strict=True):
        own = [run[measure] for run in runs if measure in run]
        values.append(own + [0.0] * (outcome.task.repeat_times - len(own)))
    return Evaluated(name, measure, values, failures)
