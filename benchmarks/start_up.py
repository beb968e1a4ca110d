"""Start-up: how long until `trireme` says something, has a first rollout, has checked a YAML?

    python benchmarks/start_up.py [--quick]

Real commands in a folder that is thrown away, the fastest of three: the first line and the first
explore step's line of a small run (the demo's model and problems, no warm-up), `check` on the
same YAML, and `--help`. Asked: 1 s to the first line, 6 s to the first rollout, 2 s for `check`.
Exits 1 where one is missed; the floor is Python that imports torch. `--quick`: once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from target import Target, judge

from trireme.demo.problems import make_problems
from trireme.demo.tiny_model import make_tiny_model
from trireme.files import write_json

PROGRAM = [sys.executable, "-u", "-c", "from trireme.cli.main import main; main()"]
COLUMNS = {"prompt_key": "question", "response_key": "answer"}


def prepare(folder: Path) -> Path:
    """A small GRPO run of two steps."""
    problems = make_problems(64, seed=0)
    model = make_tiny_model(folder / "model", [str(row["question"]) for row in problems], seed=0)
    write_json(folder / "problems.json", problems)
    config = {
        "project": "start",
        "name": "up",
        "checkpoint_root_dir": str(folder / "runs"),
        "continue_from_checkpoint": False,
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "kl_loss_fn": "none"},
        "model": {"model_path": str(model), "max_response_tokens": 16, "max_model_len": 128},
        "buffer": {
            "batch_size": 4,
            "total_steps": 2,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "accuracy",
                "taskset": {"path": str(folder / "problems.json"), "format": COLUMNS},
            },
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def until(command: list[str], text: str, folder: Path) -> float:
    """Seconds until the command has printed a line that holds `text`; it is then let end."""
    started, reached, said = time.perf_counter(), None, []
    process = subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if reached is None and text in line:
            reached = time.perf_counter() - started
    if process.wait() or reached is None:
        raise RuntimeError(f"no line with '{text}': " + "".join(said))
    return reached


def main() -> int:
    """One line a figure; 1 where one is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = str(prepare(folder))
        run = [*PROGRAM, "run", "--config", config]
        check = [*PROGRAM, "check", "--config", config]
        torch = [sys.executable, "-c", "import torch; print('imported')"]
        measured = {
            "floor: import torch": (torch, "imported"),
            "run, first line": (run, ""),
            "run, first rollout": (run, "a rollout"),
            "check": (check, "no problems"),
        }
        found = {
            title: min(until(command, text, folder) for _ in range(1 if quick else 3))
            for title, (command, text) in measured.items()
        }
    for title, seconds in found.items():
        print(f"{title:24}{seconds:8.2f} s")
    asked = {"run, first line": 1, "run, first rollout": 6, "check": 2}
    targets = [Target(f"{t}, s", found[t], s, at_most=True) for t, s in asked.items()]
    return judge(*targets, quick=quick)


if __name__ == "__main__":
    sys.exit(main())
