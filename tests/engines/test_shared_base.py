"""An engine over the base of the trainer's adapter: nothing is copied, and it samples the same."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.composites import make_composite
from tests.hybrids import make_hybrid
from tests.tiny import make_model, make_tokenizer
from tests.trainer.samples import backend_of, of_groups, optimizer_of
from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.engines.adapter import plain_name
from trireme.engines.device import Device
from trireme.engines.engine import Sampling
from trireme.engines.torch.engine import TorchEngine
from trireme.engines.torch.shell import TorchSettings
from trireme.sync.probe import Probe, WrongWeights
from trireme.sync.push import MemorySync
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.source import PartSource
from trireme.trainer.step import train_step

WITHIN = 1e-5
"""Nats, float32: what one order of the same sums differs from another by, at most."""
MERGED_WITHIN = 5e-5
"""The same where the sum of base and adapter has been rounded: Qwen3.5's delta rule repeats that
error in every token."""
ROWS = [[5, 6, 7, 8, 9, 10], [60, 3, 61, 4, 62], [33, 34, 33, 34, 33, 34, 33, 34, 35]]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def gpt2(folder: Path) -> Path:
    """A model that stores its weights transposed."""
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    sizes |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda folder: make_model(folder, "qwen3"),
    "llama": lambda folder: make_model(folder, "llama", tie=False),
    "gemma3": lambda folder: make_composite(folder, "gemma3"),
    "lfm2": lambda folder: make_hybrid(folder, "lfm2"),
    "qwen3_5_text": lambda folder: make_hybrid(folder, "qwen3_5_text"),
    "gpt2": gpt2,
}


def trainer_of(folder: Path, **given: Any) -> Backend:
    lora = Lora(rank=4, alpha=8, **given)
    return backend_of(folder, lora=lora, optimizer=optimizer_of(lr=0.005), max_token_len=200)


def engine_of(
    folder: Path, device: Device, backend: Backend | None = None, *, fast: bool = True
) -> TorchEngine:
    """An engine over the backend's base, or with a copy of the model."""
    return TorchEngine(
        folder,
        tokenizer=make_tokenizer(),
        device=device,
        settings=TorchSettings(max_model_len=64, fast=fast),
        share_with=None if backend is None else backend.module,
    )


def push_to(backend: Backend, engine: TorchEngine, device: Device, **given: Any) -> MemorySync:
    probe = Probe(99, "float32")
    options: dict[str, Any] = {"dtype": "float32", "probe": probe, "shared": False} | given
    return MemorySync(PartSource(backend, "adapter"), engine, device, **options)


