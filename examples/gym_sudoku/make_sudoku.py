"""Writes what sudoku.yaml reads: puzzles' numbers, episodes to warm up on, a tiny model.

    python examples/gym_sudoku/make_sudoku.py [--seed 0] [--out FOLDER]

The episodes are those of someone who fills the cells in order, and writes any digit at all in one
move of three; only those in which the puzzle came out are kept.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.environments.sudoku import Sudoku, make_puzzle, solutions
from trireme.files import write_jsonl

NUM_TRAIN, NUM_TEST, NUM_EPISODES = 4000, 200, 2000
EMPTY, CLUMSINESS, MAX_STEPS = 3, 1 / 3, 5


def episode(number: int, source: random.Random) -> list[dict[str, str]] | None:
    """One episode as messages; None where the puzzle did not come out."""
    env = Sudoku(make_puzzle(number, empty=EMPTY))
    (full,) = solutions(env.puzzle)
    seen, _ = env.reset()
    messages = []
    for _ in range(MAX_STEPS):
        cell = next(c for c in range(16) if env.grid[c] != full[c])
        digit = source.randint(1, 4) if source.random() < CLUMSINESS else full[cell]
        action = f"r{cell // 4 + 1}c{cell % 4 + 1}={digit}"
        messages += [
            {"role": "user", "content": seen},
            {"role": "assistant", "content": action},
        ]
        seen, _, done, _ = env.step(action)
        if done:
            return messages
    return None


def main() -> None:
    """Training and test share no puzzle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    out = options.out or root / "sudoku_assets" / f"seed_{options.seed}"
    source = random.Random(options.seed)
    numbers, puzzles = [], set()
    while len(numbers) < NUM_TEST + NUM_TRAIN:
        number = source.randrange(10**9)
        if (puzzle := make_puzzle(number, empty=EMPTY)) not in puzzles:
            puzzles.add(puzzle)
            numbers.append(number)
    test, train = numbers[:NUM_TEST], numbers[NUM_TEST:]
    played = [messages for number in train if (messages := episode(number, source))]
    episodes = [{"messages": messages} for messages in played[:NUM_EPISODES]]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "train.jsonl", [{"number": number} for number in train])
    write_jsonl(out / "test.jsonl", [{"number": number} for number in test])
    write_jsonl(out / "episodes.jsonl", episodes)
    texts = [message["content"] for row in episodes for message in row["messages"]]
    texts += ["1 is given: it stays 1.", "Say a move, for example. all numbers go from to"]
    make_tiny_model(
        out / "model", texts, seed=options.seed, max_len=512, initializer_range=0.04, largest=9
    )
    print(f"{len(train)} puzzles, {len(test)} to test on, {len(episodes)} episodes in {out}")


if __name__ == "__main__":
    main()
