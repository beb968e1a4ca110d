"""Console: prints a run's progress, and the table at its end.

On a terminal, one live display (progress, figures, a rollout's text) stays at the bottom and
permanent lines go above it; otherwise there are only lines, at most one per step and one every few
seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trireme.monitor.events import Evaluated, Event, Noted, RolloutDone, StepDone
from trireme.monitor.figures import (
    STEPS_TIMED,
    Summary,
    chart,
    clock_time,
    duration,
    figures,
    in_one_line,
    in_words,
    pace,
    sparkline,
    turns_of,
)
from trireme.monitor.monitor import EVALUATIONS
from trireme.monitor.terminal import Terminal

if TYPE_CHECKING:  # importing it would load torch before the thread settings are made
    from trireme.experience import Experience

CHART_WIDTH, CHART_HEIGHT = 60, 6
MAX_TEXT = 600


class Console:
    """Shows stages, steps, evaluations, rollouts and the summary."""

    name = "the console"

    def __init__(
        self,
        *,
        live: bool | None = None,
        output: Terminal | None = None,
        every: float = 5.0,
        rollout_every: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`live`: None means: if the output is a terminal. Otherwise it prints a line every `every`
        seconds.
        """
        self.output = output or Terminal(file=sys.stdout, highlight=False, force_jupyter=False)
        self.live = self.output.is_terminal if live is None else live
        self.every = every
        self.rollout_every = rollout_every
        self.clock = clock
        self._display: Live | None = None
        self._last_rollout = -math.inf
        self._begin("", None, "trainer")

    def stage(
        self,
        name: str | None,
        total_steps: int | None,
        *,
        by: str = "trainer",
        until: str = "",
    ) -> None:
        """Begin a stage. `by` is the part whose steps count towards `total_steps`; without a total
        `until` describes the stage's end.
        """
        self.close()
        self._begin(name or "run", total_steps, by)
        length = f"{total_steps} step{'s' * (total_steps != 1)}" if total_steps else until
        self.note(f"{self._name}: {length}", style="bold")
        if self.live:
            self._display = Live(get_renderable=self._render, console=self.output, transient=True)
            self._display.start()

    def hear(self, event: Event) -> None:
        """Show an event."""
        match event:
            case Noted(text):
                self.note(text)
            case StepDone(part, step, metrics) | Evaluated(part, step, metrics):
                self.step(part, step, metrics)
            case RolloutDone(experience):
                self.rollout(experience)

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; each evaluation becomes a permanent line."""
        if part in EVALUATIONS:
            self._evaluations(step, metrics)
            return
        self._metrics.update(metrics)
        if "rollout/reward/mean" in metrics:
            self._rewards.append(metrics["rollout/reward/mean"])
        now = self.clock()
        first = self._step is None
        if part == self._by:
            self._step = step
            self._times.append((now, step))
        counts = part == self._by
        done = counts and (first or step == self._total)
        # at most one line per step: another part's figures wait for the step that they belong to;
        # before the first step they are shown if that part has moved on
        first_of_part = self._begun.setdefault(part, step)
        due = (counts or (first and step > first_of_part)) and now - self._last_line >= self.every
        if not self.live and (done or due):
            self._last_line, self._printed = now, self._step
            self.progress(self._progress_line())

    def progress(self, text: str) -> None:
        """Print a line of progress, where nothing is shown live."""
        self.note(text)

    def sample(self, text: str) -> None:
        """Print a rollout, where nothing is shown live."""
        self.note(text)

    def note(self, text: str, style: str = "") -> None:
        """Print a permanent line."""
        self.output.print(Text(text, style=style), soft_wrap=True)

    def evaluation(self, name: str, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Print a permanent line with the result of one evaluation taskset."""
        # an explore step is evaluated with the weights that it used, and the last one once more
        again = step is not None and (name, step) in self._measured
        when = " at the end" if again else "" if step is None else f" at step {step}"
        if step is not None:
            self._measured.add((name, step))
        self.note(f"evaluation {name}{when}: {in_words(metrics, 'evaluation')}", style="green")

    def rollout(self, experience: Experience) -> None:
        """Show the text of a rollout from time to time."""
        now = self.clock()
        if now - self._last_rollout < self.rollout_every:
            return
        self._last_rollout = now
        self._sample = Text()
        for label, text in turns_of(experience):
            self._sample.append(f"{label[:8]:<9}", style="bold")
            self._sample.append(f"{in_one_line(text, MAX_TEXT)}\n")
        if truth := experience.info.get("truth"):
            self._sample.append("truth    ", style="bold").append(f"{truth}\n")
        reward = "none" if experience.reward is None else f"{experience.reward:.3g}"
        self._sample.append("reward   ", style="bold").append(reward)
        if not self.live:
            lines = self._sample.plain.splitlines()
            self.sample("\n".join(["a rollout:", *(f"    {line}" for line in lines)]))

    def finish(self, summary: Summary, rewards: Sequence[float] = (), sampled: str = "") -> None:
        """Print the end of a run: its curve of `rewards`, the replies to the first held-out task,
        and a table.

        `sampled` describes how the rollouts behind the rewards were sampled.
        """
        self.close()
        self.output.print()
        if len(rewards) > 1 and self.output.encoding.startswith("utf"):
            self.note(f"reward of the training steps (replies {sampled})", style="bold")
            for line in chart(rewards, width=CHART_WIDTH, height=CHART_HEIGHT):
                self.note(line, style="cyan")
            self.note(f"{'':>10}step 1 to {len(rewards)}\n")
        for line in example_lines(summary.example):
            self.note(line)
        for label, text in summary_rows(summary):
            row = Text().append(f"{label:<12}", style="bold").append(text)
            self.output.print(row, soft_wrap=True)

    def close(self) -> None:
        """Remove the live display; the last step's line is printed if it has not been."""
        if self._display is not None:
            self._display.stop()
            self._display = None
        if self._step != self._printed:
            self._printed = self._step
            self.progress(self._progress_line(ended=True))

    def _begin(self, name: str, total_steps: int | None, by: str) -> None:
        self._name = name
        self._total = total_steps
        self._by = by
        self._step: int | None = None
        self._printed: int | None = None
        """The step of the last line of progress."""
        self._begun: dict[str, int] = {}
        """The first step of each part."""
        self._metrics: dict[str, float] = {}
        self._measured: set[tuple[str, int]] = set()
        self._rewards: deque[float] = deque(maxlen=200)
        self._times: deque[tuple[float, int]] = deque(maxlen=STEPS_TIMED)
        self._sample: Text | None = None
        self._started = self.clock()
        self._last_line = self._started

    def _evaluations(self, step: int, metrics: Mapping[str, float]) -> None:
        """Split `eval/<taskset>/<metric>/...` by taskset."""
        by_name: dict[str, dict[str, float]] = {}
        for key, value in metrics.items():
            _, name, rest = (*key.split("/", 2), "", "")[:3]
            by_name.setdefault(name, {})[rest] = value
        for name, of_taskset in by_name.items():
            self.evaluation(name, of_taskset, step)

    def _progress_line(self, *, ended: bool = False) -> str:
        shown = in_words(self._metrics, "training")
        return "  ".join(
            [f"{self._name} {self._count()}", *filter(None, [shown]), *self._pace(ended=ended)]
        )

    def _count(self) -> str:
        """Return `12/350`, or `12` if the total is unknown."""
        return f"{self._step or 0}" + (f"/{self._total}" if self._total else "")

    def _pace(self, *, ended: bool = False) -> list[str]:
        """Return the seconds per recent step, and the time left at that pace if the total
        is known.
        """
        each, left = pace(self._times, self._total)
        shown = [] if each is None else [f"{duration(each)}/step"]
        return shown if left is None or ended else [*shown, f"left {clock_time(left)}"]

    def _render(self) -> RenderableType:
        elapsed = clock_time(self.clock() - self._started)
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=self._step or 0, width=30)
        head.add_row(Text(self._name, style="bold"), bar, self._count(), elapsed, *self._pace())
        row = Text()
        for label, text in figures(self._metrics, "training"):
            row.append(f"{label} ", style="dim").append(f"{text}   ")
        parts: list[RenderableType] = [head, row]
        if len(self._rewards) > 1 and self.output.encoding.startswith("utf"):
            trend = sparkline(list(self._rewards), width=60)
            parts.append(Text("reward ", style="dim").append(trend, style="cyan"))
        if self._sample is not None:
            parts.append(Panel(self._sample, title="a rollout", title_align="left", style="dim"))
        return Group(*parts)


