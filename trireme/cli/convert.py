"""trireme convert: exports checkpoints for transformers, and says what became of each."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table


def convert(checkpoint_dir: Path, base_model_dir: Path | None = None) -> int:
    """Convert, print one line a checkpoint and the totals; 0 where all of them are complete now."""
    from trireme.checkpoint.convert import convert as convert_all

    try:
        results = convert_all(checkpoint_dir, base_model_dir)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    table = Table("checkpoint", "result", "", title="trireme convert", title_justify="left")
    for result in results:
        table.add_row(str(result.step_dir), result.status, result.text)
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:  # a log wants each checkpoint on a line of its own, uncut
        for result in results:
            line = f"{result.status:9} {result.step_dir}: {result.text}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    count = {s: sum(r.status == s for r in results) for s in ("exported", "complete", "failed")}
    console.print(
        f"{count['exported']} exported, {count['complete']} complete already, "
        f"{count['failed']} failed",
        highlight=False,
    )
    return 1 if count["failed"] else 0
