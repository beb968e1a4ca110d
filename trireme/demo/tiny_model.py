"""Tiny model: makes the demo's model and tokenizer on the spot, without a network.

- The vocabulary covers the problems' text: a word or a number with the space before it is one
  token, so that decoding is joining, and the demo's text is restored exactly.
- The weights are random, from the seed: the model learns everything in the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils.logging import disable_progress_bar

PIECE = r" ?[A-Za-z]+| ?[0-9]+| ?[#+*/=\-]+|[.,?!:<>()\[\]]|\s"
SPECIAL = ("<|pad|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def make_tokenizer(texts: Iterable[str], largest: int = 99) -> PreTrainedTokenizerFast:
    """Make a tokenizer that knows every piece of `texts` and the numbers from 0 to `largest`."""
    pieces = {piece for text in texts for piece in re.findall(PIECE, text)}
    numbers = [f" {number}" for number in range(largest + 1)]
    pieces = {piece for piece in pieces if not piece.lstrip().isdigit() or piece[0] != " "}
    vocabulary = [*SPECIAL, *numbers, *sorted(pieces)]
    inner = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<|unknown|>")
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        unk_token="<|unknown|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    folder: Path,
    texts: Iterable[str] | PreTrainedTokenizerFast,
    *,
    seed: int,
    width: int = 128,
    layers: int = 2,
    max_len: int = 256,
    initializer_range: float = 0.02,
    largest: int = 99,
) -> Path:
    """Write a random Qwen3 of about half a million weights and its tokenizer to `folder`.

    `texts` is a tokenizer, or what one is made from: it then knows their pieces and the numbers up
    to `largest` (-1: none).
    """
    made = isinstance(texts, PreTrainedTokenizerFast)
    tokenizer = texts if made else make_tokenizer(texts, largest)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(end, int) and isinstance(pad, int)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        max_position_embeddings=max_len,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert model.generation_config is not None
    disable_progress_bar()  # unneeded at that size, least of all as a run's first line
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
