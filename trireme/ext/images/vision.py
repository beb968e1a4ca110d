"""Vision: how models of the Qwen kind and Gemma 3 see: positions, and features of their tower.

Features take the places of a picture's tokens. With Qwen, text stands at equal positions on the
three axes of M-RoPE; a picture's tokens stand at one time and at their row and column, and text
goes on after the largest of them (Qwen2-VL, arXiv:2409.12191); Qwen3-VL adds further features after
its first layers (DeepStack, arXiv:2406.04334). With Gemma 3 (arXiv:2503.19786) positions are those
of text, and a picture's tokens see one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trireme.cache import SizedCache
from trireme.ext.images.reader import GEMMA, QWEN, ImageReader, reader_of, unsampled_of
from trireme.pictures import BEGIN, MOST_TOKENS, Picture, Pictures, first_of


class TowerVision:
    """The vision of one model, by features that replace the embeddings of a picture's tokens."""

    projectors: Sequence[str] = ()
    around = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.unsampled = unsampled_of(model.config)
        self._model: Any = proxy(model)  # which its vision does not keep alive
        self._features: SizedCache[list[Tensor]] = SizedCache(_MOST_CACHED)
        """Of a picture whose tower is frozen, by its digest: those in place of its tokens, and
        those of each layer of DeepStack."""

    def inputs(self, ids: Tensor, pictures: Pictures) -> dict[str, Any]:
        """Return embeddings [B, S, D], with a picture's features in place of its tokens."""
        seen = ids >= BEGIN
        embedded = self._model.get_input_embeddings()(ids.masked_fill(seen, 0))
        if torch.is_grad_enabled() and self.learns:
            # each weight has a part in each loss: ranks add up the same gradients
            firsts = [p.reshape(-1)[0] for p in self._weights() if p.requires_grad]
            embedded = embedded + (torch.stack(firsts).sum() * 0).to(embedded.dtype)
        tokens = ids[seen]
        if not len(tokens):  # a piece of a prompt that shows pictures elsewhere
            return {"inputs_embeds": embedded}
        firsts = tokens - (tokens - BEGIN) % MOST_TOKENS
        features, begins, total = [], {}, 0
        for first in dict.fromkeys(firsts.tolist()):
            features.append(self._look(pictures[first], embedded))
            begins[first] = total
            total += len(features[-1][0])
        place = torch.tensor([begins[first] for first in firsts.tolist()], device=ids.device)
        place = place + (tokens - firsts)
        layers = [
            torch.cat([each[layer] for each in features])[place]
            for layer in range(len(features[0]))
        ]
        # out of place: embeddings may be trained
        found: dict[str, Any] = {
            "inputs_embeds": embedded.masked_scatter(seen[..., None], layers[0].to(embedded.dtype))
        }
        if len(layers) > 1:
            found |= {"visual_pos_masks": seen, "deepstack_visual_embeds": layers[1:]}
        return found

    def _look(self, picture: Picture, like: Tensor) -> list[Tensor]:
        """Return a picture's features [N, D], from the cache where the tower is frozen."""
        if (cached := self._features.get(picture.digest)) is not None:
            return cached
        tower = self._tower()
        if tower.config._attn_implementation != "sdpa":  # ours is for the language model
            tower.set_attn_implementation("sdpa")
        pixels = self._reader().pixels(picture).to(like.device)
        features = self._computed(pixels, picture)
        if not self.learns:
            self._features.put(picture.digest, features, sum(each.nbytes for each in features))
        return features

    @property
    def learns(self) -> bool:
        """Return whether weights of the tower or its projector are trained."""
        return any(weight.requires_grad for weight in self._weights())

    def _weights(self) -> Iterator[nn.Parameter]:
        modules = [self._tower(), *(self._model.get_submodule(name) for name in self.projectors)]
        yield from dict.fromkeys(w for module in modules for w in module.parameters())

    def _tower(self) -> Any:
        """Return the module that turns pixels into features."""
        raise NotImplementedError

    def _computed(self, pixels: Tensor, picture: Picture) -> list[Tensor]:
        """Return the features [N, D] of a picture's pixels, first those in place of its tokens."""
        raise NotImplementedError

    def _reader(self) -> ImageReader:
        folder = str(self._model.config._name_or_path)
        reader = reader_of(folder)
        if reader is None:
            raise ValueError(
                f"the model '{folder}' is shown a picture, and has no preprocessor_config.json"
            )
        return reader

    def renew(self) -> None:
        """Drop all features: the weights have changed."""
        self._features.clear()


class QwenVision(TowerVision):
    """The vision of a model of the Qwen kind."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config: Any = model.config
        self._merge = int(config.vision_config.spatial_merge_size)
        parts = {"merger", "deepstack_merger_list"} & {n for n, _ in self._tower().named_children()}
        self.projectors = tuple(f"model.visual.{name}" for name in sorted(parts))

    def positions(self, ids: Sequence[int], pictures: Pictures) -> Tensor:
        """Return the rotary positions [3, T] of a path of ids."""
        parts: list[Tensor] = []
        following = at = 0
        while at < len(ids):
            begin = at
            if ids[at] < BEGIN:
                while at < len(ids) and ids[at] < BEGIN:
                    at += 1
                parts.append(torch.arange(following, following + at - begin).expand(3, -1))
                following += at - begin
                continue
            picture = pictures[first_of(ids[at])]
            at += sum(
                1 for _ in zip(ids[at:], picture.ids, strict=False)
            )  # a path may be cut in it
            parts.append((self._axes(picture) + following)[:, : at - begin])
            following += max(picture.grid[1:]) // self._merge
        return torch.cat(parts, 1)

    def _axes(self, picture: Picture) -> Tensor:
        time, height, width = picture.grid
        sides = (
            torch.arange(time),
            torch.arange(height // self._merge),
            torch.arange(width // self._merge),
        )
        return torch.stack(torch.meshgrid(*sides, indexing="ij")).reshape(3, -1)

    def _tower(self) -> Any:
        return self._model.model.visual

    def _computed(self, pixels: Tensor, picture: Picture) -> list[Tensor]:
        grid = torch.tensor([picture.grid], device=pixels.device)
        out = self._model.model.get_image_features(pixels, grid, return_dict=True)
        deep = getattr(out, "deepstack_features", None) or ()
        return [out.pooler_output[0], *(layer[0] for layer in deep)]


class GemmaVision(TowerVision):
    """The vision of a Gemma 3."""

    projectors = ("model.multi_modal_projector",)
    around = True

    def positions(self, ids: Sequence[int], pictures: Pictures) -> Tensor:
        """Return the rotary positions [1, T] of a path of ids: those of text."""
        return torch.arange(len(ids))[None]

    def _tower(self) -> Any:
        return self._model.model.vision_tower

    def _computed(self, pixels: Tensor, picture: Picture) -> list[Tensor]:
        out = self._model.model.get_image_features(pixels, return_dict=True)
        return [out.pooler_output[0]]


_MOST_CACHED = 2**29
"""Bytes of the features that are cached."""


def make_vision(model: PreTrainedModel) -> TowerVision | None:
    """Make a model's vision; None if it is of another kind."""
    config: Any = model.config
    if getattr(config, "image_token_id", None) is None:
        return None
    if config.model_type == GEMMA:
        return GemmaVision(model)
    return QwenVision(model) if config.model_type in QWEN else None
