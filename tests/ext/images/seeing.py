"""Tiny models that see, and pictures to be seen."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.composites import make_composite
from tests.tiny import make_tokenizer
from trireme.ext.images.reader import ImageReader, reader_of

SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
_TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
_GEMMA_TOKENS = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}{%- if part['type'] == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def seeing_tokenizer(family: str = "qwen3_vl") -> PreTrainedTokenizerFast:
    gemma = family == "gemma3"
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    template = TEMPLATE.replace(shown, "<start_of_image>") if gemma else TEMPLATE
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens(_GEMMA_TOKENS if gemma else _TOKENS, special_tokens=True)
    if gemma:
        tokenizer.add_tokens(["\n" * count for count in (2, 3, 4)])
    return tokenizer


def make_seeing(folder: Path, family: str, **options: Any) -> Path:
    """A tiny composite with a tokenizer for pictures and an image processor: a picture of
    2 x 3 tokens is 56 x 84 pixels, or 64 x 96; Gemma's all have 2 x 2.
    """
    make_composite(folder, family, **options)
    seeing_tokenizer(family).save_pretrained(folder)
    if family == "gemma3":
        settings = folder / "tokenizer_config.json"
        names = dict(zip(("image_token", "boi_token", "eoi_token"), _GEMMA_TOKENS, strict=True))
        known = {**json.loads(settings.read_text()), "extra_special_tokens": names}
        settings.write_text(json.dumps(known))
        Gemma3ImageProcessorPil(size={"height": 56, "width": 56}).save_pretrained(folder)
        return folder
    patch = AutoConfig.from_pretrained(folder).vision_config.patch_size
    side = 2 * patch
    Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": side * side, "longest_edge": 16 * side * side}
    ).save_pretrained(folder)
    return folder


def reader_for(folder: Path) -> ImageReader:
    reader = reader_of(str(folder))
    assert reader is not None
    return reader


def picture(colour: str, size: tuple[int, int] = (84, 56), dot: tuple[int, int] = (20, 20)) -> Any:
    """A picture of Pillow: a disc on white."""
    image = Image.new("RGB", size, "white")
    x, y = dot
    ImageDraw.Draw(image).ellipse([x - 12, y - 12, x + 12, y + 12], fill=colour)
    return image


def png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
