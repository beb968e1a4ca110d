"""Dataset: writes the splits of an environment's tasks, as the tasksets read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.files import write_text


def write_splits(out: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write `<split>.jsonl` for each split, and `dataset_dict.json` with their sizes."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        write_text(out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    sizes = {name: {"name": name, "num_examples": len(rows)} for name, rows in splits.items()}
    write_text(out / "dataset_dict.json", json.dumps({"splits": sizes}))
