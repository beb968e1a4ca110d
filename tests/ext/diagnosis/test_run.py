"""Learning that goes wrong is said by the command: in the console, the log, summary and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config
from trireme.monitor.monitor import read_metrics

MINE = """
from trireme import Experience, Model, Task

def zero(task, answer):
    return 0.0

def half(task, answer):
    return 0.5

def huge(task, answer):
    return 1e38

def letters(task, answer):
    return float(len(set(answer)))

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

async def with_tools(task: Task, model: Model) -> list[Experience]:
    reply = await model.chat([{"role": "user", "content": task.prompt}], tools=[TOOL])
    return model.experiences(reward=float(len(reply.text)))

async def plain(task: Task, model: Model) -> list[Experience]:
    reply = await model.chat([{"role": "user", "content": task.prompt}])
    return model.experiences(reward=float(len(reply.text)))

async def unmasked(task: Task, model: Model) -> list[Experience]:
    reply = await model.chat([{"role": "user", "content": task.prompt}])
    found = model.experiences(reward=float(len(reply.text)))
    for experience in found:
        experience.mask[:] = False
    return found
"""
REWARD = "buffer.explorer_input.default_reward_fn_type"
WORKFLOW = "buffer.explorer_input.default_workflow_type"
LONG = ["model.max_response_tokens=100", "model.max_model_len=200"]
# What a user gets wrong: overrides, the cause that is named, and what its line says.
MISTAKES: dict[str, tuple[list[str], str, list[str]]] = {
    "a reward that is always 0": (
        [f"{REWARD}=mine:zero"],
        "zero_rewards",
        ["every reward of the last 3 steps is 0", "#### 7' (str)", "the reply ends in"],
    ),
    "a reward that is always the same": (
        [f"{REWARD}=mine:half"],
        "equal_rewards",
        ["in 100% of the groups", "(the mean is 0.5)", "the reward is 0.5"],
    ),
    "replies that are cut": (
        [],
        "replies_cut",
        ["have a reply that was cut", "raise model.max_response_tokens"],
    ),
    "prompts that are too long": (
        [f"{WORKFLOW}=mine:plain", "model.max_prompt_tokens=10"],
        "prompts_too_long",
        ["100% of the rollouts of the last 3 steps had a prompt that is too long"],
    ),
    "a template that drops tools": (
        [f"{WORKFLOW}=mine:with_tools"],
        "tools_dropped",
        ["the chat template renders none of the tools", "model.chat_template_path"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_keeps_a_run_from_learning_is_said(tmp_path: Path, mistake: str) -> None:
    overrides, cause, wanted = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(MINE)
    config = small_config(tmp_path)
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    done = run(tmp_path, config, *overrides)
    assert done.returncode == 0, done.stderr
    job = tmp_path / "checkpoints/tests/job"
    # once on the console, with what to do, and once more in the table at the end
    assert done.stderr.count(f": {cause}: ") == 1 and done.stdout.count(f": {cause}: ") == 1
    [warning] = [w for w in summary(job)["warnings"] if w["cause"] == cause]
    for text in wanted:
        assert text in done.stderr
        assert text in f"{warning['text']} {warning['sample']}"
    assert (job / "log" / f"{warning['part']}.log").read_text().count(f": {cause}: ") == 1
    flags = [
        row["step"]
        for row in read_metrics(job / "monitor/metrics.jsonl")
        if row["metrics"].get(f"watchdog/{cause}")
    ]
    assert warning["step"] in flags


def test_a_learning_rate_of_10_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = small_config(tmp_path)
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    rate = "algorithm.optimizer.lr"
    done = run(
        tmp_path, config, f"{REWARD}=mine:letters", f"{rate}=10", "buffer.total_steps=12", *LONG
    )
    assert done.returncode == 0, done.stderr
    # which of them a model shows first depends on the last bits
    causes = {"entropy_collapse", "equal_rewards", "rewards_gone"}
    lines = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    found = [line for line in lines if any(f": {cause}: " in line for cause in causes)]
    assert found and all("a smaller" in line and "lr" in line for line in found)
    assert all(done.stderr.count(f": {cause}: ") <= 1 for cause in causes)
    warnings = summary(tmp_path / "checkpoints/tests/job")["warnings"]
    assert len([w for w in warnings if w["cause"] in causes]) == len(found)


def test_a_run_in_which_everything_is_left_out_says_by_whom(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = small_config(tmp_path)
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    done = run(tmp_path, config, f"{REWARD}=mine:huge")
    assert done.returncode == 1
    assert "reward_not_finite: 16 of 16 experiences of this step" in done.stderr
    assert (
        "error: of 64 experiences of the last 4 steps 0 are left to train on: the algorithm left "
        "out 64 (64 have a reward that is not finite or too large)" in done.stderr
    )
    log = tmp_path / "checkpoints/tests/job/log/explorer_experience_pipeline.log"
    assert "1/0/0/0 (1e+38)" in log.read_text()


def test_a_resumed_run_says_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = small_config(tmp_path)
    config["buffer"]["explorer_input"]["eval_tasksets"] = []
    said = []
    for steps in (4, 8):
        done = run(tmp_path, config, f"{REWARD}=mine:zero", f"buffer.total_steps={steps}")
        assert done.returncode == 0, done.stderr
        said.append(done.stderr.count("zero_rewards: every reward"))
        assert done.stdout.count("zero_rewards: every reward of the last 3 steps is 0") == 1
    assert said == [1, 0]
    found = summary(tmp_path / "checkpoints/tests/job")["warnings"]
    assert "#### 7' (str)" in next(w["sample"] for w in found if w["cause"] == "zero_rewards")


def test_a_bench_leaves_the_warnings_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = small_config(tmp_path)
    job = tmp_path / "checkpoints/tests/job"
    for mode in ("both", "bench", "both"):
        done = run(tmp_path, config, f"{REWARD}=mine:zero", f"mode={mode}")
        assert done.returncode == 0, done.stderr
        warned = json.loads((job / "monitor/watchdog.json").read_text())
        assert "zero_rewards" in {one["cause"] for one in warned}
        assert (mode == "bench") == ("zero_rewards" not in done.stdout)


def summary(job: Path) -> dict[str, Any]:
    return json.loads((job / "summary.json").read_text())
