"""Generated: a data set that is made by its name, `reasoning_gym:leg_counting?size=500&seed=1`.

What follows the question mark are the generator's own options, each value as YAML reads it.
"""

from __future__ import annotations

from typing import Any

import yaml

COLUMNS = ("question", "answer", "metadata", "generated_by")
_SCHEME = "reasoning_gym:"


def generated(path: str) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the generator; None for a path of any other kind."""
    if not path.startswith(_SCHEME):
        return None
    name, _, options = path.removeprefix(_SCHEME).partition("?")
    parts = [part.partition("=") for part in options.split("&") if part]
    return name, {"size": 500, "seed": 0} | {key: yaml.safe_load(text) for key, _, text in parts}
