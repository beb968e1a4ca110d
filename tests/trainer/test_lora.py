"""LoRA: only the additions train, the base is the reference, merged weights have plain names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.tiny import make_model
from tests.trainer.ranks import run
from tests.trainer.samples import apart, backend_of, experiences, optimizer_of
from trireme.algorithms.recipes import get_recipe
from trireme.batch import flatten
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Adapter, Lora
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.step import train_step

RECIPE = get_recipe(SimpleNamespace(algorithm_type="grpo"))


def _trained(
    model: Path,
    steps: int = 2,
    dtype: str = "float32",
    ranks: Ranks | None = None,
    **given: Any,
) -> Backend:
    torch.manual_seed(0)
    backend = backend_of(
        model, ranks, optimizer=optimizer_of(lr=1e-2), max_token_len=60, reference=True,
        dtype=dtype, lora=Lora(rank=4, alpha=8, **given),
    )  # fmt: skip
    for number in range(steps):
        train_step(backend, RECIPE, experiences(number), version=0)
    return backend


KINDS: dict[str, dict[str, Any]] = {"plain": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_peft_and_the_module_stays_unmerged(tiny_dir, tmp_path, kind):
    backend = _trained(tiny_dir, **KINDS[kind])
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


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_score_like_the_adapter(tiny_dir, tmp_path, kind):
    backend = _trained(tiny_dir, **KINDS[kind])
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


def test_scores_before_the_first_step_have_no_dropout(tiny_dir):
    backend = _trained(tiny_dir, steps=0, dropout=0.5)
    for name, parameter in backend.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    batch = flatten(experiences())
    assert torch.equal(backend.logprobs(batch), backend.logprobs(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_adapter_ends_with_the_same_bytes(tiny_dir, tmp_path, kind):
    given: dict[str, Any] = KINDS[kind] | {"dropout": 0.1}
    whole = _trained(tiny_dir, steps=2, **given)
    torch.save(whole.state(), tmp_path / "state.pt")
    train_step(whole, RECIPE, experiences(9), version=0)
    resumed = _trained(tiny_dir, steps=0, **given)
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    train_step(resumed, RECIPE, experiences(9), version=0)
    for name, weight in whole.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


@pytest.mark.parametrize("targets", [("q_proj",), ("o_proj", "q_proj", "v_proj")])
def test_a_checkpoint_of_an_adapter_on_other_layers_is_refused(tiny_dir, tmp_path, targets):
    first = _trained(tiny_dir, target_modules=("o_proj", "v_proj"))
    first.save(tmp_path, hf=False)
    other = _trained(tiny_dir, steps=0, target_modules=targets)
    with pytest.raises(ValueError, match=r"has other layers than this one .*has changed since"):
        other.load(tmp_path)


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
    assert apart(results[1], results[0]) < 1e-3


def test_a_checkpoint_has_the_adapter_as_peft_loads_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

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


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_an_adapter_which_is_the_reference_too(tiny_dir, tmp_path, kind):
    first = _trained(tiny_dir, **KINDS[kind])
    assert first.adapter is not None
    first.adapter.save(tmp_path, first.adapter.weights())
    batch = flatten(experiences())
    before = first.logprobs(batch)
    backend = _trained(tiny_dir, steps=0, path=str(tmp_path))
    assert torch.equal(backend.logprobs(batch), before)
    train_step(backend, RECIPE, experiences(7), version=0)
    train_step(first, RECIPE, experiences(7), version=0)  # whose reference is the base
    assert torch.equal(backend.logprobs(batch, reference=True), before)
    assert not torch.allclose(backend.logprobs(batch), before, atol=1e-3)
    plain = backend_of(tiny_dir, max_token_len=60)  # computed by other passes, if there are some
    assert torch.allclose(first.logprobs(batch, reference=True), plain.logprobs(batch), atol=1e-5)
    kept = [n for n, p in backend.module.named_parameters() if ".start" in n and p.requires_grad]
    assert not kept
    assert set(backend.weights()) == set(first.weights())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_took_its_start_from_the_base_does_so_once(tiny_dir, tmp_path, init):
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    config = LoraConfig(r=4, init_lora_weights=init, target_modules=["q_proj", "v_proj"])
    peft = get_peft_model(base, config)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(1.5)
    peft.save_pretrained(tmp_path)
    plain = backend_of(tiny_dir, max_token_len=60, lora=Lora(path=str(tmp_path)))
    backend = _trained(tiny_dir, steps=0, path=str(tmp_path))
    batch = flatten(experiences())
    assert torch.equal(backend.logprobs(batch), plain.logprobs(batch))
    assert torch.equal(backend.logprobs(batch, reference=True), plain.logprobs(batch))
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_dir), str(tmp_path)
    )
    expected = loaded.merge_and_unload().state_dict()
    for name, weight in backend.weights().items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name


def test_an_adapter_of_another_model_is_refused(tiny_dir, tmp_path):
    first = _trained(tiny_dir, steps=0)
    assert first.adapter is not None
    first.adapter.save(tmp_path, first.adapter.weights())
    other = make_model(tmp_path / "other", layers=1)
    with pytest.raises(
        ValueError, match=r"has other layers than this one .*it belongs to another model"
    ):
        backend_of(other, lora=Lora(path=str(tmp_path)))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file(tensors | {name: torch.ones(1, 3)}, file)
    with pytest.raises(ValueError, match=rf"{name} of .1, 3., and this one of .*another model"):
        backend_of(tiny_dir, lora=Lora(path=str(tmp_path)))


def test_excluded_layers_get_no_addition(tiny_dir):
    lora = Lora(rank=4, exclude_modules=("q_proj", "down_proj"))
    names = [
        n for n, _ in backend_of(tiny_dir, lora=lora).module.named_parameters() if "lora_" in n
    ]
    assert any("k_proj" in name for name in names)
    assert not any("q_proj" in name or "down_proj" in name for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_of_an_adapter_is_bfloat16_where_the_forward_pass_is(tiny_dir, kind):
    exact, half = (_trained(tiny_dir, 2, d, **KINDS[kind]) for d in ("float32", "bfloat16"))
    kinds = {(p.requires_grad, p.dtype) for p in half.module.parameters()}
    assert kinds == {(False, torch.bfloat16), (True, torch.float32)}
    batch = flatten(experiences())
    assert torch.allclose(half.logprobs(batch), exact.logprobs(batch), atol=0.1)
    assert (half.logprobs(batch) - exact.logprobs(batch)).abs().mean() < 0.02
    for name, weight in half.weights().items():
        assert torch.allclose(weight.float(), exact.weights()[name], atol=0.02), name


def _goes_on(place: RankSpec | None, model: Path, adapter: Path, job: Path | None) -> list[Any]:
    """Of a step from an adapter on, in both number formats: scores, the reference's, weights."""
    ranks = Ranks(place) if place else None
    out: list[Any] = []
    for dtype in ("float32", "bfloat16"):
        backend = _trained(model, 1, dtype, ranks, path=str(adapter))
        if job and dtype == "bfloat16":
            backend.save(job, hf=False)
            assert place is not None
            backend = _trained(model, 0, dtype, ranks, path=str(adapter))
            backend.load(job)
        batch = flatten(experiences())
        scores = [backend.logprobs(batch), backend.logprobs(batch, reference=True)]
        out += [*scores, {n: t.clone() for n, t in backend.each_weight()}]
    if ranks:
        ranks.close()
    return out


