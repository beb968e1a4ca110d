"""Lowest versions: prints the lower ends of pyproject.toml's ranges as constraints of pip.

python scripts/lowest_versions.py > constraints.txt
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def lowest(line: str) -> str:
    """Return `name==version` for a requirement with a lower end. Raises ValueError without one."""
    requirement = Requirement(line)
    for part in requirement.specifier:
        if part.operator == ">=":
            return f"{requirement.name}=={part.version}"
    raise ValueError(f"{line} has no lowest version")


if __name__ == "__main__":
    print(*map(lowest, tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]), sep="\n")
