"""Makes tasks for code.yaml and sql.yaml, 300 solutions to imitate for each, and a tiny model.

    python examples/code_and_sql/make_programs.py [--seed 0]

Who wrote the solutions makes mistakes that people make: `min` for "at least", `>` for "at least".
Training and test share no task.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.files import write_jsonl

NUM_TRAIN, NUM_TEST, NUM_SOLVED = 1500, 300, 300
MISTAKE_RATE = 0.6
FIRST = {
    "the sum of a and b": "a + b",
    "a minus b": "a - b",
    "a times b": "a * b",
    "the larger of a and b": "max(a, b)",
    "the smaller of a and b": "min(a, b)",
}
NEXT = {
    "plus {n}": "x + {n}",
    "minus {n}": "x - {n}",
    "times {n}": "x * {n}",
    "at least {n}": "max(x, {n})",
    "at most {n}": "min(x, {n})",
}
COLUMNS = ("age", "size", "wage")
WHAT = {"largest": "MAX", "smallest": "MIN", "total": "SUM", "average": "AVG"}
COMPARED = {"at least": ">=", "at most": "<=", "above": ">", "below": "<"}
CONFUSED = {"max(x": "min(x", "min(x": "max(x", ">=": ">", "<=": "<"}
"""What a mistake writes, for what is right."""


def programs(source: random.Random) -> list[dict]:
    """Every task of the form f(a, b), with five tests each."""
    steps = [
        (words.format(n=n), code.format(n=n))
        for (words, code), n in itertools.product(NEXT.items(), range(2, 9))
    ]
    rows = []
    for (words, code), second, third in itertools.product(FIRST.items(), steps, steps):
        if second[0].split()[0] == third[0].split()[0] == "at" or second == third:
            continue
        lines = ["def f(a, b):", f" x = {code}", f" x = {second[1]}", f" x = {third[1]}"]
        text = "\n".join([*lines, " return x"])
        names: dict[str, Callable[[int, int], int]] = {}
        exec(text, names)  # ours, not a model's
        given = [(source.randint(0, 9), source.randint(0, 9)) for _ in range(5)]
        rows.append(
            {
                "question": f"Write f of a and b: {words}, {second[0]}, {third[0]}.",
                "answer": text,
                "tests": [[pair, names["f"](*pair)] for pair in given],
            }
        )
    return rows


def queries(source: random.Random) -> list[dict]:
    """Every question to the table `people`, with three databases each."""
    bounds = list(itertools.product(COLUMNS, COMPARED.items(), range(3, 11)))
    rows = []
    for (words, function), column, one in itertools.product(WHAT.items(), COLUMNS, bounds):
        other = source.choice([bound for bound in bounds if bound[0] != one[0]])
        conditions = [(name, said, sign, n) for name, (said, sign), n in (one, other)]
        where = " AND ".join(f"{name} {sign} {n}" for name, _, sign, n in conditions)
        told = " and ".join(f"{name} is {said} {n}" for name, said, _, n in conditions)
        rows.append(
            {
                "question": f"Table people: age, size, wage. The {words} {column} where {told}.",
                "answer": f"SELECT {function}({column}) FROM people WHERE {where}",
                "databases": [database(source) for _ in range(3)],
            }
        )
    return rows


def database(source: random.Random) -> str:
    """The table as the script that makes it."""
    values = [tuple(source.randint(1, 12) for _ in COLUMNS) for _ in range(40)]
    inserts = ", ".join(map(str, values))
    return f"CREATE TABLE people (age, size, wage); INSERT INTO people VALUES {inserts};"


def with_mistakes(text: str, source: random.Random) -> str:
    """The solution of someone who often takes one thing for another."""
    for right, wrong in CONFUSED.items():
        if right in text and source.random() < MISTAKE_RATE:
            return text.replace(right, wrong)
    return text


def main() -> None:
    """A folder for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    for name, make in (("code", programs), ("sql", queries)):
        source = random.Random(seed)
        rows = make(source)
        source.shuffle(rows)
        test, train = rows[:NUM_TEST], rows[NUM_TEST : NUM_TEST + NUM_TRAIN]
        solved = [
            {"question": row["question"], "answer": with_mistakes(row["answer"], source)}
            for row in train[:NUM_SOLVED]
        ]
        folder = root / f"{name}_assets" / f"seed_{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in (("test", test), ("train", train), ("solved", solved)):
            write_jsonl(folder / f"{file}.jsonl", data)
        texts = [row["question"] + row["answer"] for row in rows]
        make_tiny_model(folder / "model", texts, seed=seed, initializer_range=0.04)
        wrong = sum(
            row["answer"] != right["answer"] for row, right in zip(solved, train, strict=False)
        )
        print(f"{name}: {len(train)} tasks, {len(solved)} solutions ({wrong} wrong), {folder}")


if __name__ == "__main__":
    main()
