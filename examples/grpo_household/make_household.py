"""Writes what household.yaml reads: layouts to train and to test on, demonstrations, a tiny model.

    python examples/grpo_household/make_household.py [--seed 0] [--out FOLDER]

The demonstrations are of someone who knows the rules but forgets where he has been, mostly leaves
what is closed as it is, and does anything at all in one action of ten; only those that came to the
goal are kept.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.environments.household import Household, Layout, clumsy_action
from trireme.files import write_jsonl

NUM_TRAIN, NUM_TEST, NUM_DEMONSTRATIONS = 3000, 500, 1000
CLUMSINESS, LAZINESS = 0.1, 0.85
MAX_STEPS = 10


def demonstration(number: int, source: random.Random) -> list[dict[str, str]] | None:
    """One episode as messages; None where it did not come to the goal."""
    env = Household(Layout.numbered(number))
    seen, _ = env.reset()
    messages = []
    for _ in range(MAX_STEPS):
        action = clumsy_action(env, source, clumsiness=CLUMSINESS, laziness=LAZINESS)
        messages += [
            {"role": "user", "content": seen},
            {"role": "assistant", "content": action},
        ]
        seen, _, done, _ = env.step(action)
        if done:
            return messages
    return None


def main() -> None:
    """Layouts of different numbers differ: test and training share none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    out = options.out or root / "household_assets" / f"seed_{options.seed}"
    source = random.Random(options.seed)
    numbers, layouts = [], set()
    while len(numbers) < NUM_TRAIN + NUM_TEST:
        number = source.randrange(10**9)
        if (layout := Layout.numbered(number)) not in layouts:
            layouts.add(layout)
            numbers.append(number)
    test, train = numbers[:NUM_TEST], numbers[NUM_TEST:]
    demonstrations = []
    for number in train:
        found = demonstration(number, source)
        if found and len(demonstrations) < NUM_DEMONSTRATIONS:
            demonstrations.append({"messages": found})
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "train.jsonl", [{"layout": number} for number in train])
    write_jsonl(out / "test.jsonl", [{"layout": number} for number in test])
    write_jsonl(out / "demonstrations.jsonl", demonstrations)
    texts = [m["content"] for row in demonstrations for m in row["messages"]]
    make_tiny_model(
        out / "model", texts, seed=options.seed, max_len=384, initializer_range=0.04, largest=-1
    )
    print(
        f"{len(train)} layouts to train on, {len(test)} to test on, "
        f"{len(demonstrations)} demonstrations in {out}"
    )


if __name__ == "__main__":
    main()
