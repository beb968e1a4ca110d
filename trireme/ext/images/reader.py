"""Reader: turns image files into pictures and pixels, by the model's own image processor.

The processor is transformers' for Pillow: torchvision is not needed. Its settings are part of a
picture's digest, so that explorer and trainer cannot see one file differently without noticing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.cache import SizedCache
from trireme.pictures import Picture

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types of the Qwen kind."""
GEMMA = "gemma3"
MOST_BYTES = 32 * 2**20
"""Limit of a file."""
MOST_PIXELS = 64 * 10**6
"""Limit of a picture as it is decoded, which a small file may exceed by far."""
_MOST_CACHED = 2**28
"""Bytes of the pictures that are cached with their pixels: ten of 1024 x 1024 pixels."""
_NOT_SETTINGS = ("image_processor_type", "processor_class", "_processor_class", "auto_map")


class ImageReader:
    """Reads pictures for one model."""

    def __init__(
        self,
        processor: Any,
        placeholder: int,
        *,
        unsampled: Sequence[int],
        merged: int,
        patch: int | None = None,
        written: str = "",
        around: str = "",
    ) -> None:
        """`processor` is transformers' image processor; `merged` patches become a token, and have
        `patch` pixels a side if the processor does not say which patches there are.

        Where a chat template has the text `written` for a picture, the model expects the text
        `around`, with the placeholder in it.
        """
        self.placeholder = placeholder
        self.unsampled: Sequence[int] = tuple(unsampled)
        self._processor = processor
        self._merged, self._patch = merged, patch
        self._written, self._around = written, around
        settings = {
            name: value
            for name, value in processor.to_dict().items()
            if name not in _NOT_SETTINGS and value is not None
        }
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()
        self._cache: SizedCache[tuple[Picture, Tensor]] = SizedCache(_MOST_CACHED)
        """Pictures and their pixels [N, P], by digest."""

    def read(self, source: Any) -> Picture:
        """Return a picture from bytes, a path, a data URL, an image of Pillow, or a dictionary of
        `datasets` with bytes or a path. Raises ValueError for anything else, and for a picture that
        is damaged or too large.
        """
        if isinstance(source, Picture):
            return source
        data = bytes_of(source)
        digest = self._digest(data)
        return self._made(data, digest)[0]

    def _made(self, data: bytes, digest: str) -> tuple[Picture, Tensor]:
        """Return a picture and its pixels, from the cache if they are there."""
        made = self._cache.get(digest)
        if made is None:
            pixels, grid = self._process(data)
            tokens = grid[0] * grid[1] * grid[2] // self._merged
            made = Picture(data, digest, tokens, grid), pixels
            self._cache.put(digest, made, len(data) + pixels.nbytes)
        return made

    def pixels(self, picture: Picture) -> Tensor:
        """Return the patches [N, P] of a picture. Raises ValueError if it was read with other
        settings.
        """
        if self._digest(picture.data) != picture.digest:
            raise ValueError(
                f"picture {picture.digest[:16]} was read by an image processor with other "
                "settings: expected the preprocessor_config.json of this model"
            )
        return self._made(picture.data, picture.digest)[1]

    def tensors(self, picture: Picture) -> dict[str, Tensor]:
        """Return a picture's pixels, and how many patches or parts it has, by the names that
        transformers and vLLM give them.
        """
        if self._patch is None:
            grid = torch.tensor([picture.grid])
            return {"pixel_values": self.pixels(picture), "image_grid_thw": grid}
        return {
            "pixel_values": self.pixels(picture),
            "num_patches": torch.ones(1, dtype=torch.long),
        }

    def _digest(self, data: bytes) -> str:
        return hashlib.sha256(hashlib.sha256(data).digest() + self._settings).hexdigest()

    def _process(self, data: bytes) -> tuple[Tensor, tuple[int, int, int]]:
        image = _decoded(data)
        try:
            found = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise ValueError(
                f"a picture of {image.width} x {image.height} pixels: {error}"
            ) from error
        pixels = found["pixel_values"]
        if self._patch is None:
            time, height, width = found["image_grid_thw"][0].tolist()
            return pixels, (time, height, width)
        height, width = pixels.shape[2:]
        return pixels, (1, height // self._patch, width // self._patch)

    def template(self, text: str) -> str:
        """Return a chat template that writes the placeholder, and what the model expects around it,
        where `text` shows a picture; `text` itself if it does so already, or shows none.
        """
        if self._written:
            around = self._around.replace("\n", "\\n")  # as it stands in quotation marks
            for mark in "'\"":
                text = text.replace(mark + self._written + mark, mark + around + mark)
        return text


def bytes_of(source: Any) -> bytes:
    """Return the bytes of an image file, however it is given. Raises ValueError."""
    from PIL import Image

    if isinstance(source, Mapping):  # a row of `datasets` that was not decoded, OpenAI's image_url
        names = ("bytes", "path", "url")
        given = next((source[name] for name in names if source.get(name) is not None), None)
        if given is None:
            raise ValueError(
                f"a picture is {_brief(source)}: expected its `bytes`, `path` or `url`"
            )
        return bytes_of(given)
    if isinstance(source, Image.Image):
        return _limited(_png_of(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _limited(bytes(source))
    if isinstance(source, str | os.PathLike):
        return _of_text(os.fspath(source))
    raise ValueError(
        f"a picture is {_brief(source)}: expected bytes, a path, a data URL or an image of Pillow"
    )


def _png_of(image: Any) -> bytes:
    """Return an image of Pillow as PNG, turned as its EXIF orientation says, which PNG loses."""
    from PIL import ImageOps

    if image.mode == "F":
        raise ValueError("a picture of Pillow has the mode F: expected numbers from 0 to 255")
    file = io.BytesIO()
    try:
        image = ImageOps.exif_transpose(image)
        clear = image.mode in ("LA", "PA") or "transparency" in image.info
        if image.mode.startswith("I"):
            image = image.convert("I;16")  # all that PNG has
        elif image.mode not in ("L", "RGB", "RGBA"):
            image = image.convert("RGBA" if clear else "RGB")
        image.save(file, "PNG")
    except Exception as error:  # an opened file is decoded only here
        kind = type(error).__name__
        raise ValueError(
            f"a picture of Pillow ({image.mode}) cannot be written as PNG: {kind}: {error}"
        ) from error
    return file.getvalue()


def _of_text(text: str) -> bytes:
    scheme = text[:16].partition(":")[0].lower()
    if scheme == "data":
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ValueError(
                "a picture's data URL is not in base64: expected data:image/png;base64,…"
            )
        if len(body) > MOST_BYTES * 4 // 3 + 4:
            raise ValueError(f"a picture has more than {MOST_BYTES} bytes, the most")
        try:
            return _limited(base64.b64decode(body, validate=True))
        except binascii.Error as error:
            raise ValueError(f"a picture's data URL is damaged: {error}") from error
    if scheme in ("http", "https"):
        raise ValueError(
            f"a picture is at {text[:80]}: pictures are not fetched; expected a data URL, bytes or "
            "a file"
        )
    path = Path(text.removeprefix("file://"))
    try:
        if not path.is_file():
            raise ValueError(f"a picture's file {_brief(text)} does not exist (from {Path.cwd()})")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"a picture has more than {MOST_BYTES} bytes, the most: {path}")
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ValueError(f"a picture's file {_brief(text)} cannot be read: {why}") from error


def _limited(data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise ValueError(f"a picture has {len(data)} bytes: expected at most {MOST_BYTES}")
    return data


def _brief(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float) else type(value).__name__


def _decoded(data: bytes) -> Any:
    """Return the decoded image in RGB; a transparent one on white."""
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(
                f"a picture has {image.width} x {image.height} pixels: expected at most "
                f"{MOST_PIXELS} in all"
            )
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits, which a conversion would cut
            image = image.point(lambda value: value * (1 / 256)).convert("L")
        if image.mode in ("RGBA", "LA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")
    except ValueError:
        raise
    except Exception as error:  # what a damaged file makes of Pillow's decoders is endless
        kind = type(error).__name__
        raise ValueError(
            f"a picture of {len(data)} bytes cannot be decoded ({kind}): expected PNG, JPEG, WebP "
            "or another format that Pillow reads"
        ) from error


@cache
def reader_of(model_path: str) -> ImageReader | None:
    """Return the reader of a model's folder, one for each; None if it has no image processor, or
    its pictures are not read here. Raises ValueError if its files do not fit each other.
    """
    from transformers import AutoConfig, AutoImageProcessor

    if not (Path(model_path) / "preprocessor_config.json").is_file():
        return None
    config: Any = AutoConfig.from_pretrained(model_path)
    placeholder = getattr(config, "image_token_id", None)
    if config.model_type not in (*QWEN, GEMMA) or placeholder is None:
        return None
    processor: Any = AutoImageProcessor.from_pretrained(model_path, backend="pil")
    if config.model_type in QWEN:
        return ImageReader(
            processor,
            int(placeholder),
            unsampled=unsampled_of(config),
            merged=int(processor.merge_size) ** 2,
        )
    return _gemma(model_path, config, processor)


def _gemma(model_path: str, config: Any, processor: Any) -> ImageReader:
    """Return the reader of a Gemma 3, whose pictures all have one size and one number of tokens,
    between two lines of their own.
    """
    sight, size = config.vision_config, processor.size
    sides = {int(size["height"]), int(size["width"])}
    if sides != {int(sight.image_size)}:
        raise ValueError(
            f"{model_path}/preprocessor_config.json makes pictures of {size['width']} x "
            f"{size['height']} pixels: expected {sight.image_size} x {sight.image_size}, the "
            "vision_config.image_size of its config.json"
        )
    if processor.do_pan_and_scan:
        raise ValueError(
            f"{model_path}/preprocessor_config.json has do_pan_and_scan: parts of a picture beside "
            "it are not trained; expected false"
        )
    patches = (int(sight.image_size) // int(sight.patch_size)) ** 2
    begin, soft, end = _words(
        model_path, config.boi_token_index, config.image_token_id, config.eoi_token_index
    )
    return ImageReader(
        processor,
        int(config.image_token_id),
        unsampled=unsampled_of(config),
        merged=patches // int(config.mm_tokens_per_image),
        patch=int(sight.patch_size),
        written=begin,
        around=f"\n\n{begin}{soft}{end}\n\n",
    )


def unsampled_of(config: Any) -> list[int]:
    """Return the token ids that stand for pictures or videos."""
    names = (
        "image_token_id",
        "boi_token_index" if config.model_type == GEMMA else "video_token_id",
    )
    found = (getattr(config, name, None) for name in names)
    size = config.get_text_config().vocab_size
    return [token for token in found if token is not None and token < size]


def _words(model_path: str, *ids: int) -> list[str]:
    """Return the texts of added tokens, as the folder's tokenizer.json has them."""
    added = json.loads((Path(model_path) / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    texts = {token["id"]: token["content"] for token in added}
    if lacking := [i for i in ids if i not in texts]:
        raise ValueError(
            f"{model_path}/tokenizer.json lacks the added token {lacking[0]}, which config.json "
            "names for pictures"
        )
    return [texts[i] for i in ids]


def make_reader(model_path: str, config: Mapping[str, Any]) -> ImageReader | None:
    """Make the reader of a model with this config.json; None if its pictures are not read here."""
    return reader_of(str(model_path)) if config.get("model_type") in (*QWEN, GEMMA) else None
