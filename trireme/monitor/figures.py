"""Figures: which of a step's many numbers people see, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

# Label, the metrics it may come from (the first that is there), format.
_TRAINING: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/reward/mean",), ".3f"),
    ("accuracy", ("rollout/accuracy/mean",), ".1%"),
    ("loss", ("actor/sft_loss", "actor/dpo_loss"), ".3g"),  # of a policy gradient it means nothing
    ("grad", ("actor/grad_norm",), ".2g"),
    ("length", ("rollout/response_length/mean",), ".0f"),
    ("tokens/s", ("perf/tokens_per_s",), ",.0f"),
    ("failed", ("rollout/failed",), ".0f"),
)
_EVALUATION = (("accuracy", ".1%"), ("reward", ".3f"))
_SPARKS = "▁▂▃▄▅▆▇█"


def figures(
    metrics: Mapping[str, float], kind: Literal["training", "evaluation"]
) -> list[tuple[str, str]]:
    """Label and text of the figures to show; a count of failures only where there are some."""
    if kind == "evaluation":
        return _evaluation_figures(metrics)
    shown = []
    for label, names, form in _TRAINING:
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None and (label != "failed" or value):
            shown.append((label, format(float(value), form if abs(value) < 1e9 else ".3g")))
    return shown


def in_words(metrics: Mapping[str, float], kind: Literal["training", "evaluation"]) -> str:
    """The figures as one text, `reward 0.500  length 8`."""
    return "  ".join(f"{label} {text}" for label, text in figures(metrics, kind))


def _evaluation_figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """`accuracy 54.2%`, for several runs a task `accuracy (mean@4) 54.2%`, and how many tasks."""
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
    """`2:07`, from an hour on `1:02:07`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """`0.41 s`, `12 s`, from two minutes on as `clock_time`."""
    if seconds >= 120:
        return clock_time(seconds)
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The course of `values` as at most `width` blocks, each the mean of an equal part of them."""
    parts = min(width, len(values))
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def in_one_line(text: str, most: int) -> str:
    """`text` with line breaks shown as ⏎, without control characters, its middle cut out."""
    line = text.strip().replace("\n", " ⏎ ")
    line = "".join(c if c.isprintable() else " " for c in line)
    if len(line) <= most:
        return line
    half = (most - 3) // 2
    return f"{line[:half]} … {line[-half:]}"
