"""Against peers: the same work by Trireme, TRL, transformers' `generate` and vLLM's CPU build.

    make bench-peers                 # their environments, then all workloads
    python benchmarks/against_peers.py --trl .venv-peers/bin/python --vllm .venv-vllm/bin/python

Train steps, same model, prompts, lengths, sampling and reward, one optimizer step a batch:
`demo` (the warmed-up demo, 32 x 8), `long_prompts` (10M parameters, prompts of 400 tokens,
8 x 64-token replies), `ragged` (the same model, replies of 50 to 400 tokens), `episodes` of 10 and
30 steps (one sample an episode against one sample a step). Then `accuracy`: 30 steps of the demo on
three seeds, the same model after the same SFT, the share of right replies as the samplers drew
them; and tokens a second of generation in float32 and bfloat16 beside the floor, the matrix
products of the same tokens alone.

Every measurement is a process of its own; peers take turns round by round, and the median of all
rounds' steps counts. Each peer is first tried with every number of threads (`--threads`), and
measured with the one that suits it best. A peer without an environment is left out, and the table
says so. Exits 1 where a target is missed. How each peer is set is said in `peers.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from target import Target, judge

from trireme.demo.problems import make_problems
from trireme.files import write_text

HERE = Path(__file__).parent
STEP_TARGETS = {
    "demo": 3.0, "long_prompts": 8.0, "ragged": 3.0, "episodes_10": 10.0, "episodes_30": 10.0,
    "smollm2": 2.5, "half_billion": 2.5,
}  # fmt: skip
LARGE = ("smollm2", "half_billion")
"""Models of a size that people use on a CPU."""
AGAINST_VLLM, SHARE_OF_FLOOR, RAGGED_SHARE, COST_GROWTH = 1.2, 0.6, 0.85, 1.5
ACCURACY, SEEDS, ACCURACY_STEPS, ACCURACY_GAP = "accuracy", (0, 1, 2), 30, 0.03
"""The gap was chosen before it was measured: of one trainer, means over three seeds differ by about
as much."""
TIMEOUT = 1800.0
SMOLLM2 = HERE.parent / "examples" / "smollm2"
"""What `make smollm2` has made; its workloads are left out without it."""


@dataclass
class Measured:
    """What one peer took for one piece of work, over all rounds."""

    threads: int
    values: list[float] = field(default_factory=list)
    """Seconds a step, or tokens a second."""
    peak_mib: float = 0.0
    rewards: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass
class Peer:
    """A way to do a piece of work: which function of `peers.py`, by which Python."""

    name: str
    function: str
    python: str | None
    changes: dict[str, Any] = field(default_factory=dict)


def words(count: int, seed: int) -> str:
    """So many tokens of the demo's vocabulary."""
    source = random.Random(seed)
    return " ".join(source.choice(("apples", "books", "cards", "coins")) for _ in range(count))


def make_model(folder: Path, width: int, layers: int, max_len: int) -> str:
    """A random model whose vocabulary is the demo's and the episodes'; the path of its folder."""
    from peers import OBSERVATION

    from trireme.demo.tiny_model import make_tiny_model

    texts = [row["question"] + row["answer"] for row in make_problems(300, seed=0)]
    made = make_tiny_model(
        folder, [*texts, OBSERVATION, words(50, 0)], seed=0, width=width, layers=layers,
        max_len=max_len,
    )  # fmt: skip
    return str(made)


