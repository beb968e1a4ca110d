"""Figures: selects, formats and explains the metrics that people see, and summarizes a run.

metrics.csv explains each metric: its meaning, its healthy range, and what to do outside of it. `*`
in a name there stands for a name from the run: a taskset, a reward, a cause. The documentation's
page of metrics and the trackers' metric names are generated from it.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trireme.files import Unreadable, read_json, usable, write_json

if TYPE_CHECKING:  # it would load torch
    from trireme.experience import Experience

# Label, the metrics that may supply it (the first present one does), format.
_TRAINING: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/reward/mean",), ".3f"),
    ("accuracy", ("rollout/accuracy/mean",), ".1%"),
    # the loss of a policy gradient means nothing
    ("loss", ("actor/sft_loss", "actor/dpo_loss", "actor/kto_loss"), ".3g"),
    ("grad", ("actor/grad_norm",), ".2g"),
    ("length", ("rollout/response_length/mean",), ".0f"),
    ("tokens/s", ("perf/tokens_per_s",), ",.0f"),
    ("failed", ("rollout/failed",), ".0f"),
)
_EVALUATION = (("accuracy", ".1%"), ("reward", ".3f"))
STEPS_TIMED = 20
"""The most recent steps, whose mean is the pace of a run."""
MAX_TURNS = 8
_SPARKS = "▁▂▃▄▅▆▇█"


def figures(
    metrics: Mapping[str, float], kind: Literal["training", "evaluation"]
) -> list[tuple[str, str]]:
    """Return label and text of the figures to show; the count of failures only if there are any."""
    if kind == "evaluation":
        return _evaluation_figures(metrics)
    shown = []
    for label, names, form in _TRAINING:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None and (label != "failed" or value):
            shown.append((label, format(float(value), form if abs(value) < 1e9 else ".3g")))
    return shown


def in_words(metrics: Mapping[str, float], kind: Literal["training", "evaluation"]) -> str:
    """Format the figures as one text, `reward 0.500  length 8`."""
    return "  ".join(f"{label} {text}" for label, text in figures(metrics, kind))


def _evaluation_figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Format `accuracy 54.2%`, for several runs per task `accuracy (mean@4) 54.2%`, and the number
    of tasks.
    """
    shown = []
    for name, form in _EVALUATION:
        for key, value in metrics.items():
            measure = key.removeprefix(f"{name}/")
            if measure == key or measure.startswith(("std@", "worst@")):
                continue
            label = name if measure == "mean@1" else f"{name} ({measure})"
            shown.append((label, format(float(value), form)))
    if "tasks" in metrics:
        shown.append(("tasks", f"{metrics['tasks']:.0f}"))
    if metrics.get("failed"):
        shown.append(("failed", f"{metrics['failed']:.0f}"))
    return shown


