"""Extension names: writes which extension gives which name, for the sentence where one is missing.

`python scripts/extension_names.py` writes trireme/extensions.toml; a test holds that it was done.
What is listed of an extension that is not here stays.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from trireme.extensions import KINDS, extensions

FILE = Path(__file__).parents[1] / "trireme" / "extensions.toml"
HEAD = """\
# Which extension of this release gives a name: a YAML that needs one which is not here is told so.
# Written by scripts/extension_names.py.
"""


def known() -> dict[str, dict[str, str]]:
    """Kind -> name -> extension, as the file has them."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def document() -> str:
    """The file with the names of all extensions of this repository that are here."""
    written = known()
    ours = {n: e for n, e in extensions().items() if e.package.startswith("trireme.ext.")}
    lines = [HEAD]
    for kind in KINDS:
        names = {n: owner for n, owner in written.get(kind, {}).items() if owner not in ours}
        names |= {n: e.name for e in ours.values() for n in e.names.get(kind, {})}
        if names:
            rows = sorted(names.items(), key=lambda row: row[::-1])
            lines += [f"\n[{kind}]\n", *(f'{name} = "{owner}"\n' for name, owner in rows)]
    return "".join(lines)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
