"""Schedulers with pictures: ms-swift's `images` and tags, and a tool whose result is a picture."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.ext.images.seeing import make_seeing, picture, png, reader_for
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.ext.multi_turn.scheduled import multi_turn_scheduler
from trireme.ext.multi_turn.scheduler import MultiTurnScheduler, RolloutInferRequest
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model
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
