"""trireme convert: exports checkpoints for transformers, and reports the result of each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from trireme.monitor.terminal import Terminal

if TYPE_CHECKING:
    from trireme.ext.converters.convert import Checkpoint, Converted, Options


def convert(
    checkpoint_dirs: Iterable[Path],
    base_model_dir: Path | None = None,
    dtype: str | None = None,
    max_shard_gb: float = 5.0,
) -> int:
    """Convert, print one line per checkpoint and the totals; 0 if all of them are complete now."""
    from trireme.ext.converters.convert import Options, find_checkpoints

    try:
        _refuse_dtype(dtype)
        if not max_shard_gb > 0:
            raise ValueError(f"--max-shard-gb ({max_shard_gb}) must be more than 0")
        checkpoints = [
            checkpoint for path in checkpoint_dirs for checkpoint in find_checkpoints(path)
        ]
    except ValueError as error:
        return _failed(error)
    options = Options(base_model_dir, dtype, int(max_shard_gb * 1e9))
    results = _convert_all(list(dict.fromkeys(checkpoints)), options)
    _print(results)
    return 1 if any(result.status == "failed" for result in results) else 0


def convert_file(gguf: Path, folder: Path, dtype: str | None = None) -> int:
    """Write a GGUF file as a model's folder, and print what it holds; 0 if it was written."""
    from trireme.ext.converters.gguf import convert_gguf

    console = Terminal()
    try:
        _refuse_dtype(dtype)
        console.print(f"reading {gguf}", markup=False, highlight=False, soft_wrap=True)
        text = convert_gguf(gguf, folder, dtype)
    except ValueError as error:
        return _failed(error)
    console.print(f"exported  {folder}: {text}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _refuse_dtype(dtype: str | None) -> None:
    """Raise ValueError if `--dtype` is unknown."""
    from trireme.ext.converters.convert import OUTPUT_DTYPES

    if dtype is not None and dtype not in OUTPUT_DTYPES:
        raise ValueError(f"--dtype '{dtype}' is unknown; one of {', '.join(OUTPUT_DTYPES)}")


def _failed(error: ValueError) -> int:
    Terminal(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
    return 1


def _convert_all(checkpoints: list[Checkpoint], options: Options) -> list[Converted]:
    """Convert them one by one, each with a progress bar on a terminal."""
    from trireme.ext.converters.convert import convert_checkpoint

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Terminal(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        results = []
        for checkpoint in checkpoints:
            task = progress.add_task(checkpoint.root.name, total=None)
            results.append(
                convert_checkpoint(
                    checkpoint,
                    options,
                    lambda done, total, task=task: progress.update(
                        task, completed=done, total=total
                    ),
                )
            )
            progress.update(task, visible=results[-1].status == "exported")
    return results


def _print(results: list[Converted]) -> None:
    table = Table("checkpoint", "result", "", title="trireme convert", title_justify="left")
    for result in results:
        table.add_row(str(result.step_dir), result.status, result.text)
    console = Terminal()
    if console.is_terminal:
        console.print(table)
    else:  # a log should have each checkpoint on one uncut line
        for result in results:
            line = f"{result.status:9} {result.step_dir}: {result.text}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    count = {s: sum(r.status == s for r in results) for s in ("exported", "complete", "failed")}
    console.print(
        f"{count['exported']} exported, {count['complete']} complete already, "
        f"{count['failed']} failed",
        highlight=False,
    )