def example_lines(example: Mapping[str, Any]) -> list[str]:
    """Return the first held-out task, followed by the replies to it."""
    if not example:
        return []
    which = "a held-out task whose reply changed" if example.get("changed") else "a held-out task"
    lines = [f"{which}: {in_one_line(example['prompt'], 200)}"]
    if example["truth"]:
        lines.append(f"    {'right':<10} {in_one_line(example['truth'], 160)}")
    for label, reply in example["replies"].items():
        reward = "" if reply["reward"] is None else f"   (reward {reply['reward']:.3g})"
        lines.append(f"    {label:<10} {in_one_line(reply['text'], 160) or 'nothing'}{reward}")
    return [*lines, ""]


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return label and text of each line of the final table; unmeasured values have none."""
    rows = []
    before = None
    is_share = summary.measure == "accuracy"
    form = "7.1%" if is_share else "7.3f"
    for label, share in (
        ("before", summary.accuracy_before),
        ("after SFT", summary.accuracy_sft),
        ("after RL", summary.accuracy_rl),
    ):
        if share is not None:
            more = share - (before or 0.0)
            gain = f"   {100 * more:+.1f} points" if is_share else f"   {more:+.3f}"
            gain = "" if before is None else gain
            rows.append(("" if rows else summary.measure, f"{label:<10} {share:{form}}{gain}"))
            before = share
    if rows and (how := summary.example.get("drawn")):
        note = f"of replies to held-out tasks, {how}"
        note += "" if how != "greedy" else "; a training step's reward is of sampled replies"
        rows.append(("", note))
    if summary.accuracy_more_sft is not None:
        share = summary.accuracy_more_sft
        rows.append(("", f"{'more SFT':<10} {share:{form}}   in the same time instead of RL"))
    phases = ", ".join(f"{name} {clock_time(s)}" for name, s in summary.phases.items())
    for one in summary.warnings:
        stage = f"{one['stage']} " if one.get("stage") else ""
        seen = one["text"].partition(". What to do: ")[0]
        rows.append(("warning", f"{stage}{one['part']} step {one['step']}: {one['cause']}: {seen}"))
    rows.append(("wall time", clock_time(summary.wall_s) + (f"   ({phases})" if phases else "")))
    if summary.model_dir or any(name.endswith("train") for name in summary.phases):
        rows.append(("model", summary.model_dir or "none was saved"))
    if summary.next_command:
        rows.append(("next", summary.next_command))
    return rows
