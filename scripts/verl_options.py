"""verl options: writes the table of verl's options into its page.

`python scripts/verl_options.py` writes the table of docs/migrate/verl.md; a test checks that it is
up to date.
"""

from __future__ import annotations

from pathlib import Path

from trireme.ext.verl.dialect import READ_AS

PAGE = Path(__file__).parents[1] / "docs" / "migrate" / "verl.md"


def document() -> str:
    """The page with the options that are read as keys of ours."""
    head, start, rest = PAGE.read_text(encoding="utf-8").partition(
        "<!-- table: trainer_config -->\n"
    )
    _, end, tail = rest.partition("<!-- end of table -->")
    rows = "".join(f"| `{option}` | `{ours}` |\n" for option, ours in READ_AS.items())
    return f"{head}{start}{rows}{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
