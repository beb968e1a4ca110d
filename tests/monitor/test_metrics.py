"""Every metric that a run writes is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import metrics_page
from trireme.monitor.figures import metric_of, usual_names

PACKAGE = Path(__file__).parents[2] / "trireme"
NAME = re.compile(
    r'f?"((?:actor|critic|rollout|experience_pipeline|rollout_correction|sample|sync|buffer|data'
    r'|time|perf)/[\w/@{}.]+)"'
)


def names_in_the_code() -> set[str]:
    """Metric names that the package writes out; a name in braces is the run's."""
    files = [f for f in PACKAGE.rglob("*.py") if "view" not in f.parts]
    found = {name for file in files for name in NAME.findall(file.read_text(encoding="utf-8"))}
    return {re.sub(r"\{[^}]*\}", "x", name) for name in found if not name.endswith("/")}


def test_the_code_names_no_metric_that_the_table_lacks() -> None:
    names = names_in_the_code()
    assert len(names) > 60  # or the pattern has stopped finding them
    specific = {name for name in names if metric_of(name) is None}
    assert not specific, f"add them to trireme/monitor/metrics.csv: {sorted(specific)}"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("rollout/reward/mean", "rollout/reward/mean"),
        ("rollout/my_score/mean", "rollout/*/mean"),
        ("eval/held_out/accuracy/mean@1", "eval/*/accuracy/mean@*"),
        ("eval/held_out/reward/best@4", "eval/*/*/best@*"),
        ("experience_pipeline/my_filter/dropped", "experience_pipeline/*"),
        ("watchdog/zero_rewards", "watchdog/*"),
        ("rollout_correction/weight", "rollout_correction/weight"),
        ("nothing/like/it", None),
    ],
)
def test_a_name_is_found_by_itself_or_by_a_pattern(name: str, known: str | None) -> None:
    metric = metric_of(name)
    assert (metric.name if metric else None) == known


def test_usual_names_are_each_of_one_metric() -> None:
    names = usual_names()
    assert len(set(names.values())) == len(names)
    assert names["actor/kl_loss"] == "kl"


def test_the_page_is_up_to_date() -> None:
    page = metrics_page.PAGE.read_text(encoding="utf-8")
    assert page == metrics_page.document(), "run: python scripts/metrics_page.py"
