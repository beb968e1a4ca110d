"""Vision: the door for models that see pictures, on the device side.

A function of VISIONS, `(model) -> Vision | None`, makes the vision of a model, if it is of a kind
that it knows. Token ids of pictures (trireme/pictures.py) are then read as features of the model's
tower, each distinct picture computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trireme.pictures import BEGIN, Picture, Pictures, album, shown
from trireme.registry import VISIONS


class Vision(Protocol):
    """How one model sees."""

    unsampled: Sequence[int]
    """Token ids that stand for pictures, and are never sampled."""
    projectors: Sequence[str]
    """Names of the modules that turn features of the tower into those of the language model."""
    around: bool
    """True if each token of a picture sees the whole picture, later tokens too."""

    @property
    def learns(self) -> bool:
        """Return whether weights of the tower or its projector are trained. Then every micro-batch
        gets its `inputs` here, so that ranks which see no picture have a gradient of 0 for them.
        """
        ...

    def positions(self, ids: Sequence[int], pictures: Pictures) -> Tensor:
        """Return the rotary positions [A, T] of a path of ids, on three axes or on one; text goes
        on after the largest one before it.
        """
        ...

    def inputs(self, ids: Tensor, pictures: Pictures) -> dict[str, Any]:
        """Return what the language model gets in place of `input_ids` [B, S], on their device."""
        ...

    def renew(self) -> None:
        """Drop what was computed: the weights have changed."""
        ...


_VISIONS: WeakKeyDictionary[PreTrainedModel, Vision | None] = WeakKeyDictionary()


def vision_of(model: PreTrainedModel) -> Vision | None:
    """Return the vision of a model, the same one each time; None if it sees nothing."""
    if model not in _VISIONS:
        _VISIONS[model] = next(filter(None, (make(model) for make in VISIONS.values())), None)
    return _VISIONS[model]


def seeing(model: PreTrainedModel) -> Vision:
    """Return the vision of a model that has to have one. Raises ValueError if it has none."""
    vision = vision_of(model)
    if vision is None:
        raise ValueError(
            f"model_type '{model.config.model_type}' is shown a picture, and this model is trained "
            "and sampled on text alone"
        )
    return vision


class Sight(NamedTuple):
    """What a path of tokens shows."""

    pictures: Pictures
    rotary: Tensor
    """[A, T] the rotary positions of its tokens."""
    around: Tensor | None = None
    """[2, T] see `around`; None: every token sees those before it, and no others."""

    @property
    def shift(self) -> int:
        """How much later the rotary positions of tokens after it are than their places."""
        return int(self.rotary.max()) + 1 - self.rotary.shape[1]

    def end(self, start: int, end: int) -> int:
        """Return where a part of the path from `start` ends, at `end` or close to it: never inside
        of a picture that its tokens see whole.
        """
        if self.around is None or end >= self.around.shape[1]:
            return end
        first, last = self.around[:, end - 1].tolist()
        return end if last <= end else first if first > start else last


def sight_of(
    model: PreTrainedModel, ids: Sequence[int], pictures: Sequence[Picture]
) -> Sight | None:
    """Return what a path shows of `pictures`; None if nothing. Raises ValueError for a model that
    sees nothing.
    """
    found = shown(ids, album(pictures)) if pictures else {}
    if not found:
        return None
    vision = seeing(model)
    seen = torch.from_numpy(around(np.array(ids))) if vision.around else None
    return Sight(found, vision.positions(ids, found), seen)


def around(ids: np.ndarray) -> np.ndarray:
    """Return the begin and the end [2, T] of the picture that each of `ids` belongs to; 0 and 0 for
    text.
    """
    seen = ids >= BEGIN
    starts = seen.copy()
    starts[1:] &= np.diff(ids) != 1  # a picture's ids follow one another
    begins = np.flatnonzero(starts)
    ends = np.flatnonzero(seen & ~np.append(seen[1:] & ~starts[1:], False)) + 1
    number = np.cumsum(starts)[seen] - 1
    found = np.zeros((2, len(ids)), np.int64)
    found[:, seen] = begins[number], ends[number]
    return found


def axes(rotary: Tensor) -> Tensor:
    """Return rotary positions [A, ...] as a model takes them: without the axis if there is one."""
    return rotary if len(rotary) > 1 else rotary[0]


def inputs_of(
    model: PreTrainedModel,
    sights: Sequence[Sight | None],
    ids: Tensor,
    places: Tensor,
    spans: Sequence[tuple[int, int]],
) -> tuple[dict[str, Any], Tensor | None]:
    """Return what the language model gets for rows of ids [B, S] at `places` [B, S] of their paths,
    some of which show pictures, and `around` [2, B, S] of them, None where no token sees a later
    one. `spans`: the begin and the end of each row's ids on its path.
    """
    axis = next(len(sight.rotary) for sight in sights if sight is not None)
    rotary = places.expand(axis, -1, -1).clone()
    seen = rotary.new_zeros(2, *ids.shape) if seeing(model).around else None
    pictures: dict[int, Picture] = {}
    for row, (sight, (start, end)) in enumerate(zip(sights, spans, strict=True)):
        if sight is not None:
            rotary[:, row, : end - start] = sight.rotary[:, start:end]
            pictures |= sight.pictures
            if seen is not None and sight.around is not None:
                seen[:, row, : end - start] = sight.around[:, start:end]
    return {**seeing(model).inputs(ids, pictures), "position_ids": axes(rotary)}, seen
