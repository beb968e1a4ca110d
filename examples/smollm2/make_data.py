"""Makes the tasks of the gallery: words to describe, constraints, sums, products, games.

    python examples/smollm2/make_data.py
    python examples/smollm2/make_data.py --pairs checkpoints/smollm2/words_0

Every set has a held-out part: other words, other numbers, and for the constraints pairs of two that
never stand together in training. --pairs collects what DPO and KTO learn from: of the replies that
a run has tried in its first steps, better and worse ones (`pairs.jsonl`), and all of them as
desirable or not (`labelled.jsonl`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from guess import GUESSES, NUMBERS, answer
from word_chain import WordChain, common

from trireme.config.variables import variable
from trireme.files import write_jsonl

FOLDER = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints")) / "smollm2_data"
PAIR_STEPS, GAP = 12, 0.3
"""The steps of a run whose replies become pairs, and by how much the rewards of a pair differ."""
NUM_HELD_OUT = 32

THINGS = (Path(__file__).parent / "things.txt").read_text("utf-8").split()
KINDS = ("lower_case", "contains", "avoids", "bullets", "short")
HELD_OUT_PAIRS = {("lower_case", "contains"), ("avoids", "short")}
SYSTEM = (
    "You have a calculator. To use it, reply with <tool_call>"
    '{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call>. '
    "Then reply with Answer: and the number."
)


def split(rows: list[Any], seed: int) -> tuple[list[Any], list[Any]]:
    """Training and held-out rows, in an order that a seed determines."""
    shuffled = random.Random(seed).sample(rows, len(rows))
    return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]


def words() -> tuple[list[Any], list[Any]]:
    """A description in an exact number of words. The held-out words are described in as many."""
    rows = [
        {"question": f"Describe the word '{thing}' in exactly six words.", "count": 6}
        for thing in THINGS
    ]
    return split(rows, 1)


def constraint(kind: str, thing: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One constraint: how it is asked, and what checks it."""
    if kind == "contains":
        word = rng.choice(
            ["bright", "always", "small", "water", "friend", "home", "light", "world"]
        )
        return f"Use the word '{word}'.", {"kind": kind, "word": word}
    if kind == "avoids":
        word = rng.choice(["the", "is", "and", "of"])
        return f"Do not use the word '{word}'.", {"kind": kind, "word": word}
    if kind == "bullets":
        return "Write exactly three bullet points that begin with '- '.", {"kind": kind, "count": 3}
    if kind == "short":
        return "Use at most fifteen words.", {"kind": kind, "count": 15}
    return "Use only lower case letters.", {"kind": kind}


def constraints() -> tuple[list[Any], list[Any]]:
    """Two constraints a task. Held out are other words and pairs of constraints at once."""
    rng = random.Random(2)
    train, test = [], []
    shuffled = rng.sample(THINGS, len(THINGS))
    for number, thing in enumerate(shuffled):
        for pair in itertools.combinations(KINDS, 2):
            asked, checked = zip(*(constraint(kind, thing, rng) for kind in pair), strict=True)
            row = {"question": " ".join([f"Tell me about: {thing}.", *asked]), "rules": checked}
            if number < NUM_HELD_OUT // 2 and pair in HELD_OUT_PAIRS:
                test.append(row)
            elif number >= NUM_HELD_OUT // 2 and pair not in HELD_OUT_PAIRS:
                train.append(row)
    return rng.sample(train, len(train)), test


def sums() -> tuple[list[Any], list[Any]]:
    """Sums of three small numbers."""
    numbers = list(itertools.product(range(2, 10), repeat=3))
    rows = [
        {"question": f"{a} + {b} + {c} = ?", "answer": str(a + b + c)}
        for a, b, c in random.Random(3).sample(numbers, 200)
    ]
    return split(rows, 3)


def products() -> tuple[list[Any], list[Any], list[Any]]:
    """Products that no model of this size knows, for the calculator; and conversations to imitate.

    Half of these use the calculator, and half guess a number: the wrong half is for the reward.
    """
    rng = random.Random(4)
    rows = []
    for a, b in rng.sample(list(itertools.product(range(12, 99), range(12, 99))), 232):
        question = rng.choice(
            [
                f"What is {a} times {b}?",
                f"A box holds {a} pens. How many pens are in {b} boxes?",
                f"{b} tickets cost {a} coins each. What do they cost together?",
            ]
        )
        rows.append({"system": SYSTEM, "question": question, "answer": str(a * b), "a": a, "b": b})
    train, test = split(rows, 4)
    shown = []
    for place, row in enumerate(train[:48]):
        a, b = row["a"], row["b"]
        call = {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}
        called = [
            _said("assistant", f"<tool_call>{json.dumps(call)}</tool_call>"),
            _said("tool", str(a * b)),
            _said("assistant", f"Answer: {a * b}"),
        ]
        wrong = a * b + rng.choice([-100, -10, 7, 30, 200])
        guessed = [_said("assistant", f"Answer: {wrong}")]
        asked = [_said("system", SYSTEM), _said("user", row["question"])]
        shown.append({"messages": [*asked, *(guessed if place % 2 else called)]})
    return train[48:], test, shown


