"""Layout page: the tables of the kernel's files and of the extensions in docs/code_layout.md.

The files are described by their first sentences, the extensions by their manifests.

`python scripts/layout_page.py` writes them between the page's two marks; a test checks that
it is up to date.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "code_layout.md"
EXTENSIONS = ROOT / "trireme" / "ext"
BEGIN, END = "<!-- tables: scripts/layout_page.py -->", "<!-- end of tables -->"


def tables() -> str:
    """A table for each folder of the kernel, the package first, and one of the extensions."""
    files = sorted((ROOT / "trireme").rglob("*.py"), key=lambda path: (path.parent, path.name))
    kernel = [path for path in files if EXTENSIONS not in path.parents]
    folders = groupby(kernel, key=lambda path: path.parent)
    lines = [line for row in folders for line in _folder(*row)]
    return "\n".join([*lines, *_extensions()]).lstrip()


def document() -> str:
    """The page with its tables written anew."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"


def _folder(folder: Path, members: Iterator[Path]) -> Iterator[str]:
    yield f"\n### `{folder.relative_to(ROOT)}/`\n\n{first_sentence(folder / '__init__.py')}\n"
    yield "| file | what it is for |\n|-|-|"
    for path in members:
        if path.name != "__init__.py":
            yield f"| `{path.name}` | {first_sentence(path)} |"


def _extensions() -> Iterator[str]:
    yield "\n### `trireme/ext/`\n\nThe extensions; `uses` names the ones that one needs.\n"
    yield "| folder | what it adds | uses |\n|-|-|-|"
    for manifest in sorted(EXTENSIONS.glob("*/ext.toml")):
        fields = tomllib.loads(manifest.read_text(encoding="utf-8"))
        uses = ", ".join(f"`{name}`" for name in fields.get("uses", []))
        yield f"| `{manifest.parent.name}/` | {fields['about']} | {uses} |"


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring, without the name that it begins with."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = text.partition("\n\n")[0].replace("\n", " ").replace("|", r"\|")
    name, colon, rest = line.partition(": ")
    is_name = colon and len(name.split()) <= 3 and "`" not in name
    if not is_name:
        return line
    has_capital = any(letter.isupper() for letter in rest.split()[0])  # such as vLLM
    return rest if has_capital else f"{rest[0].upper()}{rest[1:]}"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
