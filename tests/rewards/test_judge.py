"""The judge: a model behind a real OpenAI-compatible server says how good a reply is."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.made import on_port, rollouts_over
from tests.tiny import make_tokenizer
from trireme.engines.scripted import ScriptedEngine
from trireme.rewards.orm import Judge, Row
from trireme.task import Task


def judged(said: list[str], texts: list[str]) -> list[float]:
    async def go() -> list[float]:
        tokenizer = make_tokenizer()
        rollouts = rollouts_over(
            ScriptedEngine(said, tokenizer=tokenizer), tokenizer, max_model_len=4096
        )
        async with on_port(rollouts) as url:
            options = {"name": "judge", "base_url": f"{url}/v1", "model": "m", "concurrency": 1}
            rows = [Row(text, [{"role": "assistant", "content": text}]) for text in texts]
            task = Task(raw_task={"question": "1+1?", "solution": "2"})
            return (await Judge.of([options]).rewards(task, rows))[0]

    return asyncio.run(go())


def test_the_number_that_it_says_is_the_reward() -> None:
    assert judged(["0.75", "it is 1", "7"], ["2", "3", "4"]) == [0.75, 1.0, 1.0]


def test_a_judge_that_says_no_number_does_not_apply() -> None:
    with pytest.raises(ValueError, match="no reward function applies to rollout 0"):
        judged(["good"], ["2"])
