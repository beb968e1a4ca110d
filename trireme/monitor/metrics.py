"""Metrics: says of every metric what it means, its healthy range, and what to do outside of it.

The table is metrics.csv. `*` in a name stands for a name that the run gives: a taskset, a reward, a
cause. The documentation's page of metrics and the names that trackers get are made from it.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, or those of one pattern."""

    section: str
    """The question that it answers."""
    name: str
    meaning: str
    healthy: str
    """Its range in a healthy run."""
    otherwise: str
    """What to do outside of that range."""
    usual: str
    """The name that other trainers give the same figure."""


@cache
def known_metrics() -> tuple[Metric, ...]:
    """All rows of the table."""
    text = (files("trireme.monitor") / "metrics.csv").read_text(encoding="utf-8")
    return tuple(Metric(**row) for row in csv.DictReader(text.splitlines()))


@cache
def usual_names() -> dict[str, str]:
    """Our name of a metric -> the usual one."""
    return {metric.name: metric.usual for metric in known_metrics() if metric.usual}


def metric_of(name: str) -> Metric | None:
    """What is known of a metric; None: nothing. Of several patterns that fit, the first counts."""
    exact = [metric for metric in known_metrics() if metric.name == name]
    for metric in exact or known_metrics():
        if re.fullmatch(".+".join(map(re.escape, metric.name.split("*"))), name):
            return metric
    return None
