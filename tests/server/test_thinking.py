"""Clients of a served rollout get its thinking apart, and what was sampled is what is trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.e2e.job import small_config
from tests.model.templates import THINKING
from tests.model.test_tool_calls import Telling
from tests.tiny import make_model, make_tokenizer
from trireme import Model, Task
from trireme.config import load_config
from trireme.launch.check import make_plans
from trireme.launch.run import run_stages
from trireme.launch.stop import Stop
from trireme.model.chat_tokens import ChatTokens
from trireme.model.thinking import ReasoningParser
from trireme.monitor.console import Console
from trireme.server.gateway import Gateway
from trireme.server.rollouts import Rollouts
from trireme.view.runs import find_runs
from trireme.view.tokens import Tokens

ASKED: list[Any] = [{"role": "user", "content": "1 + 1?"}]
OPENS = THINKING.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")
"""As THINKING, but the prompt has begun to think."""
KEEPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""As OPENS, and thinking stays in earlier replies."""
REPLIES = {
    ("qwen3", THINKING): "<think>\nOne, and\none.\n</think>\n\nTwo.",
    ("qwen3", OPENS): "One, and\none.\n</think>\n\nTwo.",
    ("deepseek_r1", THINKING): "<think>\nOne, and\none.\n</think>\n\nTwo.",
    ("deepseek_r1", OPENS): "One, and\none.\n</think>\n\nTwo.",
}


@asynccontextmanager
async def served(
    parser: ReasoningParser, template: str, reply: str
) -> AsyncIterator[tuple[Model, httpx.AsyncClient]]:
    """A rollout's Model, and a client of its address."""
    engine: Any = Telling([reply])
    chat = ChatTokens(engine.tokenizer, chat_template=template, reasoning_parser=parser)
    gateway = Gateway(Rollouts(engine, chat, "fake", 4000))
    model = Model(engine, chat, max_model_len=4000, gateway=gateway.address)
    headers = {"x-api-key": model.api_key}
    async with httpx.AsyncClient(base_url=model.base_url, headers=headers) as client:
        yield model, client
    await gateway.close()


def events_in(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "data: {" in line]
    return [json.loads(line) for line in lines]


async def by_openai(client: httpx.AsyncClient, *, streamed: bool) -> tuple[str, str]:
    body = {"model": "any", "messages": ASKED, "stream": streamed}
    answer = await client.post("/chat/completions", json=body)
    if not streamed:
        message = answer.json()["choices"][0]["message"]
        return message["reasoning_content"], message["content"]
    deltas = [event["choices"][0]["delta"] for event in events_in(answer.text)]
    kinds = [k for delta in deltas for k in ("reasoning_content", "content") if delta.get(k)]
    assert kinds == sorted(kinds, reverse=True)  # no thinking behind the answer
    return (
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
    )


async def by_anthropic(client: httpx.AsyncClient, *, streamed: bool) -> tuple[str, str]:
    body = {"model": "any", "messages": ASKED, "max_tokens": 99, "stream": streamed}
    answer = await client.post("/messages", json=body)
    if not streamed:
        thinking, text = answer.json()["content"]
        return thinking["thinking"], text["text"]
    events = events_in(answer.text)
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["content_block"]["type"] for e in starts] == ["thinking", "text"]
    assert [e["index"] for e in starts] == [0, 1]
    deltas = [e for e in events if e["type"] == "content_block_delta"]
    assert [e["index"] for e in deltas] == sorted(e["index"] for e in deltas)
    return (
        "".join(e["delta"].get("thinking", "") for e in deltas),
        "".join(e["delta"].get("text", "") for e in deltas),
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_openai, by_anthropic])
@pytest.mark.parametrize(("parser", "template"), list(REPLIES))
def test_a_served_rollout_tells_its_thinking_apart_and_records_what_was_sampled(
    parser: Any, template: str, ask: Any, streamed: bool
) -> None:
    async def main() -> None:
        reply = REPLIES[parser, template]
        async with served(parser, template, reply) as (model, client):
            assert await ask(client, streamed=streamed) == ("One, and\none.", "Two.")
            [experience] = model.experiences(reward=1.0)
            sampled = experience.tokens[experience.mask].tolist()
            assert model.chat_tokens.decode(sampled) == f"{reply}<|im_end|>"

    asyncio.run(main())


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
        "default_workflow_type": "tests.server.test_thinking:two_turns",
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
