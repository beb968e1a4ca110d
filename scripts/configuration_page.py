"""Configuration page: docs/configuration.md, written from the schema.

`python scripts/configuration_page.py` writes it; a test holds that it was written.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from trireme.config.options import kind_text, range_text, without_none
from trireme.config.schema import Config
from trireme.config.section import Mapped, NoEffect, Refused, Section, fate_of, section_in

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


def _section(section: type[Section], prefix: str, done: set[type]) -> Iterator[str]:
    """One heading and table, then those of the sections inside; each section once."""
    done.add(section)
    yield f"## {f'`{prefix}`' if prefix else 'Top level'}\n"
    yield f"{inspect.getdoc(section)}\n"
    yield "| key | value | default | meaning | here |"
    yield "|-|-|-|-|-|"
    for name, item in section.model_fields.items():
        cells = _cells(section, name, item)
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for name, item in section.model_fields.items():
        inner = section_in(item.annotation)
        if inner is not None and inner not in done:
            yield from _section(inner, f"{prefix}.{name}" if prefix else name, done)


def _cells(section: type[Section], name: str, item: FieldInfo) -> tuple[str, ...]:
    kind = item.annotation
    is_section = section_in(kind) is not None and get_origin(without_none(kind)) is not list
    value = "a section" if is_section else kind_text(kind)
    held = getattr(section(), name)
    shown = "" if isinstance(held, Section) or held in (None, "", [], {}) else f"`{_yaml(held)}`"
    return (
        f"`{name}`",
        f"{value} {range_text(item.metadata)}".strip(),
        shown,
        sentences(section)[name],
        _here(item),
    )


def _here(item: FieldInfo) -> str:
    """What this version does with a key."""
    match fate_of(item):
        case Refused(values=values) if values:
            return "refused: " + ", ".join(sorted(values))
        case Refused():
            return "refused"
        case Mapped():
            return "mapped"
        case NoEffect():
            return "no effect"
    return ""


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def sentences(section: type[Section]) -> dict[str, str]:
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