def make_half_billion(folder: Path, *, quick: bool) -> str:
    """A random Qwen3 of half a billion weights, in Qwen2.5-0.5B's shape and with as many words; the
    path of its folder. `quick`: one of a million.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from trireme.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer([words(50, 0)], largest=99 if quick else 151_900)
    end, pad = (tokenizer.vocab[token] for token in ("<|end|>", "<|pad|>"))
    width, layers = (64, 1) if quick else (896, 24)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width * 38 // 7,
        num_hidden_layers=layers, num_attention_heads=14, num_key_value_heads=2,
        head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
        eos_token_id=end, pad_token_id=pad,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def warmed_up(folder: Path, steps: int | None) -> tuple[str, list[dict[str, str]]]:
    """The demo's model after its supervised stage, and the demo's problems with their results."""
    from trireme.config.load import load_config
    from trireme.demo.prepare import demo_config
    from trireme.launch.check import checked
    from trireme.launch.run import run_stages
    from trireme.launch.stop import Stop
    from trireme.monitor.console import Console

    os.environ["TRIREME_CHECKPOINT_ROOT_DIR"] = str(folder)
    more = [f"stages.0.buffer.total_steps={steps}"] if steps else []
    plans = checked(load_config(demo_config([]), more)).plans
    summary = run_stages(plans[:1], console=Console(), stop=Stop())
    assert summary.model_dir is not None
    lines = (folder / "arithmetic_assets" / "seed_0" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    problems = [
        {"question": r["question"], "answer": r["answer"].rpartition("####")[2].strip()}
        for r in rows
    ]
    return str(summary.model_dir), problems


def step_work(folder: Path, kind: str, quick: bool) -> dict[str, Any]:
    """One workload of train steps, as `peers.py` reads it."""
    work = {"folder": str(folder), "group": 8, "min_tokens": 0, "episode": 0, "seed": 0,
            "sample_a_step": False, "steps": 3, "kind": kind}  # fmt: skip
    if quick:
        work |= {"group": 2, "steps": 2}
    if kind == "demo":
        model, rows = warmed_up(folder, 2 if quick else None)
        tasks, steps = (2, 2) if quick else (32, 8)
        return work | {"model": model, "rows": rows[: tasks * steps], "tasks": tasks,
                       "steps": steps, "max_tokens": 60, "max_len": 160}  # fmt: skip
    if kind == "smollm2":
        things = (SMOLLM2 / "things.txt").read_text().split("\n")
        tasks = 1 if quick else 4
        rows = [{"question": f"Describe the word '{thing}' in exactly six words.", "answer": ""}
                for thing in things[: tasks * work["steps"]]]  # fmt: skip
        length = 8 if quick else 64
        return work | {"model": str(SMOLLM2 / "model"), "rows": rows, "tasks": tasks,
                       "group": min(4, work["group"]), "min_tokens": length, "max_tokens": length,
                       "max_len": 144}  # fmt: skip
    if kind == "half_billion":
        model = make_half_billion(folder / "model", quick=quick)
        tasks, length = (1, 8) if quick else (4, 64)
        rows = [{"question": words(100, n), "answer": ""} for n in range(tasks * work["steps"])]
        return work | {"model": model, "rows": rows, "tasks": tasks, "group": min(4, work["group"]),
                       "min_tokens": length, "max_tokens": length, "max_len": 256}  # fmt: skip
    if kind.startswith("episodes"):
        turns, tasks = (2, 1) if quick else (int(kind.rpartition("_")[2]), 2)
        model = make_model(folder / "model", 128, 2, 2048)
        rows = [{"question": words(20, n), "answer": ""} for n in range(tasks * work["steps"])]
        return work | {"model": model, "rows": rows, "tasks": tasks, "max_len": 2048,
                       "min_tokens": 16, "max_tokens": 16, "episode": turns}  # fmt: skip
    width, layers = (64, 1) if quick else (384, 5)
    model = make_model(folder / "model", width, layers, 1024)
    tasks = 1 if quick else 8 if kind == "long_prompts" else 4
    prompt = 400 if kind == "long_prompts" else 100
    least, most = (64, 64) if kind == "long_prompts" else (50, 400)
    if quick:
        prompt, least, most = 40, 8, 8
    rows = [{"question": words(prompt, n), "answer": ""} for n in range(tasks * work["steps"])]
    return work | {"model": model, "rows": rows, "tasks": tasks, "min_tokens": least,
                   "max_tokens": most, "max_len": 1024}  # fmt: skip


def as_samples_a_step(work: dict[str, Any]) -> dict[str, Any]:
    """The same episodes for a trainer that knows prompts and replies alone: every step of them is a
    prompt of its own, with all that was said before it.
    """
    rows = []
    for number, row in enumerate(work["rows"]):
        said = [words(work["max_tokens"], 1000 * number + n) for n in range(work["episode"])]
        rows += [row | {"replies": said[:turn]} for turn in range(work["episode"])]
    return {"rows": rows, "tasks": work["tasks"] * work["episode"], "episode": 0}


def generation_work(folder: Path, kind: str, options: Any) -> dict[str, Any]:
    """64 prompts of 100 tokens and 128 sampled ones each; or 28 to 228, with the same sum. SmolLM2:
    16 prompts, 64 sampled tokens each; half a billion weights: 8 prompts.
    """
    from transformers import AutoConfig

    dtype, ragged = kind.rpartition("_")[2], kind.startswith("ragged")
    if kind.startswith("smollm2"):
        model = str(SMOLLM2 / "model")
        count, reply = (2, 4) if options.quick else (16, 64)
    elif kind.startswith("half_billion"):
        model = make_half_billion(folder / "model", quick=options.quick)
        count, reply = (2, 4) if options.quick else (8, 64)
    else:
        size = (128, 1) if options.quick else (256, 7)
        model = make_model(folder / "model", *size, 512)
        count, reply = (4, 8) if options.quick else (64, 128)
    source = random.Random(0)
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    prompts = [[source.randrange(6, vocabulary) for _ in range(100)] for _ in range(count)]
    spread = 0 if not ragged else reply * 25 // 32
    lengths = [reply + (n * 2 * spread) // (count - 1) - spread for n in range(count)]
    return {"folder": str(folder), "model": model, "dtype": dtype, "prompts": prompts,
            "lengths": lengths, "max_len": 512, "rounds": 1 if options.quick else 2}  # fmt: skip


def run_peer(peer: Peer, work: dict[str, Any], threads: int) -> dict[str, Any]:
    """One process of one peer. Raises RuntimeError with its last lines where it fails."""
    assert peer.python is not None
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "work.json"
        path.write_text(json.dumps(work | peer.changes | {"folder": name}))
        done = subprocess.run(
            [peer.python, str(HERE / "peers.py"), peer.function, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
                 "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{peer.name} failed with exit code {done.returncode}:\n{tail}")
    return json.loads(done.stdout.splitlines()[-1])


def in_turn(
    peers: Sequence[Peer], work: dict[str, Any], options: Any, key: str
) -> dict[str, Measured]:
    """Rounds of all peers in turn, each with the number of threads that was its best."""
    better = min if key == "seconds" else max
    measured: dict[str, Measured] = {}
    floor = Measured(1)

    def one(peer: Peer, threads: int, number: int) -> Measured:
        found = run_peer(peer, work, threads)
        now = Measured(threads, found[key], found["peak_mib"], found.get("reward", []))
        floor.values += found.get("floor", []) if threads == 1 else []
        told = f"  round {number}, {peer.name}, threads {threads}: {now.median:.4g} {key}"
        print(told, file=sys.stderr, flush=True)
        return now

    for number in range(1, options.rounds + 1):
        for peer in (peer for peer in peers if peer.python is not None):
            if number == 1:
                tried = [one(peer, threads, number) for threads in options.threads]
                measured[peer.name] = better(tried, key=lambda now: now.median)
                continue
            before = measured[peer.name]
            now = one(peer, before.threads, number)
            before.values += now.values
            before.rewards += now.rewards
            before.peak_mib = max(before.peak_mib, now.peak_mib)
    if floor.values:
        measured["floor"] = floor
    return measured


Table = dict[str, dict[str, Measured]]


def _lacks_model(kind: str) -> bool:
    """Return whether a workload needs SmolLM2 and it is not there, and say so."""
    lacks = kind.startswith("smollm2") and not (SMOLLM2 / "model" / "config.json").exists()
    if lacks:
        print(f"{kind}: left out, since there is no model (make smollm2)")
    return lacks


def steps_table(options: Any) -> Table:
    """Seconds a step of every chosen workload and peer."""
    table: Table = {}
    for kind in STEP_TARGETS:
        if (options.only and kind not in options.only) or _lacks_model(kind):
            continue
        print(kind, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as name:
            work = step_work(Path(name), kind, options.quick)
            peers = [Peer("Trireme", "trireme", sys.executable)]
            plain: dict[str, Any] = {}
            if work["episode"]:
                plain = as_samples_a_step(work)
                changes = {"sample_a_step": True}
                peers.append(Peer("Trireme, a sample a step", "trireme", sys.executable, changes))
            peers.append(Peer("TRL", "trl", options.trl, plain))
            table[kind] = in_turn(peers, work, options, "seconds")
    return table


def accuracy_table(options: Any) -> Table:
    """The share of right replies of each step, by Trireme and by TRL, over the seeds."""
    if options.only and ACCURACY not in options.only:
        return {}
    print(ACCURACY, file=sys.stderr, flush=True)
    row: dict[str, Measured] = {}
    peers = [Peer("Trireme", "trireme", sys.executable), Peer("TRL", "trl", options.trl)]
    threads = max(options.threads)
    with tempfile.TemporaryDirectory() as name:
        model, rows = warmed_up(Path(name), 2 if options.quick else None)
        tasks, steps, group = (2, 2, 2) if options.quick else (32, ACCURACY_STEPS, 8)
        work = {"model": model, "rows": rows[: tasks * steps], "tasks": tasks, "steps": steps,
                "group": group, "max_tokens": 60, "max_len": 160, "min_tokens": 0, "episode": 0,
                "sample_a_step": False}  # fmt: skip
        for seed in SEEDS[:1] if options.quick else SEEDS:
            for peer in (peer for peer in peers if peer.python is not None):
                found = run_peer(peer, work | {"seed": seed}, threads)
                all_ = row.setdefault(peer.name, Measured(threads))
                all_.rewards += found["reward"]
                all_.values.append(statistics.fmean(found["reward"]))
                all_.peak_mib = max(all_.peak_mib, found["peak_mib"])
                told = f"  seed {seed}, {peer.name}: {all_.values[-1]:.4f} of the replies right"
                print(told, file=sys.stderr, flush=True)
    return {ACCURACY: row}


def generation_table(options: Any) -> Table:
    """Tokens a second of every engine, and the floor, in both dtypes and for ragged lengths."""
    table: Table = {}
    large = (f"{kind}_{dtype}" for kind in LARGE for dtype in ("float32", "bfloat16"))
    for kind in ("float32", "bfloat16", "ragged_float32", *large):
        if (options.only and f"generate_{kind}" not in options.only) or _lacks_model(kind):
            continue
        print(f"generate_{kind}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as name:
            work = generation_work(Path(name), kind, options)
            peers = [
                Peer("Trireme", "engine", sys.executable),
                Peer("transformers", "transformers", sys.executable),
                Peer("vLLM", "vllm", options.vllm),
            ]
            table[f"generate_{kind}"] = in_turn(peers, work, options, "tokens_per_s")
    return table


def targets_of(table: Table) -> list[Target]:
    """What was asked, and what was reached; None where a peer was not measured."""

    def median(kind: str, name: str) -> float | None:
        return table[kind][name].median if kind in table and name in table[kind] else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    targets = [
        Target(f"{kind}, TRL's seconds / Trireme's",
               ratio(median(kind, "TRL"), median(kind, "Trireme")), asked)
        for kind, asked in STEP_TARGETS.items() if kind in table
    ]  # fmt: skip
    if "episodes_10" in table and "episodes_30" in table:
        growth = ratio(median("episodes_30", "Trireme"), median("episodes_10", "Trireme"))
        each = growth / 3 if growth else None
        name = "a token's cost in episodes of 30 steps / of 10"
        targets.append(Target(name, each, COST_GROWTH, at_most=True))
    if ACCURACY in table:
        means = [statistics.fmean(one.values) for one in table[ACCURACY].values()]
        gap = abs(means[0] - means[1]) if len(means) == 2 else None
        over = f"over {ACCURACY_STEPS} steps and {len(SEEDS)} seeds"
        name = f"accuracy {over}: Trireme's and TRL's apart"
        targets.append(Target(name, gap, ACCURACY_GAP, at_most=True))
    for kind in LARGE:
        if "TRL" in table.get(kind, {}):
            share = table[kind]["Trireme"].peak_mib / table[kind]["TRL"].peak_mib
            targets.append(Target(f"{kind}, peak memory / TRL's", share, 1.0, at_most=True))
    large = [f"generate_{kind}_float32" for kind in LARGE]
    for kind in ("generate_float32", "generate_bfloat16", *large):
        ours = median(kind, "Trireme")
        if kind in table:
            name = f"{kind}, Trireme / vLLM"
            asked = 1.0 if kind in large else AGAINST_VLLM
            targets.append(Target(name, ratio(ours, median(kind, "vLLM")), asked))
    if "generate_float32" in table:
        ours = median("generate_float32", "Trireme")
        share = ratio(ours, median("generate_float32", "floor"))
        targets.append(Target("generate_float32, Trireme / floor", share, SHARE_OF_FLOOR))
        share = ratio(median("generate_ragged_float32", "Trireme"), ours)
        targets.append(Target("ragged lengths / equal lengths", share, RAGGED_SHARE))
    return targets


def shown(table: Table) -> str:
    """The figures as a table of Markdown, best peer and floor beside them."""
    columns = ("work", "who", "threads", "median", "lowest", "highest", "Trireme / it",
               "of the floor", "peak memory")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|-" * len(columns) + "|"]
    for kind, row in table.items():
        rate = kind.startswith("generate") or kind == ACCURACY
        floor = row["floor"].median if "floor" in row else None
        for name, one in row.items():
            middle, ours = one.median, row["Trireme"].median
            times = ours / middle if rate else middle / ours
            unit = "right" if kind == ACCURACY else "tokens/s" if rate else "s a step"
            figures = [f"{value:,.0f}" if rate and kind != ACCURACY else f"{value:.3g}"
                       for value in (middle, min(one.values), max(one.values))]  # fmt: skip
            share = f"{middle / floor:.0%}" if floor else ""
            peak = f"{one.peak_mib / 1024:.1f} GiB" if one.peak_mib else ""
            lines.append(
                f"| {kind} | {name} | {one.threads} | {figures[0]} {unit} | {figures[1]} | "
                f"{figures[2]} | {times:.2f} | {share} | {peak} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Measure, print one table, write JSON; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl", help="Python of an environment that has TRL (make bench-peers)")
    parser.add_argument("--vllm", default=os.environ.get("TRIREME_VLLM_PYTHON"),
                        help="Python of an environment that has vLLM")  # fmt: skip
    parser.add_argument("--only", nargs="+", help="so many of the workloads, by name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.threads = 1, [1]
        options.only = options.only or ["long_prompts", "generate_float32"]
    for name in ("trl", "vllm"):
        if not getattr(options, name):
            print(f"{name}: no environment was named (--{name}), so that it is not measured")
    table = steps_table(options) | accuracy_table(options) | generation_table(options)
    print(shown(table))
    if options.json:
        facts = {
            kind: {name: vars(one) | {"median": one.median} for name, one in row.items()}
            for kind, row in table.items()
        }
        write_text(options.json, json.dumps(facts, indent=1) + "\n")
    return judge(*targets_of(table), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
