"""Trained: saves what each train step computed per token: new log-probabilities and advantages.

One file per step, `buffer/trained/step_N.safetensors`, with concatenated rows, for people to look
at.

Invariants:
- Nothing here changes a trained number; values are copied after the loss is known.
- A step saves the first whole groups that fit into `MOST_TOKENS`. All files together stay below the
  limit of copies: past it every second of the older ones is removed, so that all periods remain.
- A file appears whole or not at all; a resumed run removes those of steps that it does again.
- Written by a separate thread; its errors are raised by the next step, or by `close`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from trireme.files import remove, write_bytes
from trireme.pictures import BEGIN, PICTURE

if TYPE_CHECKING:
    from torch import Tensor

    from trireme.batch import Batch

FOLDER = "trained"
MOST_TOKENS = 200_000
"""Trained tokens of one step; with its share of the prompt each needs about 28 bytes."""
KEPT_NEWEST = 0.1
"""Share of the files that is never thinned."""
_NAME = re.compile(r"^step_(\d+)\.safetensors$")
Numbers = np.ndarray[Any, np.dtype[Any]]


class TrainedTokens:
    """Collects one train step at a time, and writes it."""

    def __init__(self, folder: Path, limit: float = math.inf) -> None:
        """`folder` is a run's `buffer`; `limit`: bytes of all files together."""
        self._folder = folder / FOLDER
        self._limit = limit
        self._batch: Batch | None = None
        self._found: list[tuple[Batch, Tensor]] = []
        self._kept: set[str] = set()
        self._bytes: int | None = None
        """Bytes of all files; None: not yet counted."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trained-tokens")
        self._writing: Future[None] | None = None

    def begin(self, batch: Batch) -> None:
        """Take the whole batch of a step, before any of it is left out."""
        self._batch, self._found, self._kept = batch, [], set()
        sizes: dict[str, int] = {}
        for group, count in zip(batch.groups, batch.counts.tolist(), strict=True):
            sizes[group] = sizes.get(group, 0) + count
        left, chosen = MOST_TOKENS, set[str]()
        for group, size in sizes.items():
            if size <= left:
                left -= size
                chosen.add(group)
        pairs = zip(batch.eids, batch.groups, strict=True)
        self._kept = {eid for eid, group in pairs if group in chosen}

    def add(self, batch: Batch, logprobs: Tensor) -> None:
        """Add log-probabilities [M] of a part of the batch, from which its loss was computed."""
        if not self._kept.isdisjoint(batch.eids):
            self._found.append((batch, logprobs.detach().float().cpu()))

    def end(self, step: int) -> None:
        """Write the data of `step`; nothing if it had no batch."""
        self._flush()
        batch, self._batch = self._batch, None
        if batch is not None and self._found:
            self._writing = self._thread.submit(
                self._write, step, batch, self._found, frozenset(self._kept)
            )

    def close(self) -> None:
        """Wait until all is on the disk."""
        try:
            self._flush()
        finally:
            self._thread.shutdown()

    def _flush(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self,
        step: int,
        batch: Batch,
        found: Sequence[tuple[Batch, Tensor]],
        kept: frozenset[str],
    ) -> None:
        rows_by_eid: dict[str, list[tuple[Numbers, Numbers]]] = {}
        for some, logprobs in found:
            ends = some.counts.cumsum()
            cuts = zip(some.eids, (ends - some.counts).tolist(), ends.tolist(), strict=True)
            places, values = some.positions.numpy(), logprobs.numpy()
            for eid, start, end in cuts:
                rows_by_eid.setdefault(eid, []).append((places[start:end], values[start:end]))
        chosen = [n for n, eid in enumerate(batch.eids) if eid in kept]
        part = batch.select(chosen)
        new = np.full(part.num_tokens, np.nan, np.float32)
        starts = np.cumsum(part.counts) - part.counts
        positions = part.positions.numpy()
        for n, eid in enumerate(part.eids):
            own = slice(starts[n], starts[n] + part.counts[n])
            for place, row in rows_by_eid.get(eid, ()):
                at = np.searchsorted(positions[own], place)
                if len(at) and at.max() < part.counts[n]:
                    new[own][at] = row
        tokens = np.concatenate(part.tokens)
        rows: dict[str, Numbers] = {
            "tokens": np.where(tokens >= BEGIN, PICTURE, tokens).astype(np.int32),
            "positions": positions.astype(np.int32),
            "trained_logprobs": new,
        }
        for name, kind in (("old_logprobs", np.float32), ("advantages", np.float32),
                           ("versions", np.int32)):  # fmt: skip
            if name in part.fields:
                rows[name] = part.fields[name].cpu().numpy().astype(kind)
        head = {
            "eids": list(part.eids),
            "lengths": [len(row) for row in part.tokens],
            "counts": part.counts.tolist(),
        }
        path = self._folder / f"step_{step}.safetensors"
        data = save(rows, {"rows": json.dumps(head)})
        write_bytes(path, data)
        self._thin(len(data))

    def rewind(self, step: int) -> None:
        """Remove the files of steps after `step`."""
        self._flush()
        for number, path in files(self._folder):
            if number > step:
                remove(path)
        self._bytes = None

    def _thin(self, new: int) -> None:
        """Remove every second one of the older files until all fit; the newest has `new` bytes."""
        if self._bytes is not None:  # a step must not look at the files of all steps before it
            self._bytes += new
            if self._bytes <= self._limit:
                return
        sizes = {path: path.lstat().st_size for _, path in files(self._folder)}
        while sum(sizes.values()) > self._limit and len(sizes) > 1:
            older = list(sizes)[: max(1, len(sizes) - 1 - int(KEPT_NEWEST * len(sizes)))]
            for path in older[1::2] or older:
                remove(path)
                del sizes[path]
        self._bytes = sum(sizes.values())


def files(folder: Path) -> list[tuple[int, Path]]:
    """Return step and file of each saved step, in order."""
    if not folder.is_dir():
        return []
    named = ((_NAME.match(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def eids_of(path: Path) -> list[str]:
    """Return the ids of the experiences whose tokens a file holds."""
    with safe_open(path, "np") as file:
        return json.loads(file.metadata()["rows"])["eids"]


def read_trained(path: Path, eid: str) -> dict[str, Numbers] | None:
    """Return `tokens` [T] of an experience, and of its trained ones `positions` and the rest, each
    [M].

    None if the file does not have that experience.
    """
    with safe_open(path, "np") as file:
        head = json.loads(file.metadata()["rows"])
        if eid not in head["eids"]:
            return None
        n = head["eids"].index(eid)

        def slice_of(name: str, of: str) -> Numbers:
            """Read its values; safetensors refuses an empty slice at a tensor's end."""
            begin, length = sum(head[of][:n]), head[of][n]
            if not length:
                return file.get_tensor(name)[:0]
            return file.get_slice(name)[begin : begin + length]

        out = {
            name: slice_of(name, "counts")
            for name in file.keys()  # noqa: SIM118 (it is not a dictionary)
            if name != "tokens"
        }
        out["tokens"] = slice_of("tokens", "lengths")
        return out
