"""Household seeds: how far does multi-step GRPO rise on unseen layouts, seed by seed?

    python benchmarks/household_seeds.py              # seeds 0, 1, 2, one after the other

Runs examples/grpo_household in a fresh folder each and prints one table. The target: success after
RL is at least 25 points above the warm-up's on every seed, within 360 s of wall time each. Exits 1
when it is missed, 2 when a run fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from demo_seeds import Result, read_summary, run_seeds

MIN_RISE, MAX_SECONDS = 0.25, 360.0
EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo_household"


def run_seed(seed: int, folder: Path, timeout: float) -> Result:
    """Make the data, run the YAML; raises RuntimeError with the last lines if that fails."""
    assets = folder / "assets"
    environment = {
        **os.environ,
        "TRIREME_CHECKPOINT_ROOT_DIR": str(folder),
        "TRIREME_MODEL_PATH": str(assets / "model"),
        "TRIREME_TASKSET_PATH": str(assets),
    }
    program = "from trireme.cli.main import main; main()"
    config = str(EXAMPLE / "household.yaml")
    commands = [
        [str(EXAMPLE / "make_household.py"), "--seed", str(seed), "--out", str(assets)],
        ["-c", program, "run", "--config", config, f"seed={seed}"],
    ]
    started = time.monotonic()
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise RuntimeError(f"seed {seed}: exit code {done.returncode}\n{tail}")
    (summary,) = folder.rglob("summary.json")
    return read_summary(summary, seed, time.monotonic() - started)


def main() -> int:
    """Run the seeds, print the table, say what was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one run")
    options = parser.parse_args()
    results = run_seeds(options.seeds, run_seed, options.timeout)
    if results is None:
        return 2
    problems = [r for r in results if r.rise < MIN_RISE or r.wall_s > MAX_SECONDS]
    for r in problems:
        print(f"MISSED: seed {r.seed} rose by {100 * r.rise:.1f} points in {r.wall_s:.0f} s, "
              f"wanted {100 * MIN_RISE:.0f} within {MAX_SECONDS:.0f} s")  # fmt: skip
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
