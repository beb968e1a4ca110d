"""Writes what math_tips.yaml reads: problems, a pupil's first and second tries, a tiny model.

    python examples/multi_turn_scheduler/make_retries.py [--seed 0] [--out FOLDER]

The pupil is the demo's, who often counts one short. Where the first try is wrong the tip follows,
as a new turn in one half of the rows and inside the reply in the other, and a second try, which is
no better.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from trireme.config.variables import variable
from trireme.demo.prepare import INITIALIZER_RANGE, LARGEST_NUMBER, LARGEST_RESULT
from trireme.demo.problems import make_problems, with_slips
from trireme.demo.tiny_model import make_tiny_model
from trireme.ext.multi_turn.math_tips import DOUBT, RECHECK
from trireme.files import write_jsonl

NUM_TRAIN, NUM_TEST, NUM_SHOWN = 2000, 500, 400


def attempt(answer: str, pupil: random.Random) -> tuple[str, str, bool]:
    """Thinking, result, and whether it is right."""
    *lines, last = with_slips(answer, pupil).split("\n")
    result = last.removeprefix("#### ")
    return "\n".join(lines), result, result == answer.rpartition("#### ")[2]


def reply(thinking: str, result: str) -> str:
    """A reply as the model is to write it."""
    return f"<think>\n{thinking}\n</think><answer> {result}</answer>"


def shown(row: dict[str, str], pupil: random.Random, *, inside: bool) -> list[dict[str, str]]:
    """A conversation with a second try where the first is wrong."""
    messages = [{"role": "user", "content": row["question"]}]
    thinking, result, right = attempt(row["answer"], pupil)
    if right:
        return [*messages, {"role": "assistant", "content": reply(thinking, result)}]
    again, other, _ = attempt(row["answer"], pupil)
    if inside:
        text = reply(f"{thinking}\n{DOUBT}\n{again}", other)
        return [*messages, {"role": "assistant", "content": text}]
    return [
        *messages,
        {"role": "assistant", "content": reply(thinking, result)},
        {"role": "user", "content": RECHECK},
        {"role": "assistant", "content": reply(again, other)},
    ]


def main() -> None:
    """Training and test problems differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    out = options.out or root / "retry_assets" / f"seed_{options.seed}"
    problems = make_problems(
        NUM_TRAIN + NUM_TEST, seed=options.seed, number=LARGEST_NUMBER, largest=LARGEST_RESULT
    )
    pupil = random.Random(options.seed + 1)
    rows = [
        {"question": p["question"], "solution": p["answer"].rpartition("#### ")[2]}
        for p in problems
    ]
    tries = [
        {"messages": shown(row, pupil, inside=place % 2 == 1)}
        for place, row in enumerate(problems[NUM_TEST : NUM_TEST + NUM_SHOWN])
    ]
    out.mkdir(parents=True, exist_ok=True)
    for name, data in (("test", rows[:NUM_TEST]), ("train", rows[NUM_TEST:]), ("tries", tries)):
        write_jsonl(out / f"{name}.jsonl", data)
    texts = [p["question"] + p["answer"] for p in problems] + [RECHECK, f"\n{DOUBT}\n"]
    texts += [message["content"] for row in tries for message in row["messages"]]
    make_tiny_model(
        out / "model", texts, seed=options.seed, max_len=512, initializer_range=INITIALIZER_RANGE
    )
    print(f"{NUM_TRAIN} problems to train on, {NUM_TEST} to test on, {len(tries)} tries in {out}")


if __name__ == "__main__":
    main()
