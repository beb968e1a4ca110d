"""Models page: the table of docs/models.md, from the list of tested models in tests/tested.py.

`python scripts/models_page.py` writes it between the page's two marks; a test checks that
it is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.tested import KINDS, TESTED  # noqa: E402
from trireme.files import write_text  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: scripts/models_page.py -->", "<!-- end of table -->"


def table() -> str:
    """A row for each family, in the order of its kinds."""
    lines = [f"| kind | family | {' | '.join(TESTED)} |", "|-|-|" + "-|" * len(TESTED)]
    for kind, families in KINDS.items():
        for place, family in enumerate(families):
            cells = ["yes" if family in those else "" for those in TESTED.values()]
            lines.append(f"| {'' if place else kind} | {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document() -> str:
    """The page with its table written anew."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write_text(PAGE, document())
