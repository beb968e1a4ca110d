"""Every online algorithm makes the reward of a bandit rise: from 1 in 10 to 9 in 10.

One prompt, replies of one token, a reward for a digit: what is tried is the whole of explorer,
engine, pipeline, buffer, trainer and synchronizer as a YAML starts them, in this process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from tests.e2e.job import rows, small_config, write_jsonl
from trireme import Experience, Model, Task, workflow
from trireme.config import load_config
from trireme.launch.check import make_plans
from trireme.launch.run import run_stages
from trireme.launch.stop import Stop
from trireme.monitor.console import Console
from trireme.registry import ALGORITHMS

STEPS, TASKS, RUNS = 30, 2, 16
ONLINE = [
    name
    for name in ALGORITHMS.built_in()
    if not ALGORITHMS.get(name).from_data and name != "grpo_verl"  # another name of grpo
]
OFTEN = ("grpo", "ppo", "multi_step_grpo", "mix", "on_policy_distill", "opmd")
"""One of each kind, for every `make test`; the others are for `make test-long`."""


@workflow("two_digits")
async def two_digits(task: Task, model: Model) -> list[Experience]:
    """Two steps, each with a state and a reward of its own."""
    chat = [{"role": "user", "content": task.prompt}]
    earned = []
    for _ in range(2):
        reply = await model.chat(chat)
        earned.append(digit(task, reply.text)["accuracy"] / 2)
        chat += [reply.message, {"role": "user", "content": "Another."}]
    steps = model.experiences(reward=[sum(earned)] * 2)
    for number, (step, reward) in enumerate(zip(steps, earned, strict=True)):
        step.info |= {"step_reward": reward, "env_state_hash": number}
    return steps


def digit(task: Any, answer: str) -> dict[str, float]:
    return {"accuracy": float(answer.isdigit())}


def _config(folder: Path, name: str) -> dict[str, Any]:
    config = small_config(folder)
    config["algorithm"] = {
        "algorithm_type": name,
        "repeat_times": RUNS,
        "optimizer": {"lr": 1e-2},
    }
    config["model"]["max_response_tokens"] = 1
    config["buffer"]["batch_size"] = TASKS
    config["buffer"]["total_steps"] = STEPS
    inputs = config["buffer"]["explorer_input"]
    inputs["default_reward_fn_type"] = "tests.e2e.test_bandit:digit"
    inputs["eval_tasksets"] = []
    inputs["taskset"]["path"] = str(write_jsonl(folder / "one.jsonl", rows(1)))
    config["trainer"]["save_interval"] = 0
    return config


def _solved(folder: Path) -> Path:
    """The bandit's prompt with each digit as the reply."""
    [row] = rows(1)
    return write_jsonl(
        folder / "solved.jsonl", [{**row, "answer": str(number)} for number in range(10)]
    )


def _step_wise(folder: Path, config: dict[str, Any]) -> None:
    config["buffer"]["explorer_input"]["default_workflow_type"] = "two_digits"


def _only_the_best(folder: Path, config: dict[str, Any]) -> None:
    """A tenth of the rollouts is trained: batches of all of them would come too seldom."""
    config["buffer"]["train_batch_size"] = 3


def _with_expert(folder: Path, config: dict[str, Any]) -> None:
    config["buffer"]["train_batch_size"] = 40
    config["algorithm"]["sample_strategy_args"] = {"expert_data_ratio": 0.2}
    expert = {"path": str(_solved(folder))}
    config["buffer"]["trainer_input"] = {"auxiliary_buffers": {"sft_dataset": expert}}


def _beside_teacher(folder: Path, config: dict[str, Any]) -> None:
    """A teacher that says digits: the model after supervised steps."""
    learns = config | {
        "name": "teacher",
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-2}},
        "buffer": {
            "train_batch_size": 10,
            "total_epochs": STEPS,
            "trainer_input": {"experience_buffer": {"path": str(_solved(folder))}},
        },
    }
    _run(folder, learns)
    teacher = folder / f"checkpoints/tests/teacher/global_step_{STEPS}/actor/huggingface"
    config["explorer"]["auxiliary_models"] = [{"model_path": str(teacher)}]


def _with_teacher(folder: Path, config: dict[str, Any]) -> None:
    _beside_teacher(folder, config)
    config["buffer"]["explorer_input"]["default_workflow_type"] = "on_policy_distill_workflow"


NEEDS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "multi_step_grpo": _step_wise,
    "gigpo": _step_wise,
    "raft": _only_the_best,
    "mix": _with_expert,
    "mix_chord": _with_expert,
    "on_policy_distill": _with_teacher,
    "jsd": _with_teacher,
    "rlsd": _beside_teacher,
}


def _run(folder: Path, config: dict[str, Any]) -> list[float]:
    """The mean reward of each explore step."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    run_stages(make_plans(load_config(path)), console=Console(live=False), stop=Stop())
    job = folder / "checkpoints/tests" / config["name"]
    lines = (job / "monitor/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    key = "rollout/reward/mean"
    return [row["metrics"][key] for row in found if key in row["metrics"]]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.large]) for n in ONLINE]
)
def test_the_reward_of_a_bandit_rises(name, tmp_path):
    config = _config(tmp_path, name)
    if name in NEEDS:
        NEEDS[name](tmp_path, config)
    rewards = _run(tmp_path, config)
    assert fmean(rewards[:2]) < 0.4
    assert fmean(rewards[-3:]) >= 0.9, rewards
