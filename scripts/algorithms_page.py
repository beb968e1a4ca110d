"""Algorithms page: the tables of docs/algorithms.md, written from the rows and their docstrings.

`python scripts/algorithms_page.py` writes them between the page's two marks; a test checks that it
is up to date.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from trireme.algorithms.part import PARTS, SETTINGS
from trireme.batch import COLUMNS
from trireme.cli.listing import first_line
from trireme.extensions import extensions
from trireme.registry import ALGORITHMS, Registry

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- tables: scripts/algorithms_page.py -->", "<!-- end of tables -->"


def tables() -> str:
    """All tables."""
    return "\n".join(
        [
            *_algorithms(),
            *(line for registry in dict.fromkeys(PARTS.values()) for line in _part(registry)),
            *_columns(),
        ]
    )


def document() -> str:
    """The page with its tables written anew."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


def _algorithms() -> Iterator[str]:
    yield (
        "| `algorithm_type` | advantage | policy loss | KL | averaged by | when to use it "
        "| extension |"
    )
    yield "|-|-|-|-|-|-|-|"
    for name in ALGORITHMS.built_in():
        recipe = ALGORITHMS.get(name)
        cells = (f"`{name}`", recipe.advantage_fn or "", recipe.policy_loss_fn, recipe.kl_loss_fn,
                 recipe.loss_agg_mode, recipe.use, _owner("algorithm", name))  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _part(registry: Registry) -> Iterator[str]:
    kind = registry.name.removeprefix("algorithm.")
    yield f"\n### `{kind}`\n"
    if kind in SETTINGS:
        own = ", ".join(
            f"`{key}` {value}" if value is None else f"`{key}` {value:g}"
            for key, value in SETTINGS[kind].items()
        )
        yield f"All have the options {own}.\n"
    yield "| name | what it computes | options | extension |"
    yield "|-|-|-|-|"
    for name in registry.built_in():
        function = registry.get(name)
        options = [
            f"`{p.name}` {p.default}"
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        ]
        line = first_line(function).replace("|", "\\|")
        owner = _owner(kind.removesuffix("_fn"), name)
        yield f"| `{name}` | {line} | {', '.join(options)} | {owner} |"


def _owner(kind: str, name: str) -> str:
    """The extension that gives a name; nothing for the kernel's."""
    return next((e.name for e in extensions().values() if name in e.names.get(kind, {})), "")


def _columns() -> Iterator[str]:
    yield "\n### Arguments\n"
    yield "What a function of your own may name as an argument. Shapes: N experiences, M trained"
    yield "tokens of all of them end to end, K rewards; `[]` is one number.\n"
    yield "| argument | shape | what it is | who fills it | who may name it |"
    yield "|-|-|-|-|-|"
    for column in COLUMNS.values():
        kinds = "; ".join(kind.removeprefix("an ").removeprefix("a ") for kind in column.kinds)
        yield f"| `{column.name}` | {column.shape} | {column.about} | {column.by} | {kinds} |"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
