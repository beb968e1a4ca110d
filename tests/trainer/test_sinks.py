"""Attention sinks (gpt_oss), scores in each softmax that belong to no key, are exact in every
layout, and so are their gradients.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from tests.tested import SINKS, TRAINER, families
from tests.tiny import make_model, make_tokenizer, make_with_sinks
from tests.trainer.own_pass import gradients, packed_gap
from tests.trainer.samples import backend_of, buckets, experiences, gap
from tests.trainer.test_attention import Largest, gpu_attention, long_group, random_batch
from tests.trainer.test_attention_kernels import dense, rows_of
from trireme.batch import flatten, of_tokens
from trireme.engines.torch import rows as engine_rows
from trireme.engines.torch.shell import load_shell
from trireme.trainer import attention
from trireme.trainer.attention import Layout, choose_kernel
from trireme.trainer.lora import Lora
from trireme.trainer.model import load_model, token_logprobs
from trireme.trainer.pack import pack

CLEAR = 15
"""A seed of samples in which no choice of experts is a near tie, which rounding would decide."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, two of them with a window of 8 tokens."""
    return make_model(tmp_path_factory.mktemp("sinks"), "gpt_oss", layers=4)


def by_loops(seen: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """[1, T, H, D] by the formula: exp of a score over the sum of all, the sink's among them."""
    group = query.shape[1] // key.shape[1]
    out = []
    for t in range(query.shape[2]):
        heads = []
        for h in range(query.shape[1]):
            total, weighted = sinks[h].exp(), torch.zeros_like(value[0, 0, 0])
            for at in seen[t].nonzero()[:, 0].tolist():
                score = query[0, h, t] @ key[0, h // group, at] / math.sqrt(query.shape[3])
                total = total + score.exp()
                weighted = weighted + score.exp() * value[0, h // group, at]
            heads.append(weighted / total)
        out.append(torch.stack(heads))
    return torch.stack(out)[None]


def of_layout(layout: Layout, window: int, *rows: Tensor) -> Tensor:
    *inputs, sinks = rows
    return layout.attend(*inputs, window=window, scale=None, sinks=sinks)


@pytest.mark.parametrize("window", [0, 3, -3])
@pytest.mark.parametrize("layout", ["sdpa", "aligned", "flex"])
def test_values_and_gradients_are_those_of_plain_loops_in_float64(layout: str, window: int) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    kernel: Any = "flex" if layout == "flex" else "sdpa"
    for _ in range(4):
        rows = rows_of(rng)
        packed, seen = pack(of_tokens(rows), kernel=kernel, align=layout == "aligned"), dense(rows)
        depth = seen.sum(1)
        depth -= 1
        if window > 0:
            seen &= depth[:, None] - depth < window
        elif window:  # chunks of three tokens
            seen &= depth[:, None] // -window == depth // -window
        inputs = [torch.randn(1, n, len(seen), 8).double() for n in (4, 2, 2)]
        inputs.append(2 * torch.randn(4).double())
        weight = torch.randn(1, len(seen), 4, 8)
        results = []
        for compute in (partial(of_layout, packed.attention, window), partial(by_loops, seen)):
            given = [x.clone().requires_grad_(layout != "flex") for x in inputs]
            out = compute(*given)
            if layout != "flex":  # which has no gradients on a CPU
                (out * weight).sum().backward()
            results.append([out.detach(), *(x.grad for x in given if x.grad is not None)])
        assert len(results[0]) == (1 if layout == "flex" else 5)
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, atol=1e-12)


@pytest.fixture
def without_sinks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes engine and trainer forget sinks from then on."""
    attend = engine_rows.attend

    def forgetful(*rows: Tensor, sinks: Tensor | None = None, **options: Any) -> Tensor:
        out = attend(*rows, **options)
        return out if sinks is None else out + 0 * sinks.sum()

    def forget() -> None:
        for module in (engine_rows, attention):
            monkeypatch.setattr(module, "attend", forgetful)
        monkeypatch.setattr("trireme.trainer.model._AGREEMENT", math.inf)

    return forget


@pytest.mark.parametrize("share", [True, False])
def test_packed_training_is_that_of_separate_rows(
    folder: Path, share: bool, without_sinks: Callable[[], None]
) -> None:
    batches = flatten(experiences()), random_batch(torch.Generator().manual_seed(CLEAR))
    assert max(packed_gap(folder, batch, share=share, needed=".sinks") for batch in batches) < 1e-5
    without_sinks()
    assert min(packed_gap(folder, batch, share=share, needed=".sinks") for batch in batches) > 1e-2


@pytest.mark.parametrize("kind", [kind for kind in families(TRAINER, SINKS) if kind != "gpt_oss"])
def test_other_families_with_sinks_are_trained_as_exactly(kind: str, tmp_path: Path) -> None:
    path, batch = make_with_sinks(tmp_path, kind), flatten(experiences())
    assert packed_gap(path, batch, needed=".sinks") < 1e-5


def test_a_trainer_that_forgets_sinks_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = engine_rows.attend
    monkeypatch.setattr(attention, "attend", lambda *x, sinks, **more: attend(*x, **more))
    with pytest.raises(ValueError, match=r"'gpt_oss': packed attention gives log-prob.* differ by"):
        load_model(folder, device="cpu")


def test_shared_prefixes_give_the_gradients_of_unshared_ones(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    batch = random_batch(torch.Generator().manual_seed(CLEAR))
    shared, alone = (
        gradients(model, token_logprobs(model, batch, share_prefix=share)[0])
        for share in (True, False)
    )
    assert float((shared.pop("logprobs") - alone.pop("logprobs")).abs().max()) < 1e-5
    assert gap(shared, alone) < 1e-5


def test_a_compiled_block_learns_what_an_eager_one_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *x, **more: plain(*x, backend="aot_eager", **more))
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        backend = backend_of(folder, compile=compiles)
        batch = flatten(experiences())
        backend.forward_backward(batch, lambda part, logprobs, _: -logprobs.sum())
        named = backend.module.named_parameters()
        results.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    assert gap(results[1], results[0]) < 1e-5


def test_gradients_in_bfloat16_are_near_those_in_float32(folder: Path) -> None:
    results = []
    for dtype in ("float32", "bfloat16"):
        backend = backend_of(folder, dtype=dtype)
        backend.forward_backward(flatten(experiences()), lambda part, logprobs, _: -logprobs.sum())
        named = backend.module.named_parameters()
        results.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    assert 0 < gap(results[1], results[0]) < 0.03


def test_an_adapter_on_attention_leaves_sinks_as_they_are(folder: Path) -> None:
    lora = Lora(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    backend = backend_of(folder, lora=lora)
    before = dict(backend.each_weight())
    backend.forward_backward(flatten(experiences()), lambda part, logprobs, _: -logprobs.sum())
    backend.step()
    moved = {name for name, w in backend.each_weight() if not torch.equal(w, before[name])}
    assert moved and all(name.endswith("_proj.weight") for name in moved)
    assert sum(name.endswith(".sinks") for name in before) == 4


@pytest.mark.parametrize("window", [0, 128])
def test_on_a_gpu_no_tensor_holds_the_scores_of_all_heads(window: int) -> None:
    """As torch 2.13 does with it there, by its rules."""
    layout = pack(long_group(), align=True)
    heads, width, length = 12, 64, len(layout.tokens)
    sizes: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    rows = [torch.empty(1, n, length, width, **sizes) for n in (heads, 2, 2)]
    shapes = [(rows.queries.shape[1], rows.keys.shape[1] + 1) for rows in buckets(layout)]
    names = {shape: causal_lower_right(*shape) for shape in shapes}  # cannot be made when watched
    with (
        patch.object(engine_rows, "causal_lower_right", lambda *shape: names[shape]),
        patch.object(engine_rows, "GPU", "meta"),
        patch.object(attention, "_as_autocast", lambda *rows: rows),  # unknown of this device
        patch.object(F, "scaled_dot_product_attention", gpu_attention),
        Largest() as largest,
    ):
        of_layout(
            layout.to(torch.device("meta")).attention,
            window,
            *rows,
            torch.empty(heads, device="meta"),
        )
    copies = max(rows.keys.numel() for rows in buckets(layout)) * heads * (width + 8)
    masks = max(rows.queries.numel() * rows.keys.shape[1] for rows in buckets(layout))
    assert largest.numbers <= 1.01 * max(copies, masks if window else 0)


def test_a_kernel_without_sinks_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_kernel.cache_clear()
    gpu, shape = torch.device("meta"), {"heads": 4, "key_heads": 2, "width": 16}
    monkeypatch.setattr(attention, "_trial", lambda *_: pytest.fail("nothing is to be tried"))
    assert choose_kernel("auto", gpu, half=True, sinks=True, **shape) == "sdpa"
    monkeypatch.undo()
    choose_kernel.cache_clear()
    expected = "varlen on cpu .* fails: it cannot compute attention sinks"
    with pytest.raises(ValueError, match=expected):
        choose_kernel("varlen", torch.device("cpu"), half=True, sinks=True, **shape)


def in_codes(folder: Path, plain: Path) -> Path:
    """A gpt_oss whose experts are in MXFP4, as OpenAI publishes it: random codes."""
    shutil.copytree(plain, folder)
    random = torch.Generator().manual_seed(0)
    stored = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = tensor.shape
            blocks, scales = (experts, rows, width // 32, 16), (experts, rows, width // 32)
            drawn = torch.randint(0, 256, blocks, generator=random, dtype=torch.uint8)
            stored[f"{name}_blocks"] = drawn
            stored[f"{name}_scales"] = torch.full(scales, 120, dtype=torch.uint8)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_copy_of_mxfp4_in_bfloat16_is_that_model_and_one_without_experts_is_refused(
    tmp_path: Path,
) -> None:
    """docs/models.md has these lines."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(make_model(tmp_path / "a", "gpt_oss"), **wide)
    )
    model.save_pretrained(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    folder = in_codes(tmp_path / "codes", tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16"
    )
    row = [5, 6, 7, 8, 9]
    with torch.no_grad():
        logits = model.float()(input_ids=torch.tensor([row])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    for name, original in (("right", False), ("wrong", True)):
        model.save_pretrained(tmp_path / name, save_original_format=original)
        make_tokenizer().save_pretrained(tmp_path / name)
    [scored] = backend_of(tmp_path / "right").score([row])
    assert scored[1:] == pytest.approx(expected.tolist(), abs=1e-5)
    names = {
        name for file in (tmp_path / "wrong").glob("*.safetensors") for name in load_file(file)
    }
    if "model.layers.0.mlp.experts.down_proj" in names:  # transformers writes it from 5.24 on
        [scored] = backend_of(tmp_path / "wrong").score([row])
        assert scored[1:] == pytest.approx(expected.tolist(), abs=1e-5)
        return
    for load in (backend_of, lambda path: load_shell(path, device="cpu", dtype="float32")):
        with pytest.raises(ValueError, match=r"wrong lacks 4 tensors of GptOssForCausalLM \(model"):
            load(tmp_path / "wrong")
