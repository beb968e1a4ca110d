"""Prefix cache: entries that were saved together share memory, which is bounded all the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from trireme.engines.torch.prefix import PrefixCache
from trireme.engines.torch.rows import RowStore, SavedRow

LENGTH = 32


def store_of(rows: int) -> RowStore:
    """One layer of random keys and values, of rows of LENGTH tokens."""
    store = RowStore(rows * 64)
    store.reserve(rows, LENGTH)
    for tensor in store.layer(0, torch.zeros(1, 2, 1, 4)):
        tensor.normal_()
    return store


def ids_of(row: int) -> list[int]:
    """Two prompts' lengths: a beginning that all rows share, and one of their own."""
    return [*range(LENGTH), *[100 + row] * LENGTH]


def held(cache: PrefixCache, row: int) -> bool:
    """Whether the row's own tokens are found."""
    return cache.find([*ids_of(row), 0])[1] == 2 * LENGTH


def saved_together(store: RowStore, rows: int) -> list[SavedRow]:
    """The first rows, which begin with the last one."""
    prompt, *_ = store.save([rows], [LENGTH])
    return [replace(s, prompt=prompt) for s in store.save(list(range(rows)), [LENGTH] * rows)]


def test_memory_that_entries_share_counts_once_and_until_the_last_has_gone() -> None:
    saved = saved_together(store_of(4), 3)
    cache = PrefixCache(5 * LENGTH)
    for row, one in enumerate(saved):
        cache.add(ids_of(row), one)
    assert all(held(cache, row) for row in range(3))  # 3 rows and their prompt
    alone, *_ = store_of(1).save([0], [LENGTH])
    cache.add([7] * LENGTH, alone)
    assert all(held(cache, row) for row in range(3))
    cache.add([8] * LENGTH, alone)  # the same copy
    assert all(held(cache, row) for row in range(3))
    assert [cache.find([n] * (LENGTH + 1))[1] for n in (7, 8)] == [LENGTH] * 2
    another, *_ = store_of(1).save([0], [LENGTH])
    cache.add([9] * LENGTH, another)  # the three together gave up their memory
    assert not any(held(cache, row) for row in range(3))
    assert [cache.find([n] * (LENGTH + 1))[1] for n in (7, 8, 9)] == [LENGTH] * 3


def test_a_row_is_put_back_with_its_prompt_as_it_was() -> None:
    store = store_of(4)
    saved = saved_together(store, 3)
    other = RowStore(4 * 64)
    other.reserve(2, 2 * LENGTH)
    for length in (5, LENGTH, LENGTH + 9, 2 * LENGTH):
        other.put(1, saved[2], length)
        for mine, theirs in zip(
            other.layer(0, torch.empty(0)), store.layer(0, torch.empty(0)), strict=True
        ):
            whole = torch.cat([theirs[3, :, :LENGTH], theirs[2, :, :LENGTH]], 1)
            assert torch.equal(mine[1, :, :length], whole[:, :length])


def test_many_long_rows_are_not_copied_together() -> None:
    store, lengths = store_of(8), [LENGTH] * 8
    for room, together in ((10_000, 1), (2 * 16 * LENGTH, 4), (16, 8)):
        saved = PrefixCache(room).copies(store, list(range(8)), lengths)
        assert len({id(one.rows) for one in saved}) == together and len(saved) == 8


def test_rows_are_moved_in_all_layers() -> None:
    store = store_of(6)
    store.layer(1, torch.zeros(1, 1, 1, 2))[0].normal_()
    before = [store.layer(n, torch.empty(0))[0].clone() for n in range(2)]
    store.move([5, 3], [0, 2], [LENGTH, 9])
    store.move([], [], [])
    for layer, was in enumerate(before):
        now = store.layer(layer, torch.empty(0))[0]
        assert torch.equal(now[0, :, :LENGTH], was[5, :, :LENGTH])
        assert torch.equal(now[2, :, :9], was[3, :, :9]) and torch.equal(
            now[2, :, 9:], was[2, :, 9:]
        )
        assert torch.equal(now[[1, 3, 4, 5]], was[[1, 3, 4, 5]])