def test_two_ranks_go_on_from_an_adapter_as_one_process_does(tiny_dir, tmp_path):
    first = _trained(tiny_dir, dora=True, rslora=True)
    assert first.adapter is not None
    adapter, job = tmp_path / "adapter", tmp_path / "job"
    first.adapter.save(adapter, first.adapter.weights())
    job.mkdir()
    expected = _goes_on(None, tiny_dir, adapter, None)
    for got in run(_goes_on, tmp_path / "ranks", tiny_dir, adapter, job):
        for place, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            within = 1e-5 if place < 3 else 0.1  # in bfloat16 another layout rounds otherwise
            if isinstance(theirs, Tensor):
                ours, theirs = {"": ours}, {"": theirs}
            assert set(ours) == set(theirs)
            for name, tensor in theirs.items():
                assert torch.allclose(ours[name].float(), tensor.float(), atol=within), name


def test_dora_is_refused_on_layers_that_keep_their_weights_transposed() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match=r"use_dora: transformer.h.0.attn.c_attn keeps its weight"):
        Adapter(model, Lora(rank=4, alpha=8, dora=True))
    Adapter(model, Lora(rank=4, alpha=8))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_a_head_that_is_the_embedding_is_refused(tmp_path: Path, target: str) -> None:
    """Merged weights have the one tensor: they would lack the adapter, or give it to both."""
    lora = Lora(rank=4, target_modules=("q_proj", target))
    with pytest.raises(ValueError, match=r"model.embed_tokens and lm_head are one weight"):
        backend_of(make_model(tmp_path / "tied"), lora=lora)
    backend = backend_of(make_model(tmp_path / "own", tie=False), lora=lora)
    assert backend.adapter is not None
    for name, tensor in backend.adapter.weights().items():
        if "lora_" in name:
            torch.nn.init.normal_(tensor, std=0.1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    plain.load_state_dict(backend.weights())
    plain.save_pretrained(tmp_path / "merged")
    batch = flatten(experiences())
    merged = backend_of(tmp_path / "merged", max_token_len=60)
    assert torch.allclose(merged.logprobs(batch), backend.logprobs(batch), atol=1e-5)
