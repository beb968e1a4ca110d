"""Generation: the embedded engine against `model.generate` of transformers, on the same work.

    OMP_NUM_THREADS=1 python benchmarks/generation.py

32 prompts with 8 samples each, on a tiny model. `equal`: every sample has 48 tokens. `ragged`: 8 to
64 tokens; a padded batch goes on until its longest sample has ended. The target: at least as fast
on equal work, 1.5 times as fast on ragged work. Exits 1 when it is missed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine

PROMPTS, SAMPLES, ROUNDS = 32, 8, 3
TARGETS = {"equal": 1.0, "ragged": 1.5}


def lengths(kind: str) -> list[int]:
    """Tokens to sample for each prompt; its samples have the same."""
    source = random.Random(0)
    return [48 if kind == "equal" else source.randint(8, 64) for _ in range(PROMPTS)]


async def by_engine(engine: TorchEngine, prompts: list[list[int]], wanted: list[int]) -> int:
    """Sample with the embedded engine; the number of tokens."""
    asked = [
        engine.generate(ids, Sampling(max_tokens=n, n=SAMPLES, ignore_eos=True), key=(0, i, 0))
        for i, (ids, n) in enumerate(zip(prompts, wanted, strict=True))
    ]
    return sum(len(c.ids) for found in await asyncio.gather(*asked) for c in found)


def by_transformers(model: Any, pad: int, prompts: list[list[int]], wanted: list[int]) -> int:
    """Sample with one padded batch; only the tokens that were wanted count."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        num_return_sequences=SAMPLES,
        min_new_tokens=max(wanted),
        max_new_tokens=max(wanted),
        output_scores=True,  # log-probabilities are part of the work
        return_dict_in_generate=True,
    )
    return sum(wanted) * SAMPLES


async def compare(folder: Path) -> bool:
    """Print both speeds and their ratio; whether the targets are met."""
    texts = [row["question"] for row in make_problems(PROMPTS, seed=0)]
    make_tiny_model(folder, texts, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    pad = model.generation_config.pad_token_id = tokenizer.pad_token_id
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        ))
        for text in texts
    ]  # fmt: skip
    device = Device()
    engine = TorchEngine(
        str(folder), tokenizer=tokenizer, device=device, seed=0, max_model_len=256,
        max_rows=PROMPTS * SAMPLES, gate=None, dtype="float32",
    )  # fmt: skip
    met = True
    print(f"{'work':8}{'engine tokens/s':>18}{'generate tokens/s':>20}{'ratio':>8}{'target':>8}")
    for kind, target in TARGETS.items():
        wanted, speeds = lengths(kind), []
        for run in ("engine", "generate"):
            times = []
            for _ in range(ROUNDS + 1):  # the first one warms up
                started = time.perf_counter()
                if run == "engine":
                    tokens = await by_engine(engine, prompts, wanted)
                else:
                    tokens = by_transformers(model, pad, prompts, wanted)
                times.append(time.perf_counter() - started)
            speeds.append(tokens / min(times[1:]))
        ratio = speeds[0] / speeds[1]
        met = met and ratio >= target
        print(f"{kind:8}{speeds[0]:18,.0f}{speeds[1]:20,.0f}{ratio:8.2f}{target:8.2f}")
    device.close()
    return met


def main() -> None:
    """Run in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not asyncio.run(compare(Path(folder))))


if __name__ == "__main__":
    main()
