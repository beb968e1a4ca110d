"""Writes what sums.yaml needs besides reasoning-gym itself: solutions to warm up on, a tiny model.

    python examples/reasoning_gym/make_reasoning_gym.py [--seed 0] [--out FOLDER]

The problems are those of another seed than the run's. The solutions are those of someone who is
one short in three of five results above 9.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.environments.generated import problems
from trireme.files import write_jsonl

SUMS = (
    "reasoning_gym:basic_arithmetic?operators=['+']&min_terms=3&max_terms=3&min_digits=1"
    "&max_digits=1&allow_parentheses=false&allow_negation=false&size=2000&seed=2"
)
ERRORS = 3 / 5
"""How often a result above 9 is one short."""


def solution(question: str, source: random.Random) -> str:
    """Term by term; what is wrong once stays wrong."""
    total, *terms = map(int, re.findall(r"\d+", question))
    steps = []
    for term in terms:
        result = total + term
        result -= result > 9 and source.random() < ERRORS
        steps.append(f" {total} + {term} = {result}.")
        total = result
    return f"{''.join(steps)}<answer> {total}</answer>"


def main() -> None:
    """Write solutions and model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    out = options.out or root / "reasoning_gym_assets" / f"seed_{options.seed}"
    source, made = random.Random(options.seed), problems(SUMS)
    questions = [made[i]["question"] for i in range(len(made))]
    rows = [{"prompt": q, "response": solution(q, source)} for q in questions]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "solutions.jsonl", rows)
    texts = [text for row in rows for text in row.values()]
    make_tiny_model(out / "model", texts, seed=options.seed, max_len=128)
    print(f"{rows[0]['prompt']}\n{rows[0]['response']}\n{len(rows)} of these, and a model: {out}")


if __name__ == "__main__":
    main()
