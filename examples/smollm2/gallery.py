"""Runs the gallery's trainings and makes its table from what they recorded.

    python examples/smollm2/gallery.py words --seeds 0 1 2     # each a `trireme run` of its own
    python examples/smollm2/gallery.py --table                 # of results.jsonl

A run's row has its held-out rewards by step, its wall and processor time, and its peak memory, as
the operating system measured them. Two runs with one seed give the same rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from trireme.config.variables import variable
from trireme.files import read_jsonl, write_jsonl
from trireme.monitor.monitor import read_metrics

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
ROOT = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
HELD_OUT, SAMPLED = "eval/held_out/reward/mean@1", "rollout/reward/mean"
LORA = "model.lora_configs=[{lora_rank: 16, lora_alpha: 32}]"
SHORT = "buffer.total_steps=16"
PLANNED: dict[str, tuple[str, tuple[str, ...]]] = {
    "words": ("words", ()),
    "words_cool": (
        "words",
        ("buffer.explorer_input.taskset.rollout_args.temperature=0.7", SHORT),
    ),
    "words_lora": ("words", (LORA, "algorithm.optimizer.lr=2e-4", SHORT)),
    "words_rloo": ("words", ("algorithm.algorithm_type=rloo", SHORT)),
    "words_gspo": ("words", ("algorithm.algorithm_type=gspo", SHORT)),
    "words_dr_grpo": ("words", ("algorithm.algorithm_type=dr_grpo", SHORT)),
    "words_async": (
        "words",
        ("synchronizer.sync_style=fully_async", "synchronizer.sync_method=checkpoint"),
    ),
    "words_replay": (
        "words",
        (
            "synchronizer.sync_style=fully_async",
            "synchronizer.sync_method=checkpoint",
            "buffer.trainer_input.experience_buffer.replay_buffer={enable: true, "
            "reuse_cooldown_time: 1, priority_fn: decay_limit_randomization, "
            "priority_fn_args: {use_count_limit: 2, sigma: 0.0}}",
            SHORT,
        ),
    ),
    "constraints": ("constraints", ()),
    "constraints_cool": (
        "constraints",
        ("buffer.explorer_input.taskset.rollout_args.temperature=0.7", "buffer.total_steps=32"),
    ),
    "sums": ("sums", ()),
    "sums_sft": ("sums_sft", ()),
    "calculator": ("calculator", ()),
    "second_try": ("second_try", ()),
    "guess": ("guess", ()),
    "word_chain": ("word_chain", ()),
    "dpo": ("dpo", ()),
    "kto": ("kto", ()),
    "distill": ("distill", ()),
}
"""Name -> its YAML, and the keys that differ from it."""


def command(name: str, seed: int) -> list[str]:
    """The command that a reader types."""
    file, changed = PLANNED[name]
    named = [] if name == file else [f"name={name}_{seed}"]
    return ["run", f"examples/smollm2/{file}.yaml", f"seed={seed}", *named, *changed]


def run(name: str, seed: int) -> dict[str, Any]:
    """Run a training and return its row. Raises RuntimeError if it fails."""
    started = time.monotonic()
    program = "from trireme.cli.main import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program, *command(name, seed)])
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{name}, seed {seed}: exit code {os.waitstatus_to_exitcode(status)}")
    folder = ROOT / "smollm2" / f"{name}_{seed}"
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    )
    return {
        "name": name,
        "seed": seed,
        **measured(folder),
        "wall_s": round(time.monotonic() - started),
        "cpu_s": round(used.ru_utime + used.ru_stime),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 1),
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
        "date": time.strftime("%Y-%m-%d"),
        "commit": revision.stdout.strip(),
    }


def measured(folder: Path) -> dict[str, Any]:
    """The held-out rewards of a run, and its last stage's by step, sampled rewards as well."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    stages = sorted(folder.rglob("monitor/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    held_out, sampled = [], []
    for row in read_metrics(stages[-1]):
        for name, points in ((HELD_OUT, held_out), (SAMPLED, sampled)):
            if name in row["metrics"]:
                points.append([row["step"], round(row["metrics"][name], 4)])
    return {
        "before": summary["accuracy_before"],
        "sft": summary.get("accuracy_sft"),
        "after": summary["accuracy_rl"],
        "held_out": held_out,
        "sampled": sampled,
        "warnings": [one["cause"] for one in summary["warnings"]],
    }


def rows() -> list[dict[str, Any]]:
    """All recorded rows; a later one of the same run replaces an earlier one."""
    recorded = read_jsonl(RESULTS)  # none where there is no file
    found = {(row["name"], row["seed"]): row for row in recorded}
    return [found[key] for key in sorted(found, key=lambda k: (list(PLANNED).index(k[0]), k[1]))]


def add(row: dict[str, Any]) -> None:
    """Add a row to the file, which is written whole."""
    kept = [one for one in rows() if (one["name"], one["seed"]) != (row["name"], row["seed"])]
    write_jsonl(RESULTS, [*kept, row])


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line a training: held-out reward before and after, of each seed."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        by_name[row["name"]].append(row)
    lines = [
        "| training | before | after SFT | after, seed by seed | CPU minutes | peak memory |",
        "|-|-|-|-|-|-|",
    ]
    for name, group in by_name.items():
        after = [f"{row['after']:.3f}" for row in group]
        warm = [row["sft"] for row in group if row["sft"] is not None]
        lines.append(
            f"| `{name}` | {fmean(row['before'] for row in group):.3f} | "
            f"{fmean(warm) if warm else '':{'.3f' if warm else ''}} | "
            f"{', '.join(after)} | "
            f"{fmean(row['cpu_s'] for row in group) / 60:.1f} | "
            f"{max(row['peak_gb'] for row in group):.1f} GB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is named, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*PLANNED, []])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        for seed in options.seeds:
            add(run(name, seed))
    if options.table:
        print(table(rows()))


if __name__ == "__main__":
    main()
