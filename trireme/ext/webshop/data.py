"""Data: the data set of sessions for the taskset: a row is the number of a goal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trireme.envs.env import write_splits
from trireme.text import say


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of examples/grpo_webshop/get_webshop_data.py and of scripts/data_prepare."""
    parser = argparse.ArgumentParser(description="Writes the data set of WebShop sessions.")
    parser.add_argument("--local_dir", default="examples/grpo_webshop/webshop_data")
    parser.add_argument("--train_size", type=int, default=4096)
    parser.add_argument("--test_size", type=int, default=100)
    options = parser.parse_args(arguments)
    out = Path(options.local_dir)
    rows = [{"task_id": i, "target": ""} for i in range(options.train_size + options.test_size)]
    train, test = rows[: options.train_size], rows[options.train_size :]
    write_splits(out, {"train": train, "test": test})
    say(f"{len(train)} train sessions, {len(test)} test sessions in {out}")


if __name__ == "__main__":
    main()
