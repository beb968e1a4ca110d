"""Makes tasks for learn.yaml, 300 conversations with tools to imitate, and a tiny model.

    python examples/agents/make_tasks.py [--seed 0]

Whoever led the conversations often took the wrong tool. Training and test share no task.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trireme.config.variables import variable
from trireme.demo.tiny_model import make_tiny_model
from trireme.files import write_jsonl

NUM_TRAIN, NUM_TEST, NUM_SOLVED = 1000, 200, 300
MISTAKE_RATE = 0.6
TOOLS = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__}
STORIES = {
    "{who} has {a} {what} and finds {b}. How many now?": "add",
    "{who} has {a} {what} and {b} more come. How many now?": "add",
    "{who} has {a} {what} and loses {b}. How many now?": "subtract",
    "{who} has {a} {what} and eats {b}. How many now?": "subtract",
    "{who} has {a} bags of {b} {what}. How many in all?": "multiply",
    "{who} buys {b} {what} on each of {a} days. How many in all?": "multiply",
}
WHO = ("Ann", "Ben", "Eve", "Tom", "Zoe")
WHAT = ("apples", "pears", "plums", "nuts")
INSTRUCTIONS = "Use a tool."
PIECE = r"<\|?/?\w+\|?>| ?[A-Za-z]+| ?[0-9]|[^\w\s]|\s"
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}"
    "{%- if loop.first and tools %}{% for t in tools %}{{- ' ' + t.function.name }}{% endfor %}"
    "{%- endif %}{{- '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)


def tasks() -> list[dict]:
    """Every story with every two numbers from 2 to 9."""
    numbers = range(2, 10)
    rows = []
    for (story, tool), who, what, a, b in itertools.product(
        STORIES.items(), WHO, WHAT, numbers, numbers
    ):
        if tool != "subtract" or a > b:
            question = story.format(who=who, what=what, a=a, b=b)
            rows.append(
                {"question": question, "answer": str(TOOLS[tool](a, b)), "use": [tool, a, b]}
            )
    return rows


def conversation(row: dict, tool: str) -> list[dict]:
    """One that ends with what the tool has said."""
    _, a, b = row["use"]
    call = json.dumps({"name": tool, "arguments": {"a": a, "b": b}})
    result = str(TOOLS[tool](a, b))
    return [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"It is {result}."},
    ]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Words, signs and single digits, each with the space before it."""
    special = ["<|pad|>", "<|unknown|>", "<|end|>", *(f"<|{role}|>" for role in ROLES)]
    split = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    pieces |= {f"{space}{digit}" for space in ("", " ") for digit in range(10)}
    vocabulary = [*special, *sorted(pieces - set(special))]
    inner = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<|unknown|>")
    )
    inner.pre_tokenizer, inner.decoder = split, decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        unk_token="<|unknown|>",
        eos_token="<|end|>",
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    source = random.Random(seed)
    rows = tasks()
    source.shuffle(rows)
    test, train = rows[:NUM_TEST], rows[NUM_TEST : NUM_TEST + NUM_TRAIN]
    known = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    solved = []
    for row in train[:NUM_SOLVED]:
        others = [name for name in TOOLS if name != row["use"][0]]
        wrong = source.random() < MISTAKE_RATE
        tool = source.choice(others) if wrong else row["use"][0]
        solved.append({"messages": conversation(row, tool), "tools": known})
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    folder = root / "agents_assets" / f"seed_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (("test", test), ("train", train), ("solved", solved)):
        write_jsonl(folder / f"{name}.jsonl", data)
    texts = [m["content"] for row in rows for tool in TOOLS for m in conversation(row, tool)]
    tokenizer = make_tokenizer([*texts, *(f" {name}" for name in TOOLS)])
    make_tiny_model(folder / "model", tokenizer, seed=seed, initializer_range=0.04)
    print(f"{len(train)} tasks, {len(test)} for evaluation, {len(solved)} conversations: {folder}")


if __name__ == "__main__":
    main()
