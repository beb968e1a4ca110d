"""Router replay of a mixture that sees pictures, whose tokens have experts as those of text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.engines.test_torch_engine import run
from tests.ext.images.seeing import make_seeing
from tests.ext.images.test_exact import known, own_scores, samples
from tests.mixtures import routers_of
from tests.trainer.own_pass import gradients
from tests.trainer.samples import gap
from tests.trainer.test_replay import UNKNOWN, with_routing
from trireme.batch import flatten
from trireme.engines.engine import Sampling
from trireme.trainer.model import load_model, token_logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), "qwen3_vl_moe")


def test_the_engine_records_the_experts_of_pictures_and_text(folder: Path) -> None:
    rows = [e for e in samples(folder) if e.eid.run == 0]
    asked = Sampling(max_tokens=9, n=2, ignore_eos=True)

    async def ask(engine: Any) -> Any:
        prompts = [e.tokens.tolist()[: e.prompt_length] for e in rows]
        replies = await asyncio.gather(
            *(
                engine.generate(prompt, asked, pictures=e.pictures)
                for prompt, e in zip(prompts, rows, strict=True)
            )
        )
        longer = [*prompts[2], *replies[2][0].ids, *prompts[1]]
        seen = [*rows[1].pictures, *rows[2].pictures]
        again = await engine.generate(longer, asked, pictures=seen)
        return [*zip(prompts, replies, strict=True), (longer, again)]

    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    each: list[Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda _, inputs, out: each.append(out[-1]))
    for prompt, replies in run(folder, ask, max_model_len=256, records_routing=True):
        for reply in replies:
            each.clear()
            own_scores(folder, [*prompt, *reply.ids], known(rows), model)
            expected = torch.stack(each, 1).sort(-1)[0].numpy()[:-1]
            assert (np.sort(reply.routed_experts, -1) == expected).all()


def test_replayed_training_is_that_of_a_model_with_forced_routers(folder: Path) -> None:
    eager: Any = {"experts_implementation": "eager", "attn_implementation": "eager"}
    own: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, **eager)
    rows = with_routing(samples(folder), layers=len(routers_of(own)))
    recorded: list[Tensor | None] = [None]

    def force(router: Any, layer: int) -> None:
        plain = router.forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, chosen = plain(hidden)
            if (forced := recorded[0]) is not None:
                known_rows = forced[:, layer, 0] != UNKNOWN
                chosen = torch.where(known_rows[:, None], forced[:, layer].long(), chosen)
            probabilities = torch.nn.functional.linear(hidden, router.weight).softmax(-1)
            weights = probabilities.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        router.forward = forward

    for layer, router in enumerate(routers_of(own)):
        force(router, layer)
    parts = []
    for e in rows:
        recorded[0] = e.routed_experts
        scores = own_scores(folder, e.tokens.tolist(), known(rows), own)
        parts.append(scores[e.prompt_length - 1 :])
    expected = gradients(own, torch.cat(parts))
    batch = flatten(rows)
    model = load_model(folder, device="cpu", replays=True)
    for share in (True, False):
        got = gradients(model, token_logprobs(model, batch, share_prefix=share)[0])
        scores = got.pop("logprobs").double(), expected["logprobs"]
        assert float((scores[0] - scores[1]).abs().max()) < 1e-5
        text = {n: g for n, g in expected.items() if n in got}
        assert any("mlp.gate.weight" in name for name in text)
        assert gap(got, text) < 1e-4
    without = token_logprobs(load_model(folder, device="cpu"), batch)[0].detach()
    assert float((without - expected["logprobs"]).abs().max()) > 1e-2
