"""Batch: the trained tokens of many experiences laid end to end, which is what losses work on.

Letters used in names and docstrings all over the code: N experiences (samples), G a group, M
trained tokens of all samples end to end, T tokens of one sample or of one packed micro-batch, R
attention rows, V vocabulary.

Invariants:
- entries of a sample are contiguous and in order; `sample_ids` [M] counts samples from 0;
- entry m predicts `targets[m]`, token `positions[m]` of its sample; index 0 is never an entry;
- a sample without a trained token has no entry but counts as a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.experience import TOKEN_FIELDS, Experience

# What parts of an algorithm call a per-token field of the experience.
FIELD_NAMES = {
    "old_logprobs": "logprobs",
    **{name: name for name in TOKEN_FIELDS if name not in ("mask", "logprobs")},
}


@dataclass(frozen=True)
class Batch:
    """N samples and their M trained tokens."""

    tokens: tuple[np.ndarray, ...]
    """Token ids of each sample, whole."""
    eids: tuple[str, ...]
    """Whose sample it is, for messages."""
    groups: tuple[str, ...]
    """Samples of one group are kept in one micro-batch where they fit."""
    counts: np.ndarray
    """Entries of each sample, [N]."""
    sample_ids: Tensor
    """[M]"""
    positions: Tensor
    """[M]"""
    targets: Tensor
    """[M]"""
    temperatures: Tensor
    """[M] what the logits are divided by."""
    fields: dict[str, Tensor]
    """Everything else that there is one of per trained token, each [M]."""
    missing: dict[str, str]
    """Field that not every experience has -> id of the first that lacks it."""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.targets)

    @property
    def width(self) -> int:
        """Tokens from the first trained one to the end, of the sample where that is longest."""
        ends = np.cumsum(self.counts)
        firsts = self.positions.numpy()[(ends - self.counts)[self.counts > 0]]
        lengths = [len(row) for row, n in zip(self.tokens, self.counts, strict=True) if n]
        return int((np.array(lengths) - firsts).max()) if lengths else 0

    def get(self, name: str, *, asked_by: str) -> Tensor:
        """The field [M] called `name`. Raises ValueError where an experience lacks it."""
        if name in self.fields:
            return self.fields[name]
        if name in self.missing:
            raise ValueError(
                f"{asked_by} asks for '{name}', which experience {self.missing[name]} does not have"
            )
        known = ", ".join(sorted({*self.fields, *self.missing}))
        raise ValueError(f"{asked_by} asks for '{name}', which no batch has. There is: {known}")

    def with_fields(self, **fields: Tensor) -> Batch:
        """The same batch with more fields."""
        return replace(self, fields={**self.fields, **fields})

    def eid_of(self, entry: int) -> str:
        """The experience that an entry is of."""
        return self.eids[int(self.sample_ids[entry])]

    def select(self, samples: Sequence[int]) -> Batch:
        """The batch of these samples alone, in this order, counted from 0 again."""
        chosen = np.asarray(samples, dtype=np.int64)
        counts = self.counts[chosen]
        starts = (np.cumsum(self.counts) - self.counts)[chosen]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        index = torch.from_numpy(np.repeat(starts, counts) + within)
        return Batch(
            tokens=tuple(self.tokens[i] for i in chosen),
            eids=tuple(self.eids[i] for i in chosen),
            groups=tuple(self.groups[i] for i in chosen),
            counts=counts,
            sample_ids=torch.from_numpy(np.repeat(np.arange(len(chosen)), counts)),
            positions=self.positions[index],
            targets=self.targets[index],
            temperatures=self.temperatures[index],
            fields={name: value[index] for name, value in self.fields.items()},
            missing=self.missing,
        )


def flatten(experiences: Sequence[Experience]) -> Batch:
    """The batch of these experiences: entries where `mask` is true, index 0 left out."""
    masks = [_mask(e) for e in experiences]
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    trained = _joined(masks)
    trained[torch.from_numpy(starts)] = False  # nothing predicts index 0
    entries = trained.nonzero().squeeze(1)  # where they are, all samples end to end
    sample_ids = np.searchsorted(starts, entries.numpy(), side="right") - 1
    counts = np.bincount(sample_ids, minlength=len(experiences))
    temperatures = torch.tensor([e.temperature or 1.0 for e in experiences], dtype=torch.float32)
    fields: dict[str, Tensor] = {}
    missing: dict[str, str] = {}
    for name, attribute in FIELD_NAMES.items():
        rows = [_row_of(e, attribute) for e in experiences]
        lacking = [e.eid.uid for e, row in zip(experiences, rows, strict=True) if row is None]
        if lacking:
            missing[name] = lacking[0]
        else:
            fields[name] = _joined(rows)[entries]
    return Batch(
        tokens=tuple(e.tokens.numpy() for e in experiences),
        eids=tuple(e.eid.uid for e in experiences),
        groups=tuple(e.eid.tid for e in experiences),
        counts=counts,
        sample_ids=torch.from_numpy(sample_ids),
        positions=entries - torch.from_numpy(starts[sample_ids]),
        targets=_joined([e.tokens for e in experiences])[entries],
        temperatures=temperatures[torch.from_numpy(sample_ids)],
        fields=fields,
        missing=missing,
    )


def of_tokens(rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Batch:
    """A batch in which every token but each row's first is an entry: for scoring plain ids."""
    return flatten(
        [Experience(list(row), prompt_length=1, temperature=temperature) for row in rows]
    )


def _mask(e: Experience) -> Tensor:
    if e.multi_modal_inputs:
        raise ValueError(
            f"experience {e.eid.uid} has multi_modal_inputs: only text is trained here"
        )
    return e.mask


def _row_of(e: Experience, name: str) -> Any:
    """A per-token field. Where nothing else is said, tokens were drawn from the policy itself."""
    itself = name == "sampler_logprobs" and e.sampler_logprobs is None
    return e.logprobs if itself else getattr(e, name)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows; a single row is copied too."""
    return torch.cat([*rows, rows[0][:0]]) if rows else torch.empty(0)
