"""`trireme init`: writes a starter project that runs as it is."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from trireme.files import write_text

STARTER = Path(__file__).parents[1] / "demo" / "starter"
LARGEST = 5
NUM_TEST = 6
MAX_LEN = 128


def init(folder: Path) -> int:
    """Write workflow, reward, YAML, data, test and a tiny model; returns the exit code."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"error: {folder} is there already: expected a new or empty folder", file=sys.stderr)
        return 2
    from trireme.demo.tiny_model import make_tiny_model  # loads torch

    rows = [
        {"question": f"What is {a} + {b}?", "answer": a + b}
        for a in range(LARGEST + 1)
        for b in range(LARGEST + 1)
    ]
    random.Random(0).shuffle(rows)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, own in (("test", rows[:NUM_TEST]), ("train", rows[NUM_TEST:])):
        lines = "".join(json.dumps(row) + "\n" for row in own)
        write_text(folder / "data" / f"{name}.jsonl", lines)
    texts = [f"{row['question']} No. Try again. {row['answer']}" for row in rows]
    answers = [str(number) for number in range(2 * LARGEST + 1)]
    make_tiny_model(folder / "model", [*texts, *answers], seed=0, max_len=MAX_LEN, largest=-1)
    for template in sorted(STARTER.iterdir()):
        write_text(folder / template.name.removesuffix(".txt"), template.read_text("utf-8"))
    print(f"{folder} has a workflow, a reward, data, a test and run.yaml. Next:")
    print(f"  cd {folder} && trireme run run.yaml")
    return 0
