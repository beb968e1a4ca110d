"""Watchdog: reports why a run does not learn, each cause once.

Invariants:
- The same rows give the same warnings. `Watchdog.read` reads an existing `metrics.jsonl`, so that a
  resumed run knows the earlier warnings, and repeats none.
- Each cause is reported once. From then on `watchdog/<cause>` is 1 in the steps where it applies,
  else 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.ext.diagnosis.causes import CAUSES, Cause, Facts
from trireme.files import Unreadable, json_or, out_of_the_way, write_json
from trireme.launch.listeners import RunListener
from trireme.log import get_logger
from trireme.monitor.events import Evaluated, Event, RolloutDone, StepDone
from trireme.monitor.figures import Course, Figures, in_one_line, turns_of
from trireme.monitor.monitor import FILE_NAME, read_metrics

if TYPE_CHECKING:
    from trireme.experience import Experience
    from trireme.launch.stage import Stage


@dataclass(frozen=True)
class Warned:
    """A cause that was seen."""

    cause: str
    part: str
    step: int
    text: str
    """The observation, and the remedy."""
    sample: str = ""
    """A rollout that shows it."""


class Watchdog:
    """Checks the figures of each step of each part, and reports each cause once."""

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self.warned: dict[str, Warned] = {}
        """By cause, in the order in which they were seen."""
        self.sample = ""
        """The description of the last shown rollout."""
        self._courses: dict[str, Course] = {}

    def look(self, part: str, step: int, figures: Figures) -> tuple[list[Warned], dict[str, float]]:
        """Return the causes that this step shows for the first time, and the metrics of all known
        ones.

        A step that is repeated after a resume changes nothing.
        """
        course = self._courses.setdefault(part, Course())
        if step > course.step:
            course.add(step, figures)
        new, flags = [], {}
        for cause in CAUSES:
            if cause.part != part:
                continue
            text = cause.seen(course, cause.limit, self.facts)
            if text and cause.name not in self.warned:
                new.append(self._warn(cause, step, text))
            if cause.name in self.warned:
                flags[f"watchdog/{cause.name}"] = float(text is not None)
        return new, flags

    def end(self) -> list[Warned]:
        """Return the causes that also a short run can show, once no step follows."""
        new = []
        for cause in CAUSES:
            course = self._courses.get(cause.part)
            if course is None or cause.name in self.warned:
                continue
            course.ended = True
            text = cause.seen(course, cause.limit, self.facts)
            if text:
                new.append(self._warn(cause, course.step, text))
        return new

    def read(self, rows: Iterable[Mapping[str, Any]], warned: Iterable[Warned]) -> None:
        """Restore the history of an earlier process: the rows of its `metrics.jsonl`, and its
        warnings.
        """
        self.warned = {one.cause: one for one in warned}
        for row in rows:
            course = self._courses.setdefault(row["part"], Course())
            if row["step"] > course.step:
                course.add(row["step"], row["metrics"])

    def _warn(self, cause: Cause, step: int, text: str) -> Warned:
        do = cause.do.replace("`", "")
        sample = self.sample if cause.shows else ""
        made = Warned(cause.name, cause.part, step, f"{text}. What to do: {do}", sample)
        self.warned[cause.name] = made
        return made


class Alarm(RunListener):
    """The watchdog of a run: its warnings go to the part's log, and into `watchdog.json`. A command
    that runs only one part, or does not train, writes its own file, so that two commands do not
    overwrite each other.
    """

    def __init__(self) -> None:
        self.watchdog = Watchdog()
        self._file = Path()

    def listen(self, stage: Stage) -> None:
        """Check each event of the run; for a resumed one, read its `metrics.jsonl` first."""
        folder, alone = stage.folder.monitor, stage.part
        self.watchdog = Watchdog(Facts.of(stage.plan, stage.recipe))
        own = alone or (None if stage.trains else stage.plan.mode)
        self._file = folder / (f"watchdog_{own}.json" if own else "watchdog.json")
        if stage.resumes:
            self._read(folder / FILE_NAME, alone)
        else:
            self._file.unlink(missing_ok=True)
        stage.stream.complete("the watchdog", self.complete)

    def _read(self, metrics: Path, alone: str | None) -> None:
        try:
            said = [Warned(**one) for one in json_or(self._file, list[dict[str, Any]]())]
        except TypeError:
            error = Unreadable(f"{self._file} holds no warnings of this watchdog")
            out_of_the_way(self._file, error)
            said = []
        part_rows = (row for row in read_metrics(metrics) if alone in (None, row["part"]))
        self.watchdog.read(part_rows, said)

    def complete(self, event: Event) -> Event:
        """Complete an event for listeners: a step gets the flags of the known causes."""
        if isinstance(event, StepDone | Evaluated):
            new, flags = self.watchdog.look(event.part, event.step, event.metrics)
            self._say(new)
            return replace(event, metrics={**event.metrics, **flags})
        if isinstance(event, RolloutDone):
            self.watchdog.sample = sample_of(event.experience)
        return event

    def end(self) -> list[dict[str, Any]]:
        """Return all warnings, now that no step follows."""
        self._say(self.watchdog.end())
        return self._all()

    def _say(self, new: Sequence[Warned]) -> None:
        for one in new:
            where = f"{one.part} step {one.step}: {one.cause}: {one.text}"
            text = "\n  ".join(filter(None, [where, one.sample]))
            get_logger(one.part).warning(text, extra={"whole": True})
        if new:
            write_json(self._file, self._all())

    def _all(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.watchdog.warned.values()]


def sample_of(experience: Experience) -> str:
    """Describe a rollout in a line: the truth with its type, and the end of the last reply."""
    replies = [text for label, text in turns_of(experience) if label == "replied"]
    last = replies[-1] if len(replies) > 1 else experience.response_text or ""
    end = in_one_line(last[-200:], 120)
    reward = "none" if experience.reward is None else f"{experience.reward:.3g}"
    truth = experience.info.get("truth")
    wanted = f"the truth is {truth}, " if truth else ""
    return f"for example: {wanted}the reply ends in {end!r}, the reward is {reward}"
