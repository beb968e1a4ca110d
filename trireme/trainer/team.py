"""Team: the ranks that compute a batch together, or the one process that does so alone.

Invariants:
- all ranks run equally many micro-batches: one without its own computes a dummy that weighs 0;
- what ranks found is that of one process: added up over them, never averaged;
- what one rank finds wrong is raised on all of them, between collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trireme.batch import Batch, of_tokens
from trireme.checkpoint.layout import rank_file
from trireme.checkpoint.save import write_pt
from trireme.checkpoint.stream import write_stream
from trireme.files import CannotWrite
from trireme.trainer.backend import NotFinite
from trireme.trainer.deal import deal
from trireme.trainer.pack import cut, packed_tokens
from trireme.trainer.ranks import Ranks
from trireme.trainer.shard import whole

_RAISED = {kind.__name__: kind for kind in (NotFinite, ValueError, CannotWrite)}


class Team:
    """One member of it."""

    def __init__(self, ranks: Ranks | None, *, max_token_len: int, share_prefix: bool) -> None:
        """`ranks` None: one process. `max_token_len` is what a rank computes at a time."""
        self.rank, self.size = (ranks.rank, ranks.world) if ranks else (0, 1)
        self._ranks = ranks
        self._max_token_len = max_token_len
        self._share_prefix = share_prefix

    def parts(self, batch: Batch) -> list[Batch | None]:
        """This rank's micro-batches, the largest first; None fills up to the most that any has."""
        if self._ranks is None:
            return list(cut(batch, self._max_token_len, share_prefix=self._share_prefix))
        shares = deal(batch, self._ranks.data_world, share_prefix=self._share_prefix)
        own = batch.select(shares[self._ranks.data_rank])
        limit = self._max_token_len * self._ranks.place.sequence
        parts = list(cut(own, limit, share_prefix=self._share_prefix))
        parts.sort(key=lambda part: -packed_tokens(part, share_prefix=self._share_prefix))
        rounds = max(self.gather(len(parts)))
        return [*parts, *[None] * (rounds - len(parts))]

    def scores(
        self, batch: Batch, compute: Callable[[Batch], Sequence[Tensor | None]], *, num: int = 1
    ) -> Tensor:
        """The `num` numbers of each entry, [num, M], on every rank's CPU.

        `compute(part)` gives them of a micro-batch, in rows and blocks of rows [M of the part].
        """
        out = torch.zeros(num, batch.num_tokens)
        numbered = batch.with_fields(entry=torch.arange(batch.num_tokens))
        for part in self.parts(numbered):
            got = compute(part or dummy())
            if part is not None and (self._ranks is None or self._ranks.sequence_rank == 0):
                rows = torch.vstack([values for values in got if values is not None])
                out[:, part.fields["entry"]] = rows.cpu()
        if self._ranks is not None:
            dist.all_reduce(out)  # each entry is 0 on all ranks but one
        return out

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank that has a share of the batch to itself."""
        if self._ranks is None:
            return [value]
        return self._ranks.gather(value)[:: self._ranks.place.sequence]

    def agree(self, error: Exception | None) -> None:
        """Raise what any rank found: its own there, on the others what they were told of it."""
        ranks = self._ranks
        told = ranks.gather(error and [type(error).__name__, str(error)]) if ranks else []
        if error is not None:
            raise error
        for rank, found in enumerate(told):
            if found is not None:
                kind, text = found
                if kind in _RAISED:
                    raise _RAISED[kind](text)
                raise RuntimeError(f"trainer rank {rank}: {kind}: {text}")

    def attempt(self, work: Callable[[], None]) -> None:
        """`work()`; a disk or a file that it finds wrong on one rank is raised on all."""
        error: Exception | None = None
        try:
            work()
        except (OSError, ValueError) as raised:
            error = raised
        self.agree(error)

    def write_own(self, folder: Path, state: dict[str, Any]) -> None:
        """This rank's files of a checkpoint; `state` as a backend or a critic gives it."""
        extra = dict(state)
        write_pt(folder / rank_file("optim", self.size, self.rank), extra.pop("optimizer"))
        write_pt(folder / rank_file("extra_state", self.size, self.rank), extra)

    def write_whole(self, path: Path, shards: Mapping[str, Tensor]) -> None:
        """Weights in one file, gathered one after the other; rank 0 writes. Collective."""
        shapes = {name: shards[name].shape for name in sorted(shards)}
        each = (whole(shards[name]) for name in shapes)

        def write() -> None:
            try:
                if self.rank == 0:
                    write_stream(path, shapes, torch.float32, each)
            finally:
                for _ in each:  # the other ranks, or a full disk
                    pass

        self.attempt(write)


def dummy() -> Batch:
    """What a rank computes while others have a micro-batch more."""
    # Not token 0: where that is padding, tests would not see it weigh more than 0.
    return of_tokens([[1, 1]])
