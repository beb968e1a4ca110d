"""Data: finds the games in $ALFWORLD_DATA, and writes the data set of their files for the
taskset.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path

from trireme.envs.env import write_splits
from trireme.text import say

HOW = (
    "set it to the folder that holds json_2.1.1 (alfworld-download makes one, and so does "
    "python -m trireme.ext.alfworld.make_games FOLDER)"
)
SPLITS = {"train": "train", "test": "valid_seen"}


def find_games(root: Path, split: str) -> list[Path]:
    """Return every game file of a split, sorted. Raises ValueError if there is none."""
    games = sorted(root.glob(f"json_2.1.*/{split}/*/*/game.tw-pddl"))
    if not games:
        raise ValueError(
            f"ALFWORLD_DATA is {root}: it has no json_2.1.*/{split}/*/*/game.tw-pddl; {HOW}"
        )
    return [game.resolve() for game in games]


def data_folder(folder: str | None) -> Path:
    """Return the given folder, else $ALFWORLD_DATA. Raises ValueError with the remedy."""
    path = folder or os.environ.get("ALFWORLD_DATA")
    if not path:
        raise ValueError(f"ALFWORLD_DATA is not set: {HOW}")
    if not Path(path).is_dir():
        raise ValueError(f"ALFWORLD_DATA is {path}: there is no such folder; {HOW}")
    return Path(path)


def write_dataset(
    root: Path, out: Path, sizes: dict[str, int | None], *, seed: int = 42, test: str = "valid_seen"
) -> dict[str, int]:
    """Write `<split>.jsonl` with one row per game, and `dataset_dict.json`; returns the rows of
    each.

    `sizes`: the number of games of each split, drawn with `seed`; None for all.
    """
    splits = {}
    for name, folder in {**SPLITS, "test": test}.items():
        games = find_games(root, folder)
        wanted = sizes.get(name)
        if wanted is not None and wanted > len(games):
            raise ValueError(
                f"{wanted} games were requested for split {name}, and {root} has {len(games)} in "
                f"{folder}"
            )
        chosen = games if wanted is None else random.Random(seed).sample(games, wanted)
        splits[name] = [{"game_file": str(game), "target": ""} for game in chosen]
    write_splits(out, splits)
    return {name: len(rows) for name, rows in splits.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of examples/grpo_alfworld/get_alfworld_data.py and of
    scripts/data_prepare.
    """
    parser = argparse.ArgumentParser(description="Writes the data set of the ALFWorld games.")
    parser.add_argument("--game_data_path", help="default: $ALFWORLD_DATA")
    parser.add_argument("--local_dir", default="examples/grpo_alfworld/alfworld_data")
    parser.add_argument("--train_size", type=int)
    parser.add_argument("--test_size", type=int)
    parser.add_argument("--test_split", default="valid_seen", help="or valid_unseen")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(arguments)
    out = Path(options.local_dir)
    sizes = {"train": options.train_size, "test": options.test_size}
    try:
        root = data_folder(options.game_data_path)
        written = write_dataset(root, out, sizes, seed=options.seed, test=options.test_split)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    say(", ".join(f"{size} {name} games" for name, size in written.items()), "in", out)


if __name__ == "__main__":
    main()
