"""Pictures: vLLM's inputs for prompts that show pictures, without its own preparation of them.

vLLM would expand placeholders and read image files itself, by a processor of its own version. Here
it gets what the trainer computes with: our ids, with the model's placeholder for each token of a
picture, the pixels of our reader, and the picture's digest as its name in vLLM's caches. So there
is nothing that could differ, and nothing to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from trireme.pictures import BEGIN, Picture, PictureReader, album, first_of, outside

MODALITY = "image"


class PictureInputs:
    """Makes the inputs of one vLLM."""

    def __init__(self, processor: Any, reader: PictureReader) -> None:
        """`processor` is vLLM's for this model, which knows the fields of its pictures."""
        self._processor = processor
        self.reader = reader
        self._inputs: Any = import_module("vllm.multimodal.inputs")

    def of(self, ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
        """Return vLLM's input for a prompt of `ids`, some of which are tokens of `pictures`."""
        known = album(pictures)
        shown: list[Picture] = []
        places = []
        for at, token in enumerate(ids):
            if token >= BEGIN and token == first_of(token):
                shown.append(picture := known[token])
                places.append(self._inputs.PlaceholderRange(offset=at, length=picture.tokens))
        return {
            "type": "multimodal",
            "prompt_token_ids": outside(ids, self.reader.placeholder),
            "mm_kwargs": self._fields(shown),
            "mm_hashes": {MODALITY: [picture.digest for picture in shown]},
            "mm_placeholders": {MODALITY: places},
        }

    def _fields(self, shown: Sequence[Picture]) -> Any:
        parts = [self.reader.tensors(picture) for picture in shown]
        together: Any = import_module("transformers").BatchFeature(
            {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        )
        fields = self._processor._get_mm_fields_config(together, {})
        return self._inputs.MultiModalKwargsItems.from_hf_inputs(together, fields)
