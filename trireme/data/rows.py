"""Rows: reads the rows of a data set's split, wherever and in whatever form it is stored.

`trireme check` and a run read data sets here, and a process reads each once: rows that are still in
use are not read again while their files are unchanged. JSON is read directly: a broken line is
named, and a small data set does not need to import `datasets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

from trireme.config.lookup import located
from trireme.data.files import (
    BUILDERS,
    SPLIT,
    FilePlaces,
    chosen_rows,
    data_files,
    load_saved,
    load_tables,
    not_utf8,
    quiet_datasets,
    saved_state,
)
from trireme.log import get_logger
from trireme.registry import SOURCES, did_you_mean
from trireme.task import NO_JSON, is_missing
from trireme.text import as_json, from_json, has_half, storable

logger = get_logger("data")
"""A file in a folder written by `save_to_disk`."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a surrogate pair in JSON; whether the other half follows is seen in parsing."""
USUAL = {
    "prompt_key": ("prompt", "question", "problem", "messages"),
    "response_key": ("response", "answer", "solution", "truth"),
}
"""The usual names of a column, by the key of `format` that names it."""
OnError = Literal["fail", "skip"]
"""The treatment of a malformed row: it ends the run before it begins, or is left out and
counted."""


class Rows:
    """The rows of one split, each a dictionary of all its columns."""

    def __init__(
        self,
        source: str,
        data: Sequence[Any],
        columns: Iterable[str],
        *,
        places: Sequence[str] = (),
        skipped: int = 0,
    ) -> None:
        """`source` is the data set's name in messages; `data[i]` is row i, from the file and line
        `places[i]` if known. `skipped` malformed ones were left out before.
        """
        self.source = source
        self.columns = tuple(columns)
        self.skipped = skipped
        self._data = data
        self._places = places

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._data[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def require(self, column: str, key: str, *, entries: bool = False) -> None:
        """Raise ValueError, naming the available columns, unless `column` (of `key`) is one; with
        `entries`, `a.b` may be the entry `b` of the dictionaries in the column `a`.
        """
        if column in self.columns:
            return
        outer, _, inner = column.partition(".")
        if entries and inner and outer in self.columns:
            self._require_entry(outer, inner, key)
            return
        near = did_you_mean(column, self.columns)
        likely = usual(key.removeprefix("format."), self.columns)
        if likely and not get_close_matches(column, self.columns, n=1, cutoff=0.75):
            near = f"; did you mean '{likely}'?"
        hint = near or "."
        raise ValueError(
            f"{self.source} has no column '{column}' ({key}){hint} "
            f"It has: {', '.join(self.columns)}"
        )

    def _require_entry(self, column: str, entry: str, key: str) -> None:
        """Raise ValueError unless a row's dictionary in `column` has `entry`; usually the first one
        does, so that few rows are read.
        """
        others: dict[str, None] = {}
        for row in self:
            held = row.get(column)
            if isinstance(held, dict):
                if entry in held:
                    return
                others |= dict.fromkeys(held)
        hint = did_you_mean(entry, others) or "."
        has = f"{hint} They have: {', '.join(others)}"
        without = f"dictionaries without '{entry}'{has}" if others else "no dictionaries"
        raise ValueError(
            f"{self.source} has no column '{column}.{entry}' ({key}), and its column '{column}' "
            f"holds {without}"
        )

    def require_values(self, column: str, key: str) -> None:
        """Raise ValueError naming the first row without a value in `column` (of `key`)."""
        for number in self.without(column)[:1]:
            how = "empty" if column in self[number] else "missing"
            raise ValueError(f"{self.where(number)}: the column '{column}' ({key}) is {how}")

    def without(self, column: str) -> list[int]:
        """Return the numbers of the rows without a value in `column`."""
        table = getattr(self._data, "data", None)  # a whole column is checked in the table
        whole = getattr(self._data, "_indices", None) is None
        if table is not None and whole and table.column(column).null_count == 0:
            return []
        return [number for number, row in enumerate(self) if is_missing(row.get(column))]

    def blank(self, column: str) -> list[int]:
        """Return the numbers of the rows whose text in `column` is empty or white space."""
        table = getattr(self._data, "data", None)
        if table is None or getattr(self._data, "_indices", None) is not None:
            alone = getattr(self._data, "select_columns", None)  # no other column is decoded
            texts = (row.get(column) for row in (self if alone is None else alone([column])))
            blank = (isinstance(text, str) and not text.strip() for text in texts)
            return [at for at, is_blank in enumerate(blank) if is_blank]
        import pyarrow
        from pyarrow import compute

        values = table.column(column)
        if not (pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type)):
            return []
        texts = compute.call_function("utf8_trim_whitespace", [values])
        empty = compute.call_function("equal", [texts, pyarrow.scalar("", values.type)])
        return compute.call_function("indices_nonzero", [empty]).to_pylist()

    def where(self, index: int) -> str:
        """Describe a row in messages, with its file and line if known."""
        where = f" ({self._places[index]})" if len(self._places) else ""
        return f"{self.source}, row {index}{where}"

    def part(self, chosen: Sequence[int], *, skipped: int = 0) -> Rows:
        """Return the rows of these numbers; `skipped` more were left out."""
        return Rows(
            self.source,
            [self._data[index] for index in chosen],
            self.columns,
            places=[self._places[index] for index in chosen] if len(self._places) else (),
            skipped=self.skipped + skipped,
        )

    def checked(self, check: Callable[[dict[str, Any]], None], on_error: OnError) -> Rows:
        """Return the rows for which `check` raises no ValueError.

        `on_error` fail: the first error is raised, with the row's place; skip: such rows are left
        out and counted, and the first is named in the log.
        """
        kept: list[int] = []
        first = ""
        for index, row in enumerate(self):
            try:
                check(row)
            except ValueError as error:
                text = f"{self.where(index)}: {error}"
                if on_error == "fail":
                    raise ValueError(text) from error
                first = first or text
                continue
            kept.append(index)
        bad = len(self) - len(kept)
        if not bad:
            return self
        logger.warning("%d of %d rows are malformed and left out; %s", bad, len(self), first)
        if not kept:
            raise ValueError(f"{self.source}: all {bad} rows are malformed; the first: {first}")
        return self.part(kept, skipped=bad)


