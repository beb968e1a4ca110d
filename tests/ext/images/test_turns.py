"""Schedulers with pictures: ms-swift's `images` and tags, and a tool whose result is a picture."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.ext.images.seeing import TEMPLATE, make_seeing, picture, png, reader_for
from tests.ext.multi_turn.test_run_override import OneDialogue
from tests.model.fake import FakeEngine
from trireme.engines.device import Device
from trireme.engines.engine import Completion, EngineTraits, Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.ext.multi_turn.scheduled import multi_turn_scheduler
from trireme.ext.multi_turn.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
)
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
from trireme.pictures import BEGIN, with_placeholders
from trireme.task import Task

pytestmark = pytest.mark.extension("multi_turn")


class ZoomScheduler(MultiTurnScheduler):
    """A tool that cuts a part out of the first picture and shows it in the next turn, as ms-swift's
    zoom-in plug-ins do.
    """

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        """A reply of a random model is cut, which would end the conversation."""
        return current_turn >= 3

    def step(self, infer_request: RolloutInferRequest, result: Any, current_turn: int) -> Any:
        first = infer_request.images[0]
        image = Image.open(io.BytesIO(first) if isinstance(first, bytes) else first)
        infer_request.images.append(image.crop((0, 0, 42, 56)))
        infer_request.messages.append({"role": "user", "content": "The part: <image> And now?"})
        return {
            "infer_request": infer_request,
            "rollout_infos": {"images": len(infer_request.images)},
        }


@pytest.mark.parametrize("prompt", ["What is it?", "Look at <image>: what is it?"])
def test_a_tool_shows_a_further_picture_in_each_turn(tmp_path: Path, prompt: str) -> None:
    folder = make_seeing(tmp_path / "model", "qwen2_5_vl")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reader = reader_for(folder)
    row = {"messages": [{"role": "user", "content": prompt}], "images": [png(picture("red"))]}
    args = {"scheduler": ZoomScheduler, "max_turns": 3}
    task = Task(raw_task=row, workflow_args=args)

    async def run() -> Any:
        settings = TorchSettings(max_model_len=400)
        engine = TorchEngine(folder, tokenizer=tokenizer, device=Device(), settings=settings)
        chat = ChatTokens(tokenizer, reader=reader)
        model = Model(engine, chat, sampling=Sampling(max_tokens=5), max_model_len=400)
        try:
            return await multi_turn_scheduler(task, model), len(model.recorder)
        finally:
            await engine.close()

    made, calls = asyncio.run(run())
    [experience] = made
    assert calls == 3 and experience.info["rollout_infos"]["images"] == 3
    cut = picture("red").crop((0, 0, 42, 56))
    seen = [reader.read(each).digest for each in (png(picture("red")), cut)]
    assert [each.digest for each in experience.pictures] == seen  # the part comes twice
    tokens = experience.tokens.tolist()
    assert tokens.count(experience.pictures[1].first) == 2
    assert experience.messages[0]["content"].count("<image>") == 1


class SeeingFake(FakeEngine):
    """Says what it is told, whatever it is shown."""

    traits = EngineTraits(sees=True)

    async def generate(
        self, ids: Any, sampling: Sampling, *, pictures: Any = (), **options: Any
    ) -> list[Completion]:
        return await super().generate([t for t in ids if t < BEGIN], sampling, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")


def played(folder: Path, replies: list[str], row: Any, scheduler: Any, template: Any = None) -> Any:
    """The experiences of one trajectory, and their text with a placeholder for each picture."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    reader = reader_for(folder)
    chat = ChatTokens(tokenizer, chat_template=template, reader=reader)
    sampling = Sampling(max_tokens=40)
    model = Model(SeeingFake(replies, tokenizer), chat, sampling=sampling, max_model_len=400)
    task = Task(raw_task=row, workflow_args={"scheduler": scheduler, "max_turns": 3})
    made = asyncio.run(multi_turn_scheduler(task, model))
    ids = [with_placeholders(e.tokens.tolist(), reader.placeholder) for e in made]
    return made, [tokenizer.decode(row) for row in ids]


def test_a_tag_that_the_model_writes_is_text(folder: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "<image> What?"}],
        "images": [png(picture("red"))],
    }
    replies = ["a dot in <image>", "<image>", "done"]
    [experience], [text] = played(folder, replies, row, ZoomScheduler)
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text.count(shown) == 3 and text.count("<image>") == 2
    assert text.count(f"The part: {shown} And now?") == 2
    assert len(experience.pictures) == 2


@pytest.mark.parametrize("form", ["parts", "column"])
def test_a_run_keeps_turns_that_show_pictures_and_were_rewritten(folder: Path, form: str) -> None:
    """Pictures are in the parts of a message, or in the row's column."""
    image = png(picture("red"))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    row: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    if form == "column":
        row = {"messages": [{"role": "user", "content": "What?"}], "images": [image]}
    written = "{{- message['content'] }}{%- else %}"
    forgets = "{{- message['content'].split('</think>')[-1] }}{%- else %}"
    made, _ = played(
        folder,
        ["<think>a</think>1", "<think>b</think>2"],
        row,
        OneDialogue,
        TEMPLATE.replace(written, forgets),
    )
    assert len(made) == 2
    assert all(len(e.pictures) == 1 and e.trained_tokens for e in made)


class Leads(SeeingFake):
    """A rollout server with a scheduler of its own."""

    multi_turn = True

    async def connect(self) -> None: ...

    async def infer(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        raise AssertionError("the server was asked")


@pytest.mark.parametrize("form", ["parts", "column"])
def test_a_servers_own_scheduler_gets_no_pictures(folder: Path, form: str) -> None:
    image = str(folder / "red.png")
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    row: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    if form == "column":
        row = {"messages": [{"role": "user", "content": "What?"}], "images": [image]}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = ChatTokens(tokenizer, reader=reader_for(folder))
    model = Model(Leads([], tokenizer), chat, max_model_len=400)
    with pytest.raises(ValueError, match="a rollout server's own scheduler does not get"):
        asyncio.run(multi_turn_scheduler(Task(raw_task=row), model))
