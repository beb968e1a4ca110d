"""A reward model as one of several rewards: of single replies, of conversations, in evaluation."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.job import length_reward, run, small_config
from tests.e2e.test_exact import check_that_a_killed_run_ends_alike
from tests.tiny import make_reward_model

LAST_REPLY = "{{ 'x' + messages[-1]['content'] }}"
WEIGHTS = {"reward_model": 2.0, "length_reward": 0.25}
PLUGIN = """
from trireme import MultiTurnScheduler, multi_turns


class Again(MultiTurnScheduler):
    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": "Again."})
        return infer_request

    def check_finished(self, infer_request, result, current_turn):
        return current_turn >= 2


multi_turns["again"] = Again
"""


def likes_digits(folder: Path) -> Path:
    """A reward model whose score is 1 where the last token of a reply is a digit, else 0: its
    layers add nothing, so that the head reads that token's embedding.
    """
    make_reward_model(folder, "llama", template=LAST_REPLY)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = model.model.embed_tokens.weight.zero_()
        table[:, 1] = 1.0
        for token in tokenizer.convert_tokens_to_ids(list(string.digits)):
            table[token, :2] = torch.tensor([1.0, 0.0])
        model.score.weight.zero_()[0, 0] = table.shape[1] ** -0.5  # the norm's factor
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """GRPO on replies of two tokens, with the reward model and a function."""
    config = small_config(folder)
    config["model"]["max_response_tokens"] = 2
    config["buffer"]["explorer_input"]["default_reward_fn_type"] = [
        {
            "name": "reward_model",
            "model_path": str(likes_digits(folder / "scores")),
            "weight": WEIGHTS["reward_model"],
        },
        {"name": "tests.e2e.job:length_reward", "weight": WEIGHTS["length_reward"]},
    ]
    return config


def rollouts_of(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The experiences of a run, in order."""
    done = run(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr
    path = folder / "checkpoints/tests/job/buffer/experience_buffer.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(reply: str) -> float:
    """The weighted sum, computed from the reply alone."""
    score = float(f"x{reply}"[-1] in string.digits)
    length = length_reward(None, reply)["accuracy"]
    return WEIGHTS["reward_model"] * score + WEIGHTS["length_reward"] * length


def metrics_of(folder: Path) -> str:
    return (folder / "checkpoints/tests/job/monitor/metrics.jsonl").read_text()


@pytest.mark.slow
def test_replies_come_to_end_as_the_reward_model_likes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config["algorithm"] |= {"repeat_times": 16, "optimizer": {"lr": 1e-2}}
    config["buffer"]["total_steps"] = 12
    config["explorer"]["eval_interval"] = 12
    rollouts = rollouts_of(tmp_path, config)
    for one in rollouts:
        reply = one["response"].replace("<|im_end|>", "")
        assert one["reward"] == pytest.approx(expected(reply), abs=1e-4)
    ends = [float(one["response"][-1:] in string.digits) for one in rollouts]
    first, last = ends[: 3 * 64], ends[-3 * 64 :]
    assert sum(last) / len(last) > sum(first) / len(first) + 0.3
    metrics = metrics_of(tmp_path)
    assert "eval/held_out/rewards/reward_model" in metrics
    assert "rollout/rewards/reward_model/mean" in metrics


def test_the_last_reply_of_a_conversation_is_scored(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(PLUGIN)
    config = config_of(tmp_path)
    config["plugins"] = [str(tmp_path / "again.py")]
    config["buffer"]["total_steps"] = 2
    inputs = config["buffer"]["explorer_input"]
    inputs["default_workflow_type"] = "multi_turn_scheduler"
    for taskset in (inputs["taskset"], *inputs["eval_tasksets"]):
        taskset["workflow_args"] = {"scheduler": "again", "max_turns": 2}
    rollouts = rollouts_of(tmp_path, config)
    assert len(rollouts) == 2 * 4 * 4
    assert all("Again." in one["prompt"] + one["response"] for one in rollouts)
    for one in rollouts:
        assert one["reward"] == pytest.approx(expected(one["info"]["completion"]), abs=1e-4)
    assert {round(one["metrics"]["rewards/reward_model"], 4) for one in rollouts} == {0.0, 1.0}
    assert "eval/held_out/rewards/reward_model" in metrics_of(tmp_path)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    check_that_a_killed_run_ends_alike(tmp_path, config_of)
