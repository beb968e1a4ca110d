"""Extension names: writes the extension of each name, and the public names for type checkers.

`python scripts/extension_names.py` writes trireme/extensions.toml, for the error that names a
missing extension, and trireme/ext/__init__.pyi; a test checks that both are up to date. Entries of
an extension that is not installed stay.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from trireme.extensions import KINDS, Extension, extensions

PACKAGE = Path(__file__).parents[1] / "trireme"
FILE = PACKAGE / "extensions.toml"
HEAD = """\
# The extension of this release that defines each name, for the error that names a missing one.
# Written by scripts/extension_names.py.
"""
STUB = PACKAGE / "ext" / "__init__.pyi"
STUB_HEAD = '''\
"""What `from trireme import ...` finds in extensions, for type checkers and editors.

Written by scripts/extension_names.py.
"""
'''
_IMPORT = re.compile(r"^from (trireme\.ext\.(\w+)[\w.]*) import \(?\s*(\w+ as \w+)", re.M)


def ours() -> dict[str, Extension]:
    """The extensions of this repository that are here."""
    return {n: e for n, e in extensions().items() if e.package.startswith("trireme.ext.")}


def known() -> dict[str, dict[str, str]]:
    """Kind -> name -> extension, as the file has them."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def document() -> str:
    """The file with the names of all extensions of this repository."""
    written = known()
    here = ours()
    lines = [HEAD]
    for kind in (*KINDS, "formerly"):
        names = {n: owner for n, owner in written.get(kind, {}).items() if owner not in here}
        for e in here.values():
            names |= dict.fromkeys(
                e.formerly if kind == "formerly" else e.names.get(kind, ()), e.name
            )
        if names:
            rows = sorted(names.items(), key=lambda row: row[::-1])
            lines += [f"\n[{kind}]\n", *(f'{_quoted(name)} = "{owner}"\n' for name, owner in rows)]
    return "".join(lines)


def stub(written: str) -> str:
    """The public names of all extensions of this repository, as imports."""
    here = ours()
    rows = {(m[1], m[3]) for m in _IMPORT.finditer(written) if m[2] not in here}
    for extension in here.values():
        for name, place in extension.names.get("public", {}).items():
            module, _, attribute = place.partition(":")
            rows.add((module, f"{attribute} as {name}"))
    return (
        STUB_HEAD
        + "".join(f"\n{_import(*row)}" for row in sorted(rows, key=_order))
        + "\n" * bool(rows)
    )


def _order(row: tuple[str, str]) -> tuple[str, int, str]:
    """As ruff sorts imports: constants, classes, the others."""
    module, name = row
    word = name.partition(" ")[0]
    return module, 0 if word.isupper() else 1 if word[0].isupper() else 2, word.lower()


def _import(module: str, name: str) -> str:
    line = f"from {module} import {name}"
    return line if len(line) <= 100 else f"from {module} import (\n    {name},\n)"


def _quoted(name: str) -> str:
    """Quote a name that has a dot, which would make a table, or a colon."""
    return f'"{name}"' if {".", ":"} & {*name} else name


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
    STUB.write_text(stub(STUB.read_text(encoding="utf-8")), encoding="utf-8")
