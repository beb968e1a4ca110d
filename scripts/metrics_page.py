"""Metrics page: docs/metrics.md, written from trireme/monitor/metrics.csv.

`python scripts/metrics_page.py` writes it; a test checks that it is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from trireme.monitor.figures import known_metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = (
    "# Metrics\n\n"
    "Every metric that a run writes to `monitor/metrics.jsonl`, TensorBoard and trackers: what it "
    "means, its range in a healthy run, and what to do outside of that range. `*` stands "
    "for a name that the run gives: a taskset, a metric of a workflow, a cause. Trackers get the "
    "metrics with a usual name under that name too.\n\n"
    "A training step's reward is that of sampled replies. A held-out evaluation samples at the "
    "same temperature unless its taskset sets `rollout_args: {temperature: 0.0}` (greedy).\n"
)


def lines() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    for title, metrics in groupby(known_metrics(), key=lambda metric: metric.section):
        yield f"## {title}\n"
        yield "| metric | meaning | healthy | otherwise | usual name |"
        yield "|-|-|-|-|-|"
        for metric in metrics:
            usual = f"`{metric.usual}`" if metric.usual else ""
            cells = (f"`{metric.name}`", metric.meaning, metric.healthy, metric.otherwise, usual)
            yield f"| {' | '.join(cells)} |"
        yield ""


def document() -> str:
    """The whole page."""
    return "\n".join(lines())


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    sys.exit(0)
