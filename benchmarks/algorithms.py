"""What do the core algorithms come to on the arithmetic demo, from one SFT checkpoint?

    python benchmarks/algorithms.py                          # all, one after the other
    python benchmarks/algorithms.py --only ppo rloo --steps 40

One warm-up (the demo's SFT stage) makes the checkpoint; `dpo` learns from pairs of its own right
and wrong replies to training problems, all others from the same problems. Each runs for the same
number of train steps, of as many experiences (pairs for dpo, half as many). Prints one table:
greedy accuracy on 500 held-out problems before and after, the rise in standard errors, seconds a
step. Exits 1 when an online algorithm rises by two standard errors or less, 2 when a run fails.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

NUM_TEST = 500
BATCH, GROUP = 32, 8
OFFLINE = ("sft", "dpo")
COMMON: dict[str, Any] = {"kl_loss_fn": "none"}
CLIP_HIGHER = {"policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.28}}
CRITIC = {"critic": {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0}}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {"optimizer": {"lr": 1e-3}},
    # beta 0.1 leaves the reference so far that both replies become unlikely: 42.0 % at this rate.
    "dpo": {"optimizer": {"lr": 1e-4}, "policy_loss_fn_args": {"beta": 0.5}},
    "ppo": COMMON | CRITIC,
    "grpo": COMMON | CLIP_HIGHER,
    "dapo": {},
    "gspo": COMMON,
    "rloo": COMMON | CLIP_HIGHER,
    "reinforceplusplus": COMMON,
    "opmd": COMMON,
}
"""What each says beyond the demo's YAML; all else is the algorithm's own."""


class Result(NamedTuple):
    """One algorithm's figures; accuracies are shares of the held-out problems."""

    name: str
    before: float
    after: float
    seconds_a_step: float

    @property
    def error(self) -> float:
        """Standard error of the rise, the two evaluations taken as independent."""
        spread = sum(p * (1 - p) for p in (self.before, self.after))
        return math.sqrt(max(spread, 1e-9) / NUM_TEST)

    @property
    def rise(self) -> float:
        """In standard errors."""
        return (self.after - self.before) / self.error


def base_config(folder: Path, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The demo's configuration without its stages, and that of its warm-up."""
    from trireme.demo.prepare import prepare

    data = prepare(folder / "assets", seed)
    os.environ["TRIREME_TASKSET_PATH"], os.environ["TRIREME_MODEL_PATH"] = str(data), ""
    source = Path(__file__).parents[1] / "trireme" / "demo" / "arithmetic.yaml"
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    config |= {"seed": seed, "checkpoint_root_dir": str(folder)}
    config["explorer"]["eval_interval"] = 1000
    warm_up = config.pop("stages")[0]
    warm_up.pop("stage_name")
    return config, warm_up


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, key by key."""
    out = copy.deepcopy(base)
    for key, value in over.items():
        inner = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if inner else value
    return out


def run(config: dict[str, Any], folder: Path, timeout: float) -> tuple[dict[str, Any], float]:
    """Run a configuration in a process of its own; its `summary.json`, and its wall time."""
    path, job = folder / f"{config['name']}.yaml", folder / config["project"] / config["name"]
    shutil.rmtree(job, ignore_errors=True)  # of an earlier run in the same folder
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    program = "from trireme.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--config", str(path)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{config['name']}: exit code {done.returncode}\n{tail}")
    summary = json.loads((job / "summary.json").read_text(encoding="utf-8"))
    return summary, time.monotonic() - started


async def make_pairs(model: str, problems: Path, out: Path, num: int) -> int:
    """Write `num` pairs at most: of a problem's eight replies a right and a wrong one; how many."""
    from transformers import AutoTokenizer

    from trireme.engines.device import Device
    from trireme.engines.engine import Sampling
    from trireme.engines.torch.engine import TorchEngine
    from trireme.engines.torch.shell import TorchSettings
    from trireme.model.chat_tokens import ChatTokens
    from trireme.model.model import Model
    from trireme.rewards.answers import final_answer, final_truth, same

    tokenizer, device = AutoTokenizer.from_pretrained(model), Device()
    engine = TorchEngine(
        model,
        tokenizer=tokenizer,
        device=device,
        settings=TorchSettings(max_model_len=160, max_rows=512),
    )
    chat = ChatTokens(tokenizer)
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]

    async def pair(place: int, row: dict[str, str]) -> dict[str, str] | None:
        sampling = Sampling(max_tokens=60, temperature=1.0, n=8)
        asker = Model(engine, chat, key=(0, place, 0), sampling=sampling, max_model_len=160)
        replies = await asker.chat_samples([{"role": "user", "content": row["question"]}])
        right = {same(final_answer(r.text), final_truth(row["answer"])): r.text for r in replies}
        if len(right) < 2:
            return None
        return {"prompt": row["question"], "chosen": right[True], "rejected": right[False]}

    found = await asyncio.gather(*(pair(n, row) for n, row in enumerate(rows)))
    await engine.close()
    device.close()
    pairs = [made for made in found if made is not None][:num]
    out.write_text("".join(json.dumps(made) + "\n" for made in pairs), encoding="utf-8")
    return len(pairs)


