"""Makers: names the script that makes the model or the data that a configuration lacks.

Examples have theirs next to the YAML; the demo's tasks and model have a module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trireme.cli.arguments import Given, with_flags
from trireme.config import Problem
from trireme.config.lookup import NOT_HERE

_DEMO = re.compile(
    r"arithmetic_assets(/seed_(?P<seed>\d+))?(/(model|(train|test|solved)\.jsonl))?\) "
)
"""What `trireme.demo.prepare` makes: other files of that folder are made by an example's script."""
_OF_OTHERS = ("; did you mean", "global_step_")
"""What shows that a path is mistyped, or another run's checkpoint."""
_SCRIPTS = ("make_*.py", "prepare*.py", "get_*_data.py")


def in_full(
    problems: Iterable[Problem], *, config: Path | None, flags: Given | None
) -> list[Problem]:
    """Return the problems of a file with the flags that have set their keys, and a last one with
    what may make the files that some of them miss.
    """
    out = with_flags(problems, flags)
    missing = [
        problem.text
        for problem in out
        if NOT_HERE in problem.text and not any(word in problem.text for word in _OF_OTHERS)
    ]
    demo = [made for text in missing if (made := _DEMO.search(text))]
    seeds = sorted({int(made["seed"] or 0) for made in demo})
    commands = [
        f"python -m trireme.demo.prepare{f' --seed {seed}' if seed else ''}" for seed in seeds
    ]
    if config is not None and len(missing) > len(demo):
        scripts = {path for name in _SCRIPTS for path in config.parent.glob(name)}
        commands += [f"python {script}" for script in sorted(scripts)]
    if commands:
        named = " or ".join(f"`{command}`" for command in commands)
        out.append(Problem("", f"what is missing may be made by {named}: run it first"))
    return out
