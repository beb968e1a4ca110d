"""Indexes a run's rollouts in memory, filters them, and reads the wanted ones back.

Invariants:
- The index contains numbers and positions in files, never text: 100,000 rollouts take about 10 MB.
- A file that has grown is read from the end of the index; one that was replaced or has shrunk (a
  resume, a copy at its limit) is read again.
- A place identifies one rollout: after an index was read again, its places differ, and an old one
  is refused instead of meaning another rollout.
- Nothing is written, and a database is opened read-only.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trireme.checkpoint.layout import DATA_ROWS, EVALUATED, FAILED
from trireme.ext.page.rewards import distribution
from trireme.ext.page.search import Columns, Mask, Search, Selection
from trireme.monitor.figures import spoken
from trireme.text import as_json, storable

KINDS = ("train", "eval", "failed", "data")
LINES = {
    "train": "experience_buffer.jsonl",
    "eval": EVALUATED,
    "failed": FAILED,
    "data": DATA_ROWS,
}
"""The files of each kind of rollouts in a run's `buffer` folder."""
DATABASE = "explorer_output.db"
ORDERS = ("newest", "oldest", "best", "worst", "longest", "random")
READ_FIRST = 5000
"""Rollouts that are read one by one for a search's first page, about 10 ms: then all are."""
SNIPPET = 160
"""Characters of a reply that a list shows."""
SPECIAL = re.compile(r"<\|?[a-z_/]+\|?>|\[/?INST\]")
ROLE = re.compile(r"(system|user|human|assistant|model|tool)(?:\n|$)")
_COLUMNS = {
    "kind": "b", "offset": "q", "size": "i", "text": "i", "text_end": "i", "step": "i",
    "task": "i", "group": "i", "run": "i", "reward": "d", "length": "i", "version": "i", "cut": "b",
}  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """The conditions that rollouts must meet; None and empty texts set none."""

    kind: str | None = None
    step: int | None = None
    task: str | None = None
    group: str | None = None
    least: float | None = None
    """The lowest reward."""
    most: float | None = None
    """The highest reward."""
    cut: bool | None = None
    """Whether the reply was cut at its limit."""
    disagree: bool = False
    """Whether only groups with different rewards are wanted: the others have no gradient."""
    text: str = ""
    """Occurs in the prompt or the reply, whatever the case of its letters."""
    order: str = "newest"
    seed: int = 0
    """Of the random order, so that its pages fit together."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order '{self.order}' is not known: one of {', '.join(ORDERS)}")
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"kind '{self.kind}' is not known: one of {', '.join(KINDS)}")


@dataclass
class _Source:
    path: Path
    kind: str
    inode: int = -1
    read: int = 0
    head: bytes = b""
    """The beginning of the file: a rewritten file may get the same inode."""


@dataclass
class _Names:
    codes: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def code(self, name: str) -> int:
        if name not in self.codes:
            self.codes[name] = len(self.names)
            self.names.append(name)
        return self.codes[name]


class RolloutIndex:
    """All rollouts in a run's folder."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's; it may have no rollouts yet."""
        self.buffer = folder / "buffer"
        self._lock = threading.Lock()
        self._sources = [_Source(self.buffer / name, kind) for kind, name in LINES.items()]
        self._first = 0
        """The place of the first rollout: past all places of the indexes before."""
        self._columns: dict[str, array[Any]] = {}
        self._searched: Search | None = None
        self._clear()

    def _clear(self) -> None:
        self._first += len(self._columns.get("offset", ()))
        self._columns = {name: array(code) for name, code in _COLUMNS.items()}
        self._tasks, self._groups = _Names(), _Names()
        self._places: dict[str, int] = {}
        self._from_database: tuple[int, str, float] | None = None
        """Key, id and time of the last row that was read."""
        for source in self._sources:
            source.inode, source.read, source.head = -1, 0, b""

    # --- reading ---------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the data written since the last time."""
        with self._lock:
            if any(self._was_replaced(source) for source in self._sources):
                self._clear()
            for source in self._sources:
                if source.path.exists():
                    self._read_on(source)
            if not self._sources[0].path.exists() and (self.buffer / DATABASE).exists():
                self._read_database()

    def _was_replaced(self, source: _Source) -> bool:
        if source.inode == -1:
            return False
        if not source.path.exists():
            return True
        stat = source.path.stat()
        with source.path.open("rb") as file:
            head = file.read(len(source.head))
        return stat.st_ino != source.inode or stat.st_size < source.read or head != source.head

    def _read_on(self, source: _Source) -> None:
        with source.path.open("rb") as file:
            source.inode = os.fstat(file.fileno()).st_ino
            file.seek(source.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._add_line(source, line)
                source.read += len(line)
                source.head = source.head or line[:200]

    def _add_line(self, source: _Source, line: bytes) -> None:
        row = json.loads(line, parse_constant=_no_number)
        begin = line.find(b'"prompt": ')  # quotes in texts are escaped: these are keys
        end = line.find(b', "prompt_length": ', begin)
        if min(begin, end) < 0:
            begin, end = 0, len(line)
        self._add(
            row,
            kind=KINDS.index(source.kind),
            offset=source.read,
            size=len(line),
            text=begin,
            text_end=end,
        )

    def _add(self, row: dict[str, Any], **fields: int) -> None:
        eid = str(row["eid"])
        group, run = _group_and_run(eid)
        reward = row.get("reward")
        values = {
            "step": int(row["step"]),
            "task": self._tasks.code(task_of(row, KINDS[fields["kind"]])),
            "group": self._groups.code(group),
            "run": run,
            "reward": math.nan if reward is None else float(reward),
            "length": int(row.get("response_length") or 0),
            "version": -1 if row.get("model_version") is None else int(row["model_version"]),
            "cut": int(row.get("stop_reason") == "length" or bool(row.get("truncate_status"))),
        }
        self._places[f"{KINDS[fields['kind']]} {eid}"] = len(self._columns["offset"])
        for name, value in (values | fields).items():
            self._columns[name].append(value)

    def _read_database(self) -> None:
        """Read rows of the copy of workflows' experiences, if a run writes no lines."""
        query = (
            "SELECT id, msg_id, timestamp, batch, reward, model_version, length(response_text) "
            "FROM experiences WHERE id > ? ORDER BY id"
        )
        with closing(open_read_only(self.buffer / DATABASE)) as database:
            if self._from_database is not None and self._database_was_cut(database):
                self._clear()
                for source in self._sources:
                    if source.path.exists():
                        self._read_on(source)
            known = self._from_database[0] if self._from_database else 0
            for key, eid, time, step, reward, version, size in database.execute(query, [known]):
                row = {"eid": eid, "step": step, "reward": reward, "model_version": version}
                self._add(row | {"response_length": size}, kind=0, offset=-key, size=0, text=0,
                          text_end=0)  # fmt: skip
                self._from_database = key, eid, time

    def _database_was_cut(self, database: sqlite3.Connection) -> bool:
        """Return whether rows that were read have been removed, or their keys reused."""
        assert self._from_database is not None
        key, *last = self._from_database
        # a count of all walks an index; one of `id <= ?` would walk the rows with their tokens
        (count,) = database.execute(
            "SELECT (SELECT count(*) FROM experiences) "
            "- (SELECT count(*) FROM experiences WHERE id > ?)",
            [key],
        ).fetchone()
        now = database.execute(
            "SELECT msg_id, timestamp FROM experiences WHERE id = ?", [key]
        ).fetchone()
        indexed = int((self.column("offset") < 0).sum())
        return count != indexed or now != tuple(last)

    # --- asking ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._columns["offset"])

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column in its current state."""
        return np.array(self._columns[name])

    def select(self, wanted: Filter) -> Selection:
        """Return the places of the matching rollouts, in their order."""
        columns, keep, first = self._numbers_fit(wanted)
        if wanted.text:
            keep &= self._holding(wanted.text, columns, keep, first)
        return _ordered(np.flatnonzero(keep), columns, wanted) + first

    def _numbers_fit(self, wanted: Filter) -> tuple[Columns, Mask, int]:
        """Return the columns, the rows that match all of the filter except its text, and the first
        row's place.
        """
        with self._lock:
            first = self._first
            columns = {name: np.array(values) for name, values in self._columns.items()}
            tasks, groups = self._tasks.codes, self._groups.codes
            values = {
                "kind": None if wanted.kind is None else KINDS.index(wanted.kind),
                "step": wanted.step,
                "task": None if wanted.task is None else tasks.get(wanted.task, -1),
                "group": None if wanted.group is None else groups.get(wanted.group, -1),
                "cut": wanted.cut,
            }
        keep = np.ones(len(columns["offset"]), bool)
        for name, value in values.items():
            if value is not None:
                keep &= columns[name] == value
        if wanted.least is not None:
            keep &= columns["reward"] >= wanted.least
        if wanted.most is not None:
            keep &= columns["reward"] <= wanted.most
        if wanted.disagree:
            keep &= _disagree(columns)
        return columns, keep, first

    def leading(self, wanted: Filter, count: int) -> Selection | None:
        """Return the first `count` places of `select`, if few rollouts had to be read to find them.

        None if that many are not among the first; a whole search then knows them.
        """
        columns, keep, first = self._numbers_fit(wanted)
        if not wanted.text or (columns["offset"] < 0).any():
            return None
        order = _ordered(np.flatnonzero(keep), columns, wanted)[:READ_FIRST]
        found = self._search(first).among(order, wanted.text, columns, count)
        return None if len(found) < count else found + first

    def _holding(self, text: str, columns: Columns, keep: Mask, first: int) -> Mask:
        """Return the mask of the rollouts in `keep` whose prompt or reply contains a text."""
        holding = self._search(first).all(keep, text, columns)
        if (columns["offset"] < 0).any():
            wanted = text.casefold()
            query = "SELECT id FROM experiences WHERE says(prompt_text) OR says(response_text)"
            with closing(open_read_only(self.buffer / DATABASE)) as database:
                # LIKE ignores the case of ASCII letters only
                database.create_function("says", 1, lambda said: wanted in (said or "").casefold())
                ids = [-key for (key,) in database.execute(query)]
            holding |= np.isin(columns["offset"], ids)
        return holding

    def _search(self, first: int) -> Search:
        """Return the cache of searches over the lines whose places begin at `first`."""
        with self._lock:
            if self._searched is None or self._searched.first != first:
                self._searched = Search([source.path for source in self._sources], first)
            return self._searched

    def rows(self, places: Sequence[int] | Selection) -> list[dict[str, Any]]:
        """Return the whole lines at these places, each with its kind, task and group."""
        with self._lock:
            return [self._row(int(place)) for place in places]

    def groups(self, wanted: Filter, first: int, count: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of groups with a matching rollout, and a page of them, each with its
        question and the rewards of all its rollouts.

        The best and the worst are those by mean reward; otherwise the first match decides.
        """
        places = self.select(wanted)
        with self._lock:
            if len(places) and places.min() < self._first:
                raise ValueError(f"{self.buffer} was rewritten in the meantime: try again")
            columns = {name: np.array(values) for name, values in self._columns.items()}
            ids = columns["group"].astype(np.int64) * len(KINDS) + columns["kind"]
            found, at = np.unique(ids[places - self._first], return_index=True)
            ordered = found[np.argsort(at)]
            if wanted.order in ("best", "worst"):
                means = _means(ids, columns["reward"])
                sign = -1 if wanted.order == "best" else 1
                ordered = ordered[np.argsort(sign * means[ordered], kind="stable")]
            page = ordered[first : first + count]
            shown = np.flatnonzero(np.isin(ids, page)).tolist()
            among = set(shown)
            eids = {index: key for key, index in self._places.items() if index in among}
            members: dict[int, list[int]] = {}
            for index in sorted(shown, key=lambda index: (columns["run"][index], index)):
                members.setdefault(int(ids[index]), []).append(int(index))
            return len(ordered), [self._group(members[int(one)], eids) for one in page]

    def _group(self, members: Sequence[int], eids: Mapping[int, str]) -> dict[str, Any]:
        row = self._row(self._first + members[0])
        rewards = [self._columns["reward"][index] for index in members]
        known = [reward for reward in rewards if not math.isnan(reward)]
        return {
            **{key: row.get(key) for key in ("group", "kind", "task", "step")},
            "question": question_of(row)[:SNIPPET],
            "mean": sum(known) / len(known) if known else None,
            "rollouts": [
                {
                    "eid": eids[index].partition(" ")[2],
                    "run": self._columns["run"][index],
                    "reward": None if math.isnan(reward) else reward,
                    "cut": bool(self._columns["cut"][index]),
                }
                for index, reward in zip(members, rewards, strict=True)
            ],
        }

    def _row(self, index: int) -> dict[str, Any]:
        index -= self._first
        if index < 0:
            raise ValueError(f"{self.buffer} was rewritten in the meantime: try again")
        fields = {name: values[index] for name, values in self._columns.items()}
        if fields["offset"] < 0:
            row = self._database_row(-fields["offset"])
        else:
            with self._sources[fields["kind"]].path.open("rb") as file:
                file.seek(fields["offset"])
                row = json.loads(file.read(fields["size"]), parse_constant=_no_number)
        if _group_and_run(str(row["eid"])) != (self._groups.names[fields["group"]], fields["run"]):
            raise ValueError(f"{self.buffer} was rewritten in the meantime: try again")
        row["kind"] = KINDS[fields["kind"]]
        row["task"] = self._tasks.names[fields["task"]]
        row["group"] = self._groups.names[fields["group"]]
        row["cut"] = bool(fields["cut"])
        return row

    def _database_row(self, key: int) -> dict[str, Any]:
        query = (
            "SELECT msg_id, batch, reward, model_version, prompt_text, response_text "
            "FROM experiences WHERE id = ?"
        )
        with closing(open_read_only(self.buffer / DATABASE)) as database:
            record = database.execute(query, [key]).fetchone()
        if record is None:
            raise ValueError(f"row {key} of {DATABASE} is gone: the copy was trimmed or rewound")
        names = ("eid", "step", "reward", "model_version", "prompt", "response")
        return dict(zip(names, record, strict=True))

    def row(self, kind: str, eid: str) -> dict[str, Any]:
        """Return one rollout by its id. Raises ValueError if there is none."""
        with self._lock:
            index = self._places.get(f"{kind} {eid}")
            if index is None:
                raise ValueError(f"there is no rollout '{eid}' of kind '{kind}' in {self.buffer}")
            return self._row(self._first + index)

    def rewards(self) -> dict[str, Any] | None:
        """Return how the rewards of sampled rollouts are distributed, step by step."""
        with self._lock:
            kinds, steps, rewards = (self.column(name) for name in ("kind", "step", "reward"))
        sampled = kinds == KINDS.index("train")
        return distribution(steps[sampled], rewards[sampled])

    def facts(self) -> dict[str, Any]:
        """Return what the page's filters offer: for each kind the number of rollouts and of groups,
        the steps, and the lowest and highest reward.
        """
        kinds, steps = self.column("kind"), self.column("step")
        groups, rewards = self.column("group"), self.column("reward")
        out: dict[str, Any] = {}
        for number, kind in enumerate(KINDS):
            kind_steps = steps[kinds == number]
            if len(kind_steps):
                known = rewards[(kinds == number) & ~np.isnan(rewards)]
                out[kind] = {
                    "count": len(kind_steps),
                    "steps": np.unique(kind_steps).tolist(),
                    "groups": len(np.unique(groups[kinds == number])),
                    "rewards": [known.min().item(), known.max().item()] if len(known) else None,
                }
        return out


def _no_number(name: str) -> None:
    """Replace NaN and the infinities, which browsers' JSON does not allow."""


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a SQLite database that this process cannot change."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)


def task_of(row: dict[str, Any], kind: str) -> str:
    """Return the task over all steps: its row in the taskset, or `<eval set>/<row>`; else its
    group.

    For a data set's rows, whose ids begin with the epoch, it is the row.
    """
    eid = str(row["eid"])
    if kind == "data":
        return eid.split("/")[1]
    if kind == "eval":
        return _group_and_run(eid)[0].partition("/")[2]
    index = (row.get("info") or {}).get("task_index")
    if isinstance(index, dict) and "index" in index:
        return f"{index.get('taskset_id', 0)}:{index['index']}"
    return _group_and_run(eid)[0]


def _group_and_run(eid: str) -> tuple[str, int]:
    """Return `batch/task` and the run of `batch/task/run/step`, of evaluations' `step/set/task/…`,
    and of a named explorer's `step/name/task/…`.
    """
    parts = eid.split("/")
    # a fifth part is the step, also after an explorer called 1, unless it is a copy's suffix
    named = len(parts) >= 5 and (parts[4].isdigit() or not parts[1].isdigit())
    cut = 3 if named else 2
    run = parts[cut] if len(parts) > cut else "0"
    return "/".join(parts[:cut]), int(run) if run.isdigit() else 0


def _disagree(columns: Columns) -> Mask:
    """Return the mask of the rollouts in whose group not all rewards are equal."""
    ids = columns["group"].astype(np.int64) * len(KINDS) + columns["kind"]
    low, high = np.full(ids.max(initial=0) + 1, np.inf), np.full(ids.max(initial=0) + 1, -np.inf)
    known = ~np.isnan(columns["reward"])
    np.minimum.at(low, ids[known], columns["reward"][known])
    np.maximum.at(high, ids[known], columns["reward"][known])
    return (low < high)[ids]


def _means(ids: Selection, rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the mean reward of each group, by its id; groups without a reward are the last."""
    known = ~np.isnan(rewards)
    size = ids.max(initial=0) + 1
    sums = np.bincount(ids[known], rewards[known], size)
    counts = np.bincount(ids[known], minlength=size)
    return np.divide(sums, counts, out=np.full(size, np.nan), where=counts > 0)


def _ordered(
    places: Selection, columns: dict[str, np.ndarray[Any, Any]], wanted: Filter
) -> Selection:
    """Return places in the requested order; rollouts without a reward follow the best and the
    worst.
    """
    if wanted.order == "random":
        # a number for each rollout there is: the same order whatever else the filter leaves out
        drawn = np.random.default_rng(abs(wanted.seed)).random(len(columns["offset"]))
        return places[np.argsort(drawn[places])]
    by_age = np.lexsort((places, columns["step"][places]))
    places = places[by_age]
    if wanted.order == "oldest":
        return places
    if wanted.order == "newest":
        return places[::-1]
    if wanted.order == "longest":
        return places[np.argsort(-columns["length"][places], kind="stable")]
    sign = -1 if wanted.order == "best" else 1
    return places[np.argsort(sign * columns["reward"][places], kind="stable")]


def as_item(row: dict[str, Any]) -> dict[str, Any]:
    """Return a rollout in the form of a list."""
    keys = ("eid", "kind", "step", "task", "group", "reward", "response_length", "cut",
            "model_version", "stop_reason")  # fmt: skip
    reply = row.get("response") or (row.get("failure") or {}).get("message") or ""
    return {key: row.get(key) for key in keys} | {
        "question": question_of(row)[:SNIPPET],
        "reply": reply[:SNIPPET],
        "pair": (row.get("info") or {}).get("reply"),
    }


def question_of(row: Mapping[str, Any]) -> str:
    """Return the last message of the user, for a list; without recorded messages it is found in the
    prompt, by the names of roles between the chat template's special tokens.
    """
    asked = [one for one in row.get("messages") or [] if one.get("role") == "user"]
    if asked:
        return spoken(asked[-1])
    parts = [part.strip() for part in SPECIAL.split(row.get("prompt") or "")]
    role, found = "", ""
    for part in filter(None, parts):
        said = ROLE.match(part)
        role, text = (said[1], part[said.end() :].strip()) if said else (role, part)
        if text and role in ("", "user", "human"):
            found = text
    return found or " ".join(filter(None, parts))


def export(
    rollouts: RolloutIndex, places: Selection, form: Literal["jsonl", "parquet"]
) -> Iterator[bytes]:
    """Yield the whole rollouts at these places as one file, in parts."""
    if form == "jsonl":
        for first in range(0, len(places), 500):
            rows = rollouts.rows(places[first : first + 500])
            yield "".join(as_json(row) + "\n" for row in rows).encode()
        return
    import io

    import pyarrow
    import pyarrow.parquet

    rows = rollouts.rows(places)
    for row in rows:  # keys that differ from row to row become text in one column
        for key, value in row.items():
            if isinstance(value, (dict, list)):
                row[key] = as_json(value)
            elif isinstance(value, str):
                row[key] = storable(value)
    names = list(dict.fromkeys(key for row in rows for key in row))
    out = io.BytesIO()
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table, out)
    except pyarrow.ArrowException as error:
        raise ValueError(f"Parquet cannot hold these rollouts ({error}): expected jsonl") from error
    yield out.getvalue()
