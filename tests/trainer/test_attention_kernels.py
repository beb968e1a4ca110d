"""Layouts: each kernel's attention over a trie is that of a loop over its tokens."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from tests.trainer.samples import backend_of, experiences
from tests.trainer.test_attention import random_batch
from trireme.batch import Batch, flatten, of_tokens
from trireme.engines.torch.vision import around
from trireme.pictures import BEGIN, Picture
from trireme.trainer import attention
from trireme.trainer.attention import Blocks, choose_kernel
from trireme.trainer.pack import pack

CPU = torch.device("cpu")


def rows_of(rng: random.Random) -> list[list[int]]:
    """Some rows that share prefixes, extend one another or are equal."""
    rows = [[rng.randrange(3) for _ in range(rng.randrange(2, 9))]]
    for _ in range(rng.randrange(1, 5)):
        old = rng.choice(rows)
        new = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        rows.append(old[: rng.randrange(len(old) + 1)] + new)
    return [row for row in rows if len(row) > 1]


def dense(rows: list[list[int]]) -> Tensor:
    """[T, T] who sees whom: a path sees its beginnings. Sorted, as flat tokens are."""
    paths = sorted({tuple(row[:n]) for row in rows for n in range(1, len(row))})
    return torch.tensor([[path[: len(other)] == other for other in paths] for path in paths])


def blocks_for(batch: Batch) -> Blocks:
    layout = pack(batch, kernel="flex").attention
    assert isinstance(layout, Blocks)
    return layout


def blocks_of(seen: Tensor, size: int) -> Tensor:
    """[B, B, size, size] blocks of a mask, without what lies beyond it."""
    padding = -len(seen) % size
    padded = F.pad(seen, (0, padding, 0, padding))
    return padded.view(len(padded) // size, size, -1, size).transpose(1, 2)


@pytest.mark.parametrize("tries", [250, pytest.param(5000, marks=pytest.mark.large)])
@pytest.mark.parametrize("window", [0, 3])
def test_block_masks_are_the_dense_masks_of_random_tries(
    window: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MULTIPLE", 4)
    rng = random.Random(window)
    for _ in range(tries):
        rows = rows_of(rng)
        trie, seen = blocks_for(of_tokens(rows)), dense(rows)
        behind = trie.depth[:, None] - trie.depth
        seen = seen & (behind < window) if window else seen
        some, whole = attention._blocks(trie.depth.numpy(), trie.ends.numpy(), window)
        blocks = blocks_of(seen, 4)
        assert not (blocks.any(-1).any(-1) & ~torch.from_numpy(some)).any()
        assert not (~blocks.all(-1).all(-1) & torch.from_numpy(whole)).any()
        if not window:  # nor are there blocks in vain
            assert torch.equal(blocks.any(-1).any(-1), torch.from_numpy(some))
            assert torch.equal(blocks.all(-1).all(-1), torch.from_numpy(whole))
        mask = trie.mask(window)
        index = torch.arange(len(seen))
        nothing = index.new_zeros(())
        assert torch.equal(mask.mask_mod(nothing, nothing, index[:, None], index), seen)
        listed = mask.to_dense()[0, 0].bool() | torch.from_numpy(whole)
        assert torch.equal(listed, torch.from_numpy(some))


def varlen_as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What `varlen_attn` computes on a GPU: the last query sees the last key."""
    assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    out = []
    for r in range(len(cu_seq_q) - 1):
        row = query[cu_seq_q[r] : cu_seq_q[r + 1]]
        keys, values = (x[cu_seq_k[r] : cu_seq_k[r + 1]] for x in (key, value))
        last = torch.arange(len(row))[:, None] + len(keys) - len(row)
        behind = last - torch.arange(len(keys))
        seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        a, b, c = (x.transpose(0, 1)[None] for x in (row, keys, values))
        attended = F.scaled_dot_product_attention(a, b, c, seen, scale=scale, enable_gqa=True)
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


