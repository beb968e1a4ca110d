"""Deal: which samples of a batch each rank computes.

Invariants:
- every sample with an entry goes to exactly one rank; a group stays on one rank, so that what its
  samples share is computed once, unless it alone is more than a rank's share;
- shares are close to equal in computed tokens, and equal on every rank that computes them.
"""

from __future__ import annotations

from trireme.batch import Batch
from trireme.trainer.pack import cut, packed_tokens


def deal(batch: Batch, ranks: int, *, share_prefix: bool = True) -> list[list[int]]:
    """Sample numbers of each rank's share, each in order."""
    groups: dict[str, list[int]] = {}
    for n, (group, count) in enumerate(zip(batch.groups, batch.counts, strict=True)):
        if count:
            groups.setdefault(group, []).append(n)
    if ranks == 1:
        return [sorted(n for members in groups.values() for n in members)]
    pieces = [(_tokens(batch, members, share_prefix), members) for members in groups.values()]
    fair = -(-sum(size for size, _ in pieces) // ranks)
    pieces = [
        part
        for size, members in pieces
        for part in (
            [(size, members)]
            if size <= fair or len(members) == 1
            else _split(batch, members, fair, share_prefix)
        )
    ]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # The largest first, each to who has least; ties by order, alike everywhere.
    for size, members in sorted(pieces, key=lambda piece: -piece[0]):
        least = loads.index(min(loads))
        shares[least] += members
        loads[least] += size
    return [sorted(share) for share in shares]


def _split(
    batch: Batch, members: list[int], limit: int, share_prefix: bool
) -> list[tuple[int, list[int]]]:
    """A group in parts of at most `limit` computed tokens."""
    numbered = batch.with_fields(sample=batch.sample_ids).select(members)
    parts = [
        part.fields["sample"].unique().tolist()
        for part in cut(numbered, limit, share_prefix=share_prefix)
    ]
    return [(_tokens(batch, part, share_prefix), part) for part in parts]


def _tokens(batch: Batch, members: list[int], share_prefix: bool) -> int:
    return packed_tokens(batch.select(members), share_prefix=share_prefix)
