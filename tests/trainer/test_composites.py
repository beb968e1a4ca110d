"""Composites whose text alone is trained: the language model is exact in every layout, and the
towers stay what they are.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.composites import make_composite
from tests.engines.test_torch_engine import run
from tests.tested import COMPOSITES, RANKS, families
from tests.trainer.samples import backend_of, experiences, gap, gradients_of, move
from tests.trainer.test_fsdp2 import two_ranks_learn_alike
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.config.schema import AlgorithmConfig
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.composite import towers, towers_in_files
from trireme.sync.probe import Probe, WrongWeights
from trireme.sync.push import MemorySync
from trireme.trainer.lora import Lora
from trireme.trainer.source import PartSource

SIGHT = ("vision_", "multi_modal_projector", "visual", "connector")


@pytest.fixture(scope="module", params=COMPOSITES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_composite(tmp_path_factory.mktemp(request.param), request.param)


def grpo() -> Any:
    return get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))


def own_scores(folder: Path, rows: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """log p of each row's tokens after the first, by transformers' whole model."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row])).logits[0, :-1] for row in rows]
    return [
        x.double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        for x, row in zip(logits, rows, strict=True)
    ]


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_packed_and_shared_is_single_with_gradients(folder: Path, lora: Lora | None) -> None:
    samples = experiences()
    scores, gradients = [], []
    for tokens, share in ((1, False), (999, True)):
        backend = backend_of(folder, lora=lora, max_token_len=tokens, share_prefix=share)
        move(backend)  # an adapter begins at 0, where half of its gradients are
        scores.append(backend.logprobs(flatten(samples)))
        gradients.append(gradients_of(backend, grpo(), samples)[0])
    rounds_more = "qwen3_5" in str(folder)  # layers with a state, see test_hybrids.py
    assert float((scores[0] - scores[1]).abs().max()) < (3e-5 if rounds_more else 1e-5)
    assert gradients[0]
    assert gap(gradients[1], gradients[0]) < (1e-4 if rounds_more else 1e-5)
    assert not any(part in name for name in gradients[0] for part in SIGHT)


def test_trainer_and_engine_score_as_transformers_does(folder: Path) -> None:
    rows = [list(range(5, 45)), [7, 7, 9]]
    backend = backend_of(folder)

    async def ask(engine: Any) -> Any:
        asked = Sampling(max_tokens=12, n=2, ignore_eos=True)
        replies = await asyncio.gather(*(engine.generate(row, asked) for row in rows))
        return await engine.logprobs(rows), replies

    scored, replies = run(folder, ask, max_model_len=128)
    for expected, engine, trainer in zip(
        own_scores(folder, rows, torch.float64), scored, backend.score(rows), strict=True
    ):
        assert float((torch.tensor(engine[1:]) - expected).abs().max()) < 1e-4
        assert float((torch.tensor(trainer[1:]) - expected).abs().max()) < 1e-4
    for row, pair in zip(rows, replies, strict=True):
        for reply in pair:
            [expected] = own_scores(folder, [[*row, *reply.ids]], torch.float64)
            assert (
                float((torch.tensor(reply.logprobs) - expected[len(row) - 1 :]).abs().max()) < 1e-4
            )


def test_towers_are_frozen(folder: Path) -> None:
    backend = backend_of(folder)
    sights = dict(towers(backend.module))
    assert sights and all(any(part in name for part in SIGHT) for name in sights)
    assert not any(tensor.requires_grad for tensor in sights.values())


def test_engines_take_the_weights_of_a_trained_composite(folder: Path) -> None:
    backend = backend_of(folder)
    move(backend)
    row = list(range(5, 25))

    async def ask(engine: Any) -> Any:
        await engine.update_weights(backend.weights(), 1)
        return (await engine.logprobs([row]))[0], await engine.fingerprint()

    scored, marks = run(folder, ask, max_model_len=64)
    [expected] = backend.score([row])
    assert max(abs(a - b) for a, b in zip(scored, expected, strict=True)) < 1e-4
    assert set(marks) >= set(backend.weights())


def test_the_towers_of_a_folder_are_known_without_its_weights(folder: Path) -> None:
    module = backend_of(folder).module
    sights = dict(towers(module))
    stored, held = load_file(folder / "model.safetensors"), towers_in_files(folder)
    assert held and all(stored[file].equal(sights[name]) for name, file in held.items())
    assert held.keys() == sights.keys() & module.state_dict().keys()


async def pushed_from(source: Any, engine: Any, version: int) -> dict[str, float]:
    """The metrics of a push through memory, which proves the engine's weights."""
    device = Device(1)
    common: dict[str, Any] = {"dtype": "float32", "probe": Probe(90, "float32"), "shared": False}
    try:
        return await MemorySync(source, engine, device, **common).push(version)
    finally:
        device.close()


@pytest.mark.parametrize("lora", [None, Lora(rank=4, dora=True)], ids=["full", "merged"])
def test_a_push_leaves_the_towers_at_home_and_proves_the_whole(
    folder: Path, lora: Lora | None
) -> None:
    backend = backend_of(folder, lora=lora)
    source = PartSource(backend, "text")
    whole, text = backend.weights(), source.weights()
    towers = set(whole) - set(text)
    assert towers == {name for name in whole if any(part in name for part in SIGHT)}
    size = sum(tensor.nbytes for tensor in text.values())

    def learn() -> None:
        for parameter in backend.module.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.01)

    async def ask(engine: Any) -> Any:
        learn()
        metrics = await pushed_from(source, engine, 1)
        assert metrics["sync/pushed_bytes"] == size
        assert metrics["sync/probe_diff"] < 1e-4
        engine.module.get_parameter(min(towers)).data.add_(0.5)
        with pytest.raises(WrongWeights, match="1 of"):
            await pushed_from(source, engine, 2)
        await pushed_from(backend, engine, 3)  # the whole model mends it
        some = {**source.weights(), min(towers): whole[min(towers)]}
        with pytest.raises(ValueError, match=f"{len(towers) - 1} tensors are missing"):
            await engine.update_weights(some, 4)

    run(folder, ask, max_model_len=64)


@pytest.mark.large
@pytest.mark.parametrize("family", families(RANKS, COMPOSITES))
def test_ranks_learn_what_one_process_learns(family: str, tmp_path: Path) -> None:
    path = make_composite(tmp_path / "model", family)
    two_ranks_learn_alike(path, tmp_path / "ranks")
