"""Writes what guess.yaml reads: episodes' seeds, games to warm up on, a tiny model.

    python examples/textarena/make_guess.py [--seed 0] [--out FOLDER]

The games are those of someone who listens to higher and lower, but guesses anywhere in between.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.environments.gyms import ArenaGame
from trireme.files import write_jsonl

NUM_TRAIN, NUM_TEST, NUM_GAMES = 2000, 200, 1000


def play(seed: int, source: random.Random) -> list[dict[str, str]]:
    """One game as messages, won or lost."""
    game = ArenaGame("GuessTheNumber-v0", seed=seed, env_args={"max_turns": 3})
    seen, _ = game.reset()
    low, high, done = 1, 20, False
    messages = []
    while not done:
        number = source.randint(low, high)
        action = f"[{number}]"
        messages += [
            {"role": "user", "content": seen},
            {"role": "assistant", "content": action},
        ]
        seen, _, done, _ = game.step(action)
        low, high = (number + 1, high) if "higher" in seen else (low, number - 1)
    return messages


def main() -> None:
    """Training, test and warm-up share no seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    out = options.out or root / "textarena_assets" / f"seed_{options.seed}"
    source = random.Random(options.seed)
    first = NUM_TEST + NUM_TRAIN
    games = [{"messages": play(seed, source)} for seed in range(first, first + NUM_GAMES)]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "train.jsonl", [{"seed": seed} for seed in range(NUM_TEST, first)])
    write_jsonl(out / "test.jsonl", [{"seed": seed} for seed in range(NUM_TEST)])
    write_jsonl(out / "games.jsonl", games)
    texts = [message["content"] for row in games for message in row["messages"]]
    make_tiny_model(out / "model", texts, seed=options.seed, max_len=320, largest=20)
    print(f"{NUM_TRAIN} seeds, {NUM_TEST} to test on, {NUM_GAMES} games and a model: {out}")


if __name__ == "__main__":
    main()
