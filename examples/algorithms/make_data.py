"""Makes the demo's problems and tiny model, and what some algorithms read beside them.

    python examples/algorithms/make_data.py [--seed 0]
    python examples/algorithms/make_data.py --pairs checkpoints/Trireme-examples/gspo_0
    python examples/algorithms/make_data.py --labels checkpoints/Trireme-examples/gspo_0

- `expert.jsonl` for mix: right solutions to problems that the warm-up has not seen.
- `rated.jsonl` for a curriculum: the training problems with two pass rates, that of the pupil who
  wrote the warm-up's solutions (computed from the numbers in it) and that of an expert, 1.
- `pairs.jsonl` for DPO, with --pairs: of each group that a run has tried in its first 20 steps, a
  right and a wrong reply.
- `labelled.jsonl` for KTO, with --labels: every different reply of these, and whether it is right.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trireme.demo.prepare import NUM_SOLVED, assets_folder, prepare
from trireme.demo.problems import SLIP_RATE, SURE_UP_TO
from trireme.files import write_jsonl

NUM_EXPERT, PAIR_STEPS = 300, 20


def pupil_rate(solution: str) -> float:
    """How often the pupil gets all results of a solution right."""
    results = map(int, re.findall(r"= (\d+)", solution))
    return (1 - SLIP_RATE) ** sum(result > SURE_UP_TO for result in results)


def tried(run: Path) -> Iterator[dict[str, Any]]:
    """The replies of a run's first steps, each with its problem as `question`."""
    with (run / "buffer" / "experience_buffer.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["step"] <= PAIR_STEPS:
                question = row["prompt"].removeprefix("<|user|>").partition("<|end|>")[0]
                yield row | {"question": question}


def labelled(run: Path) -> list[dict[str, Any]]:
    """Every different reply of a run's first steps, and whether it is right."""
    rows = {(row["question"], row["response"]): row["reward"] == 1 for row in tried(run)}
    return [
        {"prompt": q, "completion": reply, "label": right} for (q, reply), right in rows.items()
    ]


def pairs(run: Path) -> list[dict[str, str]]:
    """A right and a wrong reply to each problem of which a run's first steps had both."""
    groups: dict[str, dict[float, dict]] = defaultdict(dict)
    for row in tried(run):
        batch, task, *_ = row["eid"].split("/")
        groups[f"{batch}/{task}"].setdefault(row["reward"], row)
    return [
        {
            "prompt": found[1.0]["question"],
            "chosen": found[1.0]["response"],
            "rejected": found[0.0]["response"],
        }
        for found in groups.values()
        if len(found) == 2
    ]


def main() -> None:
    """All of it into one folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=Path, help="the folder of a run")
    parser.add_argument("--labels", type=Path, help="the folder of a run")
    options = parser.parse_args()
    folder = prepare(assets_folder(options.seed), options.seed)
    if options.pairs is not None:
        made = pairs(options.pairs)
        write_jsonl(folder / "pairs.jsonl", made)
        print(f"{len(made)} pairs in {folder}")
    if options.labels is not None:
        replies = labelled(options.labels)
        write_jsonl(folder / "labelled.jsonl", replies)
        right = sum(row["label"] for row in replies)
        print(f"{right} right and {len(replies) - right} wrong replies in {folder}")
    if options.pairs is not None or options.labels is not None:
        return
    train = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rated = [{**row, "pupil_rate": pupil_rate(row["answer"]), "expert_rate": 1.0} for row in train]
    write_jsonl(folder / "expert.jsonl", train[NUM_SOLVED : NUM_SOLVED + NUM_EXPERT])
    write_jsonl(folder / "rated.jsonl", rated)
    print(f"{NUM_EXPERT} solutions and {len(rated)} rated problems in {folder}")


if __name__ == "__main__":
    main()
