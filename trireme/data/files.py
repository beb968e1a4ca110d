"""Files: finds the files and rows of a data set's split, and reads tables.

A folder is in the Hugging Face layout: its README lists the files of each split, or their names
show it. Tables are Parquet, CSV and Arrow files.
"""

from __future__ import annotations

import csv
import fnmatch
import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import yaml

from trireme.files import Unreadable, read_json
from trireme.log import get_logger
from trireme.registry import did_you_mean

logger = get_logger("data")

SPLIT = re.compile(r"^(?P<name>[\w.-]+)(\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?$")
"""A split, with or without a slice of it: `train`, `train[:100]`, `train[10%:]`."""
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""Maps a table file's suffix to the builder of `datasets` that reads it."""
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Suffixes of compressed files, which are not read."""
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
SAVED, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files of a data set that `save_to_disk` wrote."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end of an Arrow stream, as `save_to_disk` writes it."""
_NOT_DATA = ("dataset_infos.json", _SPLITS, _INFO, SAVED)


def data_files(folder: Path, subset: str | None, split: str) -> list[Path]:
    """Return the files of `split`, sorted; of a single file, itself. Raises ValueError naming the
    available splits or subsets.
    """
    if folder.is_file():
        _check_split(folder, split)
        return [folder]
    splits = _from_header(folder, subset)
    if splits is None:
        splits = _by_name(folder, subset)
    if not splits:
        packed = next(filter(_is_packed, sorted(folder.rglob("*"))), None)
        hint = f"; {packed.name} is compressed: expected it unpacked" if packed else ""
        raise ValueError(f"holds no data files ({', '.join(SUFFIXES)}){hint}")
    if split not in splits:
        raise ValueError(f"has no split '{split}'{_choice(split, splits)}")
    return splits[split]


def chosen_rows(split: re.Match[str], rows: int) -> range:
    """Return the rows of `rows` that a match of SPLIT names: its bounds are numbers or shares."""

    def bound(text: str | None) -> int | None:
        if not text:
            return None
        return round(rows * int(text[:-1]) / 100) if text.endswith("%") else int(text)

    return range(rows)[bound(split["first"]) : bound(split["last"])]


def _check_split(file: Path, split: str) -> None:
    """Check the split that is named for a single file, all of whose rows are read: `train`, `all`,
    or one in the name of the file or its folder. Another usual name is a warning. Raises ValueError
    for other names.
    """
    word = rf"(?<![a-z0-9]){re.escape(split.lower())}(?![a-z0-9])"
    names = file.stem.lower(), file.parent.name.lower()
    if split in ("train", "all", _split_of(Path(*file.parts[-2:]))):
        return
    if any(re.search(word, name) for name in names):
        return
    usual = [*_SPLIT_WORDS, *(word for known in _SPLIT_WORDS.values() for word in known)]
    if split not in usual:
        hint = did_you_mean(split, usual) or "."
        raise ValueError(
            f"has no split '{split}'{hint} A file is one split, all of whose rows are read: "
            "expected 'train', or a word of its name"
        )
    _note_split(file, split)


@lru_cache(maxsize=256)
def _note_split(file: Path, split: str) -> None:
    """Warn once of a file that is read as a split that its name does not say."""
    text = "all rows of %s are read as split '%s', since a file has no splits: expected 'train'"
    logger.warning(text, file, split)


def _choice(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    return did_you_mean(name, known) or f"; it has: {', '.join(known)}"


def _from_header(folder: Path, subset: str | None) -> dict[str, list[Path]] | None:
    """Return the splits that the `configs:` header of the folder's README lists, if it has one."""
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
        files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        out.setdefault(entry["split"], []).extend(sorted(files))
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
    """Group files into splits by the words in file and folder names; files without such a word are
    `train`.
    """
    root = folder / subset if subset and (folder / subset).is_dir() else folder
    out: dict[str, list[Path]] = {}
    plain: list[Path] = []
    packed: list[Path] = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith((".", "__")) for part in relative.parts)
        if not hidden and _is_packed(path) and not path.with_suffix("").exists():
            packed.append(path)
        if hidden or path.suffix not in SUFFIXES or path.name in _NOT_DATA:
            continue
        split = _split_of(relative)
        (plain if split is None else out.setdefault(split, [])).append(path)
    if packed and (out or plain):
        _note_packed(packed[0], len(packed) - 1)
    return out or ({"train": plain} if plain else {})


