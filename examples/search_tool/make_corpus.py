"""Makes a corpus, questions that it answers, solutions to imitate, and a tiny model.

    python examples/search_tool/make_corpus.py [--seed 0]

A question needs two searches: who owns a building, and where that person lives. Who wrote the
solutions is impatient: three times in five the second search is left out, and the town guessed.
Training and test share no building.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.files import write_jsonl

NUM_TEST, NUM_SOLVED, IMPATIENT = 100, 200, 0.6
COLORS = (
    "red blue green yellow white black brown grey pink golden old new tall small round long wide "
    "dark bright silver"
)
BUILDINGS = (
    "tower mill barn castle bridge school church inn shop house gate harbour farm stable forge "
    "bakery library market garden theatre"
)
NAMES = (
    "Anna Ben Carla David Emma Felix Grace Henry Ida Jack Karl Lena Mia Noah Olga Paul Rosa Sam "
    "Tina Victor"
)
TOWNS = "Rome Paris Oslo Bern Riga Lyon Cork Porto Graz Bonn"
STEP = "Action: search\nAction Input: {0}\nObservation: {1}\n"


def solution(building: str, owner: str, town: str, guess: str | None) -> str:
    """The reply, with what the tool shows; with a guess the second search is left out."""
    text = STEP.format(building, f"The {building} belongs to {owner}.")
    if guess is None:
        text += STEP.format(f"{owner} lives", f"{owner} lives in {town}.")
    return f"{text}#### {guess or town}"


def main() -> None:
    """Everything into one folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    source = random.Random(seed)
    colors, kinds, names, towns = (text.split() for text in (COLORS, BUILDINGS, NAMES, TOWNS))
    homes = {name: source.choice(towns) for name in names}
    buildings = [f"{color} {building}" for color, building in itertools.product(colors, kinds)]
    owners = {building: source.choice(names) for building in buildings}
    source.shuffle(buildings)
    texts = [f"The {building} belongs to {owner}." for building, owner in owners.items()]
    texts += [f"{name} lives in {town}." for name, town in homes.items()]
    rows = [
        {
            "question": f"Where does the owner of the {building} live?",
            "solution": homes[owners[building]],
        }
        for building in buildings
    ]
    shown = []
    for row, building in list(zip(rows, buildings, strict=True))[NUM_TEST:][:NUM_SOLVED]:
        guess = source.choice(towns) if source.random() < IMPATIENT else None
        reply = solution(building, owners[building], row["solution"], guess)
        user = {"role": "user", "content": row["question"]}
        shown.append({"messages": [user, {"role": "assistant", "content": reply}]})
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    folder = root / "search_assets" / f"seed_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "corpus.jsonl", [{"text": text} for text in texts])
    for name, data in (("test", rows[:NUM_TEST]), ("train", rows[NUM_TEST:]), ("solved", shown)):
        write_jsonl(folder / f"{name}.jsonl", data)
    texts += [row["question"] for row in rows] + [STEP.format("", "Nothing found.")]
    texts += [
        solution(building, owners[building], town, None) for building in buildings for town in towns
    ]
    make_tiny_model(folder / "model", texts, seed=seed, initializer_range=0.04, largest=-1)
    print(f"{len(rows) - NUM_TEST} questions, {len(shown)} solutions, a corpus, a model: {folder}")


if __name__ == "__main__":
    main()