def clock_time(seconds: float) -> str:
    """Format `2:07`, from an hour on `1:02:07`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def pace(
    times: Sequence[tuple[float, int]], total: int | None
) -> tuple[float | None, float | None]:
    """Return the seconds per step of recent steps (time, step), and the seconds that are left at
    that pace; None for what is not known, or past.
    """
    if len(times) < 2:
        return None, None
    (then, first), (now, last) = times[0], times[-1]
    each = (now - then) / max(last - first, 1)
    return each, each * (total - last) if total and last < total else None


def duration(seconds: float) -> str:
    """Format `0.41 s`, `12 s`, from two minutes on as `clock_time`."""
    if seconds >= 120:
        return clock_time(seconds)
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw `values` as at most `width` blocks, each the mean of an equal part of them."""
    parts = min(width, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def chart(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Draw `values` as columns of blocks, with the lowest and highest value at the side."""
    parts = min(width, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    eighths = [1 + round((m - low) / ((high - low) or 1.0) * (8 * height - 1)) for m in means]
    lines = []
    for row in reversed(range(height)):
        label = f"{high:.2f}" if row == height - 1 else f"{low:.2f}" if row == 0 else ""
        filled = (max(0, min(8, e - 8 * row)) for e in eighths)
        lines.append(f"{label:>8} │{''.join(f' {_SPARKS}'[n] for n in filled)}".rstrip())
    return lines


def in_one_line(text: str, most: int) -> str:
    """Return `text` with line breaks shown as ⏎, without control characters, its middle cut out."""
    line = text.strip().replace("\n", " ⏎ ")
    line = "".join(c if c.isprintable() else " " for c in line)
    if len(line) <= most:
        return line
    half = (most - 3) // 2
    return f"{line[:half]} … {line[-half:]}"


def spoken(message: Mapping[str, Any]) -> str:
    """Return the text of a message, followed by its tool calls, each as `name(arguments)`. A user's
    own message may have any form.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        parts = content if isinstance(content, list) else [content]
        content = "\n".join(
            str(part.get("text") or f"[{part.get('type')}]")
            if isinstance(part, dict)
            else str(part)
            for part in parts
        )
    given_calls = message.get("tool_calls")
    calls = [
        call.get("function") or call
        for call in (given_calls if isinstance(given_calls, list) else ())
        if isinstance(call, dict)
    ]
    made = [
        f"{call.get('name')}({given if isinstance(given, str) else json.dumps(given)})"
        for call in calls
        if isinstance(call, dict)
        for given in [call.get("arguments", "")]
    ]
    return "\n".join(filter(None, [content.strip(), *made]))


def turns_of(experience: Experience) -> list[tuple[str, str]]:
    """Return the messages before the first sampled reply, and those from it on.

    The middle of a long conversation is left out. If no messages were recorded, the texts are
    decoded from the tokens, with the chat template's special tokens.
    """
    messages = [one for one in experience.messages or () if isinstance(one, dict)]
    mask = experience.mask.tolist()
    sampled = sum(now and not before for before, now in pairwise([False, *mask]))
    replies = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    first = replies[-min(sampled, len(replies))] if sampled and replies else len(messages)
    asked = [spoken(message) for message in messages[:first] if message.get("role") == "user"]
    turns = [(message.get("role") or "", spoken(message)) for message in messages[first:]]
    if not turns:
        turns = [("assistant", experience.response_text or "")]
    left_out = len(turns) - MAX_TURNS
    if left_out > 1:
        turns[2 : 2 + left_out] = [("", f"... {left_out} turns ...")]
    return [
        ("asked", asked[-1] if asked else experience.prompt_text or ""),
        *(("replied" if role == "assistant" else role, text) for role, text in turns),
    ]


def reply_text(experience: Experience) -> str:
    """Return the text of a rollout from its first sampled reply on, without the chat template's
    special tokens if its messages were recorded: the reply, or each turn after it with its label.
    """
    (_, reply), *later = turns_of(experience)[1:]
    if not later:
        return experience.response_text or ""
    return "\n".join([reply, *(f"[{label}] {text}" if label else text for label, text in later)])


Figures = Mapping[str, float]
FEW = 3
"""Steps that make up the beginning of a run, and the present."""
ROLLOUTS = 32
"""With fewer rollouts, more steps make up the present: chance must not look like a cause."""
GROUPS = 16
"""With fewer groups, more steps as well: a step of one group mostly shows how hard its task is."""
KEPT = 64
"""Steps to remember."""


def span(rows: Sequence[Figures]) -> str:
    """Describe these steps: `the last 3 steps`."""
    return "the first step" if len(rows) == 1 else f"the last {len(rows)} steps"


@dataclass
class Course:
    """The steps of one part so far."""

    step: int = 0
    first: list[Figures] = field(default_factory=list)
    rows: list[Figures] = field(default_factory=list)
    best: float = 0.0
    """The highest mean reward of the present so far."""
    ended: bool = False
    """Whether no step will follow: the present steps have to suffice."""

    def add(self, step: int, figures: Figures) -> None:
        """Add a step."""
        self.step = step
        if len(self.first) < FEW:
            self.first.append(figures)
        self.rows = [*self.rows[1 - KEPT :], figures]
        rewards = values(self.now, "rollout/reward/mean")
        if len(rewards) >= FEW:
            self.best = max(self.best, fmean(rewards))

    @property
    def now(self) -> Sequence[Figures]:
        """Return the last steps: a few, and enough to have some rollouts of some groups; empty: too
        early.
        """
        for start in range(len(self.rows) - FEW, -1, -1):
            if self._have_enough(start, 1):
                return self.rows[start:]
        return self.rows if self.ended and self._have_enough(0, 4) else ()

    @property
    def began(self) -> Sequence[Figures]:
        """Return the first steps, if they differ from the last ones."""
        return self.first if len(self.rows) >= len(self.now) + FEW else ()

    def _have_enough(self, start: int, part: int) -> bool:
        """Return True if the rows from `start` on have enough rollouts and groups, or `part` has
        enough of one.
        """
        rows = self.rows[start:]
        rollouts = sum(row.get("rollout/runs", ROLLOUTS) for row in rows)
        rollouts += sum(values(rows, "rollout/failed"))
        alone = all(row.get("rollout/tasks", GROUPS) <= 1 for row in rows)
        return rollouts >= ROLLOUTS // part and (not alone or len(rows) >= GROUPS // part)


def values(rows: Iterable[Figures], name: str) -> list[float]:
    """Return a figure of the steps that have it; files hold null for a number that is not
    finite.
    """
    cells = (row.get(name) for row in rows)
    return [value for value in cells if value is not None and math.isfinite(value)]


def mean(rows: Iterable[Figures], name: str) -> float:
    """Return the mean over the steps that have it; 0 if none has."""
    numbers = values(rows, name)
    return fmean(numbers) if numbers else 0.0


FILE_NAME = "summary.json"


@dataclass
class Summary:
    """Figures of a run over all its stages. Accuracies are shares, 0 to 1; None: not measured and
    not written.
    """

    accuracy_before: float | None = None
    """Accuracy of the original model."""
    accuracy_sft: float | None = None
    """Accuracy after the supervised stage."""
    accuracy_rl: float | None = None
    """Accuracy after the reinforcement stage."""
    accuracy_more_sft: float | None = None
    """Accuracy if the reinforcement stage's wall time had gone into more supervised training."""
    example: dict[str, Any] = field(default_factory=dict)
    """A held-out task, one that `changed` in the last stage if there is one: `prompt`, `truth`, how
    its replies are `drawn`, and the reply before and after each stage: its `text` and `reward`."""
    measure: str = "accuracy"
    """The measure of these four: `reward` if the evaluation has no accuracy but a mean reward."""
    taskset: str | None = None
    """The evaluation taskset of these four: the first that all evaluations have."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """First and last evaluation of each stage (`run` if there are none), by taskset."""
    steps: dict[str, int] = field(default_factory=dict)
    """The last step of each stage."""
    wall_s: float = 0.0
    """Seconds from start to end."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in the order in which they ran."""
    model_dir: str | None = None
    """The folder of the trained model; None where none was saved."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """The watchdog's warnings: stage, cause, step, and the text with the remedy."""
    next_command: str | None = None
    """The command to try next."""

    def write(self, folder: str | Path) -> Path:
        """Write `<folder>/summary.json`, whole or not at all."""
        path = Path(folder) / FILE_NAME
        usable(path)
        write_json(path, {key: value for key, value in asdict(self).items() if value is not None})
        return path

    @classmethod
    def read(cls, folder: str | Path) -> Summary:
        """Read the summary that `write` left in a folder."""
        return cls(**read_json(Path(folder) / FILE_NAME))

    @classmethod
    def of_earlier(cls, folder: str | Path) -> Summary | None:
        """Read the summary of an earlier attempt; None if it left none that is whole."""
        with suppress(FileNotFoundError, Unreadable, TypeError):
            return cls.read(folder)
        return None


class Metric(NamedTuple):
    """A metric, or the metrics of one pattern."""

    section: str
    """The question that the metric answers."""
    name: str
    meaning: str
    healthy: str
    """Its range in a healthy run."""
    otherwise: str
    """What to do outside of that range."""
    usual: str
    """The name of the same figure in other trainers."""


@cache
def known_metrics() -> tuple[Metric, ...]:
    """Return all rows of the table."""
    text = (files("trireme.monitor") / "metrics.csv").read_text(encoding="utf-8")
    return tuple(Metric(**row) for row in csv.DictReader(text.splitlines()))


@cache
def usual_names() -> dict[str, str]:
    """Map our name of a metric to the usual one."""
    return {metric.name: metric.usual for metric in known_metrics() if metric.usual}


def metric_of(name: str) -> Metric | None:
    """Look a metric up; None if it is unknown. Of several matching patterns the first counts."""
    exact = [metric for metric in known_metrics() if metric.name == name]
    for metric in exact or known_metrics():
        if re.fullmatch(".+".join(map(re.escape, metric.name.split("*"))), name):
            return metric
    return None
