"""Prepare: makes the demo's problems, solutions, model and tokenizer on the spot."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from trireme.config import load_config
from trireme.config.variables import variable
from trireme.demo import YAML
from trireme.files import json_or, write_jsonl, write_text
from trireme.text import say

NUM_TRAIN = 2000
NUM_TEST = 500
NUM_SOLVED = 300
"""Training problems whose worked solutions, mistakes included, the warm-up sees."""
LARGEST_NUMBER = 7
LARGEST_RESULT = 12
INITIALIZER_RANGE = 0.04
"""Larger than usual: so small a model leaves the flat start sooner, on every seed."""


def prepare(folder: Path, seed: int) -> Path:
    """Write train, test and solved problems and the model into `folder`, unless that was done
    before.

    Raises ValueError if the generator cannot make as many problems as requested.
    """
    from trireme.demo.problems import make_problems, with_slips
    from trireme.demo.tiny_model import make_tiny_model

    done = folder / "prepared.json"
    facts = {"seed": seed, "train": NUM_TRAIN, "test": NUM_TEST, "solved": NUM_SOLVED}
    if json_or(done, dict[str, int]()) == facts:
        return folder
    say(f"making a model, and {NUM_TRAIN + NUM_TEST:,} problems, in {folder}", flush=True)
    problems = make_problems(
        NUM_TRAIN + NUM_TEST, seed=seed, number=LARGEST_NUMBER, largest=LARGEST_RESULT
    )
    test, train = problems[:NUM_TEST], problems[NUM_TEST:]
    pupil = random.Random(seed + 1)
    solved = [{**row, "answer": with_slips(row["answer"], pupil)} for row in train[:NUM_SOLVED]]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("test", test), ("train", train), ("solved", solved)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    texts = [row["question"] + row["answer"] for row in problems]
    make_tiny_model(folder / "model", texts, seed=seed, initializer_range=INITIALIZER_RANGE)
    write_text(done, json.dumps(facts))
    return folder


def assets_folder(seed: int) -> Path:
    """Return the folder of a seed's problems and model."""
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    return root / "arithmetic_assets" / f"seed_{seed}"


def demo_config(overrides: Sequence[str]) -> Path:
    """Return the path of the demo's YAML, after making its model and data, from the seed of the
    overrides if any.

    Raises ConfigError for a wrong override before anything is made.
    """
    seeds = [text.removeprefix("seed=") for text in overrides if text.startswith("seed=")]
    if seeds and not seeds[-1].isdigit():
        raise ValueError(f"seed is '{seeds[-1]}': expected a whole number, 0 or more")
    seed = int(seeds[-1]) if seeds else 0
    folder = assets_folder(seed)
    load_config(YAML, overrides)
    os.environ["TRIREME_MODEL_PATH"] = str(folder / "model")
    os.environ["TRIREME_TASKSET_PATH"] = str(folder)
    prepare(folder, seed)
    return YAML


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the demo's model and data; print where.")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args().seed
    say(prepare(assets_folder(chosen), chosen))
