"""Source: the part of a trainer's weights that a push sends, if engines have the rest."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from torch import Tensor

from trireme.engines.weights import fingerprint
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Part

_REST: Mapping[Part, Part] = {"adapter": "base", "text": "towers"}


class PartSource:
    """The weight source for engines that have the rest of the model from its folder. See
    sync/probe.py.
    """

    def __init__(self, backend: Backend, part: Part) -> None:
        """`part` is the adapter or a composite's language model."""
        self.score = backend.score
        self._backend = backend
        self._part: Part = part
        self._rest: Part = _REST[part]
        self._unmoved: dict[str, float] | None = None

    def weights(self) -> dict[str, Tensor]:
        """Return the part, by the engines' names."""
        return self._backend.weights(self._part)

    def each_weight(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield the part's tensors one after the other."""
        return self._backend.each_weight(dtype, self._part)

    def unmoved(self, dtype: str) -> dict[str, float]:
        """Return the fingerprints of the rest, which training never changes."""
        if self._unmoved is None:
            each = self._backend.each_weight(dtype, self._rest)
            marks = (fingerprint({name: tensor}, dtype) for name, tensor in each)
            self._unmoved = {name: mark for part in marks for name, mark in part.items()}
        return self._unmoved