def older_varlen(*given: Any, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """By the arguments that its first release had."""
    assert is_causal
    grouped = given[0].shape[1] != given[1].shape[1]
    return varlen_as_documented(*given, scale=scale, window_size=(-1, 0), enable_gqa=grouped)


def aligned_at_the_first(
    query: Tensor, key: Tensor, value: Tensor, *spans: Any, **_: Any
) -> Tensor:
    """A kernel whose first query sees the first key: wrong where a prefix is shared."""
    starts, keys = spans[:2]
    parts = []
    for r in range(len(starts) - 1):
        given = [
            query[starts[r] : starts[r + 1]],
            *(x[keys[r] : keys[r + 1]] for x in (key, value)),
        ]
        a, b, c = (x.transpose(0, 1)[None] for x in given)
        out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def use_varlen(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(attention, "_varlen", lambda: kernel)
    choose_kernel.cache_clear()


def by_tokens(seen: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[1, T, H, D] one flat token after the other over the tokens that it sees."""
    out = []
    for t, keys in enumerate(seen):
        given = query[:, :, t : t + 1], key[:, :, keys], value[:, :, keys]
        out.append(F.scaled_dot_product_attention(*given, enable_gqa=True).transpose(1, 2))
    return torch.cat(out, 1)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen", "flex"])
def test_values_and_gradients_are_those_of_a_loop(
    kernel: Any, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_varlen(monkeypatch, varlen_as_documented)
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(10):
        rows = rows_of(rng)
        layout, seen = pack(of_tokens(rows), kernel=kernel).attention, dense(rows)
        depth = seen.sum(1)
        seen &= (depth[:, None] - depth < window) if window else True
        inputs = [torch.randn(1, n, len(seen), 8).double() for n in (4, 2, 2)]
        weight = torch.randn(1, len(seen), 4, 8)
        results = []
        for compute in (
            partial(layout.attend, window=window, scale=None),
            partial(by_tokens, seen),
        ):
            given = [x.clone().requires_grad_(kernel != "flex") for x in inputs]
            out = compute(*given)
            if kernel != "flex":  # which has no gradients on a CPU
                (out * weight).sum().backward()
            results.append([out.detach(), *(x.grad for x in given if x.grad is not None)])
        for one, other in zip(*results, strict=True):
            assert torch.allclose(one, other, atol=1e-12)


class Seeing:
    """The vision of a model whose pictures see themselves whole."""

    unsampled, around = (), True

    def positions(self, ids: Any, pictures: Any) -> Tensor:
        return torch.arange(len(ids))[None]


def with_pictures(rows: list[list[int]], shown: list[Picture]) -> list[list[int]]:
    """The same rows with a picture in place of token 0 and of token 1."""
    return [
        [t for token in row for t in (shown[token].ids if token < 2 else [token])] + [2]
        for row in rows
    ]


def whole_pictures(rows: list[list[int]], seen: Tensor) -> Tensor:
    """[T, T] who sees whom in a picture: its own tokens, earlier and later."""
    paths = sorted({tuple(row[:n]) for row in rows for n in range(1, len(row))})
    begins = [around(np.array(path))[0, -1] for path in paths]
    ends = [path[int(begin) :] for path, begin in zip(paths, begins, strict=True)]
    found = torch.zeros_like(seen)
    for i, path in enumerate(paths):
        for j, other in enumerate(paths):
            if path[-1] >= BEGIN and other[-1] >= BEGIN and begins[i] == begins[j]:
                head = path[: int(begins[i])] == other[: int(begins[j])]
                found[i, j] = head and ends[i][0] == ends[j][0]
    return found


@pytest.mark.parametrize("window", [0, 3, -4])
@pytest.mark.parametrize(("kernel", "align"), [("sdpa", False), ("sdpa", True), ("flex", False)])
def test_a_picture_that_sees_itself_is_computed_as_a_loop_does(
    kernel: Any, align: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MULTIPLE", 4)
    rng = random.Random(window)
    torch.manual_seed(0)
    shown = [Picture(b"", f"{n:064x}", tokens, (1, 1, 1)) for n, tokens in ((1 << 210, 3), (7, 6))]
    assert len({picture.first for picture in shown}) == 2
    for _ in range(12):
        rows = with_pictures(rows_of(rng), shown)
        batch = of_tokens(rows, pictures=shown)
        layout = pack(batch, kernel=kernel, align=align, vision=Seeing()).attention  # pyright: ignore
        seen = dense(rows)
        depth, whole = seen.sum(1) - 1, whole_pictures(rows, seen)
        if window > 0:
            seen &= depth[:, None] - depth < window
        elif window:
            seen &= (depth // -window)[:, None] == depth // -window
        seen |= whole
        inputs = [torch.randn(1, n, len(seen), 8).double() for n in (4, 2, 2)]
        out = layout.attend(*inputs, window=window, scale=None)
        assert torch.allclose(out, by_tokens(seen, *inputs), atol=1e-12)
        if kernel == "flex":  # no block that is seen is left out
            assert isinstance(layout, Blocks)
            index = torch.arange(len(seen))
            mask, nothing = layout.mask(window), index.new_zeros(())
            assert torch.equal(mask.mask_mod(nothing, nothing, index[:, None], index), seen)
            whole = attention._blocks(layout.depth.numpy(), layout.ends.numpy(), window)[1]
            listed = mask.to_dense()[0, 0].bool() | torch.from_numpy(whole)
            assert not (blocks_of(seen, 4).any(-1).any(-1) & ~listed).any()


def test_varlen_cannot_compute_a_picture_that_sees_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_varlen(monkeypatch, varlen_as_documented)
    with pytest.raises(ValueError, match=r"varlen on cpu .* no tokens that see later ones; sdpa"):
        choose_kernel("varlen", CPU, half=True, heads=4, key_heads=2, width=16, around=True)
    gpu = torch.device("meta")
    assert choose_kernel("auto", gpu, half=True, heads=4, key_heads=2, width=16, around=True)


@pytest.mark.parametrize("double", [varlen_as_documented, older_varlen])
def test_a_step_with_varlen_is_that_with_sdpa(
    double: Any, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_varlen(monkeypatch, double)
    batch, results = flatten(experiences()), []
    for kernel in ("sdpa", "varlen"):
        backend = backend_of(tiny_dir, attn_implementation=kernel)
        assert backend._kernel == kernel
        backend.forward_backward(batch, lambda part, logprobs, _: -logprobs.sum())
        results.append([backend.logprobs(batch), *(p.grad for p in backend.module.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=2e-5)


def test_a_kernel_is_tried_on_its_device_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(asked: str, device: torch.device = CPU, half: bool = True) -> str:
        choose_kernel.cache_clear()
        return choose_kernel(asked, device, half=half, heads=4, key_heads=2, width=16)

    assert choose("auto") == choose("sdpa") == "sdpa"
    for asked in ("varlen", "flex"):
        with pytest.raises(
            ValueError, match=f"trainer.attn_implementation: .* {asked} on cpu .*fails"
        ):
            choose(asked)

    def without_a_word(*args: Any, **options: Any) -> Tensor:
        raise NotImplementedError

    use_varlen(monkeypatch, without_a_word)
    with pytest.raises(ValueError, match="fails: NotImplementedError; sdpa works"):
        choose("varlen")
    use_varlen(monkeypatch, varlen_as_documented)
    assert choose("varlen") == "varlen"
    use_varlen(monkeypatch, aligned_at_the_first)
    with pytest.raises(ValueError, match=r"varlen on cpu .* differs from SDPA by .*; sdpa works"):
        choose("varlen")
    gpu = torch.device("meta")  # stands for one: all that is asked of it fails
    with caplog.at_level(logging.WARNING):
        assert choose("auto", gpu) == "sdpa" and "continues with sdpa" in caplog.text
    assert choose("auto", gpu, half=False) == "sdpa"


def long_batch() -> Batch:
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 900, (200,), generator=rng).tolist()
    return of_tokens(
        [prompt + row for row in torch.randint(3, 900, (4, 300), generator=rng).tolist()]
    )


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_on_a_gpu_that_is_not_there_shapes_and_devices_are_right(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a torch without CUDA cannot index such a tensor in Python, by its operator it can
    monkeypatch.setattr(attention, "select", lambda flat, at: torch.ops.aten.index(flat, [at]))
    layout = pack(long_batch(), kernel=kernel, align=True)
    device, length = torch.device("cuda:0"), len(layout.tokens)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        sizes = {"device": device, "dtype": torch.bfloat16}
        query, key = (torch.empty(1, heads, length, 128, **sizes) for heads in (12, 2))
        out = layout.attention.to(device).attend(query, key, key, window=0, scale=None)
        assert out.shape == (1, length, 12, 128)
        assert out.device == device and out.dtype == torch.bfloat16


def test_one_compiled_graph_serves_every_trie() -> None:
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter, fullgraph=True)
    rng = torch.Generator().manual_seed(2)
    for _ in range(20):
        batch = random_batch(rng)
        blocks = blocks_for(batch)
        query, key = (torch.randn(1, heads, len(blocks.ends), 8) for heads in (4, 2))
        with torch.no_grad():
            compiled(query, key, key, block_mask=blocks.mask(), enable_gqa=True)
    assert counter.frame_count <= 3