def solved(sums: list[Any]) -> list[Any]:
    """Sums with their solutions, to imitate."""
    return [
        {"messages": [_said("user", row["question"]), _said("assistant", row["answer"])]}
        for row in sums
    ]


def chains() -> tuple[list[Any], list[Any]]:
    """Games of word chain, each by its first word."""
    return split([{"question": thing, "env_config": {"first": thing}} for thing in THINGS], 5)


def guesses() -> tuple[list[Any], list[Any]]:
    """Games of guessing one of seven numbers. Held out are other numbers."""
    rng = random.Random(7)
    firsts = rng.sample(range(10, 93), 83)
    games = [
        {
            "question": f"I think of a number from {first} to {first + NUMBERS - 1}. "
            "You have three guesses. Reply with a number only.",
            "answer": str(first + more),
        }
        for first in firsts
        for more in range(NUMBERS)
    ]
    some = 12 * NUMBERS  # of twelve firsts, which no other game has
    return rng.sample(games[some:], len(games) - some), rng.sample(games[:some], NUM_HELD_OUT)


def guessed(games: list[Any]) -> list[Any]:
    """Games of someone who guesses any of the seven numbers, whatever was answered before."""
    rng, shown = random.Random(8), []
    for game in games:
        first, secret = int(re.findall(r"\d+", game["question"])[0]), int(game["answer"])
        messages = [_said("user", game["question"])]
        for _ in range(GUESSES):
            number = first + rng.randrange(NUMBERS)
            messages.append(_said("assistant", str(number)))
            if number == secret:
                break
            messages.append(_said("user", answer(number, secret)))
        else:
            messages.pop()  # nobody answers the last guess
        shown.append({"messages": messages})
    return shown


def played(games: list[Any]) -> list[Any]:
    """Games of someone who plays any word that fits, and in two of five turns one that does not."""
    rng, shown = random.Random(6), []
    for game in games:
        env = WordChain(game["env_config"])
        observation, _, rules = asyncio.run(env.reset(None))
        messages, done = [_said("system", rules), _said("user", observation)], False
        while not done:
            fits = env.last[-1] if rng.random() < 0.6 else rng.choice("abcdeghilmnoprst")
            left = [w for w in common() if w not in env.used]
            word = rng.choice([w for w in left if w[0] == fits] or left)
            messages.append(_said("assistant", word))
            observation, _, done, _ = asyncio.run(env.step(messages))
            if not done:
                messages.append(_said("user", observation))
        shown.append({"messages": messages})
    return shown


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def tried(run: Path) -> list[dict[str, Any]]:
    """The replies of a run's first steps that were not cut, each with its task as `question`."""
    rows = []
    with (run / "buffer" / "experience_buffer.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["step"] <= PAIR_STEPS and row["stop_reason"] == "stop":
                asked = row["prompt"].rpartition("<|im_start|>user\n")[2]
                rows.append(row | {"question": asked.partition("<|im_end|>")[0]})
    return rows


def collect(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pairs for DPO and labelled replies for KTO, from a run's first steps."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in tried(run):
        groups[row["question"]].append(row)
    pairs, labelled = [], []
    for question, rows in groups.items():
        rows.sort(key=lambda row: row["reward"])
        half = len(rows) // 2
        for worse, better in zip(rows[:half], reversed(rows[half:]), strict=False):
            if better["reward"] - worse["reward"] >= GAP:
                said = {"chosen": better["response"], "rejected": worse["response"]}
                pairs.append({"prompt": question} | said)
        labelled += [
            {"prompt": question, "completion": row["response"], "label": row["reward"] >= 0.5}
            for row in rows
        ]
    return pairs, labelled


def main() -> None:
    """All sets into one folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=Path, help="the folder of a run that describes words")
    run = parser.parse_args().pairs
    FOLDER.mkdir(parents=True, exist_ok=True)
    if run is not None:
        pairs, labelled = collect(run)
        write_jsonl(FOLDER / "pairs.jsonl", pairs)
        write_jsonl(FOLDER / "labelled.jsonl", labelled)
        print(f"{len(pairs)} pairs and {len(labelled)} labelled replies in {FOLDER}")
        return
    sets = {"words": words(), "constraints": constraints(), "sums": sums(), "chains": chains()}
    sets["guesses"] = guesses()
    train, test, shown = products()
    sets["products"] = (train, test)
    for name, (rows, held_out) in sets.items():
        write_jsonl(FOLDER / f"{name}.jsonl", rows)
        write_jsonl(FOLDER / f"{name}_held_out.jsonl", held_out)
        print(f"{name}: {len(rows)} tasks, {len(held_out)} held out, in {FOLDER}")
    write_jsonl(FOLDER / "products_shown.jsonl", shown)
    write_jsonl(FOLDER / "sums_shown.jsonl", solved(sets["sums"][0][:32]))
    write_jsonl(FOLDER / "guesses_shown.jsonl", guessed(sets["guesses"][0][:96]))
    write_jsonl(FOLDER / "chains_shown.jsonl", played(2 * sets["chains"][0]))


if __name__ == "__main__":
    main()
