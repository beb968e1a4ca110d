"""Rows: what a data set's split holds, wherever and in whatever form it lies.

Which file belongs to which split is decided in one place, `trireme.config.data_files`, so that
what `trireme check` saw is what is loaded. JSON is read directly: a broken line is named, and a
small data set costs no import of `datasets`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trireme.config.data_files import SPLIT, chosen_rows, data_files
from trireme.config.located import located

_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


class Rows:
    """The rows of one split, each a dictionary of all its columns."""

    def __init__(self, source: str, data: Sequence[Any], columns: Iterable[str]) -> None:
        """`source` is the data set's name in messages; `data[i]` is row i."""
        self.source = source
        self.columns = tuple(columns)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._data[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def require(self, column: str, key: str) -> None:
        """Raise ValueError, naming the columns there are, unless `column` (of `key`) is one."""
        if column in self.columns:
            return
        near = get_close_matches(column, self.columns, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"{self.source} has no column '{column}' ({key}){hint} "
            f"It has: {', '.join(self.columns)}"
        )

    def require_values(self, column: str, key: str) -> None:
        """Raise ValueError naming the first row that holds nothing in `column` (of `key`)."""
        table = getattr(self._data, "data", None)  # a whole column is looked at in the table
        whole = getattr(self._data, "_indices", None) is None
        if table is not None and whole and table.column(column).null_count == 0:
            return
        for number, row in enumerate(self):
            if row.get(column) is None:
                raise ValueError(
                    f"{self.source}, row {number}: the column '{column}' ({key}) is empty"
                )

    def part(self, chosen: range) -> Rows:
        """The rows of these numbers."""
        return Rows(self.source, [self._data[index] for index in chosen], self.columns)


def load_rows(
    path: str | Path,
    subset_name: str | None = None,
    split: str = "train",
    *,
    progress: bool = False,
) -> Rows:
    """The rows of a split: `path` is a file, a folder, one of `save_to_disk`, or an id on the hub.

    `split` may end in a slice, `train[:100]` or `train[10%:]`. `progress` shows the library's bars.
    Raises ValueError: nothing there, no such subset or split, a broken row, no rows at all.
    """
    found = SPLIT.match(split)
    if found is None:
        raise ValueError(f"split '{split}': expected a name, or one with a slice as 'train[:100]'")
    name = found["name"]
    source = f"dataset '{path}' (split '{name}')"
    try:
        place = located(str(path), "datasets")
        rows = _local(source, place, subset_name, name, progress) if place else None
    except ValueError as error:
        raise ValueError(f"dataset '{path}' {error}") from error
    if rows is None:
        rows = _from_hub(source, str(path), subset_name, name, progress)
    if found["first"] or found["last"]:
        rows = rows.part(chosen_rows(found, len(rows)))
    if len(rows) == 0:
        raise ValueError(f"{source} is empty")
    return rows


def _local(source: str, place: Path, subset: str | None, split: str, progress: bool) -> Rows:
    """Rows of a file or folder on this machine. Errors continue the sentence `dataset 'x' …`."""
    if place.is_dir():
        for saved in (place / split, place):
            if (saved / "state.json").is_file():
                data = _quiet(progress).load_from_disk(str(saved))
                return Rows(source, data, data.column_names)
        files = data_files(place, subset, split)
    else:
        files = [place]
    rows: list[Rows] = []
    tables = [file for file in files if file.suffix in _BUILDERS]
    for suffix in sorted({file.suffix for file in tables}):
        group = [str(file) for file in tables if file.suffix == suffix]
        rows.append(_from_tables(source, suffix, group, progress))
    texts = [file for file in files if file not in tables]
    if texts:
        found = [row for file in texts for row in _read_json(file)]
        rows.append(Rows(source, found, dict.fromkeys(key for row in found for key in row)))
    if len(rows) == 1:
        return rows[0]
    columns = dict.fromkeys(column for part in rows for column in part.columns)
    return Rows(source, [row for part in rows for row in part], columns)


def _from_tables(source: str, suffix: str, files: list[str], progress: bool) -> Rows:
    """Rows of Parquet, CSV or Arrow files."""
    datasets = _quiet(progress)
    try:
        data = datasets.load_dataset(_BUILDERS[suffix], data_files=files, split="train")
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"has a broken file among {', '.join(files)}: {cause}") from error
    return Rows(source, data, data.column_names)


def _read_json(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, or of a JSON file that holds one list of objects."""
    if path.suffix not in (".jsonl", ".json"):
        known = ", ".join((".jsonl", ".json", *_BUILDERS))
        raise ValueError(f"has a file of unknown kind: {path}: expected one of {known}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"has a file that is not UTF-8 text: {path}: {error.reason}") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = list(enumerate(json.loads(text), 1))
        except ValueError as error:
            raise ValueError(f"has a file that is no JSON: {path}: {error}") from error
        return [_object(row, f"{path}, entry {number}") for number, row in rows]
    out = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"has a line that is no JSON: {path}, line {number}: {error}"
            ) from error
        out.append(_object(row, f"{path}, line {number}"))
    return out


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"has a line that is no row: {where}: expected an object, got {row!r:.60}")
    return row


def _from_hub(source: str, path: str, subset: str | None, split: str, progress: bool) -> Rows:
    """Rows of a data set on the hub that is not in the local cache yet."""
    datasets = _quiet(progress)
    try:
        data = datasets.load_dataset(path, name=subset, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # the hub's own sentence names the subsets and splits there are
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(
            f"dataset '{path}' is neither a file or folder here nor a data set that the hub "
            f"gives us: {reason}"
        ) from error
    return Rows(source, data, data.column_names)


def _quiet(progress: bool) -> Any:
    """The `datasets` library, imported when first needed, without its bars and notes."""
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs it also raises
    (datasets.enable_progress_bars if progress else datasets.disable_progress_bars)()
    return datasets
