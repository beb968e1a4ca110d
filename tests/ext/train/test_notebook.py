"""A run in a notebook: one output that is updated, and its curves and table at the end."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.buffer.made import experience
from trireme.ext.train import notebook
from trireme.ext.train.figure import _ticks, figure_of
from trireme.ext.train.notebook import CellConsole, in_notebook
from trireme.ext.train.train import Run
from trireme.monitor.figures import Summary
from trireme.monitor.monitor import JsonLinesMonitor


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a cell was given: first its output, then the updates of it."""
    calls: list[tuple[str, Any]] = []
    module: Any = ModuleType("IPython.display")

    def display(data: Any, **options: Any) -> Any:
        assert options == {"raw": True, "display_id": True}
        calls.append(("display", data))
        return SimpleNamespace(update=lambda data, raw: calls.append(("update", data)))

    module.display = display
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return calls


def test_a_run_has_one_output_that_is_updated(shown: list[tuple[str, Any]]) -> None:
    console = CellConsole()
    console.clock = iter(float(n) for n in range(0, 1000, 10)).__next__
    console.stage("run", 3)
    console.show()
    console.show()  # nothing new
    for step in (1, 2, 3):
        console.step("trainer", step, {"rollout/reward/mean": step / 4})
        console.show()
    console.finish(Summary(wall_s=3))
    console.show()
    assert [kind for kind, _ in shown] == ["display"] + ["update"] * 4
    texts = [data["text/plain"] for _, data in shown]
    assert texts[0] == "run: 3 steps"
    assert texts[2].startswith("run: 3 steps\nrun 2/3  reward 0.500") and "1/3" not in texts[2]
    assert texts[2].splitlines()[-1].startswith("reward ")
    assert "run 3/3" in texts[-1] and "wall time" in texts[-1] and "\x1b" not in texts[-1]
    assert shown[-1][1]["text/html"].startswith("<pre style=")


@pytest.mark.parametrize(("length", "notes"), [(10, 1000), (150, 1000), (3000, 300), (20_000, 70)])
def test_a_long_run_shows_its_last_lines(
    shown: list[tuple[str, Any]], length: int, notes: int
) -> None:
    console = CellConsole()
    for number in range(notes):
        console.note(f"line {number} <b>{'é<' * length}")
    console.show()
    data = shown[0][1]
    assert len(json.dumps(data)) <= notebook.MOST_BYTES
    lines = data["text/plain"].split("\n")
    assert len(lines) <= notebook.MOST_LINES + 1 and lines[-1].startswith(f"line {notes - 1} <b>")
    if length == 10:
        assert lines[:2] == ["(940 earlier lines)", f"line 940 <b>{'é<' * length}"]
        assert "line 999 &lt;b&gt;" in data["text/html"]


def test_warnings_and_the_newest_rollout_are_in_the_run_s_output(
    shown: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    console = CellConsole()
    with console.warnings():
        console.stage("run", 3)
        print("warning: rewards are equal", file=sys.stderr)
        for text in ("one", "two"):
            console.rollout(experience(1, 0, 0, 1.0, response_text=text, messages=None))
            console._last_rollout = -math.inf
        print("\rloading 10%\rloading 20%", end="", file=sys.stderr)
        console.progress("run 1/3")
        console.show()
    assert capsys.readouterr().err == ""
    first, warned, bar, progress, rollout, *rest = shown[0][1]["text/plain"].split("\n")
    assert (first, warned, bar) == ("run: 3 steps", "warning: rewards are equal", "loading 20%")
    assert (progress, rollout) == ("run 1/3", "a rollout:")
    assert "two" in "".join(rest) and "one" not in "".join(rest)
    console.close()
    console.show()
    assert "a rollout" not in shown[-1][1]["text/plain"]


def test_only_a_notebook_s_shell_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not in_notebook()
    shells = [type(name, (), {})() for name in ("TerminalInteractiveShell", "ZMQInteractiveShell")]
    for shell, expected in zip(shells, (False, True), strict=True):
        module = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert in_notebook() is expected


def run_in(folder: Path) -> Run:
    plan: Any = SimpleNamespace(job_dir=folder, explorer_name="")
    return Run(folder, None, Summary(accuracy_before=0.25, accuracy_rl=0.5, wall_s=1), [plan])


def test_a_run_draws_its_reward_and_what_was_measured(tmp_path: Path) -> None:
    monitor = JsonLinesMonitor(tmp_path / "monitor")
    for step in (1, 2, 3):
        monitor.log({"rollout/reward/mean": step / 4, "actor/entropy": 0.1}, step, "explorer")
    monitor.log({"eval/held_out/accuracy/mean@1": 0.5}, 3, "eval")
    run = run_in(tmp_path)
    svg = run.plot().svg
    assert svg.startswith("<svg ") and svg.count("<polyline") == 2 and svg.count("<circle") == 4
    assert "rollout/reward/mean" in svg and "eval/held_out/accuracy/mean@1" in svg
    assert run.plot("actor/entropy").svg.count("<polyline") == 1
    assert repr(run.plot()) == "Figure()", "the drawing is in the HTML"
    assert run.plot().save(tmp_path / "a.svg").read_text() == svg
    with pytest.raises(ValueError, match="no metric 'actor/entrop'; did you mean 'actor/entropy'"):
        run.plot("actor/entrop")
    assert run.plot()._repr_svg_() == svg and "currentColor" not in svg
    page = run._repr_html_()
    assert page.startswith("<svg ") and "<table>" in page and "after RL" in page


def test_a_figure_of_a_long_run_is_small_and_has_its_highest_and_lowest_point() -> None:
    curve = [(float(step), math.sin(step)) for step in range(20_000)]
    curve[777], curve[13_000] = (777.0, 9.0), (13_000.0, -5.0)
    svg = figure_of({"a": curve}).svg
    assert len(svg) < 8000
    drawn = re.findall(r'points="([^"]*)"', svg)[0].split()
    heights = [float(point.split(",")[1]) for point in drawn]
    ticks = [float(text) for text in re.findall(r'end">([-.\d]+)</text>', svg)]
    assert ticks == [-5, 0, 5, 10]
    rows = [float(y) for y in re.findall(r'y1="([\d.]+)"', svg)]
    assert max(heights) == pytest.approx(rows[0])  # -5
    assert min(heights) == pytest.approx(rows[-1] + (rows[0] - rows[-1]) / 15, abs=0.2)  # 9


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 0.79, [0, 0.2, 0.4, 0.6, 0.8]),
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (1, 20, [0, 5, 10, 15, 20]),
        (-3e-8, 2e-8, [-4e-8, -2e-8, 0, 2e-8]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert list(_ticks(low, high)) == ticks


def test_a_run_without_a_step_is_a_table(tmp_path: Path) -> None:
    assert run_in(tmp_path)._repr_html_().startswith("<table>")


def test_a_curve_of_equal_values_lies_in_the_figure() -> None:
    assert 'points="' in figure_of({"a": [(1.0, 2.0), (2.0, 2.0)]}).svg
    with pytest.raises(ValueError, match="nothing to plot of a"):
        figure_of({"a": []})
