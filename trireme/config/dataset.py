"""Dataset: counts a data set's files, rows and columns without loading it.

A data set is a file, a folder in the Hugging Face layout, an id on the hub, or made by its name, as
in `reasoning_gym:leg_counting?size=500&seed=1`. Text rows are parsed here, so that a broken line is
named before anything slow begins; what lies past the first 64 MB of a file is only counted.
"""

from __future__ import annotations

import csv
import fnmatch
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trireme.config.lookup import located
from trireme.registry import did_you_mean

COLUMNS = ("question", "answer", "metadata", "generated_by")
_SCHEME = "reasoning_gym:"
SPLIT = re.compile(r"^(?P<name>[\w.-]+)(\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?$")
"""A split, with or without a slice of it: `train`, `train[:100]`, `train[10%:]`."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_NOT_DATA = ("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json")
_PARSED_BYTES = 64 * 2**20


def generated(path: str) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the generator; None for a path of any other kind."""
    if not path.startswith(_SCHEME):
        return None
    name, _, options = path.removeprefix(_SCHEME).partition("?")
    parts = [part.partition("=") for part in options.split("&") if part]
    return name, {"size": 500, "seed": 0} | {key: yaml.safe_load(text) for key, _, text in parts}


def data_files(folder: Path, subset: str | None, split: str) -> list[Path]:
    """The files of `split`, sorted. Raises ValueError naming the splits or subsets there are."""
    splits = _from_header(folder, subset)
    if splits is None:
        splits = _by_name(folder, subset)
    if not splits:
        raise ValueError(f"holds no data files ({', '.join(SUFFIXES)})")
    if split not in splits:
        raise ValueError(f"has no split '{split}'{_choice(split, splits)}")
    return splits[split]


def why_no_json(error: Exception) -> str:
    """What the parser says of a text; Python's words for too deep a one speak of its own stack."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def chosen_rows(split: re.Match[str], rows: int) -> range:
    """The rows of so many that a match of SPLIT names: its bounds are numbers or shares."""

    def bound(text: str | None) -> int | None:
        if not text:
            return None
        return round(rows * int(text[:-1]) / 100) if text.endswith("%") else int(text)

    return range(rows)[bound(split["first"]) : bound(split["last"])]


def _choice(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    return did_you_mean(name, known) or f"; it has: {', '.join(known)}"


def _from_header(folder: Path, subset: str | None) -> dict[str, list[Path]] | None:
    """The splits that the `configs:` header of the folder's README lists, if it has one."""
    configs = _header_configs(folder)
    if not configs:
        return None
    names = {str(config.get("config_name", "default")): config for config in configs}
    chosen = subset
    if chosen is None:
        marked = [name for name, config in names.items() if config.get("default")]
        chosen = next(name for name in (*marked, "default", *names) if name in names)
        if len(names) > 1 and not marked and chosen != "default":
            raise ValueError(f"has several subsets: name one as subset_name: {', '.join(names)}")
    if chosen not in names:
        raise ValueError(f"has no subset '{chosen}'{_choice(chosen, names)}")
    listed = names[chosen].get("data_files")
    if listed is None:
        return None
    out: dict[str, list[Path]] = {}
    for entry in [listed] if isinstance(listed, str) else listed:
        entry = {"split": "train", "path": entry} if isinstance(entry, str) else entry
        patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        out.setdefault(entry["split"], []).extend(sorted(found))
    return {name: files for name, files in out.items() if files}


def _header_configs(folder: Path) -> list[dict[str, Any]]:
    readme = folder / "README.md"
    if not readme.is_file():
        return []
    header = re.match(r"---\s*\n(.*?)\n---", readme.read_text(encoding="utf-8"), re.DOTALL)
    try:
        values = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError as error:
        raise ValueError(f"has a README.md whose header is no YAML: {error}") from error
    return values.get("configs") or [] if isinstance(values, dict) else []


def _by_name(folder: Path, subset: str | None) -> dict[str, list[Path]]:
    """Splits by the words in file and folder names; files without such a word are `train`."""
    root = folder / subset if subset and (folder / subset).is_dir() else folder
    out: dict[str, list[Path]] = {}
    plain: list[Path] = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith((".", "__")) for part in relative.parts)
        if hidden or path.suffix not in SUFFIXES or path.name in _NOT_DATA:
            continue
        split = _split_of(relative)
        (plain if split is None else out.setdefault(split, [])).append(path)
    return out or ({"train": plain} if plain else {})


def _split_of(relative: Path) -> str | None:
    """The split that a path names: the file's own words first, then its folders'."""
    for part in (relative.stem, *reversed(relative.parts[:-1])):
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in _SPLIT_WORDS.items():
            if any(word in known for word in words):
                return split
        if fnmatch.fnmatch(part, "*-[0-9]*-of-[0-9]*"):
            return part.split("-")[0]
    return None


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
