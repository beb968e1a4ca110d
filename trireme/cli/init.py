"""`trireme init`: writes a starter project that runs as it is."""

from __future__ import annotations

import sys
from pathlib import Path

from trireme.files import write_jsonl, write_text
from trireme.text import say

STARTER = Path(__file__).parents[1] / "demo" / "starter"
NAMES = ("Ann", "Ben", "Cleo", "Dan")
"""The first name has the held-out rows."""
LARGEST = 9
MAX_LEN = 128
INITIALIZER_RANGE = 0.04


def init(folder: Path) -> int:
    """Write workflow, reward, YAML, data, test and a tiny model; returns the exit code."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        say(f"error: {folder} is there already: expected a new or empty folder", file=sys.stderr)
        return 2
    say(f"{folder}: making data and a tiny model", flush=True)
    from trireme.demo.tiny_model import make_tiny_model  # imports torch

    rows = [
        {"question": f"{name} counts to {number}. What comes next?", "answer": number + 1}
        for name in NAMES
        for number in range(LARGEST)
    ]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, part in (("test", rows[:LARGEST]), ("train", rows[LARGEST:])):
        write_jsonl(folder / "data" / f"{name}.jsonl", part)
    texts = [row["question"] for row in rows] + ["No. Try again."]
    answers = [str(row["answer"]) for row in rows]
    make_tiny_model(
        folder / "model",
        [*texts, *answers],
        seed=0,
        max_len=MAX_LEN,
        initializer_range=INITIALIZER_RANGE,
        largest=LARGEST,
    )
    for template in sorted(STARTER.iterdir()):
        write_text(folder / template.name.removesuffix(".txt"), template.read_text("utf-8"))
    say(f"{folder} has a workflow, a reward, data, a test and run.yaml. Next:")
    say(f"  cd {folder} && trireme run run.yaml")
    return 0
