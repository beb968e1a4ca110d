"""A run with thinking: the ids that clients saw apart are those that are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.e2e.job import small_config
from tests.tiny import make_model, make_tokenizer
from trireme import Model, Task
from trireme.config import load_config
from trireme.ext.page.runs import find_runs
from trireme.ext.page.tokens import Tokens
from trireme.launch.check import make_plans
from trireme.launch.run import run_stages
from trireme.launch.stop import Stop
from trireme.monitor.console import Console

KEEPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Each prompt has begun to think, and thinking stays in earlier replies."""


async def two_turns(task: Task, model: Model) -> Any:
    """Asks over HTTP, streamed and then plain, and keeps the ids that the client saw."""
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        asked: list[Any] = [{"role": "user", "content": task.prompt}]
        said: dict[str, str] = {"content": "", "reasoning_content": ""}
        options: Any = {"model": "any", "max_tokens": 8}
        async for chunk in await client.chat.completions.create(
            messages=asked, stream=True, **options
        ):
            delta = chunk.choices[0].delta
            said["content"] += delta.content or ""
            said["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        asked += [{"role": "assistant", **said}, {"role": "user", "content": "And now?"}]
        second: Any = await client.chat.completions.create(messages=asked, **options)
    choice = second.choices[0]
    [experience] = model.experiences(reward=sum(choice.token_ids) % 7 / 7)  # one conversation
    thoughts = [said["reasoning_content"], choice.message.reasoning_content]
    answers = [said["content"], choice.message.content]
    experience.info |= {"thoughts": thoughts, "answers": answers, "second": choice.token_ids}
    return [experience]


def test_a_run_trains_the_ids_of_replies_whose_thinking_clients_saw_apart(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config["model"]["model_path"] = str(make_model(tmp_path / "thinks", template=KEEPS))
    config["buffer"] |= {"total_steps": 2}
    config["buffer"]["explorer_input"] |= {
        "default_workflow_type": "tests.ext.page.test_thinking:two_turns",
        "eval_tasksets": [],
    }
    config["explorer"] = {
        "runner_per_model": 4,
        "rollout_model": {"enable_openai_api": True, "reasoning_parser": "deepseek_r1"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    run_stages(make_plans(load_config(path)), console=Console(), stop=Stop(), compare_sft=False)
    job = tmp_path / "checkpoints/tests/job"
    (run,) = find_runs(job)
    lines = (job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    tokens, decode = Tokens(run), make_tokenizer().decode
    assert len(lines) == 32
    for row in map(json.loads, lines):
        info, shown = row["info"], tokens.of(row["eid"])
        sampled = [i for i, m in zip(shown["ids"], shown["mask"], strict=True) if m]
        assert sampled[-len(info["second"]) :] == info["second"]
        first, second = info["thoughts"]
        text = str(decode(sampled, skip_special_tokens=True))
        assert first and first.strip() in text and second.strip() in text
        assert not any(info["answers"])  # each prompt opens the thinking, and nothing ends it
        old = [v for v, m in zip(shown["logprobs"], shown["mask"], strict=True) if m]
        new = [v for v in shown["trained_logprobs"] if v is not None]
        assert new == pytest.approx(old, abs=1e-4)  # lock-step: the same ids, the same weights
