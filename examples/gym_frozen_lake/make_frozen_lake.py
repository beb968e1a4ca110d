"""Writes what frozen_lake.yaml reads: episodes' seeds, walks by luck, a tiny model.

    python examples/gym_frozen_lake/make_frozen_lake.py [--seed 0] [--out FOLDER]

Nobody here knows the way: the walks to warm up on are those of someone who goes anywhere, and of
these only the ones that came to the goal.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.environments.gyms import TextGym
from trireme.files import write_jsonl

ACTIONS = ("left", "down", "right", "up")
LAKE = {"is_slippery": True, "success_rate": 0.9, "render_mode": "ansi"}
NUM_TRAIN, NUM_TEST, NUM_WALKS = 2000, 200, 200
MAX_STEPS = 20


def walk(source: random.Random) -> list[dict[str, str]] | None:
    """One episode as messages; None where it did not come to the goal."""
    env = TextGym("FrozenLake-v1", seed=source.randrange(10**9), actions=ACTIONS, env_args=LAKE)
    seen, _ = env.reset()
    messages = []
    for _ in range(MAX_STEPS):
        action = source.choice(ACTIONS)
        messages += [
            {"role": "user", "content": seen},
            {"role": "assistant", "content": action},
        ]
        seen, reward, done, _, _ = env.step(action)
        if done:
            return messages if reward else None
    return None


def main() -> None:
    """Training and test share no seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    out = options.out or root / "frozen_lake_assets" / f"seed_{options.seed}"
    source = random.Random(options.seed)
    walks: list[dict] = []
    tries = 0
    while len(walks) < NUM_WALKS:
        tries += 1
        if found := walk(source):
            walks.append({"messages": found})
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "train.jsonl", [{"seed": number} for number in range(NUM_TEST, NUM_TRAIN)])
    write_jsonl(out / "test.jsonl", [{"seed": number} for number in range(NUM_TEST)])
    write_jsonl(out / "walks.jsonl", walks)
    texts = [message["content"] for row in walks for message in row["messages"]]
    make_tiny_model(
        out / "model", texts, seed=options.seed, max_len=512, initializer_range=0.04, largest=-1
    )
    print(f"{len(walks)} of {tries} walks came to the goal; they, the seeds and a model: {out}")


if __name__ == "__main__":
    main()