class NoRows(ValueError):
    """A data set that cannot be read; `reason` continues the sentence `dataset 'x' …`."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"dataset '{self.path}' {self.reason}"


_IN_USE: WeakValueDictionary[tuple[Any, ...], Rows] = WeakValueDictionary()
"""Rows by the request and by the state of the files that they were read from."""


@dataclass(frozen=True)
class DataSet:
    """A split of a data set, in a YAML's terms."""

    path: str
    subset: str | None = None
    split: str = "train"
    """With a slice, `train[:100]`, if there is one."""
    on_error: OnError = "fail"
    otherwise: str | None = None
    """The default subset, if there is one of that name."""

    @property
    def split_name(self) -> str:
        """Return the split without its slice. Raises NoRows if it is invalid."""
        try:
            return _matched(self.split)["name"]
        except ValueError as error:
            raise NoRows(self.path, str(error)) from error


def usual(key: str, columns: Sequence[str]) -> str | None:
    """Return the first usual name for the column of a key of `format` that is there, or None."""
    return next((name for name in USUAL.get(key, ()) if name in columns), None)


class RowSource(Protocol):
    """A place of rows other than data files, such as a database. Its class is listed in SOURCES and
    is called without arguments.
    """

    reproducible: bool
    """Whether the path alone determines the rows, so that a job stores no hash of them."""

    def takes(self, data: DataSet) -> bool:
        """Return whether the rows of this data set come from here. Raises nothing."""
        ...

    def files(self, data: DataSet) -> list[Path]:
        """Return the files that the rows are read from, which are read again when one has changed;
        empty: the rows are not in files, and are read each time.
        """
        ...

    def read(self, data: DataSet) -> Rows:
        """Read the rows of the whole split. Raises NoRows if there are none, and ValueError or
        ImportError if they cannot be made.
        """
        ...


