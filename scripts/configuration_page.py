"""Configuration page: docs/configuration.md, written from the schema and from what is supported.

`python scripts/configuration_page.py` writes it; a test holds that it was written.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from trireme.config.schema import Config
from trireme.config.support import HINTS, PLACED, REFUSED, REFUSED_VALUES
from trireme.config.typed import hints, kind_text, range_text, section_in

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

A run is one YAML file. `trireme check --config X.yaml` prints what it comes to and every problem in
it, and starts nothing; `trireme run --config X.yaml trainer.grad_clip=0.5` changes a key on the
command line (list items too: `buffer.explorer_input.eval_tasksets[0].split=test`).
`${oc.env:NAME,default}` takes an environment variable. Plug-ins, data and models by a relative path
are looked for in the working directory, then beside the YAML.

Stages (`stages`) run one after the other. Each is laid over the global file key by key; data with a
new `path` inherits neither storage type, format, split nor replay, and a new `algorithm_type` no
`*_fn` and no `*_args`. A stage starts from the model that the stage before it leaves.

The last column says what this version does with a key: nothing there means that it works;
*refused*: another value than the default stops the run with a sentence; *mapped*: it becomes what
this machine has, and `check` says how; *no effect*: `check` lists it.

This page is generated from the schema by `python scripts/configuration_page.py`.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_section(Config, "", set())])


def _section(section: type, prefix: str, done: set[type]) -> Iterator[str]:
    """One heading and table, then those of the sections inside; each dataclass once."""
    done.add(section)
    yield f"## {f'`{prefix}`' if prefix else 'Top level'}\n"
    yield f"{inspect.getdoc(section)}\n"
    yield "| key | value | default | meaning | here |"
    yield "|-|-|-|-|-|"
    for item in fields(section):
        cells = _cells(section, item)
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for item in fields(section):
        inner = section_in(hints(section)[item.name])
        if inner is not None and inner not in done:
            yield from _section(inner, f"{prefix}.{item.name}" if prefix else item.name, done)


def _cells(section: type, item: Field[Any]) -> tuple[str, ...]:
    kind = hints(section)[item.name]
    inner = section_in(kind)
    value = kind_text(kind) if inner is None or _is_list(kind) else "a section"
    limits = range_text(item)
    held = getattr(section(), item.name)
    shown = "" if is_dataclass(held) or held in (None, "", [], {}) else f"`{_yaml(held)}`"
    meaning = sentences(section)[item.name]
    return (
        f"`{item.name}`",
        f"{value} {limits}".strip(),
        shown,
        meaning,
        _here(f"{section.__name__}.{item.name}"),
    )


def _here(where: str) -> str:
    """What this version does with a key."""
    if where in REFUSED:
        return "refused"
    if where in REFUSED_VALUES:
        return "refused: " + ", ".join(sorted(REFUSED_VALUES[where]))
    if where in PLACED:
        return "mapped"
    return "no effect" if where in HINTS else ""


def _is_list(kind: Any) -> bool:
    return "list" in str(kind).split("[")[0] or str(kind).startswith("list")


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def sentences(section: type) -> dict[str, str]:
    """Field name -> the docstring under it."""
    tree = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(tree, ast.ClassDef)
    out: dict[str, str] = {}
    for above, below in pairwise(tree.body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(above.target, ast.Name) and isinstance(below.value, ast.Constant)
            out[above.target.id] = str(below.value.value)
    return out


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
