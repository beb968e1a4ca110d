"""Pack: the trie computes each shared prefix once and keeps every row's own view of the past."""

from __future__ import annotations

import pytest

from tests.trainer.samples import buckets, experiences
from trireme.batch import flatten, of_tokens
from trireme.experience import EID, Experience
from trireme.trainer.attention import Rows
from trireme.trainer.learning import split_pairs, with_pairs
from trireme.trainer.pack import cut, pack
from trireme.trainer.ranks import deal


def _paths(layout) -> dict[int, list[int]]:
    """Flat token -> the token ids it sees, itself last, from rows and masks."""
    seen = {}
    at = 0
    assert isinstance(layout.attention, Rows)
    where = {int(p): t for t, p in enumerate(layout.attention.place)}
    for rows in buckets(layout):
        mask = rows.mask()
        for r in range(len(rows.queries)):
            for q in range(rows.queries.shape[1]):
                if at in where:
                    keys = rows.keys[r][mask[r, 0, q]]
                    seen[where[at]] = layout.tokens[keys].tolist()
                at += 1
    return seen


@pytest.mark.parametrize("share", [True, False])
def test_every_entry_is_predicted_from_exactly_what_comes_before_it(share):
    batch = flatten(experiences())
    layout = pack(batch, share_prefix=share)
    seen = _paths(layout)
    for m in range(batch.num_tokens):
        row = batch.tokens[int(batch.sample_ids[m])]
        before = row[: int(batch.positions[m])].tolist()
        assert seen[int(layout.predecessors[m])] == before
        assert int(layout.positions[layout.predecessors[m]]) == len(before) - 1


def test_a_shared_prompt_is_computed_once():
    batch = of_tokens([[1, 2, 3, 4, 9], [1, 2, 3, 5, 9], [1, 2, 3, 4, 8]])
    assert sorted(pack(batch).tokens.tolist()) == [1, 2, 3, 4, 5]
    assert len(pack(batch, share_prefix=False).tokens) == 12


def test_equal_rollouts_are_one_row():
    layout = pack(of_tokens([[1, 2, 3]] * 5))
    assert layout.tokens.tolist() == [1, 2]
    assert [len(r.queries) for r in buckets(layout)] == [1]


def test_steps_that_extend_one_another_are_one_causal_row():
    layout = pack(of_tokens([[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]))
    [rows] = buckets(layout)
    assert rows.causal and rows.queries.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_long_row_behind_a_short_prefix_needs_no_mask():
    prefix = [3, 4, 5]
    samples = [[*prefix, first, *range(7, 607)] for first in (1, 2)]
    layout = pack(batch := of_tokens(samples))
    assert all(rows.causal for rows in buckets(layout))
    assert len(layout.tokens) == 2 * 603 - len(prefix)  # the last token predicts nothing
    seen = _paths(layout)
    for m in range(batch.num_tokens):
        before = samples[int(batch.sample_ids[m])][: int(batch.positions[m])]
        assert seen[int(layout.predecessors[m])] == before


def test_tokens_after_the_last_trained_one_are_left_out():
    [e] = experiences()[-1:]
    e.mask[:] = False
    e.mask[4] = True
    assert len(pack(flatten([e])).tokens) == 4


def test_a_window_hides_what_is_further_back():
    layout = pack(of_tokens([list(range(8))]))
    mask = buckets(layout)[0].mask(window=3)[0, 0]
    assert mask.sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 20, 45, 1000])
def test_a_cut_holds_every_sample_once_and_keeps_to_its_budget(share, budget):
    batch = flatten(experiences())
    parts = list(cut(batch, budget, share_prefix=share))
    assert sorted(e for p in parts for e in p.eids) == sorted(batch.eids)
    for part in parts:
        assert part.num_samples == 1 or len(pack(part, share_prefix=share).tokens) <= budget


def test_a_group_that_fits_stays_together():
    rows = [[t, 2, 3, 4, run, 5] for t in range(6) for run in range(3)]
    batch = of_tokens(rows)
    batch = type(batch)(**{**vars(batch), "groups": tuple(str(r[0]) for r in rows)})
    # One group costs 4 + 3 tokens: two fit into 15, a third would be split.
    parts = list(cut(batch, 15))
    assert [len(set(p.groups)) for p in parts] == [2, 2, 2]


def test_pairs_of_one_task_are_cut_and_dealt_pair_by_pair():
    replies = [8] * 10, [9] * 10
    pairs = [
        Experience([5, 6, 7], prompt_length=3, chosen=a, rejected=b, eid=EID(1, 0, run))
        for run, (a, b) in enumerate([replies] * 8)
    ]
    batch = with_pairs(flatten(split_pairs(pairs)))
    parts = list(cut(batch, 60))  # a pair has twice 12 tokens that are read
    assert [part.fields["pair_ids"].unique().tolist() for part in parts] == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip
    shares = deal(batch, 4)
    assert sorted(map(len, shares)) == [4] * 4
    assert all([n // 2 for n in share[::2]] == [n // 2 for n in share[1::2]] for share in shares)


def test_a_sample_without_entries_is_in_no_micro_batch():
    some = experiences()
    some[1].mask[:] = False
    assert some[1].eid.uid not in {e for p in cut(flatten(some), 50) for e in p.eids}


def test_the_sort_orders_ids_beyond_a_byte():
    layout = pack(of_tokens([[300, 1, 0], [2, 1, 0], [300, 2, 0]]))
    assert layout.tokens.tolist() == [2, 1, 300, 1, 2]


def test_what_extends_a_row_behind_a_prefix_stays_behind_that_prefix():
    """The row that is extended is the last one, not the first, and keeps where its queries begin:
    behind two shared keys here, which is no sample's number in the chain.
    """
    samples = [
        [1, 2, 9, 8, 7, 6],
        [1, 2, 9, 6],
        [3, 0],
        [1, 2, 3, 4, 5],
        [1, 2, 9, 8, 7],
        [1, 1, 0],
    ]
    layout = pack(batch := of_tokens(samples))
    assert len(layout.tokens) == 9
    seen = _paths(layout)
    for m in range(batch.num_tokens):
        before = samples[int(batch.sample_ids[m])][: int(batch.positions[m])]
        assert seen[int(layout.predecessors[m])] == before
    asked = [set(row.tolist()) for rows in buckets(layout) for row in rows.queries]
    assert sorted(map(len, asked)) == [1, 2, 3, 3] and len(set.union(*asked)) == 9
