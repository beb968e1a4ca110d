"""Generation: the embedded engine against transformers, vLLM and the floor, on the same work.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--vllm PYTHON] [--quick]

`long`: 64 prompts of 100 tokens, 128 tokens each, in float32 and bfloat16. Asked: 1.2 times as fast
as vLLM (`--vllm` names the Python of an environment that has its CPU build; without one that is not
measured) and 60 % of the floor: the matrix products of the same tokens alone. `equal` and `ragged`:
32 prompts with 8 samples, each of 48 tokens, or of 8 to 64; a padded batch of `generate` goes on
until its longest sample has ended. Asked: as fast on equal work, 1.5 times on ragged work. Exits 1
where a number is missed. The model is the demo's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from target import Target, judge
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.make import EngineSpec
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.linear import linear
from trireme.engines.torch.shell import TorchSettings
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.engine_host import EngineHost, start_all, stop_all

PROMPTS, SAMPLES, ROUNDS = 32, 8, 3
TARGETS = {"equal": 1.0, "ragged": 1.5}
LONG, PROMPT, REPLY = 64, 100, 128
AGAINST_VLLM, SHARE_OF_FLOOR = 1.2, 0.6


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


def floor(model: Any, rows: int, prompt: int, reply: int) -> float:
    """Seconds of the matrix products of so many tokens, by the quickest library: prompts at once,
    replies step by step.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings()

    def once(tokens: int, sampled: int, times: int) -> float:
        inputs = {m: torch.randn(tokens, m.in_features, dtype=m.weight.dtype) for m in layers}
        inputs[head] = inputs[head][:sampled]
        started = time.perf_counter()
        for _ in range(times):
            for layer, values in inputs.items():
                linear(values, layer.weight)
        return time.perf_counter() - started

    with torch.no_grad():
        once(rows, rows, 2)  # warms up
        return once(rows * prompt, rows, 1) + once(rows, rows, reply)


async def rate(engine: Any, prompts: list[list[int]], reply: int) -> float:
    """Tokens a second of one reply to each prompt; the first round warms up."""
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(ids, Sampling(max_tokens=reply, ignore_eos=True), key=(0, i, 0))
                for i, ids in enumerate(prompts)
            )
        )
        times.append(time.perf_counter() - started)
    return len(prompts) * reply / min(times[1:])


async def by_vllm(folder: Path, python: str, dtype: str, prompts: Any, reply: int) -> float:
    """The same work by a vLLM engine in a process of its own."""
    host = EngineHost(
        EngineSpec(str(folder), 256, kind="vllm", dtype=dtype),
        name="vllm",
        log_file=folder / "vllm.log",
        python=python,
    )
    await start_all([host])
    engine = RemoteEngine([host.url], api_key=host.key)
    try:
        return await rate(engine, prompts, reply)
    finally:
        await engine.close()
        await stop_all([host])


async def long_work(folder: Path, options: argparse.Namespace) -> list[Target]:
    """Both dtypes against vLLM and the floor."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows, reply = (4, 8) if options.quick else (LONG, REPLY)
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, len(tokenizer), (rows, PROMPT), generator=source).tolist()
    targets = []
    print(f"{'dtype':10}{'engine tokens/s':>18}{'vLLM tokens/s':>18}{'floor tokens/s':>18}")
    for dtype in ("float32", "bfloat16"):
        device = Device()
        engine = TorchEngine(
            str(folder),
            tokenizer=tokenizer,
            device=device,
            barrier=None,
            settings=TorchSettings(seed=0, max_model_len=256, max_rows=rows, dtype=dtype),
        )
        ours = await rate(engine, prompts, reply)
        await engine.close()
        device.close()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        least = rows * reply / floor(model, rows, PROMPT, reply)
        theirs = None
        if options.vllm:
            theirs = await by_vllm(folder, options.vllm, dtype, prompts, reply)
        shown = f"{theirs:,.0f}" if theirs else "-"
        print(f"{dtype:10}{ours:18,.0f}{shown:>18}{least:18,.0f}")
        ratio = ours / theirs if theirs else None
        targets += [
            Target(f"{dtype}, engine / vLLM", ratio, AGAINST_VLLM),
            Target(f"{dtype}, engine / floor", ours / least, SHARE_OF_FLOOR),
        ]
    return targets


async def short_work(folder: Path, quick: bool) -> list[Target]:
    """Many samples of short replies, against a padded batch."""
    texts = [row["question"] for row in make_problems(PROMPTS, seed=0)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    pad = model.generation_config.pad_token_id = tokenizer.pad_token_id
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        ))
        for text in texts[: 2 if quick else PROMPTS]
    ]  # fmt: skip
    device = Device()
    engine = TorchEngine(
        str(folder),
        tokenizer=tokenizer,
        device=device,
        barrier=None,
        settings=TorchSettings(
            seed=0, max_model_len=256, max_rows=PROMPTS * SAMPLES, dtype="float32"
        ),
    )
    targets = []
    print(f"{'work':10}{'engine tokens/s':>18}{'generate tokens/s':>20}")
    for kind, asked in TARGETS.items():
        wanted, speeds = lengths(kind)[: len(prompts)], []
        for run in ("engine", "generate"):
            times = []
            for _ in range(2 if quick else ROUNDS + 1):  # the first one warms up
                started = time.perf_counter()
                if run == "engine":
                    tokens = await by_engine(engine, prompts, wanted)
                else:
                    tokens = by_transformers(model, pad, prompts, wanted)
                times.append(time.perf_counter() - started)
            speeds.append(tokens / min(times[1:]))
        print(f"{kind:10}{speeds[0]:18,.0f}{speeds[1]:20,.0f}")
        targets.append(Target(f"{kind} work, engine / generate", speeds[0] / speeds[1], asked))
    await engine.close()
    device.close()
    return targets


def main() -> int:
    """Run in a folder that is thrown away; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", help="Python of an environment that has vLLM")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder, [row["question"] for row in make_problems(PROMPTS, seed=0)], seed=0)
        targets = asyncio.run(long_work(folder, options))
        targets += asyncio.run(short_work(folder, options.quick))
    return judge(*targets, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
