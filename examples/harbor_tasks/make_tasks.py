"""Makes task folders in Harbor's form: five kinds of small tasks in a shell, and a tiny model.

    python examples/harbor_tasks/make_tasks.py [--count 10] [--seed 0]

Their scripts take the folders from variables where these are set, so that they also run without
bubblewrap.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model

TOML = """version = "1.0"

[metadata]
category = "{kind}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 60.0
"""
DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY . /app/\n"
TEST = """cd "${{APP_DIR:-/app}}"
verdict="${{LOGS_DIR:-/logs}}/verifier"
mkdir -p "$verdict"
{check}
"""
EQUAL = """if [ "$(cat {file} 2>/dev/null)" = '{right}' ]; then echo 1; else echo 0; fi \\
    > "$verdict/reward.txt\""""
WORDS = ("ash", "bay", "cob", "dew", "elm", "fir", "gum", "hop", "ivy", "jam", "key", "log")


def count_lines(source: random.Random) -> tuple[str, dict[str, str], str, str]:
    """Instruction, files, test and solution."""
    lines = source.choices(WORDS, k=source.randint(5, 40))
    ask = "Write the number of lines of words.txt to count.txt, the number alone."
    test = EQUAL.format(file="count.txt", right=len(lines))
    return ask, {"words.txt": "\n".join(lines) + "\n"}, test, "wc -l < words.txt > count.txt"


def sort_words(source: random.Random) -> tuple[str, dict[str, str], str, str]:
    """The same."""
    words = source.choices(WORDS, k=20)
    ask = "Write the words of words.txt to sorted.txt: each once, in the order of the alphabet."
    test = EQUAL.format(file="sorted.txt", right="\n".join(sorted(set(words))))
    return ask, {"words.txt": "\n".join(words) + "\n"}, test, "sort -u words.txt > sorted.txt"


def sum_column(source: random.Random) -> tuple[str, dict[str, str], str, str]:
    """The same; its reward has two parts."""
    rows = [(word, source.randint(1, 99)) for word in source.sample(WORDS, 8)]
    table = "name,price\n" + "".join(f"{word},{price}\n" for word, price in rows)
    total = sum(price for _, price in rows)
    ask = "Write the sum of the column price of prices.csv to total.txt, the number alone."
    test = (
        "there=0; right=0\n"
        "[ -s total.txt ] && there=0.1\n"
        f"[ \"$(cat total.txt 2>/dev/null)\" = '{total}' ] && right=0.9\n"
        'echo "{\\"there\\": $there, \\"right\\": $right}" > "$verdict/reward.json"'
    )
    solution = (
        "tail -n +2 prices.csv | cut -d, -f2 | paste -sd+ | python3 -c 'print(eval(input()))'"
    )
    return ask, {"prices.csv": table}, test, f"{solution} > total.txt"


def rename_files(source: random.Random) -> tuple[str, dict[str, str], str, str]:
    """The same."""
    names = source.sample(WORDS, 4)
    ask = "Rename every file of the folder notes that ends in .txt: it has to end in .md."
    files = {f"notes/{name}.txt": f"{name}\n" for name in names}
    test = EQUAL.replace("cat {file} 2>/dev/null", "ls notes").format(
        right="\n".join(sorted(f"{name}.md" for name in names))
    )
    return ask, files, test, 'for f in notes/*.txt; do mv "$f" "${f%.txt}.md"; done'


def mend_program(source: random.Random) -> tuple[str, dict[str, str], str, str]:
    """The same."""
    number = source.randint(2, 9)
    broken = f"def times(x):\n    return x + {number}\n"
    ask = f"times(x) in times.py has to return {number} times x. Mend it."
    program = f"import times; print(*map(times.times, (0, 1, {number + 1})))"
    test = EQUAL.replace("cat {file}", "python3 -c '{program}'").format(
        program=program, right=f"0 {number} {number * (number + 1)}"
    )
    return ask, {"times.py": broken}, test, "sed -i 's/x +/x */' times.py"


KINDS = (count_lines, sort_words, sum_column, rename_files, mend_program)


def write_task(folder: Path, kind: str, made: tuple[str, dict[str, str], str, str]) -> None:
    """One task folder."""
    ask, files, check, solution = made
    texts = {
        "task.toml": TOML.format(kind=kind),
        "instruction.md": ask + "\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST.format(check=check),
        "solution/solve.sh": f'cd "${{APP_DIR:-/app}}"\n{solution}\n',
        **{f"environment/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def write_tasks(root: Path, count: int, seed: int) -> list[str]:
    """So many task folders below `root`; their instructions."""
    source = random.Random(seed)
    asked = []
    for number in range(count):
        make = KINDS[number % len(KINDS)]
        kind = make.__name__.replace("_", "-")
        made = make(source)
        write_task(root / f"{kind}-{number:03}", kind, made)
        asked.append(made[0])
    return asked


def main() -> None:
    """Two splits and a model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    folder = root / "harbor_assets" / f"seed_{given.seed}"
    asked = write_tasks(folder / "tasks" / "train", given.count, given.seed)
    asked += write_tasks(folder / "tasks" / "test", len(KINDS), given.seed + 1)
    make_tiny_model(folder / "model", asked, seed=given.seed, max_len=1024)
    print(f"{len(asked)} tasks and a tiny model in {folder}")


if __name__ == "__main__":
    main()