def configured(
    name: str, base: dict[str, Any], model: str, steps: int, folder: Path, own: dict[str, Any]
) -> dict[str, Any]:
    """The configuration of one algorithm."""
    reads = name in OFFLINE
    data = {
        "sft": str(Path(os.environ["TRIREME_TASKSET_PATH"]) / "solved.jsonl"),
        "dpo": str(folder / "pairs.jsonl"),
    }
    algorithm = {"algorithm_type": name, "repeat_times": GROUP}
    over: dict[str, Any] = {
        "name": name,
        "mode": "train" if reads else "both",
        "model": {"model_path": model},
        "buffer": {"batch_size": BATCH, "total_steps": steps},
        "trainer": {"save_hf_checkpoint": "never"},
    }
    if reads:
        over["buffer"] |= {
            "train_batch_size": BATCH * GROUP // (2 if name == "dpo" else 1),
            "trainer_input": {"experience_buffer": {"name": name, "path": data[name]}},
        }
    config = merged(base, over)
    for key in [key for key in config["algorithm"] if key.endswith(("_fn", "_args"))]:
        del config["algorithm"][key]
    # Groups that are left out make the explorer go on: the trainer's steps are the budget.
    if name == "dapo":
        del config["buffer"]["total_steps"]
        config["buffer"]["total_epochs"] = 100
        config["trainer"]["total_steps"] = steps
        config["synchronizer"] |= {"sync_style": "explorer_driven"}
    config["algorithm"] = merged(merged(config["algorithm"], algorithm), own)
    return config


def table(results: list[Result]) -> str:
    """One line an algorithm."""
    lines = ["algorithm          before   after    rise  standard errors  s/step"]
    lines += [
        f"{r.name:17} {r.before:7.1%} {r.after:7.1%}  {100 * (r.after - r.before):+6.1f}"
        f"  {r.rise:15.1f}  {r.seconds_a_step:6.2f}"
        for r in results
    ]
    return "\n".join(lines)


def main() -> int:
    """Warm up, run each, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument("--folder", type=Path, help="where runs go and a warm-up is found again")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        base, warm_up = base_config(folder, options.seed)
        try:
            model = _warmed_up(base, warm_up, folder, options.timeout)
            if "dpo" in options.only:
                problems = Path(os.environ["TRIREME_TASKSET_PATH"]) / "train.jsonl"
                num = asyncio.run(make_pairs(model, problems, folder / "pairs.jsonl", 2000))
                print(f"{num} pairs for dpo", flush=True)
            for name in options.only:
                own = ALGORITHMS[name]
                config = configured(name, base, model, options.steps, folder, own)
                summary, _ = run(config, folder, options.timeout)
                phases = summary["phases"]
                seconds = phases.get("explore", 0.0) + phases.get("train", 0.0)
                after = summary["accuracy_rl"]
                after = summary["accuracy_sft"] if after is None else after
                before = summary["accuracy_before"]
                results.append(Result(name, before, after, seconds / options.steps))
                lines = table(results[-1:]).splitlines()
                print("\n".join(lines if len(results) == 1 else lines[1:]), flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return 2
    weak = [r.name for r in results if r.name not in OFFLINE and r.rise <= 2]
    for name in weak:
        print(f"MISSED: {name} rose by two standard errors or less")
    return bool(weak)


def _warmed_up(base: dict[str, Any], warm_up: dict[str, Any], folder: Path, timeout: float) -> str:
    """The model that the demo's warm-up leaves; made once in a folder."""
    config = merged(base, warm_up | {"name": "warm_up"})
    for key in [key for key in config["algorithm"] if key.endswith(("_fn", "_args"))]:
        del config["algorithm"][key]
    config["model"]["model_path"] = str(Path(os.environ["TRIREME_TASKSET_PATH"]) / "model")
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    done = folder / config["project"] / "warm_up" / "summary.json"
    if done.exists():
        return json.loads(done.read_text(encoding="utf-8"))["model_dir"]
    return run(config, folder, timeout)[0]["model_dir"]


if __name__ == "__main__":
    sys.exit(main())
