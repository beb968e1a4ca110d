"""Picture reader: finds the reader of a model's pictures among those that extensions make."""

from __future__ import annotations

from trireme.config.lookup import model_config
from trireme.pictures import PictureReader
from trireme.registry import PICTURE_READERS


def reader_for(model_path: str) -> PictureReader | None:
    """Make the reader of a model's pictures; None for a model that takes text alone."""
    config = model_config(model_path)
    made = (make(model_path, config) for make in PICTURE_READERS.values())
    return next(filter(None, made), None)