def source_of(data: DataSet) -> RowSource | None:
    """Return the source of a data set; None: it consists of data files, here or on the hub."""
    sources: Iterator[RowSource] = (SOURCES.get(name)() for name in SOURCES)
    return next((source for source in sources if source.takes(data)), None)


def load_rows(
    path: str | Path,
    subset_name: str | None = None,
    split: str = "train",
    *,
    progress: bool = False,
    on_error: OnError = "fail",
    otherwise: str | None = None,
) -> Rows:
    """Read the rows of a split: `path` is a file, a folder, one of `save_to_disk`, an id on the
    hub, or a path for a RowSource, such as a database. Its table is `subset_name`, or `otherwise`
    if there is one of that name.

    `split` may end in a slice, `train[:100]` or `train[10%:]`. `progress` shows the library's bars.
    With `on_error` skip a line that is not a row is left out and counted. Raises NoRows: nothing
    there, no such subset or split, a broken row, no rows at all.
    """
    data = DataSet(str(path), subset_name, split, on_error, otherwise)
    source = source_of(data)
    if source is not None:
        files = source.files(data)
        read = partial(_chosen, data, partial(source.read, data))
        return _in_use(data, files, read) if files else read()
    try:
        files = split_files(data)
        read = partial(_chosen, data, partial(_read, data, files, progress))
        return _in_use(data, files, read)
    except NoRows:
        raise
    except ValueError as error:
        raise NoRows(data.path, str(error)) from error


def _in_use(data: DataSet, files: Sequence[Path] | None, read: Callable[[], Rows]) -> Rows:
    """Return rows that are already in use if their files are unchanged; else read them."""
    states = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files or ()]
    key = (data.path, data.subset, data.split, data.on_error, *states)
    rows = _IN_USE.get(key)
    if rows is None:
        rows = _IN_USE[key] = read()
    return rows


def _chosen(data: DataSet, read: Callable[[], Rows]) -> Rows:
    """Return the rows, or the slice of them that the split names."""
    rows, matched = read(), _matched(data.split)
    if matched["first"] or matched["last"]:
        rows = rows.part(chosen_rows(matched, len(rows)))
    if len(rows) == 0:
        raise NoRows(data.path, f"has no rows in split '{data.split}': expected at least one")
    return rows


def is_remote(data: DataSet) -> bool:
    """Return whether a data set is on the hub and not on this machine."""
    try:
        return source_of(data) is None and located(data.path, "datasets") is None
    except ValueError:  # it is nowhere
        return False


def split_files(data: DataSet) -> list[Path] | None:
    """Return the files of a split; None if the data set is on the hub and not here.

    Raises ValueError, continuing the sentence `dataset 'x' …`, if there are none.
    """
    matched = _matched(data.split)
    location = located(data.path, "datasets")
    if location is None:
        return None
    if not location.is_dir() and not location.is_file():
        raise ValueError(
            "is a pipe or a device, and rows are read more than once: expected a file or a "
            "folder, so write the rows to a file first"
        )
    state = saved_state(location, matched["name"])
    if state is not None:
        return [state]
    return data_files(location, data.subset, matched["name"])


def _matched(split: str) -> re.Match[str]:
    matched = SPLIT.match(split)
    if matched is None:
        raise ValueError(f"has no split '{split}': expected a name, or one as in 'train[:100]'")
    return matched


def _read(data: DataSet, files: Sequence[Path] | None, progress: bool) -> Rows:
    name = _matched(data.split)["name"]
    source = f"dataset '{data.path}' (split '{name}')"
    if files is None:
        return _from_hub(source, data.path, data.subset, name, progress)
    return _local(source, files, progress, data.on_error)


