"""Chunked attention (Llama 4): a query sees the keys of its own chunk of its path, and queries of
layers without rotations are scaled by their positions, in every layout.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.test_torch_engine import run
from tests.tested import CHUNKS, ENGINE, TRAINER, families
from tests.tiny import make_tokenizer
from tests.trainer.own_pass import packed_gap
from tests.trainer.samples import backend_of, experiences
from tests.trainer.test_hybrids import ROWS, far, far_of, own_scores
from trireme.batch import flatten
from trireme.engines.engine import Sampling
from trireme.trainer import attention, ulysses
from trireme.trainer.model import load_model


@pytest.fixture(scope="module", params=families(TRAINER, CHUNKS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with chunks of 8 tokens, and two that see all and scale queries every 4 tokens."""
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        request.param,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=8,
        floor_scale=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("share", [True, False])
def test_packed_training_is_that_of_separate_rows(folder: Path, share: bool) -> None:
    assert packed_gap(folder, flatten(experiences()), share=share) < 1e-5


@pytest.mark.parametrize("forgotten", ["window_of", "scaled_by_position"])
def test_what_is_forgotten_is_seen(
    folder: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"window_of": lambda *_: 0, "scaled_by_position": lambda _, query, *__: query}
    monkeypatch.setattr(attention, forgotten, plain[forgotten])
    monkeypatch.setattr("trireme.trainer.model._AGREEMENT", math.inf)
    assert packed_gap(folder, flatten(experiences())) > 1e-2


@pytest.mark.parametrize("family", families(ENGINE, CHUNKS))
def test_trainer_and_engine_score_as_transformers_does(folder: Path, family: str) -> None:
    async def ask(engine: Any) -> Any:
        asked = Sampling(max_tokens=12, n=2, ignore_eos=True)
        replies = await asyncio.gather(*(engine.generate(row, asked) for row in ROWS))
        return await engine.logprobs(ROWS[:2]), replies

    assert family in str(folder)
    scored, answered = run(folder, ask, max_model_len=128)
    trained = backend_of(folder).score(ROWS[:2])
    for row, engine, trainer in zip(ROWS[:2], scored, trained, strict=True):
        assert max(far(x[1:], own_scores(folder, row)) for x in (engine, trainer)) < 1e-4
    for row, pair in zip(ROWS, answered, strict=True):
        assert far_of(folder, row, pair) < 1e-4


def test_ranks_that_share_a_sequence_are_refused(folder: Path) -> None:
    group: Any = type("Group", (), {"size": 2})
    with pytest.raises(ValueError, match="scale queries by their places in a rank's own tokens"):
        ulysses.switch(load_model(folder, device="cpu"), group)
