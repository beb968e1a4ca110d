"""`trireme list` and `trireme compare`: print the entries of runs that the page shows."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.cli.listing import print_table
from trireme.ext.page.runs import RunFolder, compared, find_runs, note_of
from trireme.ext.page.table import HEADINGS, Entries, finds, lines, text_of
from trireme.registry import did_you_mean
from trireme.text import say


def list_runs(folder: Path, *, hidden: bool = False, find: str = "") -> int:
    """Print a table of the runs below a folder in which each word of `find` occurs, `hidden` ones
    too or without them; the exit code is 1 for an error.
    """
    try:
        runs = find_runs(folder)
        shown = [run for run in runs if hidden or not note_of(run)["hidden"]]
        entries = Entries().of(shown)
        wanted = [entry for entry in entries if finds(entry, find)]
        if not wanted and entries:
            raise ValueError(
                f"none of {len(entries)} runs below {folder} has '{find}' in its name, state, "
                "kind, note or settings"
            )
        _print(wanted)
        if len(shown) < len(runs):
            say(f"{len(runs) - len(shown)} hidden on the page: --all lists them too")
    except (ValueError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compare(names: Sequence[str], folder: Path) -> int:
    """Print a table of two runs or more, and the settings in which they differ; the exit code is 1
    for an error.
    """
    try:
        first, *others = runs = [run_named(name, folder) for name in names]
        changes = [{row["key"]: row for row in compared(first, run)} for run in others]
        _print(Entries().of(runs))
    except (ValueError, OSError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    rows = []
    for key, row in {key: row for changed in changes for key, row in changed.items()}.items():
        of_others = [changed[key]["new"] if key in changed else row["old"] for changed in changes]
        rows.append((key, text_of(row["old"]), *map(text_of, of_others)))
    if rows:
        print_table(("setting", *(run.name for run in runs)), rows)
    else:
        say("no setting differs")
    return 0


def run_named(name: str, folder: Path) -> RunFolder:
    """Return the run in a folder, or by its name below another; of a job's stages the last one.

    Raises ValueError if there is none.
    """
    if Path(name).is_dir():
        return find_runs(Path(name))[-1]
    runs = find_runs(folder)
    found = [run for run in runs if run.name == name or f"{run.name}/".startswith(f"{name}/")]
    found = found or [run for run in runs if f"/{name}/" in f"/{run.name}/"]
    if not found:
        names = dict.fromkeys(part for run in runs for part in (run.name, *run.name.split("/")))
        hint = did_you_mean(name, names, " (did you mean '{}'?)")
        raise ValueError(
            f"there is no run '{name}' below {folder}{hint}: `trireme list {folder}` lists them"
        )
    return found[-1]


def _print(entries: Sequence[Mapping[str, Any]]) -> None:
    rows = list(lines(entries))
    last = len(HEADINGS) if any(row[-1] for row in rows) else len(HEADINGS) - 1
    print_table(HEADINGS[:last], [row[:last] for row in rows])
    for entry in entries:
        if entry["error"]:
            say(f"{entry['name']}: {entry['error']}", "", sep="\n")
