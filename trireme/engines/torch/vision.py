"""Vision: the door for models that see pictures, on the device side.

A function of VISIONS, `(model) -> Vision | None`, makes the vision of a model, if it is of a kind
that it knows. Token ids of pictures (trireme/pictures.py) are then read as features of the model's
tower, each distinct picture computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from trireme.pictures import Picture, Pictures, album, shown
from trireme.registry import VISIONS


class Vision(Protocol):
    """How one model sees."""

    unsampled: Sequence[int]
    """Token ids that stand for pictures, and are never sampled."""

    def positions(self, ids: Sequence[int], pictures: Pictures) -> Tensor:
        """Return the rotary positions [3, T] of a path of ids; text goes on after the largest one
        before it.
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
    """[3, T] the rotary positions of its tokens."""

    @property
    def shift(self) -> int:
        """How much later the rotary positions of tokens after it are than their places."""
        return int(self.rotary.max()) + 1 - self.rotary.shape[1]


def sight_of(
    model: PreTrainedModel, ids: Sequence[int], pictures: Sequence[Picture]
) -> Sight | None:
    """Return what a path shows of `pictures`; None if nothing. Raises ValueError for a model that
    sees nothing.
    """
    found = shown(ids, album(pictures)) if pictures else {}
    return Sight(found, seeing(model).positions(ids, found)) if found else None


def inputs_of(
    model: PreTrainedModel,
    sights: Sequence[Sight | None],
    ids: Tensor,
    places: Tensor,
    spans: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Return what the language model gets for rows of ids [B, S] at `places` [B, S] of their paths,
    some of which show pictures. `spans`: the begin and the end of each row's ids on its path.
    """
    rotary = places.expand(3, -1, -1).clone()
    pictures: dict[int, Picture] = {}
    for row, (sight, (start, end)) in enumerate(zip(sights, spans, strict=True)):
        if sight is not None:
            rotary[:, row, : end - start] = sight.rotary[:, start:end]
            pictures |= sight.pictures
    return {**seeing(model).inputs(ids, pictures), "position_ids": rotary}
