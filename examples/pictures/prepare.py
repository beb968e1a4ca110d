"""Draws pictures with questions, and makes a tiny vision-language model that knows nothing yet.

    python examples/pictures/prepare.py                       # checkpoints/pictures_data
    python examples/pictures/prepare.py --family qwen2_5_vl   # or qwen3_5, gemma3

A picture has one to four circles of one colour in one half. Questions ask for the colour, the
number or the half. Half of the solved examples have an answer by chance, which is right in every
third: a third of all are wrong, so that imitating them is not enough.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen2Tokenizer,
    Qwen3_5Config,
    Qwen3VLConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trireme.config.variables import variable
from trireme.files import write_jsonl

SIDE, PATCH = 64, 8
COLOURS = ("red", "green", "blue", "orange")
NUMBERS = ("one", "two", "three", "four")
HALVES = ("left", "right")
QUESTIONS = {
    "colour": "What colour are the circles?",
    "number": "How many circles are there?",
    "half": "On which side are the circles?",
}
ANSWERS = {"colour": COLOURS, "number": NUMBERS, "half": HALVES}
VISION = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}{%- if part['type'] == 'image' %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def draw(rng: random.Random) -> tuple[Image.Image, dict[str, str]]:
    """Draw a picture, and say what is on it."""
    facts = {name: rng.choice(words) for name, words in ANSWERS.items()}
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    left = 0 if facts["half"] == "left" else SIDE // 2
    cells = rng.sample(
        [(x, y) for x in range(2) for y in range(4)], NUMBERS.index(facts["number"]) + 1
    )
    for x, y in cells:  # a grid of two by four in that half, each circle moved a little
        at = left + 16 * x + rng.randint(1, 4), 16 * y + rng.randint(1, 4)
        pen.ellipse([*at, at[0] + 11, at[1] + 11], fill=facts["colour"])
    return image, facts


def rows(folder: Path, name: str, count: int, rng: random.Random, wrong: float = 0.0) -> None:
    """Write rows with a question, an answer and the file of a picture."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    out = []
    for number in range(count):
        image, facts = draw(rng)
        file = folder / name / f"{number}.png"
        image.save(file)
        kind = rng.choice(tuple(QUESTIONS))
        answer = rng.choice(ANSWERS[kind]) if rng.random() < wrong else facts[kind]
        out.append({"question": f"<image>{QUESTIONS[kind]}", "answer": answer, "image": str(file)})
    write_jsonl(folder / f"{name}.jsonl", out)


def make_tokenizer(family: str) -> Qwen2Tokenizer:
    """Make a byte-level tokenizer of Qwen's class that knows the words of this task. transformers
    loads Qwen3.5's by that class, whatever a folder says. Gemma's chat template writes the token
    that begins a picture, and no others.
    """
    alphabet = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(
        vocab=alphabet, merges=[], unk_token="<|pad|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", *VISION], special_tokens=True)
    texts = [*QUESTIONS.values(), *COLOURS, *NUMBERS, *HALVES]
    tokenizer.add_tokens(sorted({piece for text in texts for piece in re.findall(r" ?\w+", text)}))
    _, begin, end, _ = VISION
    whole = f"{begin}{VISION[0]}{end}"
    tokenizer.chat_template = TEMPLATE.replace(whole, begin) if family == "gemma3" else TEMPLATE
    return tokenizer


def make_model(folder: Path, family: str, seed: int) -> None:
    """Write a random model of a family with its tokenizer and image processor."""
    tokenizer = make_tokenizer(family)
    known = tokenizer.get_vocab()
    image, begin, end, video = (known[word] for word in VISION)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.04,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": rope,
    }
    sight: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "depth": 1,
        "num_heads": 4,
        "patch_size": PATCH,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
    }
    ids: dict[str, Any] = {
        "image_token_id": image,
        "vision_start_token_id": begin,
        "vision_end_token_id": end,
    }
    ids |= {"video_token_id": video, "tie_word_embeddings": True}
    config: Any
    if family == "qwen2_5_vl":
        sight |= {"fullatt_block_indexes": [0], "window_size": SIDE}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=sight, **ids)
    elif family == "qwen3_5":
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
        text |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        text |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        config = Qwen3_5Config(text_config=text, vision_config=sight, **ids)
    elif family == "gemma3":
        del rope["mrope_section"], text["rope_parameters"]
        text |= {"sliding_window": 32, "query_pre_attn_scalar": 32}
        names = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}
        sight = {names.get(key, key): value for key, value in sight.items()}
        sight |= {"image_size": SIDE}
        marks: dict[str, Any] = {
            "image_token_index": image,
            "boi_token_index": begin,
            "eoi_token_index": end,
        }
        config = Gemma3Config(
            text_config=text, vision_config=sight, mm_tokens_per_image=16, **marks
        )
    else:
        rope |= {"mrope_interleaved": True}
        sight |= {"deepstack_visual_indexes": [0]}
        config = Qwen3VLConfig(text_config=text, vision_config=sight, **ids)
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(config)
    if family == "gemma3":  # whose projection begins at 0, and is frozen
        nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family == "gemma3":
        Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
        return
    pixels = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=PATCH, size=pixels).save_pretrained(folder)


def main() -> None:
    """Write model and data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", default="qwen3_vl", choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(variable("CHECKPOINT_ROOT_DIR", "./checkpoints"))
    folder = root / "pictures_data"
    rng = random.Random(options.seed)
    for name, count, wrong in (("solved", 1000, 0.5), ("train", 1500, 0.0), ("held_out", 300, 0.0)):
        rows(folder, name, count, rng, wrong)
    make_model(folder / options.family, options.family, options.seed)
    print(f"model and pictures: {folder}")


if __name__ == "__main__":
    main()