def _local(source: str, files: Sequence[Path], progress: bool, on_error: OnError) -> Rows:
    """Read rows from files on this machine. Errors continue the sentence `dataset 'x' …`."""
    saved = load_saved(files, progress=progress)
    if saved is not None:
        data, shards = saved
        return Rows(source, data, data.column_names, places=FilePlaces(shards))
    parts: list[Rows] = []
    tables = [file for file in files if file.suffix in BUILDERS]
    for suffix in sorted({file.suffix for file in tables}):
        group = [str(file) for file in tables if file.suffix == suffix]
        data = load_tables(group, progress=progress)
        parts.append(Rows(source, data, data.column_names, places=FilePlaces(group)))
    texts = [file for file in files if file not in tables]
    if texts:
        broken: list[str] = []
        read = [pair for file in texts for pair in _read_json(file, broken, on_error)]
        if broken:
            logger.warning("%d lines are not rows and are left out; %s", len(broken), broken[0])
        values = [row for _, row in read]
        names = dict.fromkeys(key for row in values for key in row)
        places = [number for number, _ in read]
        parts.append(Rows(source, values, names, places=places, skipped=len(broken)))
    if len(parts) == 1:
        return parts[0]
    columns = dict.fromkeys(column for part in parts for column in part.columns)
    skipped = sum(part.skipped for part in parts)
    places = [number for part in parts for number in part._places]
    whole = [row for part in parts for row in part]
    return Rows(source, whole, columns, places=places, skipped=skipped)


def _read_json(
    path: Path, broken: list[str], on_error: OnError
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and row of a JSON Lines file, or of a JSON file with one list of objects.

    Invalid rows are raised, or with `on_error` skip appended to `broken`.
    """
    if path.suffix not in (".jsonl", ".json"):
        known = ", ".join((".jsonl", ".json", *BUILDERS))
        raise ValueError(f"has a file of unknown kind: {path}: expected one of {known}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        where = not_utf8(path.read_bytes(), error)
        raise ValueError(f"has a broken file: {path}: {where}") from error
    listed = None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            listed = from_json(text)
        except ValueError as error:
            raise ValueError(f"has a file that is not JSON: {path}: {error}") from error
        entries = [(f"{path}, entry {n}", json.dumps(row)) for n, row in enumerate(listed, 1)]
    else:
        lines = enumerate(text.split("\n"), 1)
        entries = [(f"{path}, line {n}", line) for n, line in lines if line.strip()]
    for number, entry in entries:
        try:
            yield number, _object(entry, number)
        except ValueError as error:
            first = number == entries[0][0] and len(entries) > 1
            if first and not listed and (whole := _over_lines(text)):
                raise ValueError(
                    f"has a file that is {whole} over several lines: {path}: expected one object "
                    "a line, or a .json file that is one list of objects"
                ) from error
            if on_error == "fail":
                raise
            broken.append(f"it {error}")


def _over_lines(text: str) -> str:
    """Return what a text of several lines is if it is JSON as a whole; else ''."""
    try:
        return "one list" if isinstance(json.loads(text), list) else "one object"
    except NO_JSON:
        return ""


def _object(entry: str, where: str) -> dict[str, Any]:
    try:
        row = from_json(entry)
    except ValueError as error:
        raise ValueError(f"has a line that is not JSON: {where}: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"has a line that is not a row: {where}: expected an object, got {row!r:.60}"
            + "; a list of rows is a .json file" * isinstance(row, list)
        )
    if _HALF.search(entry):
        refuse_halves(row, where)
    return row


def refuse_halves(row: dict[str, Any], where: str) -> None:
    """Raise ValueError for half a character, naming its column and the row's place `where`: no
    tokenizer, file or database accepts it, and the intended one is not known.
    """
    for column, value in row.items():
        if has_half({column: value}):
            raise ValueError(
                f"has half of a surrogate pair: {where}, column '{storable(column)}': expected "
                f"whole characters, got {as_json(value):.60}"
            )


def _from_hub(source: str, path: str, subset: str | None, split: str, progress: bool) -> Rows:
    datasets = quiet_datasets(progress)
    try:
        data = datasets.load_dataset(path, name=subset, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # the hub's own sentence names the available subsets and splits
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(
            f"is neither a file or folder here nor a data set that the hub gives us: {reason}"
        ) from error
    return Rows(source, data, data.column_names)
