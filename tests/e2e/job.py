"""A small job for end-to-end tests: model, data set and YAML, and the real command line on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import make_model

ROOT = Path(__file__).parents[2]


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    """Sums in GSM8K's shape."""
    out = []
    for i in range(first, first + count):
        a, b = i % 7 + 1, i % 5 + 2
        answer = f"{a} + {b} = {a + b}.\n#### {a + b}"
        out.append({"question": f"What is {a} + {b}? ({i})", "answer": answer})
    return out


def write_jsonl(path: Path, data: list[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def small_config(folder: Path) -> dict[str, Any]:
    """GRPO on a tiny model: 4 steps of 4 tasks x 4 rollouts of at most 8 tokens."""
    train = write_jsonl(folder / "data" / "train.jsonl", rows(16))
    test = write_jsonl(folder / "data" / "test.jsonl", rows(3, 100))
    columns = {"prompt_key": "question", "response_key": "answer"}
    return {
        "project": "tests",
        "name": "job",
        "checkpoint_root_dir": str(folder / "checkpoints"),
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": 4,
            "kl_loss_fn": "none",
            "optimizer": {"lr": 1e-3},
        },
        "model": {
            "model_path": str(make_model(folder / "model", max_len=256)),
            "max_response_tokens": 8,
            "max_model_len": 128,
        },
        "buffer": {
            "batch_size": 4,
            "total_steps": 4,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "tests.e2e.job:length_reward",
                "taskset": {"name": "sums", "path": str(train), "format": columns},
                "eval_tasksets": [{"name": "held_out", "path": str(test), "format": columns}],
            },
        },
        "explorer": {"runner_per_model": 4, "eval_interval": 2},
        "trainer": {"save_interval": 2},
    }


def length_reward(task: Any, answer: str) -> dict[str, float]:
    """Differs from reply to reply, so that there is something to learn from random text."""
    return {"accuracy": (sum(map(ord, answer)) % 17) / 16}


def command(folder: Path, config: dict[str, Any], *overrides: str) -> list[str]:
    """`trireme run` on a configuration, as a list of words."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    program = "from trireme.cli.main import main; main()"
    return [sys.executable, "-c", program, "run", "--config", str(path), *overrides]


def environment() -> dict[str, str]:
    """One thread, no network, and the tests' own modules on the path."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def run(folder: Path, config: dict[str, Any], *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(folder, config, *overrides),
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(),
        cwd=folder,
    )


def kill_when(folder: Path, config: dict[str, Any], moment: str, *overrides: str) -> None:
    """Start a run, and end it by SIGKILL once the file `moment` is in its job's folder."""
    words = command(folder, config, *overrides)
    process = subprocess.Popen(
        words, env=environment(), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    name = next((o.removeprefix("name=") for o in overrides if o.startswith("name=")), "job")
    path = folder / "checkpoints/tests" / name / moment
    deadline = time.monotonic() + 240
    while not path.exists() and process.poll() is None:
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.002)
    process.kill()
    process.wait()


def weights(job: Path, step: int) -> bytes:
    """The exported model's bytes."""
    return (job / f"global_step_{step}" / "actor/huggingface/model.safetensors").read_bytes()


def wait_for(what: Callable[[], Any], seconds: float, *processes: subprocess.Popen[str]) -> Any:
    """What `what` finds, once it finds something; while all processes run."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        late = time.monotonic() > deadline
        for process in processes:
            if process.poll() is not None or late:
                process.kill()
                raise AssertionError("\n".join(map(str, process.communicate())))
        assert not late, f"what was waited for did not come in {seconds:g} s"
        time.sleep(0.05)
    return found


def attended() -> None:
    """In the child: signals as a terminal leaves them, also where these tests run under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