def with_device(work: Callable[[Device], Awaitable[None]]) -> None:
    async def main() -> None:
        device = Device(1)
        try:
            await work(device)
        finally:
            device.close()

    asyncio.run(main())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_samples_and_scores_as_a_merged_copy_and_the_trainer_do_after_every_step(
    family: str, tmp_path: Path
) -> None:
    folder = FAMILIES[family](tmp_path / "model")
    backend = trainer_of(folder)
    base = {plain_name(n): t for n, t in backend.module.named_parameters() if ".lora_" not in n}
    before = {name: tensor.clone() for name, tensor in base.items()}
    recipe = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))

    async def work(device: Device) -> None:
        shared = engine_of(folder, device, backend)
        plain = engine_of(folder, device, backend, fast=False)
        merged = engine_of(folder, device)
        own = dict(shared.module.named_parameters())
        assert own.keys() == base.keys()
        assert all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in base.items())
        pushes = [push_to(backend, engine, device) for engine in (shared, plain, merged)]
        last: list[list[float]] = []
        for version in (1, 2, 3):
            train_step(backend, recipe, of_groups(), version=version - 1)
            for push in pushes:
                assert (await push.push(version))["sync/probe_diff"] < MERGED_WITHIN
            trained = backend.score(ROWS)
            assert trained != last  # each step has moved it
            last = trained
            for engine in (shared, plain, merged):
                for ours, theirs in zip(await engine.logprobs(ROWS), trained, strict=True):
                    within = MERGED_WITHIN if engine is merged else WITHIN
                    assert ours == pytest.approx(theirs, abs=within)
            replies = [await e.generate(ROWS[0], GREEDY) for e in (shared, plain, merged)]
            drawn = [(reply[0].ids, reply[0].logprobs) for reply in replies]
            scored = backend.score([[*ROWS[0], *drawn[0][0]]])[0][len(ROWS[0]) :]
            for ids, logprobs in drawn:
                assert ids == drawn[0][0]
                assert list(logprobs) == pytest.approx(scored, abs=MERGED_WITHIN)
        for engine in (shared, plain, merged):
            await engine.close()

    with_device(work)
    assert all(torch.equal(base[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("lock_step", [True, False])
def test_it_has_the_version_that_was_pushed_while_the_trainer_goes_on(
    lock_step: bool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    backend = trainer_of(folder)
    recipe = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))

    async def work(device: Device) -> None:
        engine = engine_of(folder, device, backend)
        push = push_to(backend, engine, device, lock_step=lock_step)
        train_step(backend, recipe, of_groups(), version=0)
        await push.push(1)
        pushed = await engine.logprobs(ROWS), await engine.fingerprint()
        train_step(backend, recipe, of_groups(), version=1)
        assert (await engine.logprobs(ROWS), await engine.fingerprint()) == pushed
        assert backend.score(ROWS)[0] != pytest.approx(pushed[0][0], abs=WITHIN)
        await push.push(2)
        assert (await engine.logprobs(ROWS))[0] == pytest.approx(backend.score(ROWS)[0], abs=WITHIN)
        await engine.close()

    with_device(work)


def test_an_adapter_on_fewer_layers_leaves_nothing_of_the_last_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    many, few = trainer_of(folder), trainer_of(folder, exclude_modules=("q_proj", "down_proj"))
    recipe = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    for backend in (many, few):
        train_step(backend, recipe, of_groups(), version=0)

    async def work(device: Device) -> None:
        engine = engine_of(folder, device, many)
        for backend in (many, few, many):
            await engine.update_weights(PartSource(backend, "adapter").weights(), 1)
            for ours, theirs in zip(await engine.logprobs(ROWS), backend.score(ROWS), strict=True):
                assert ours == pytest.approx(theirs, abs=WITHIN)
        await engine.close()

    with_device(work)


def test_a_mixture_has_an_adapter_on_attention_and_shares_its_experts(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3_moe")
    backend = trainer_of(folder, target_modules=("q_proj", "o_proj"))
    recipe = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))
    train_step(backend, recipe, of_groups(), version=0)

    async def work(device: Device) -> None:
        engine = engine_of(folder, device, backend)
        await push_to(backend, engine, device).push(1)
        for ours, theirs in zip(await engine.logprobs(ROWS), backend.score(ROWS), strict=True):
            assert ours == pytest.approx(theirs, abs=WITHIN)
        await engine.close()

    with_device(work)


def test_other_weights_and_a_wrong_adapter_are_refused_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model")
    other = make_model(tmp_path / "other", seed=3)
    backend = trainer_of(folder)
    recipe = get_recipe(AlgorithmConfig(algorithm_type="grpo", kl_loss_fn="none"))

    async def work(device: Device) -> None:
        engine = engine_of(folder, device, backend)
        train_step(backend, recipe, of_groups(), version=0)
        push = push_to(backend, engine, device)
        await push.push(1)
        marks = await engine.fingerprint()
        for source in (other, backend.weights(), None):
            with pytest.raises(ValueError, match=r"takes an adapter alone|needs a source"):
                await engine.update_weights(source, 2)
        good = PartSource(backend, "adapter").weights()
        for wrong, said in (
            ({n: t[:, :-1] if n.endswith("A.weight") else t for n, t in good.items()}, "is for"),
            ({n: t * float("nan") for n, t in good.items()}, "NaN"),
        ):
            with pytest.raises(ValueError, match=said):
                await engine.update_weights(wrong, 2)
        assert await engine.fingerprint() == marks and engine.version == 1
        with monkeypatch.context() as patched:
            patched.setattr(engine._adapter, "take", lambda *_: None)  # the last one stays
            train_step(backend, recipe, of_groups(), version=1)
            with pytest.raises(WrongWeights, match="tensors differ"):
                await push.push(2)
        await engine.close()

    with_device(work)


def test_in_bfloat16_the_adapter_has_the_dtype_of_the_base(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    backend = backend_of(folder, lora=Lora(rank=4, alpha=8), dtype="bfloat16", max_token_len=200)
    for name, parameter in backend.module.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(std=0.05)

    async def work(device: Device) -> None:
        settings = TorchSettings(max_model_len=64, dtype="bfloat16")
        engine = TorchEngine(
            folder,
            tokenizer=make_tokenizer(),
            device=device,
            settings=settings,
            share_with=backend.module,
        )
        copy = TorchEngine(folder, tokenizer=make_tokenizer(), device=device, settings=settings)
        for one in (engine, copy):
            probe = Probe(99, "bfloat16")
            await push_to(backend, one, device, dtype="bfloat16", probe=probe).push(1)
        assert {t.dtype for t in engine._adapter._adapter.values()} == {torch.bfloat16}
        exact = backend_of(folder, lora=Lora(rank=4, alpha=8))
        assert exact.adapter is not None and backend.adapter is not None
        exact.adapter.load(backend.adapter.weights())
        gaps = []
        for one in (engine, copy):
            rows = zip(await one.logprobs(ROWS), exact.score(ROWS), strict=True)
            gaps.append(
                sum(abs(a - b) for ours, theirs in rows for a, b in zip(ours, theirs, strict=True))
            )
        assert gaps[0] < 1.5 * gaps[1]  # as far from float32 as merged weights are
        await engine.close()
        await copy.close()

    with_device(work)


@pytest.mark.extension("fast_engine")
def test_the_lean_pass_adds_the_adapter_too(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    backend = trainer_of(folder)

    async def work(device: Device) -> None:
        engine = engine_of(folder, device, backend)
        assert engine._decoder.forward is not None
        await push_to(backend, engine, device).push(1)
        pairs = [await engine.generate(row, replace(GREEDY, n=3, temperature=1.0)) for row in ROWS]
        for row, replies in zip(ROWS, pairs, strict=True):
            for reply in replies:
                scored = backend.score([[*row, *reply.ids]])[0][len(row) :]
                assert list(reply.logprobs) == pytest.approx(scored, abs=WITHIN)
        await engine.close()

    with_device(work)


@pytest.mark.parametrize("shares", [True, False])
def test_a_closed_engine_has_neither_the_base_nor_the_adapter(tmp_path: Path, shares: bool) -> None:
    held: list[weakref.ref[Any]] = []
    engines: list[TorchEngine] = []

    async def work(device: Device) -> None:
        backend = trainer_of(make_model(tmp_path / "model"))
        engine = engine_of(tmp_path / "model", device, backend if shares else None)
        engines.append(engine)
        await push_to(backend, engine, device).push(1)
        held.extend(weakref.ref(weight) for weight in backend.module.parameters())
        weights = await engine._device.run(
            lambda: engine._adapter.apart(engine.module.state_dict()).values()
        )
        held.extend(map(weakref.ref, weights))
        await engine.close()

    with_device(work)
    gc.collect()
    assert held and not any(weight() is not None for weight in held)
    assert engines[0].version == 1
