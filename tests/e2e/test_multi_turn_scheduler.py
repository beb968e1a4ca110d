"""Multi-turn schedulers from a user's file: in process, and against a real rollout server."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.e2e.job import Forked, run, small_config, wait_for

ADDRESS = r"http://127.0.0.1:\d+"
PLUGIN = '''
from typing import Any

from trireme import MultiTurnScheduler, ORM, RolloutInferRequest, RolloutResponseChoice
from trireme import multi_turns, orms


class Nudge(MultiTurnScheduler):
    """The two styles in turns: a new turn for odd rows, the same reply for even ones."""

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        if len(infer_request.data_dict["question"]) % 2:
            infer_request.messages.append({"role": "user", "content": "Again."})
        else:
            infer_request.messages[-1]["content"] = result.message.content[:3] + " wait,"
        return infer_request


class Shape(ORM):

    def __call__(completions, **kwargs):
        assert set(kwargs) >= {"question", "messages", "is_truncated", "rollout_infos"}
        assert [m[-1]["content"][-1:] for m in kwargs["messages"]] == [c[-1:] for c in completions]
        return [sum(c.isalpha() for c in text) / 8 for text in completions]


multi_turns["nudge"] = Nudge
orms["shape"] = Shape
'''


def config_of(folder: Path) -> dict[str, Any]:
    """Three steps of GRPO, led by the plug-in."""
    (folder / "plugin.py").write_text(PLUGIN)
    config = small_config(folder)
    config["plugins"] = [str(folder / "plugin.py")]
    config["buffer"]["total_steps"] = 3
    inputs = config["buffer"]["explorer_input"]
    inputs["default_workflow_type"] = "multi_turn_scheduler"
    inputs.pop("default_reward_fn_type", None)
    for taskset in (inputs["taskset"], *inputs["eval_tasksets"]):
        taskset["workflow_args"] = {"scheduler": "nudge", "max_turns": 2}
        taskset["reward_fn_args"] = {"funcs": ["shape"], "weights": [2.0]}
    config["continue_from_checkpoint"] = False
    return config


@contextmanager
def server(folder: Path, model: str, *flags: str) -> Iterator[str]:
    """A rollout server in a process of its own; its address."""
    words = ("--port", "0", "--seed", "42", "--max-model-len", "128", *flags)
    process = Forked(("rollout", "--model", model, *words), folder)
    try:
        yield wait_for(lambda: re.search(ADDRESS, process.said()), process)[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def outcome(folder: Path, config: dict[str, Any], name: str) -> tuple[list[Any], dict[str, Any]]:
    """The experiences of a run, and its last weights."""
    done = run(folder, {**config, "name": name})
    assert done.returncode == 0, done.stdout + done.stderr
    job = folder / "checkpoints" / "tests" / name
    lines = (job / "buffer" / "experience_buffer.jsonl").read_text().splitlines()
    keys = ("eid", "prompt", "response", "reward", "trained_tokens", "model_version")
    rows = [tuple(json.loads(line)[key] for key in keys) for line in lines]
    [weights] = job.glob("global_step_3/actor/huggingface/model.safetensors")
    return sorted(rows, key=str), load_file(weights)


@pytest.mark.slow
def test_in_process_and_at_a_server_the_same_seed_gives_the_same_samples(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rows, weights = outcome(tmp_path, config, "colocate")
    assert len(rows) == 3 * 4 * 4
    assert any("Again." in row[2] for row in rows) and any(" wait," in row[2] for row in rows)
    model = config["model"]["model_path"]
    remote = {"engine_type": "remote"}
    with server(tmp_path, model) as url:
        config["explorer"] = config.get("explorer", {}) | {
            "rollout_model": remote | {"base_urls": [url]}
        }
        there, others = outcome(tmp_path, config, "server")
    assert there == rows
    assert max(float((weights[n] - others[n]).abs().max()) for n in weights) < 1e-5
    flags = ("--multi_turn_scheduler", "nudge", "--max_turns", "2", "--external_plugins")
    with server(tmp_path, model, *flags, str(tmp_path / "plugin.py")) as url:
        config["explorer"]["rollout_model"]["base_urls"] = [url]
        inputs = config["buffer"]["explorer_input"]
        for taskset in (inputs["taskset"], *inputs["eval_tasksets"]):
            taskset["workflow_args"] = {}
        led, weights = outcome(tmp_path, config, "led")
        assert httpx.post(f"{url}/get_engine_type/").json()["enable_multi_turn"] is True
    assert led == rows
    assert max(float((weights[n] - others[n]).abs().max()) for n in weights) < 1e-5
