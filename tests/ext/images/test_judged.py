"""Conversations with pictures are judged by a model that sees them too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.ext.images.seeing import make_seeing, picture, png, reader_for
from tests.ext.images.test_turns import SeeingFake
from trireme.engines.engine import Sampling
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.rewards.grouped import Judge, reward_group
from trireme.task import Task
from trireme.workflows.workflow import resolve

pytestmark = pytest.mark.extension("judges")
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")


def seeing(folder: Path, replies: list[str]) -> Model:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = ChatTokens(tokenizer, reader=reader_for(folder))
    return Model(
        SeeingFake(replies, tokenizer), chat, sampling=Sampling(max_tokens=99), max_model_len=2000
    )


def last_prompt(model: Model) -> str:
    call = [*model.recorder][-1]
    return model.chat_tokens.render(call.messages or [], None)


def test_a_model_of_the_run_that_sees_is_shown_what_the_trained_one_was(folder: Path) -> None:
    model, judge = seeing(folder, ["a red disc"]), seeing(folder, ["0.5"])
    task = Task(raw_task={"question": "What?", "image": png(picture("red"))})

    async def go() -> Any:
        content = [{"type": "image", "image": task.raw_task["image"]}]
        await model.chat([{"role": "user", "content": content}])
        made = model.experiences()
        await reward_group(Judge.of(["judge"]), task, made, [judge])
        return made

    [experience] = asyncio.run(go())
    assert experience.reward == 0.5
    assert f"user: {SHOWN}\n\nassistant: a red disc" in last_prompt(judge)
    [call] = judge.recorder
    assert [each.digest for each in call.pictures] == [experience.pictures[0].digest]


def test_a_model_that_judges_itself_sees_the_pictures_again(folder: Path) -> None:
    model = seeing(folder, ["red", "blue", "[0.9, 0.1]"])
    task = Task(
        raw_task={"prompt": "What?", "response": "red", "image": png(picture("red"))},
        workflow_args={"truth_share": 0.0},
    )
    spec = resolve("math_trainable_ruler_workflow")
    found = asyncio.run(spec.call(task, model, 2, 0))
    assert [e.reward for e in found] == [0.9, 0.1]
    assert f"user: {SHOWN}What?" in last_prompt(model)
