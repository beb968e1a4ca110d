"""Data: the data set of sessions for the taskset: a row is the number of a goal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from trireme.files import write_text


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of examples/grpo_webshop/get_webshop_data.py and of scripts/data_prepare."""
    parser = argparse.ArgumentParser(description="Writes the data set of WebShop sessions.")
    parser.add_argument("--local_dir", default="examples/grpo_webshop/webshop_data")
    parser.add_argument("--train_size", type=int, default=4096)
    parser.add_argument("--test_size", type=int, default=100)
    options = parser.parse_args(arguments)
    out = Path(options.local_dir)
    out.mkdir(parents=True, exist_ok=True)
    first = {"train": 0, "test": options.train_size}
    sizes = {"train": options.train_size, "test": options.test_size}
    for name, size in sizes.items():
        rows = [{"task_id": first[name] + i, "target": ""} for i in range(size)]
        write_text(out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    splits = {name: {"name": name, "num_examples": size} for name, size in sizes.items()}
    write_text(out / "dataset_dict.json", json.dumps({"splits": splits}))
    print(f"{sizes['train']} train sessions, {sizes['test']} test sessions in {out}")


if __name__ == "__main__":
    main()
