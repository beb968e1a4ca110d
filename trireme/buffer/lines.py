"""Lines: the facts about experiences that people read, in a file of JSON Lines.

A line has no tokens and log-probabilities: those are in the database of a Record. A file may be
gigabytes (`copy_limit_mb`): it is read and written anew line by line, never as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from trireme.buffer.limit import SHARE, cut_file, fitting, note_cut
from trireme.buffer.owner import owner_note
from trireme.buffer.table import batch_number
from trireme.experience import EID, Experience
from trireme.files import append, json_or, jsonl_rows, whole_file, whole_lines, write_json
from trireme.text import as_json


class LineFile:
    """A JSON Lines file with one line per id."""

    def __init__(self, path: Path, limit: float = math.inf, sampled: bool = False) -> None:
        self._path = path
        self._limit = limit
        self._sampled = sampled
        self._ids: set[str] | None = None

    def append(self, new: list[dict[str, Any]]) -> None:
        """Add lines; an id's old line is removed."""
        lines = {line["eid"]: line for line in new}
        ids = self._known()
        if ids & lines.keys():
            self.keep(lambda line: line["eid"] not in lines)
            ids = self._known()
        size = append(self._path, _text(lines.values()).encode())
        ids.update(lines)
        if size > self._limit:
            self._trim()

    def _trim(self) -> None:
        groups: dict[str, str] = {}  # one text for all lines of a group
        rows = []
        for number, (line, data) in enumerate(self._rows()):
            group = line["eid"].rsplit("/", 2)[0] if self._sampled else ""
            rows.append((number, groups.setdefault(group, group), len(data)))
        kept, numbers = set(fitting(rows, SHARE * self._limit, sampled=self._sampled)), count()
        self.keep(lambda line: next(numbers) in kept)
        note_cut(self._path, len(rows) - len(kept), sampled=self._sampled)

    def claim(self, job: Path, refuse_other: Callable[[str, str | None, bool], None]) -> None:
        """Note in a file beside it that this is the copy of the job in that folder, unless it is
        refused as another's.
        """
        note = owner_note(self._path)
        owner = json_or(note, dict[str, Any]()).get("job")
        refuse_other(str(self._path), owner, bool(self._known()))
        write_json(note, {"job": str(job)})

    def rewind(self, step: int) -> None:
        """Keep the lines up to `step`; at 0 there is nothing to keep or cut."""
        self.keep(lambda line: line["step"] <= step)
        if step == 0:
            cut_file(self._path).unlink(missing_ok=True)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the wanted lines; a half-written line is dropped too."""
        ids = set[str]()
        with whole_file(self._path) as temporary, temporary.open("wb") as file:
            for line, data in self._rows():
                if wanted(line):
                    ids.add(line["eid"])
                    file.write(data)
        self._ids = ids

    def _known(self) -> set[str]:
        if self._ids is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._ids = {line["eid"] for line, _ in self._rows()}
        return self._ids

    def _rows(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        if whole_lines(self._path):
            yield from jsonl_rows(self._path, eid=str, step=int)


def summary(experience: Experience) -> dict[str, Any]:
    """Return the facts about an experience that a person may want to read."""
    seen = [picture.digest for picture in experience.pictures]
    return ({"pictures": seen} if seen else {}) | {
        "eid": experience.eid.uid,
        "step": batch_number(experience.eid),
        "reward": experience.reward,
        "prompt": experience.prompt_text,
        "response": experience.response_text,
        "prompt_length": experience.prompt_length,
        "response_length": experience.response_length,
        "trained_tokens": experience.trained_tokens,
        "model_version": experience.version,
        "stop_reason": experience.stop_reason,
        "truncate_status": experience.truncate_status,
        "metrics": experience.metrics,
        "info": experience.info,
    }


def with_messages(experience: Experience) -> dict[str, Any]:
    """Return the summary with the conversation, for readers without the database."""
    turns = {"messages": experience.messages, "tools": experience.tools}
    return summary(experience) | {name: value for name, value in turns.items() if value}


def data_lines(step: int, experiences: Iterable[Experience]) -> list[dict[str, Any]]:
    """Return the rows of a data set that a train step learned from; for a pair one line per
    reply.
    """
    lines: list[dict[str, Any]] = []
    for e in experiences:
        line = summary(e) | {"step": step, "model_version": None}
        line.pop("pictures", None)  # files are those of rollouts
        if e.chosen is None or e.rejected is None:
            lines.append(line)
            continue
        for n, (name, reply) in enumerate((("chosen", e.chosen), ("rejected", e.rejected))):
            eid = EID(e.eid.batch, e.eid.task, 2 * e.eid.run + n, e.eid.step, e.eid.suffix).uid
            line = line | {"eid": eid, "response": e.info[name], "info": {"reply": name}}
            lines.append(line | {"response_length": len(reply), "trained_tokens": len(reply)})
    return lines


def _text(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(as_json(line) + "\n" for line in lines)
