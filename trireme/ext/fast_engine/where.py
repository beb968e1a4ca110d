"""Where: the place of every row of a decode step, from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Where:
    """The position of each row of a decode step, from one step to the next.

    A row's first `shared` tokens are in slot `slots` of the shared prompts, the rest in the row.
    """

    positions: Tensor
    """[B] of the new tokens"""
    lengths: Tensor
    """[B] tokens in the row itself, the new one included"""
    slots: Tensor
    """[B]"""
    shared: Tensor
    """[B]"""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], device: torch.device) -> Where:
        """Build it from each row's number of computed tokens, slot, and number of tokens in that
        slot.
        """
        cached, slots, shared = torch.tensor(rows, device=device).unbind(1)
        return cls(
            cached.contiguous(), cached - shared + 1, slots.contiguous(), shared.contiguous()
        )

    def __post_init__(self) -> None:
        self.longest = int(self.lengths.max())
        self.longest_shared = int(self.shared.max())
        self.num_slots = int(self.slots.max()) + 1
        self._even = bool((self.lengths == self.longest).all())
        self._even_shared = bool((self.shared == self.longest_shared).all())
        self._flat: Tensor | None = None
        self._bias: Tensor | None = None
        self._by_slot: tuple[Tensor, Tensor] | None = None

    def next(self, tokens: int = 1) -> None:
        """Advance every row by so many tokens."""
        self.positions += tokens
        self.lengths += tokens
        self.longest += tokens
        self._flat = self._bias = None

    def flat(self, num_keys: int, room: int) -> Tensor:
        """Return [B * K] the indices of the new tokens in a layer's keys, seen as [rows * K * room,
        D].
        """
        if self._flat is None:
            heads = torch.arange(len(self.lengths) * num_keys, device=self.lengths.device)
            self._flat = heads * room + (self.lengths - 1).repeat_interleave(num_keys)
        return self._flat

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return [B, shared + own], -inf where a row has no key; None if all rows are
        equally long.
        """
        if self._even and self._even_shared:
            return None
        if self._bias is None:
            parts = []
            for longest, lengths in (
                (self.longest_shared, self.shared),
                (self.longest, self.lengths),
            ):
                parts.append(torch.arange(longest, device=lengths.device) < lengths[:, None])
            seen = torch.cat(parts, 1)
            self._bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._bias.masked_fill_(~seen, -torch.inf)
        return self._bias

    def to_slots(self, x: Tensor) -> Tensor:
        """Gather [B, K, group, W] -> [slots * K, members * group, W], a slot's members side by
        side.
        """
        members, _ = self._members()
        _, num_keys, group, width = x.shape
        out = x[members.flatten()].view(*members.shape, num_keys, group, width).transpose(1, 2)
        return out.reshape(members.shape[0] * num_keys, -1, width)

    def to_rows(self, x: Tensor, num_keys: int) -> Tensor:
        """Invert `to_slots`: -> [B, K, group, W], zeros where a row shares nothing."""
        members, index = self._members()
        slots, most = members.shape
        out = x.view(slots, num_keys, most, -1, x.shape[-1]).transpose(1, 2)
        out = out.reshape(slots * most, num_keys, -1, x.shape[-1])[index]
        return out if self._even_shared else out * (self.shared > 0)[:, None, None, None]

    def _members(self) -> tuple[Tensor, Tensor]:
        """Return [slots, members] the rows of each slot, padded with row 0, and [B] which entries
        are real.
        """
        if self._by_slot is None:
            rows: list[list[int]] = [[] for _ in range(self.num_slots)]
            places = []
            pairs = zip(self.slots.tolist(), self.shared.tolist(), strict=True)
            for row, (slot, shared) in enumerate(pairs):
                places.append((slot, len(rows[slot])) if shared else (0, 0))
                if shared:
                    rows[slot].append(row)
            most = max(map(len, rows))
            padded = [[*row, *[0] * (most - len(row))] for row in rows]
            device = self.slots.device
            self._by_slot = (
                torch.tensor(padded, device=device),
                torch.tensor([slot * most + at for slot, at in places], device=device),
            )
        return self._by_slot
