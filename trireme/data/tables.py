"""Tables: rows of Parquet, CSV and Arrow files, and in which file each of them lies."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


class FilePlaces(Sequence[str]):
    """Of each row its file and its number there, from 0. Files are counted when first asked."""

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


def load_tables(files: Sequence[str], *, progress: bool = False) -> Any:
    """The rows of files of one kind, in their order. Errors continue the sentence `dataset 'x' …`.

    Raises ValueError naming the file that is broken, or whose columns are others.
    """
    datasets = quiet_datasets(progress)
    try:
        return _load(datasets, files)
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        first: dict[str, Any] = {}
        for file in files:
            try:
                columns = dict(_load(datasets, [file]).features)
            except (ValueError, datasets.exceptions.DatasetsError) as broken:
                cause = str(broken.__cause__ or broken).splitlines()[0]
                raise ValueError(f"has a broken file: {file}: {cause}") from error
            first = first or columns
            if columns != first:
                raise ValueError(
                    f"has a file with other columns: {file}: {_told(columns)}; {files[0]} has "
                    f"{_told(first)}"
                ) from error
        raise


def quiet_datasets(progress: bool) -> Any:
    """The `datasets` library, imported when first needed, without its bars and notes."""
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs it also raises
    (datasets.enable_progress_bars if progress else datasets.disable_progress_bars)()
    return datasets


def _load(datasets: Any, files: Sequence[str]) -> Any:
    kind = BUILDERS["." + files[0].rpartition(".")[2]]
    return datasets.load_dataset(kind, data_files=list(files), split="train")


def _count(file: str) -> int:
    """How many rows a file has."""
    if file.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(file).metadata.num_rows
    datasets = quiet_datasets(False)
    return len(
        datasets.Dataset.from_file(file) if file.endswith(".arrow") else _load(datasets, [file])
    )


def _told(columns: dict[str, Any]) -> str:
    types = ((name, getattr(kind, "dtype", None)) for name, kind in columns.items())
    return ", ".join(f"{name} ({kind or 'nested'})" for name, kind in types)
