"""Tiny composites: a language model, a tower for pictures and a projector, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Idefics3Config,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.hybrids import HYBRIDS, calm
from tests.tiny import make_tokenizer

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SIGHT = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 14}
_PIXTRAL = {**_SIGHT, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
_QWEN_SIGHT = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}


def make_composite(folder: Path, family: str, **options: Any) -> Path:
    """A folder that transformers loads by the class that it names; `options` of the text."""
    tokenizer = make_tokenizer()
    text = {**_TEXT, "vocab_size": len(tokenizer) + 8, **options}
    image = len(tokenizer)  # ids that no text has
    width = text["head_dim"]
    seen = {**_QWEN_SIGHT, "out_hidden_size": text["hidden_size"]}
    mrope = {**_MROPE, "mrope_section": [width // 8, width // 8, width // 4]}
    config: Any
    if family == "gemma3":
        text |= {"sliding_window": 16}
        config = Gemma3Config(
            text_config=text, vision_config={**_PIXTRAL, "image_size": 56}, mm_tokens_per_image=4,
            image_token_index=image, boi_token_index=image + 1, eoi_token_index=image + 2,
        )  # fmt: skip
    elif family == "mistral3":
        text |= {"model_type": "mistral", "sliding_window": None}
        sight = {**_PIXTRAL, "model_type": "pixtral", "head_dim": 8}
        config = Mistral3Config(text_config=text, vision_config=sight, image_token_index=image)
    elif family == "idefics3":
        text |= {"model_type": "llama"}
        config = Idefics3Config(
            text_config=text, vision_config=_PIXTRAL, image_token_id=image, scale_factor=2
        )
    elif family == "qwen3_5":
        text |= {"rope_parameters": {**mrope, "mrope_interleaved": True}}
        text |= {**HYBRIDS["qwen3_5_text"], "initializer_range": 0.15}
        sight = {**seen}
        config = Qwen3_5Config(
            text_config=text, vision_config=sight, image_token_id=image,
            vision_start_token_id=image + 1, vision_end_token_id=image + 2,
        )  # fmt: skip
    elif family == "qwen2_5_vl":
        text |= {"rope_parameters": mrope}
        sight = {
            **_QWEN_SIGHT,
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": [1],
        }
        config = Qwen2_5_VLConfig(
            text_config=text, vision_config=sight, image_token_id=image,
            vision_start_token_id=image + 1, vision_end_token_id=image + 2,
        )  # fmt: skip
    else:
        text |= {"rope_parameters": {**mrope, "mrope_interleaved": True}}
        sight = {
            **_QWEN_SIGHT,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": [0],
        }
        mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= mixture if family == "qwen3_vl_moe" else {}
        config = (Qwen3VLMoeConfig if family == "qwen3_vl_moe" else Qwen3VLConfig)(
            text_config=text, vision_config=sight, image_token_id=image,
            vision_start_token_id=image + 1, vision_end_token_id=image + 2,
        )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    calm(model)
    if family == "gemma3":  # whose projection begins at 0: nothing would be seen
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
