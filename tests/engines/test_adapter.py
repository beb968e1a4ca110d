"""An adapter pushed alone: held beside the base by the embedded engine, proved as weights are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.tiny import make_model, make_tokenizer
from tests.trainer.samples import backend_of
from trireme.engines.adapter import A, Merged
from trireme.engines.device import Device
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.sync.probe import Probe, WrongWeights
from trireme.sync.push import MemorySync
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.source import PartSource

WITHIN = 1e-5
"""Nats, float32: what one order of the same sums differs from another by, at most."""


def adapted(folder: Path, seed: int = 0, **given: Any) -> Backend:
    """A trainer with an adapter that has learned something, whatever that is."""
    backend = backend_of(folder, lora=Lora(rank=4, alpha=8, **given))
    change(backend, seed)
    return backend


def change(backend: Backend, seed: int, size: float = 0.1) -> None:
    assert backend.adapter is not None
    torch.manual_seed(seed)
    for tensor in backend.adapter.weights().values():
        tensor.data.add_(torch.randn_like(tensor) * size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("adapter") / "base")


def engine_at(folder: Path, device: Device) -> TorchEngine:
    return TorchEngine(
        folder, tokenizer=make_tokenizer(), device=device, settings=TorchSettings(max_model_len=64)
    )


ROWS = [[5, 6, 7, 8, 9, 10], [60, 3, 61, 4, 62]]


@pytest.mark.parametrize("given", [{}, {"rslora": True}, {"exclude_modules": ("q_proj",)}])
def test_an_adapter_pushed_alone_scores_as_merged_weights_do(folder, given):
    async def main() -> None:
        device = Device(1)
        backend, engine = adapted(folder, **given), engine_at(folder, device)
        common: dict[str, Any] = {
            "shared": False,
            "dtype": "float32",
            "probe": Probe(99, "float32"),
        }
        alone = MemorySync(PartSource(backend, "adapter"), engine, device, **common)
        whole = MemorySync(backend, engine, device, **common)
        sizes = []
        for version in (1, 3):
            found = await alone.push(version)
            assert found["sync/probe_diff"] < WITHIN
            held = await engine.logprobs(ROWS)
            merged = await whole.push(version + 1)
            for ours, theirs in zip(held, await engine.logprobs(ROWS), strict=True):
                assert ours == pytest.approx(theirs, abs=WITHIN)
            await engine.update_weights(folder, 9)  # the base again, for the next adapter
            change(backend, version)
            sizes.append((found["sync/pushed_bytes"], merged["sync/pushed_bytes"]))
        tensors = PartSource(backend, "adapter").weights().values()
        weights = backend.weights().values()
        expected = (sum(t.nbytes for t in tensors), sum(t.nbytes for t in weights))
        assert sizes == [expected, expected] and expected[0] < expected[1] / 4
        await engine.close()
        device.close()

    asyncio.run(main())


@pytest.mark.parametrize("targets", ["all-linear", ("c_proj",), r".*attn\.c_proj"])
def test_an_adapter_on_weights_that_lie_transposed_scores_as_its_trainer_does(targets, tmp_path):
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=256, **sizes)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    async def main() -> None:
        device = Device(1)
        backend, engine = adapted(tmp_path, target_modules=targets), engine_at(tmp_path, device)
        common: dict[str, Any] = {"shared": False, "dtype": "float32"}
        sync = MemorySync(
            PartSource(backend, "adapter"), engine, device, probe=Probe(99, "float32"), **common
        )
        for version in (1, 2):
            await sync.push(version)
            held = engine.module.state_dict()
            for name, tensor in backend.weights().items():
                assert torch.allclose(held[name], tensor, atol=1e-6), name
            for ours, theirs in zip(await engine.logprobs(ROWS), backend.score(ROWS), strict=True):
                assert ours == pytest.approx(theirs, abs=WITHIN)
            change(backend, version)
        await engine.close()
        device.close()

    asyncio.run(main())


def test_adapters_that_follow_each_other_leave_the_base_as_it_was(folder):
    backend, other = adapted(folder), adapted(folder, seed=5, exclude_modules=("q_proj",))
    module, merged = backend_of(folder).module, Merged()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for number in range(20):
        change(backend, number, 1.0)
        merged.take(module, PartSource(backend, "adapter").weights())
    merged.take(module, PartSource(other, "adapter").weights())
    for name, tensor in other.weights().items():
        assert torch.allclose(module.state_dict()[name], tensor, atol=1e-6), name
    merged.leave(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_another_base_or_an_adapter_that_is_not_the_trainers_is_seen(folder, tmp_path, monkeypatch):
    async def main() -> None:
        device = Device(1)
        common: dict[str, Any] = {
            "shared": False,
            "dtype": "float32",
            "probe": Probe(99, "float32"),
        }
        backend = adapted(folder)
        other = engine_at(make_model(tmp_path / "other", seed=3), device)
        with pytest.raises(WrongWeights, match=r"does not serve .* tensors differ \(model\."):
            await MemorySync(PartSource(backend, "adapter"), other, device, **common).push(1)
        engine = engine_at(folder, device)
        sync = MemorySync(PartSource(backend, "adapter"), engine, device, **common)
        await sync.push(1)
        with monkeypatch.context() as patched:  # the adapter of before the step stays
            patched.setattr(Merged, "take", lambda *_: None)
            change(backend, 2, 1e-7)
            with pytest.raises(WrongWeights, match=r"28 of \d+ tensors differ \(model\."):
                await sync.push(2)
        good = PartSource(backend, "adapter").weights()
        marks = await engine.fingerprint()
        odd = {name: t[:, :-1] if name.endswith(A) else t for name, t in good.items()}
        with pytest.raises(ValueError, match=r"is for weights of .*: this model's are \(\d+, \d+"):
            await engine.update_weights(odd, 3)
        with pytest.raises(ValueError, match="mix an adapter's tensors with a model's"):
            await engine.update_weights(good | {"model.norm.weight": torch.ones(8)}, 3)
        with pytest.raises(ValueError, match=r"has A None and B \["):
            await engine.update_weights({n: t for n, t in good.items() if not n.endswith(A)}, 3)
        with pytest.raises(ValueError, match="NaN"):
            await engine.update_weights({n: t * float("nan") for n, t in good.items()}, 3)
        assert await engine.fingerprint() == marks and engine.version == 2
        await engine.close()
        await other.close()
        device.close()

    asyncio.run(main())


def test_an_adapter_on_the_embedding_does_not_travel_alone(tmp_path):
    folder = make_model(tmp_path / "untied", tie=False)
    with pytest.raises(ValueError, match=r"'model\.embed_tokens', which is not a linear layer"):
        PartSource(adapted(folder, target_modules=("embed_tokens",)), "adapter").weights()


def test_a_dora_adapter_does_not_travel_alone(folder):
    with pytest.raises(ValueError, match="DoRA adapter cannot travel alone"):
        PartSource(adapted(folder, dora=True), "adapter").weights()
