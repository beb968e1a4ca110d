"""Dataset: how many rows and which columns a data set has, read without loading it.

Text rows are parsed here, so that a broken line is named before anything slow begins; what lies
past the first 64 MB of a file is only counted.
"""

from __future__ import annotations

import csv
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from trireme.config.data_files import SPLIT, SUFFIXES, chosen_rows, data_files, why_no_json
from trireme.config.generated import COLUMNS, generated
from trireme.config.located import located

_PARSED_BYTES = 64 * 2**20


class DatasetFacts(NamedTuple):
    """What is known before the data set is loaded; None: only loading will tell."""

    rows: int | None = None
    columns: tuple[str, ...] | None = None


def dataset_facts(
    path: str, subset: str | None, split: str, *, skip: bool = False
) -> DatasetFacts | None:
    """Facts of one split; None where it is on the hub and not here. With `skip` broken rows are
    left out, and only loading tells how many rows stay.

    Raises ValueError: not there, no such split, or a row that is broken.
    """
    if (made := generated(path)) is not None:
        if split != "train":
            raise ValueError(f"has no split '{split}': give another seed in place of a split")
        return DatasetFacts(int(made[1]["size"]), COLUMNS)
    place = located(path, "datasets")
    if place is None:
        return None
    part = SPLIT.match(split)
    if part is None:
        raise ValueError(f"has no split '{split}': expected a name, or one as in 'train[:100]'")
    for folder in (place / part["name"], place):
        if (folder / "state.json").is_file():
            return _saved_to_disk(folder)
    files = data_files(place, subset, part["name"]) if place.is_dir() else [place]
    if any(file.suffix not in SUFFIXES for file in files):
        return DatasetFacts()
    facts = [_file_facts(str(f), f.stat().st_mtime_ns, f.stat().st_size, skip) for f in files]
    columns = dict.fromkeys(name for fact in facts for name in fact.columns or ())
    rows = [fact.rows for fact in facts if fact.rows is not None]
    known = len(rows) == len(facts) and (not skip or sum(rows) == 0)
    total = len(chosen_rows(part, sum(rows))) if known else None
    return DatasetFacts(total, tuple(columns) or None)


def _saved_to_disk(folder: Path) -> DatasetFacts:
    """Facts of a folder that `Dataset.save_to_disk` wrote."""
    info_file = folder / "dataset_info.json"
    info = json.loads(info_file.read_text(encoding="utf-8")) if info_file.is_file() else {}
    splits = info.get("splits") or {}
    rows = [split.get("num_examples") for split in splits.values()]
    columns = tuple(info.get("features") or {})
    return DatasetFacts(rows[0] if len(rows) == 1 else None, columns or None)


@lru_cache(maxsize=256)
def _file_facts(name: str, modified: int, size: int, skip: bool) -> DatasetFacts:
    """Facts of one file; `modified` and `size` tell a changed file from the one seen before."""
    path = Path(name)
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".arrow":
        return DatasetFacts()
    if size == 0:
        return DatasetFacts(0)
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file)
                return DatasetFacts(sum(1 for _ in reader), tuple(reader.fieldnames or ()))
        if path.suffix == ".json" and _is_array(path):
            return _array(path)
        return _lines(path, skip)
    except UnicodeDecodeError as error:
        raise ValueError(f"has a file that is not UTF-8 text: {path}: {error.reason}") from error


def _parquet(path: Path) -> DatasetFacts:
    import pyarrow.parquet  # a third of a second: only where there is such a file
    from pyarrow import ArrowInvalid

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"has a broken Parquet file: {path}: {error}") from error
    return DatasetFacts(file.metadata.num_rows, tuple(file.schema_arrow.names))


def _is_array(path: Path) -> bool:
    with path.open(encoding="utf-8-sig") as file:
        return file.read(256).lstrip().startswith("[")


def _array(path: Path) -> DatasetFacts:
    if path.stat().st_size > _PARSED_BYTES:
        return DatasetFacts()
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has a file that is no JSON: {path}: {why_no_json(error)}") from error
    columns = dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    return DatasetFacts(len(rows), tuple(columns))


def _lines(path: Path, skip: bool) -> DatasetFacts:
    """One JSON object a line; blank lines don't count, nor with `skip` broken ones."""
    columns: dict[str, None] = {}
    rows = read = 0
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            rows += 1
            read += len(line)
            if read > _PARSED_BYTES:
                continue
            try:
                columns.update(dict.fromkeys(_row(path, number, line)))
            except ValueError:
                if not skip:
                    raise
                rows -= 1
    return DatasetFacts(rows, tuple(columns))


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"has a line that is no JSON: {path}, line {number}: {why_no_json(error)}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"has a line that is no row: {path}, line {number}: expected an object, "
            f"got {line.strip()[:60]}"
        )
    return row
