"""Cost curves: how the seconds of a step grow with batch, group, reply, episode, model and runners.

    OMP_NUM_THREADS=1 python benchmarks/cost_curves.py [--json FILE] [--quick]

One thing is changed at a time; the rest is a GRPO step of 8 tasks x 8 rollouts with prompts of 20
tokens and replies of 32, on a model of width 128 with two layers. Every point is a run in a process
of its own, of 5 steps, whose first warms up; the median of the others counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from against_peers import Peer, make_model, run_peer, words

from trireme.files import write_text

CURVES: dict[str, tuple[int, ...]] = {
    "tasks": (4, 8, 16, 32),
    "group": (2, 4, 8, 16),
    "reply": (16, 64, 128, 256),
    "episode": (1, 4, 10, 30),
    "width": (64, 128, 256, 384),
    "runners": (1, 2, 8, 64),
}
BASE = {"tasks": 8, "group": 8, "reply": 32, "episode": 0, "width": 128, "runners": 64}
STEPS = 5


def seconds(point: dict[str, int], steps: int) -> float:
    """The median step of a run with these sizes."""
    with tempfile.TemporaryDirectory() as name:
        reply = 16 if point["episode"] else point["reply"]
        rows = [{"question": words(20, n), "answer": ""} for n in range(point["tasks"] * steps)]
        model = make_model(Path(name) / "model", point["width"], 2, 2048)
        work: dict[str, Any] = {
            "model": model, "rows": rows, "tasks": point["tasks"], "group": point["group"],
            "min_tokens": reply, "max_tokens": reply, "max_len": 2048, "steps": steps,
            "episode": point["episode"], "sample_a_step": False, "seed": 0,
            "runners": point["runners"],
        }  # fmt: skip
        found = run_peer(Peer("Trireme", "trireme", sys.executable), work, 1)
    return statistics.median(found["seconds"])


def main() -> int:
    """Print every point, and write them all where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    curves = {"reply": (4, 8)} if options.quick else CURVES
    base = BASE | ({"tasks": 1, "group": 2} if options.quick else {})
    found: dict[str, list[tuple[int, float]]] = {}
    for name, sizes in curves.items():
        for size in sizes:
            took = seconds(base | {name: size}, 2 if options.quick else STEPS)
            found.setdefault(name, []).append((size, took))
            print(f"{name} {size}: {took:.3g} s a step", flush=True)
    if options.json:
        write_text(options.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