def _is_packed(path: Path) -> bool:
    return path.suffix in PACKED and Path(path.stem).suffix in SUFFIXES


@lru_cache(maxsize=256)
def _note_packed(first: Path, others: int) -> None:
    """Warn once of compressed files whose rows are nowhere unpacked."""
    more = f" and {others} more are" if others else " is"
    logger.warning("%s%s passed over, as compressed: unpack what is to be read", first, more)


def _split_of(relative: Path) -> str | None:
    """Return the split that a path names, by the file's name first and then by its folders'."""
    for part in (relative.stem, *reversed(relative.parts[:-1])):
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in _SPLIT_WORDS.items():
            if any(word in known for word in words):
                return split
        if fnmatch.fnmatch(part, "*-[0-9]*-of-[0-9]*"):
            return part.split("-")[0]
    return None


class FilePlaces(Sequence[str]):
    """The file of each row and its number there, from 0. Files are counted on first use."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._counted()[-1]

    def __getitem__(self, index: Any) -> Any:
        ends = self._counted()
        file = bisect_right(ends, index)
        return f"{self._files[file]}, row {index - (ends[file - 1] if file else 0)}"

    def _counted(self) -> list[int]:
        if not self._ends:
            self._ends = list(accumulate(_count(file) for file in self._files))
        return self._ends


def saved_state(location: Path, split: str) -> Path | None:
    """Return the `state.json` of a split of a folder that `save_to_disk` wrote; None for another
    folder. Raises ValueError, continuing the sentence `dataset 'x' …`, if it lacks the split, or
    was not written whole.
    """
    for folder in (location / split, location):
        if (folder / SAVED).is_file():
            return folder / SAVED
        if (folder / _INFO).is_file() and any(folder.glob("data-*-of-*.arrow")):
            raise ValueError(
                f"lacks the file {folder / SAVED}, which save_to_disk writes last: it was not "
                "saved, or not copied, whole"
            )
    splits = [path.parent.name for path in location.glob(f"*/{SAVED}")]
    if splits and (location / _SPLITS).is_file():
        raise ValueError(f"has no split '{split}'{_choice(split, splits)}")
    return None


def load_saved(files: Sequence[Path], *, progress: bool = False) -> tuple[Any, list[str]] | None:
    """Return the rows that `save_to_disk` wrote, and their files; None if `files` are not the
    `state.json` of such a folder. Raises ValueError, continuing the sentence `dataset 'x' …`,
    naming the file that it lacks or that is broken.
    """
    state = files[0]
    if state.name != SAVED:
        return None
    try:
        read_json(state.with_name(_INFO))
        named = read_json(state)["_data_files"]
        shards = [str(state.with_name(entry["filename"])) for entry in named]
        for shard in shards:
            with open(shard, "rb") as file:
                file.seek(max(0, Path(shard).stat().st_size - len(_END)))
                if file.read() != _END:  # cut between two batches, it would have fewer rows
                    raise ValueError(f"has a broken file: {shard}: its end is missing")
    except FileNotFoundError as error:
        raise ValueError(f"lacks the file {error.filename}, which save_to_disk writes") from None
    except Unreadable as error:
        raise ValueError(f"has a broken file: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"has a broken file: {state}: it names no data files") from error
    try:
        return quiet_datasets(progress).load_from_disk(str(state.parent)), shards
    except Exception as error:  # of pyarrow, of the library, of what the files say
        faults = ((shard, _arrow_fault(shard)) for shard in shards)
        what = next((f"has a broken file: {s}: {fault}" for s, fault in faults if fault), "")
        raise ValueError(what or f"cannot be read: {type(error).__name__}: {error}") from error


def _arrow_fault(file: str) -> str:
    """Return what keeps an Arrow stream from being read; else ''."""
    import pyarrow

    try:
        with pyarrow.memory_map(file) as source, pyarrow.ipc.open_stream(source) as stream:
            for _ in stream:
                pass
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def load_tables(files: Sequence[str], *, progress: bool = False) -> Any:
    """Load the rows of files of one kind, in order. Errors continue the sentence `dataset 'x' …`.

    Raises ValueError naming the file that is broken, or has other columns.
    """
    datasets = quiet_datasets(progress)
    for file in files:
        if file.endswith(".csv") and (fault := _misnamed(Path(file))):
            raise ValueError(f"has a broken file: {file}: {fault}")
    try:
        return _load(datasets, files)
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        first: dict[str, Any] = {}
        for file in files:
            try:
                columns = dict(_load(datasets, [file]).features)
            except (ValueError, datasets.exceptions.DatasetsError) as broken:
                known = _csv_fault(Path(file)) or _parquet_fault(file)
                cause = known or str(broken.__cause__ or broken).splitlines()[0]
                raise ValueError(f"has a broken file: {file}: {cause}") from error
            first = first or columns
            if columns != first:
                raise ValueError(
                    f"has a file with other columns: {file}: {_in_words(columns)}; {files[0]} has "
                    f"{_in_words(first)}"
                ) from error
        raise


def _csv_fault(file: Path) -> str:
    """Return why a CSV file has no rows, as far as its text shows it; else ''."""
    if file.suffix != ".csv":
        return ""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return not_utf8(data, error)
    lines = [line for line in text.splitlines() if line.strip()]
    return "it has names of columns and no rows" if len(lines) == 1 else ""


def _parquet_fault(file: str) -> str:
    """Return which column of a Parquet file is there twice, if its names can be read; else ''."""
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(file).names if file.endswith(".parquet") else []
    except pyarrow.ArrowInvalid:
        return ""
    return _twice(names)


def _twice(names: Sequence[str]) -> str:
    """Return which name is there more than once; else ''."""
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    return f"it has the column '{twice[0]}' {names.count(twice[0])} times" if twice else ""


def _misnamed(file: Path) -> str:
    """Return why a CSV file's values would be read under the wrong names: pandas makes an index of
    the first ones where a row has more values than there are names, and renames a column that is
    there twice. Else ''.
    """
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        rows = csv.reader(lines)
        try:
            names, first = islice(filter(None, rows), 2)
        except (ValueError, csv.Error):  # no rows, or none that this module reads
            return ""
    if len(first) <= len(names):
        return _twice(names)
    return (
        f"line {rows.line_num} has {len(first)} values: expected {len(names)}, since the first "
        f"line names {', '.join(names)}"
    )


def not_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    """Return where the bytes of a file are not UTF-8, and what to do."""
    line = data.count(b"\n", 0, error.start) + 1
    return f"line {line} is not UTF-8 text (byte {data[error.start]:#04x}): save it as UTF-8"


def quiet_datasets(progress: bool) -> Any:
    """The `datasets` library, imported when first needed, without its bars and notes."""
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # it also raises what it logs
    (datasets.enable_progress_bars if progress else datasets.disable_progress_bars)()
    return datasets


def _load(datasets: Any, files: Sequence[str]) -> Any:
    kind = BUILDERS["." + files[0].rpartition(".")[2]]
    if kind == "parquet":  # whose builder fails on a file without rows
        files = [file for file in files if _count(file)]
        if not files:
            raise ValueError("it has no rows")
    return datasets.load_dataset(kind, data_files=list(files), split="train")


def _count(file: str) -> int:
    if file.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(file).metadata.num_rows
    datasets = quiet_datasets(False)
    return len(
        datasets.Dataset.from_file(file) if file.endswith(".arrow") else _load(datasets, [file])
    )


def _in_words(columns: dict[str, Any]) -> str:
    types = ((name, getattr(kind, "dtype", None)) for name, kind in columns.items())
    return ", ".join(f"{name} ({kind or 'nested'})" for name, kind in types)
