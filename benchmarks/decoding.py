"""Decoding: the lean pass against transformers' module in the engine, `generate`, and the floor.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py [--quick] [--rounds 3]

Ways take turns round by round in one process and thread, so that a busy machine slows all of them;
what counts is CPU time, the median of the rounds. `compiled` and `plain` are the lean pass with and
without a C compiler, `module` the engine over transformers' module, the floor the matrix products
of the same tokens. `equal`: 64 prompts of 100 tokens, replies of 128, a Qwen2 of 6M parameters.
`ragged`: 128 prompts for 64 rows, replies of 16 to 240; asked: at least 0.85 of the tokens a second
of equal ones. `demo`: 32 prompts of 29 tokens, 8 samples of 28 each, the demo's model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generation import SHARE_OF_FLOOR
from target import Target, judge
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.engines.engine import Sampling
from trireme.engines.request import Request, make_requests
from trireme.engines.torch.decoder import Decoder
from trireme.engines.torch.shell import load_shell
from trireme.ext.fast_engine.lean import Lean, PlainOps, make_lean

ROWS, RAGGED = 64, 0.85
Work = list[tuple[list[int], int, int]]
"""Prompts, each with how many samples, and how long their replies are."""


def make_model(folder: Path) -> tuple[Path, Path]:
    """The demo's model, and one of 6M parameters."""
    small = make_tiny_model(
        folder / "demo", [row["question"] for row in make_problems(300, seed=0)], seed=0
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(small)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "large")
    tokenizer.save_pretrained(folder / "large")
    return small, folder / "large"


def prompts(count: int, length: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(0)
    return torch.randint(5, 100, (count, length), generator=source).tolist()


def by_decoder(decoder: Decoder, work: Work, rows: int) -> None:
    """All requests, `rows` at a time: one that ends makes room for the next."""
    waiting: list[Request] = []
    for number, (ids, samples, length) in enumerate(work):
        sampling = Sampling(max_tokens=length, n=samples, ignore_eos=True)
        waiting += make_requests(
            ids, sampling, ((number,),), seed=0, room=10**6, max_model_len=512, vocabulary=100,
            ends=[],
        )  # fmt: skip
    while waiting or decoder.active:
        room = rows - len(decoder.active)
        admitted, waiting = waiting[:room], waiting[room:]
        decoder.advance(admitted, steps=8, hurry=lambda: False)


def by_generate(model: Any, work: Work) -> None:
    """One padded batch of equal lengths, with log-probabilities, which are part of the work."""
    ids = torch.tensor([ids for ids, _, _ in work])
    length = work[0][2]
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, num_return_sequences=work[0][1],
        min_new_tokens=length, max_new_tokens=length, output_scores=True,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip


def products(model: Any, work: Work) -> Callable[[], None]:
    """The matrix products of the same tokens: each prompt once, all replies step by step."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    ids, samples, length = work[0]
    rows = len(work) * samples

    def inputs(tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(tokens, m.in_features).to(m.weight.dtype), m.weight.detach())
            for m in layers
        ]

    head = model.get_output_embeddings()
    read = inputs(len(work) * len(ids))[: -1 if layers[-1] is head else None]
    step = inputs(rows)

    @torch.inference_mode()
    def run() -> None:
        for pair in [*read, *(step * length)]:
            torch.nn.functional.linear(*pair)

    return run


def in_turn(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            started = time.process_time()
            way()
            times[name].append(time.process_time() - started)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measured(
    folder: Path, dtype: str, works: dict[str, tuple[Work, int]], rounds: int
) -> dict[tuple[str, str], float]:
    """Tokens a CPU second of each work and way, printed."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    shell = load_shell(folder, device="cpu", dtype=dtype)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    lean = {"compiled": make_lean(shell), "plain": Lean(shell, PlainOps()), "module": None}
    assert lean["compiled"] is not None
    out: dict[tuple[str, str], float] = {}
    for name, (work, rows) in works.items():
        ways: dict[str, Callable[[], object]] = {}
        for way, one in lean.items():
            decoder = Decoder(shell, tokenizer, kv_tokens=2**18, prefix_tokens=0)
            decoder.forward = one
            ways[way] = lambda decoder=decoder, work=work, rows=rows: by_decoder(
                decoder, work, rows
            )
        tokens = sum(samples * length for _, samples, length in work)
        if name != "ragged":
            ways["generate"] = lambda work=work: by_generate(own, work)
            ways["floor"] = products(own, work)
        for way, seconds in in_turn(ways, rounds).items():
            out[name, way] = tokens / seconds
            print(f"{dtype:10}{name:8}{way:10}{tokens / seconds:10,.0f}", flush=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = random.Random(0)
    rows, reply = (4, 8) if options.quick else (ROWS, 128)
    equal: Work = [(ids, 1, reply) for ids in prompts(rows, 100)]
    ragged: Work = [
        (ids, 1, source.randint(reply // 8, 2 * reply - reply // 8))
        for ids in prompts(2 * rows, 100)
    ]
    demo: Work = [(ids, 8, 28) for ids in prompts(2 if options.quick else 32, 29)]
    targets = []
    with tempfile.TemporaryDirectory() as name:
        small, large = make_model(Path(name))
        print(f"{'dtype':10}{'work':8}{'way':10}{'tokens / CPU s':>10}")
        for dtype in ("float32", "bfloat16"):
            works = {"equal": (equal, rows), "ragged": (ragged, rows)}
            found = measured(large, dtype, works, options.rounds)
            share = found["equal", "compiled"] / found["equal", "floor"]
            loss = found["ragged", "compiled"] / found["equal", "compiled"]
            if dtype == "float32":
                targets.append(Target("float32, compiled / floor", share, SHARE_OF_FLOOR))
            else:
                print(f"bfloat16, compiled / floor: {share:.3g}")
            targets.append(Target(f"{dtype}, ragged / equal", loss, RAGGED))
        measured(small, "float32", {"demo": (demo, 256)}, options.rounds)
    return judge(*targets, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
