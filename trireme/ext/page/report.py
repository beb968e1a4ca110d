"""Report: writes the page and its data into one file that needs no server and no network.

Invariants:
- The file contains all curves, warnings, configuration and timeline, and a selection of rollouts:
  the best, the worst and the newest, in whole groups, and some held-out tasks through all steps.
- It uses the page's own code; only the source of its answers differs.
"""

from __future__ import annotations

import base64
import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

from trireme.ext.page.app import STATIC, UPLOT, Page
from trireme.ext.page.rollouts import KINDS, SNIPPET, Filter, RolloutIndex, question_of
from trireme.ext.page.runs import RunFolder, about, compared
from trireme.files import write_text
from trireme.text import as_json

GROUPS = 8
"""Groups of each order: newest, best and worst."""
TASKS = 20
"""Held-out tasks that are followed through the steps."""
FAILURES, DATA_ROWS = 20, 200
MOST_COMPARED = 12
"""Runs of which any two are compared."""
MOST_TOKENS = 40
"""Rollouts of each kind with their tokens."""


def write_report(root: Path, path: Path) -> Path:
    """Write one HTML file of all runs below `root`. Raises ValueError if there are none."""
    if path.is_dir():
        raise ValueError(f"--html {path} is a folder: expected a file, as in report.html")
    page = Page(root)
    runs = list(page.runs.values())
    pairs = permutations(runs, 2) if len(runs) <= MOST_COMPARED else ()
    held = {
        "runs": page.list(),
        "compared": {f"{one.name} {two.name}": compared(one, two) for one, two in pairs},
        "of": {run.name: _held(page, run) for run in page.runs.values()},
    }
    write_text(path, _document(held))
    return path


def _held(page: Page, run: RunFolder) -> dict[str, Any]:
    rollouts = page.rollouts(run)
    rollouts.refresh()
    rows = _selected(rollouts)
    tokens = page.tokens_of(run)
    for row in rows:
        row["question"] = question_of(row)[:SNIPPET]
        if row["kind"] == "train" and (experience := tokens.experience(row["eid"])) is not None:
            row |= {"messages": experience.messages, "tools": experience.tools}
    token_views: dict[str, Any] = {}
    for kind in ("train", "eval", "data"):
        for eid in [row["eid"] for row in rows if row["kind"] == kind][:MOST_TOKENS]:
            try:
                token_views[f"{kind} {eid}"] = tokens.of(eid, kind)
            except ValueError:  # no copy of its tokens was saved
                continue
    facts = {
        kind: {
            "count": sum(row["kind"] == kind for row in rows),
            "steps": sorted({row["step"] for row in rows if row["kind"] == kind}),
            "groups": len({row["group"] for row in rows if row["kind"] == kind}),
            "rewards": _range([row.get("reward") for row in rows if row["kind"] == kind]),
        }
        for kind in KINDS
        if any(row["kind"] == kind for row in rows)
    }
    return {
        "curves": page.curves.of(run),
        "meanings": page.meanings({"run": run.name}),
        "about": about(run),
        "rewards": rollouts.rewards(),
        "rollouts": rows,
        "tokens": token_views,
        "facts": facts,
    }


def _range(rewards: list[float | None]) -> list[float] | None:
    known = [reward for reward in rewards if reward is not None]
    return [min(known), max(known)] if known else None


def _selected(rollouts: RolloutIndex) -> list[dict[str, Any]]:
    """Return whole groups of the newest, best and worst rollouts, some held-out tasks, some
    failures.
    """
    chosen: dict[str, dict[str, Any]] = {}

    def add(wanted: Filter, most: int | None = None) -> list[dict[str, Any]]:
        rows = rollouts.rows(rollouts.select(wanted)[:most])
        chosen.update({f"{row['kind']} {row['eid']}": row for row in rows})
        return rows

    for order in ("best", "worst", "newest"):
        some = rollouts.rows(rollouts.select(Filter(kind="train", order=order))[: GROUPS * 32])
        for group in list(dict.fromkeys(row["group"] for row in some))[:GROUPS]:
            add(Filter(kind="train", group=group, order="oldest"))
    held_out = rollouts.rows(rollouts.select(Filter(kind="eval", order="newest"))[: TASKS * 4])
    for task in list(dict.fromkeys(row["task"] for row in held_out))[:TASKS]:
        add(Filter(kind="eval", task=task))
    add(Filter(kind="failed"), FAILURES)
    add(Filter(kind="data"), DATA_ROWS)
    return list(chosen.values())


def _document(held: dict[str, Any]) -> str:
    page = _text(STATIC / "index.html")
    modules = {
        f"view/{file.name}": _module_url(_text(file))
        for file in sorted(STATIC.glob("*.js"))
        if file.name != "theme.js"
    }
    data = as_json(held, default=str).replace("<", "\\u003c")
    parts = {
        '<link rel="stylesheet" href="/uplot/uPlot.min.css">': (
            f"<style>{_text(UPLOT / 'uPlot.min.css')}</style>"
        ),
        '<link rel="stylesheet" href="/static/style.css">': (
            f"<style>{_text(STATIC / 'style.css')}</style>"
        ),
        '<script src="/static/theme.js"></script>': (
            f"<script>{_text(STATIC / 'theme.js')}</script>"
            f"<script>globalThis.TRIREME_REPORT = {data};</script>"
            f'<script type="importmap">{json.dumps({"imports": modules})}</script>'
        ),
        '<script defer src="/uplot/uPlot.iife.min.js"></script>': (
            f"<script>{_text(UPLOT / 'uPlot.iife.min.js')}</script>"
        ),
        '<script type="module" src="/static/app.js"></script>': (
            '<script type="module">import "view/app.js";</script>'
        ),
    }
    for old, new in parts.items():
        assert old in page, f"index.html has no {old}"
        page = page.replace(old, new)
    return page


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _module_url(module: str) -> str:
    """Return a module as a data URL, which has no folder: its imports become names of the import
    map.
    """
    module = re.sub(r'from "\./([\w-]+\.js)"', r'from "view/\1"', module)
    return "data:text/javascript;base64," + base64.b64encode(module.encode()).decode()
