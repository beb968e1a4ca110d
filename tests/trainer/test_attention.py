"""Attention as a GPU computes it: no mask, no score of every pair, no plan for every shape."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.trainer.samples import buckets, experiences
from trireme.batch import Batch, flatten, of_tokens
from trireme.engines.torch import rows as engine_rows
from trireme.trainer import attention
from trireme.trainer.model import hidden_states, load_model, token_logprobs
from trireme.trainer.pack import PackedBatch, pack


def random_batch(rng: torch.Generator) -> Batch:
    """Groups of rollouts that share a prompt, some of them a few tokens more."""
    texts: list[list[int]] = []

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=rng))
        return torch.randint(3, 90, (length,), generator=rng).tolist()

    for _ in range(int(torch.randint(1, 4, (), generator=rng))):
        prompt = ids(2, 150)
        texts += [prompt + ids(1, 300) for _ in range(4)]
    return of_tokens(texts)


def test_the_aligned_layout_computes_what_the_masked_one_does(tiny_dir: Any) -> None:
    model = load_model(tiny_dir, device="cpu")
    for batch in (flatten(experiences()), random_batch(torch.Generator().manual_seed(1))):
        found = []
        for align in (False, True):
            model.zero_grad()
            layout = pack(batch, align=align)
            with patch("trireme.trainer.model.pack_for", lambda *_, layout=layout, **__: layout):
                logprobs, _ = token_logprobs(model, batch)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
            found.append([logprobs, *(p.grad for p in model.parameters())])
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_under_autocast_rows_of_a_gpu_are_in_bfloat16_alone(kind: Any) -> None:
    """As one GPU trains: rotary embeddings leave queries and keys in float32, values are not, and
    torch takes no mask by its name for rows of two dtypes.
    """
    torch.manual_seed(0)
    given = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 99}
    attention.register()
    model = AutoModelForCausalLM.from_config(
        kind(**given, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        attn_implementation=attention.NAME,
    )
    layout = pack(random_batch(torch.Generator().manual_seed(1)), align=True)
    plain, seen = attention.attend, set()

    def watched(*rows: Tensor, **options: Any) -> Tensor:
        seen.update(x.dtype for x in rows)
        return plain(*rows, **options)

    exact = hidden_states(model, layout)
    with torch.autocast("cpu", torch.bfloat16), patch.object(attention, "attend", watched):
        hidden_states(model, layout).float().square().mean().backward()
        assert (hidden_states(model, layout) - exact).abs().max() < 0.05
    assert seen == {torch.bfloat16}


def test_aligned_rows_need_no_mask() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        batch = random_batch(rng)
        for rows in buckets(pack(batch, align=True)):
            (queries, keys), width = (rows.queries.shape, rows.keys.shape), rows.queries.shape[1]
            assert rows.named is not None and width % 128 == 0
            assert rows.starts.tolist() == [keys[1] - queries[1]] * len(rows.queries)
            lower_right = torch.ones(queries[1], keys[1], dtype=torch.bool).tril(keys[1] - width)
            assert torch.equal(rows.mask(), lower_right.expand(len(rows.queries), 1, -1, -1))


def test_cudnn_which_plans_for_every_shape_is_left_out() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    attention.register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    engine_rows.register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("mask", [True, False])
def test_one_query_of_grouped_heads_is_that_of_repeated_ones(mask: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 1, 8, generator=rng)
    key, value = torch.randn(2, 3, 2, 11, 8, generator=rng)
    seen = torch.rand(3, 1, 1, 11, generator=rng) < 0.7
    seen[..., 0] = True
    given = seen if mask else None
    expected = F.scaled_dot_product_attention(query, key, value, given, enable_gqa=True)
    got = engine_rows.attend_one(query, key, value, given, None)
    assert torch.allclose(got, expected, atol=1e-6)


class Largest(TorchDispatchMode):
    """The most numbers that a tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return out


def gpu_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **given: Any
) -> Tensor:
    """What torch 2.13 does with it on a GPU: `sdp_utils.cpp` and `CausalBias`, by their rules."""
    grouped = query.shape[1] != key.shape[1]
    flash = query.dtype != torch.float32 and (
        attn_mask is None or isinstance(attn_mask, CausalBias)
    )
    efficient = not grouped and query.shape[3] % 8 == key.shape[3] % 8 == value.shape[3] % 8 == 0
    if not flash and not efficient:  # all scores at once
        query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.float32)
    return torch.empty_like(query)


def walk(layout: PackedBatch, dtype: torch.dtype) -> int:
    """The largest tensor of a forward pass of a 1.5B's attention on a GPU that is not there."""
    attention.register()
    shape = Qwen2Config(
        hidden_size=1536,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(shape, attn_implementation=attention.NAME).to(
            dtype
        )
        with (
            patch.object(engine_rows, "GPU", "meta"),
            patch.object(attention, "_as_autocast", lambda *rows: rows),  # unknown of this device
            patch.object(F, "scaled_dot_product_attention", gpu_attention),
            Largest() as largest,
        ):
            hidden_states(model, layout.to(torch.device("meta")))
    return largest.numbers


def long_group() -> Batch:
    """Eight rollouts of 4,000 tokens on a prompt of 1,000."""
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 900, (1000,), generator=rng).tolist()
    replies = torch.randint(3, 900, (8, 4000), generator=rng).tolist()
    return of_tokens([prompt + reply for reply in replies])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tensor_of_a_forward_pass_holds_all_scores(dtype: torch.dtype) -> None:
    batch = long_group()
    masked, aligned = pack(batch), pack(batch, align=True)
    width = 1536
    most = max(len(aligned.tokens), *(rows.keys.numel() for rows in buckets(aligned))) * width
    assert walk(aligned, dtype) <= most < walk(masked, dtype) / 2
