"""The Model over the embedded engine: what is recorded is what the engine gives again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.model.fake import user
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.experience import Experience
from trireme.model.chat_tokens import ChatTokens
from trireme.model.model import Model


@pytest.mark.parametrize(
    "through_client", [False, pytest.param(True, marks=pytest.mark.extension("openai"))]
)
def test_logprobs_of_a_conversation_are_those_of_its_ids(
    tiny_dir: Path, through_client: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)

    async def run() -> tuple[Experience, list[float]]:
        engine = TorchEngine(
            tiny_dir,
            tokenizer=tokenizer,
            device=Device(),
            settings=TorchSettings(max_model_len=400),
        )
        sampling = Sampling(max_tokens=12, temperature=0.7)
        model = Model(engine, ChatTokens(tokenizer), sampling=sampling, max_model_len=400)
        chat = [user("one")]
        for text in ("two", "three", "four"):
            if through_client:
                done = await model.openai.chat.completions.create(model="", messages=chat)  # type: ignore
                chat += [done.choices[0].message.model_dump(), user(text)]
            else:
                chat += [(await model.chat(chat)).message, user(text)]
        (experience,) = model.experiences(reward=1.0)
        again = await model.logprobs(experience.tokens.tolist(), temperature=0.7)
        await engine.close()
        return experience, again

    experience, again = asyncio.run(run())
    assert experience.logprobs is not None and experience.temperature == 0.7
    assert 3 <= int(experience.mask.sum()) <= 36
    difference = (experience.logprobs - torch.tensor(again))[experience.mask]
    assert difference.abs().max() < 1e-4
