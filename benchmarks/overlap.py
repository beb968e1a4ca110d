"""Overlap: how much of the time is the device idle while environments are slow?

    OMP_NUM_THREADS=1 python benchmarks/overlap.py [--rounds 3] [--quick]

Episodes of 6 steps in an environment that takes 50 to 500 ms a step (it waits, as one on another
machine does), replies of 24 tokens, the demo's model, GRPO with 8 x 8 episodes a step. Lock-step,
where engine and trainer take turns, against `sync_style: fully_async` with four times the runners,
interleaved; the medians of all steps but the first two of a run. The share in which the device
works is the complement of the metric `perf/device_idle`.
Asked: 1.8 times as many steps a second as in lock-step, the device busy for 90 % of the time; exits
1 below.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from target import Target, judge

from trireme import Experience, Model, Task, train
from trireme.checkpoint.layout import JobFolder
from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.monitor.monitor import FILE_NAME, read_metrics

STEPS_OF_EPISODE, SHORTEST_S, LONGEST_S, REPLY = 6, 0.05, 0.5, 24
GROUP, TASKS = 8, 8
ASYNCHRONOUS: dict[str, Any] = {
    "synchronizer.sync_style": "fully_async",
    "algorithm.sample_strategy": "staleness_control",
    "algorithm.sample_strategy_args": {"max_staleness": 8},
}


async def episode(task: Task, model: Model) -> list[Experience]:
    """Reply, and wait for the environment, step after step."""
    slow = random.Random(f"{task.prompt} {model.key[2]}")
    talk: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    said = ""
    for _ in range(STEPS_OF_EPISODE):
        reply = await model.chat(talk)
        said += reply.text
        await asyncio.sleep(slow.uniform(SHORTEST_S, LONGEST_S))
        talk += [reply.message, {"role": "user", "content": "and then?"}]
    return model.experiences(reward=float(len(said) % 2))


def run(folder: Path, steps: int, runners: int, more: dict[str, Any]) -> tuple[float, float]:
    """Seconds a step, and the share of them in which the device works."""
    rows = [{"question": row["question"]} for row in make_problems(TASKS * (steps + 4), seed=0)]
    done = train(
        model=folder / "model",
        tasks=rows,
        workflow=episode,
        checkpoint_root_dir=str(folder),
        seed=0,
        **{
            "algorithm.repeat_times": GROUP,
            "algorithm.kl_loss_fn": "none",
            "model.max_model_len": 1024,
            "model.max_response_tokens": REPLY,
            "model.min_response_tokens": REPLY,
            "buffer.batch_size": TASKS,
            "buffer.train_batch_size": TASKS * GROUP,
            "buffer.total_steps": steps,
            "trainer.total_steps": steps,
            "explorer.runner_per_model": runners,
            **more,
        },
    )
    plan = done.plans[-1]
    path = JobFolder(plan.job_dir, plan.explorer_name).monitor / FILE_NAME
    lines = [row for row in read_metrics(path) if row["part"] == "trainer"]
    lines = lines[-(steps - 1) :] if steps < 4 else lines[1:]
    ends = [row["time"] for row in lines]
    idle = statistics.fmean(row["metrics"]["perf/device_idle"] for row in lines[1:] or lines)
    each = (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
    return each, 1 - idle


def main() -> int:
    """Print the table; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 3
    found: dict[str, list[tuple[float, float]]] = {"lock-step": [], "asynchronous": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [row["question"] + row["answer"] for row in make_problems(300, seed=0)]
        make_tiny_model(folder / "model", [*texts, "and then?"], seed=0, max_len=1024)
        for _ in range(options.rounds):
            found["lock-step"].append(run(folder, options.steps, TASKS, {}))
            found["asynchronous"].append(run(folder, options.steps, 4 * TASKS, ASYNCHRONOUS))
    each = {kind: statistics.median(t for t, _ in rounds) for kind, rounds in found.items()}
    busy = {kind: statistics.median(b for _, b in rounds) for kind, rounds in found.items()}
    print(f"{'mode':<14}{'s a step':>10}{'busy':>8}")
    for kind, seconds in each.items():
        print(f"{kind:<14}{seconds:>10.2f}{busy[kind]:>8.0%}")
    return judge(
        Target("lock-step / asynchronous", each["lock-step"] / each["asynchronous"], 1.8),
        Target("asynchronous: share in which the device works", busy["asynchronous"], 0.9),
        quick=options.quick,
    )


if __name__ == "__main__":
    sys.exit(main())
