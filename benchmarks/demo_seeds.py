"""Demo seeds: how far does the built-in demo rise on held-out problems, seed by seed?

    python benchmarks/demo_seeds.py                # seeds 0, 1, 2, one after the other
    python benchmarks/demo_seeds.py --seeds 0 1 --timeout 900

Runs `trireme run seed=N` in a fresh folder each and prints one table. The target: the
reinforcement stage raises accuracy by at least 25 points on every seed, to a mean of at least 85 %,
within 240 s of wall time each. Exits 1 when it is missed, 2 when a run fails. `more SFT` is the
floor that the rise is read against: what the same wall time of more supervised training reached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIN_RISE = 0.25
MIN_MEAN = 0.85
MAX_SECONDS = 240.0


@dataclass(frozen=True)
class Result:
    """One seed's figures; accuracies are shares of the held-out problems, 0 to 1."""

    seed: int
    before: float
    sft: float
    rl: float
    more_sft: float | None
    wall_s: float

    @property
    def rise(self) -> float:
        """What the reinforcement stage added."""
        return self.rl - self.sft


def run_seed(seed: int, folder: Path, timeout: float) -> Result:
    """Run the demo with a seed in a folder; raises RuntimeError with its last lines if it fails."""
    program = "from trireme.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--compare", f"seed={seed}"]
    environment = {**os.environ, "TRIREME_CHECKPOINT_ROOT_DIR": str(folder)}
    for name in ("TRIREME_MODEL_PATH", "TRIREME_TASKSET_PATH"):
        environment.pop(name, None)
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )
    wall = time.monotonic() - started
    found = sorted(folder.rglob("summary.json"))
    if done.returncode or len(found) != 1:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(
            f"seed {seed}: exit code {done.returncode}, {len(found)} summaries\n{tail}"
        )
    return read_summary(found[0], seed, wall)


def read_summary(path: Path, seed: int, wall: float) -> Result:
    """The figures of a `summary.json`; the wall time is the one measured from outside."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    return Result(
        seed=seed,
        before=facts["accuracy_before"],
        sft=facts["accuracy_sft"],
        rl=facts["accuracy_rl"],
        more_sft=facts["accuracy_more_sft"],
        wall_s=wall,
    )


def table(results: list[Result]) -> str:
    """One line a seed."""
    lines = ["seed  before  after SFT  after RL   rise  more SFT  RL/more SFT  wall s"]
    for r in results:
        more = "       -            -" if r.more_sft is None else _against(r.rl, r.more_sft)
        lines.append(
            f"{r.seed:4}  {r.before:6.1%}  {r.sft:9.1%}  {r.rl:8.1%}  {100 * r.rise:+5.1f}"
            f"  {more}  {r.wall_s:6.0f}"
        )
    return "\n".join(lines)


def _against(reached: float, floor: float) -> str:
    ratio = f"{reached / floor:.2f}" if floor else "-"
    return f"{floor:8.1%}  {ratio:>11}"


def missed(results: list[Result]) -> list[str]:
    """What of the target was not met, one line each."""
    problems = [
        f"seed {r.seed} rose by {100 * r.rise:.1f} points, wanted {100 * MIN_RISE:.0f}"
        for r in results
        if r.rise < MIN_RISE
    ]
    problems += [
        f"seed {r.seed} took {r.wall_s:.0f} s, wanted at most {MAX_SECONDS:.0f}"
        for r in results
        if r.wall_s > MAX_SECONDS
    ]
    mean = sum(r.rl for r in results) / len(results)
    if mean < MIN_MEAN:
        problems.append(f"mean accuracy after RL is {mean:.1%}, wanted {MIN_MEAN:.0%}")
    return problems


def run_seeds(
    seeds: list[int], run: Callable[[int, Path, float], Result], timeout: float
) -> list[Result] | None:
    """Run each seed in a folder of its own and print its line; None where one fails."""
    results: list[Result] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results.append(run(seed, Path(folder), timeout))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr)
                return None
        lines = table(results[-1:]).splitlines()
        print("\n".join(lines if len(results) == 1 else lines[1:]), flush=True)
    return results


def main() -> int:
    """Run the seeds, print the table, say what was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one run")
    options = parser.parse_args()
    results = run_seeds(options.seeds, run_seed, options.timeout)
    if results is None:
        return 2
    mean = sum(r.rl for r in results) / len(results)
    print(f"mean accuracy after RL {mean:.1%}")
    problems = missed(results)
    for problem in problems:
        print(f"MISSED: {problem}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
