"""LoRA: only the additions train, the base is the reference, merged weights have plain names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.samples import backend_of, experiences, optimizer_of
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Lora
from trireme.trainer.step import train_step

RECIPE = get_recipe(SimpleNamespace(algorithm_type="grpo"))


def _trained(path, steps: int = 2, **given) -> Backend:
    torch.manual_seed(0)
    backend = backend_of(
        path, optimizer=optimizer_of(lr=1e-2), max_token_len=60, reference=True,
        lora=Lora(rank=4, alpha=8, **given),
    )  # fmt: skip
    for number in range(steps):
        train_step(backend, RECIPE, experiences(number), version=0)
    return backend


def test_merged_weights_are_those_of_peft_and_the_module_stays_unmerged(tiny_dir, tmp_path):
    backend = _trained(tiny_dir)
    assert backend.adapter is not None
    merged = backend.weights()
    before = {n: p.clone() for n, p in backend.module.named_parameters()}
    backend.adapter.save(tmp_path, backend.adapter.weights())
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    expected = PeftModel.from_pretrained(base, str(tmp_path)).merge_and_unload().state_dict()
    del expected["lm_head.weight"]  # tied
    assert set(merged) == set(expected)
    for name, weight in expected.items():
        assert torch.allclose(merged[name], weight, atol=1e-7), name
    assert all(torch.equal(p, before[n]) for n, p in backend.module.named_parameters())


def test_merged_weights_score_like_the_adapter(tiny_dir, tmp_path):
    backend = _trained(tiny_dir)
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir)
    plain.load_state_dict(backend.weights(), strict=False)
    plain.tie_weights()
    plain.save_pretrained(tmp_path)
    other = backend_of(tmp_path, max_token_len=60)
    batch = flatten(experiences())
    assert torch.allclose(other.logprobs(batch), backend.logprobs(batch), atol=1e-5)


def test_the_base_weights_do_not_move_and_are_the_reference(tiny_dir):
    backend = _trained(tiny_dir)
    plain = backend_of(tiny_dir, max_token_len=60)
    batch = flatten(experiences())
    assert torch.allclose(backend.logprobs(batch, reference=True), plain.logprobs(batch), atol=1e-6)
    assert not torch.allclose(backend.logprobs(batch), plain.logprobs(batch), atol=1e-3)
    trainable = [n for n, p in backend.module.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in n for n in trainable)


def test_a_resumed_adapter_ends_with_the_same_bytes(tiny_dir, tmp_path):
    whole = _trained(tiny_dir, steps=2, dropout=0.1)
    torch.save(whole.state(), tmp_path / "state.pt")
    train_step(whole, RECIPE, experiences(9), version=0)
    resumed = _trained(tiny_dir, steps=0, dropout=0.1)
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    train_step(resumed, RECIPE, experiences(9), version=0)
    for name, weight in whole.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


def test_the_saved_adapter_holds_the_additions_alone(tiny_dir, tmp_path):
    backend = _trained(tiny_dir, steps=1)
    assert backend.adapter is not None
    backend.adapter.save(tmp_path, backend.adapter.weights())
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)


def test_gradient_checkpointing_works_with_an_adapter(tiny_dir):
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backend = backend_of(tiny_dir, max_token_len=60, reference=True, lora=Lora(rank=4),
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        train_step(backend, RECIPE, experiences(), version=0)
        results.append(backend.weights())
    for name, weight in results[0].items():
        assert torch.allclose(results[1][name], weight, atol=1e-6), name


def test_a_checkpoint_has_the_adapter_as_peft_loads_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.tiny import make_model
    from trireme.config.schema import OptimizerConfig

    base = make_model(tmp_path / "model")
    backend = backend_of(base, optimizer=OptimizerConfig(), lora=Lora(rank=4))
    assert backend.adapter is not None
    for name, tensor in backend.adapter.weights().items():
        torch.nn.init.normal_(tensor, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    (tmp_path / "actor").mkdir()
    backend.save(tmp_path / "actor", hf=False)
    adapter = {path.name for path in (tmp_path / "actor" / "lora_adapter").iterdir()}
    assert adapter == {"adapter_config.json", "adapter_model.safetensors"}
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "actor" / "lora_adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    merged = AutoModelForCausalLM.from_pretrained(base)
    before = merged(ids).logits
    merged.load_state_dict(backend.weights(), strict=False)
    assert torch.allclose(loaded(ids).logits, merged(ids).logits, atol=1e-5)
    assert not torch.allclose(before, merged(ids).logits, atol=1e-2)
