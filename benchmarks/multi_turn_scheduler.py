"""Multi-turn schedulers: does a model learn to answer with one retry, in process and at a server?

    python benchmarks/multi_turn_scheduler.py [--seed 0] [--steps 40]

One warm-up of examples/multi_turn_scheduler, then four short runs from its model: both math tricks,
each in this process and against a `trireme rollout` server. Prints held-out accuracy with one retry
before and after, the seconds, and one rollout token by token: what is inserted carries no loss.
Exits 1 where a run does not rise by 25 points, or inserted text carries loss.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.ext.multi_turn.math_tips import DOUBT, RECHECK
from trireme.ext.multi_turn.scheduled import multi_turn_scheduler
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.task import Task

EXAMPLE = Path(__file__).parent.parent / "examples" / "multi_turn_scheduler"
PROGRAM = [sys.executable, "-u", "-c", "from trireme.cli.main import main; main()"]
MIN_RISE = 0.25
TRICKS = ("math_tip_trick_multi_turn", "math_tip_trick")


def call(folder: Path, *words: str) -> str:
    """A command's output. Raises RuntimeError with its last lines where it fails."""
    environment = {
        **os.environ,
        "TRIREME_CHECKPOINT_ROOT_DIR": str(folder),
        "TRIREME_MODEL_PATH": str(folder / "assets" / "model"),
        "TRIREME_TASKSET_PATH": str(folder / "assets"),
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-20:]))
    return done.stdout


def split_config(folder: Path) -> tuple[Path, Path]:
    """The example's warm-up and its GRPO stage as files of their own."""
    whole = yaml.safe_load((EXAMPLE / "math_tips.yaml").read_text())
    warm_up = {**whole, "stages": whole["stages"][:1], "name": "warm_up"}
    learn = {key: value for key, value in whole.items() if key != "stages"}
    paths = folder / "warm_up.yaml", folder / "learn.yaml"
    for path, config in zip(paths, (warm_up, learn), strict=True):
        path.write_text(yaml.safe_dump(config))
    return paths


@contextmanager
def server(model: Path, log: Path, seed: int) -> Iterator[str]:
    """A rollout server's address."""
    with open(log, "w") as out:
        words = [*PROGRAM, "rollout", "--model", str(model), "--port", "0", "--seed", str(seed)]
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        for _ in range(1200):
            if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"no server in 120 s: {log.read_text()}")
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)


def accuracies(output: str) -> tuple[float, float]:
    """Before and after, from the summary that a run prints."""
    before = re.search(r"before\s+([\d.]+)%", output)
    after = re.search(r"after RL\s+([\d.]+)%", output)
    assert before and after, output
    return float(before[1]) / 100, float(after[1]) / 100


async def trace(folder: Path, model: Path, trick: str) -> bool:
    """Print a rollout that was told to try again; whether what was inserted carries no loss."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    device = Device()
    engine = TorchEngine(
        model, tokenizer=tokenizer, device=device, settings=TorchSettings(max_model_len=320, seed=1)
    )
    rows = [json.loads(line) for line in (folder / "assets" / "test.jsonl").open()]
    clean = False
    for place, row in enumerate(rows):
        task = Task(
            raw_task=row,
            format_args={"prompt_key": "question", "response_key": "solution"},
            workflow_args={"scheduler": trick, "max_turns": 2},
            reward_fn_args={"funcs": ["accuracy"]},
        )
        chat = Model(engine, ChatTokens(tokenizer), key=(0, place, 0), max_model_len=320)
        [experience] = await multi_turn_scheduler(task, chat)
        if experience.metrics["num_turns"] < 2:
            continue
        print(f"\n{trick}, token by token:")
        trained = []
        for token, on in zip(experience.tokens.tolist(), experience.mask.tolist(), strict=True):
            text = tokenizer.decode([token])
            print(f"  {'train' if on else '-':<6}{text!r}")
            trained += [text] if on else []
        clean = not any(tip in "".join(trained) for tip in (DOUBT, RECHECK))
        break
    await engine.close()
    device.close()
    return clean


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print(f"{'scheduler':<28}{'where':<12}{'before':>8}{'after':>8}{'seconds':>9}", flush=True)
    missed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seed = f"seed={options.seed}"
        make = str(EXAMPLE / "make_retries.py")
        assets = str(folder / "assets")
        call(folder, sys.executable, make, "--seed", str(options.seed), "--out", assets)
        warm_up, learn = split_config(folder)
        call(folder, *PROGRAM, "run", "--config", str(warm_up), seed)
        [model] = folder.rglob("actor/huggingface")
        for trick in TRICKS:
            words = [*PROGRAM, "run", "--config", str(learn), seed, f"model.model_path={model}"]
            words += [f"buffer.total_steps={options.steps}", "--multi_turn_scheduler", trick]
            for where in ("in process", "server"):
                more = [f"name={trick}_{where.split()[0]}"]
                started = time.monotonic()
                if where == "server":
                    with server(model, folder / "server.log", options.seed) as url:
                        output = call(folder, *words, *more, "--vllm_server_base_url", url)
                else:
                    output = call(folder, *words, *more)
                before, after = accuracies(output)
                took = time.monotonic() - started
                print(f"{trick:<28}{where:<12}{before:>8.1%}{after:>8.1%}{took:>9.0f}", flush=True)
                missed |= after - before < MIN_RISE
        for trick in TRICKS:
            missed |= not asyncio.run(trace(folder, model, trick))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
