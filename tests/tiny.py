"""Tiny models for tests: random weights, a character-level tokenizer, a ChatML template, made
offline.
"""

from __future__ import annotations

import string
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


def loaded(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Return transformers' own model of a folder, read once for all replies that a test compares:
    nobody may change it.
    """
    changed = max(file.stat().st_mtime_ns for file in folder.glob("*.safetensors"))
    return _loaded(folder, auto, changed, **options)


@lru_cache(maxsize=2)
def _loaded(folder: Path, auto: Any, changed: int, **options: Any) -> Any:
    return auto.from_pretrained(folder, **options)


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, plus the special ones."""
    vocabulary = {t: i for i, t in enumerate([*SPECIAL, "\n", *string.printable[:95], "<unk>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def make_model(
    folder: Path,
    arch: str = "qwen3",
    *,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
    template: str | None = CHATML,
    max_len: int = 512,
    tie: bool = True,
    head_dim: int = 8,
) -> Path:
    """A folder that `from_pretrained` loads: `arch` is qwen3, qwen2, llama, or qwen3_moe, mixtral
    or gpt_oss, which have four experts and take two of them for a token. `head_dim`: theirs and
    qwen3's; vLLM has kernels for no less than 32 on a CPU. gpt_oss has attention sinks, and sees 8
    tokens in every other layer.
    """
    tokenizer = make_tokenizer(template)
    kinds: dict[str, Any] = {
        "qwen3": Qwen3Config,
        "qwen2": Qwen2Config,
        "llama": LlamaConfig,
        "qwen3_moe": Qwen3MoeConfig,
        "mixtral": MixtralConfig,
        "gpt_oss": GptOssConfig,
    }
    extra = {"head_dim": head_dim} if arch.startswith(("qwen3", "mixtral", "gpt_oss")) else {}
    if arch == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    if arch == "mixtral":
        extra |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    if arch == "gpt_oss":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        extra |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        extra |= {"rope_parameters": rope}
    config = kinds[arch](
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        tie_word_embeddings=tie,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **extra,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    _draw_sinks(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WITH_SINKS: dict[str, dict[str, Any]] = {
    "flint": _EXPERTS | {"num_experts": 4},
    "granite_swa": {},
    "granitemoe_swa": _EXPERTS | {"num_local_experts": 4},
    "mimo_v2_flash": _EXPERTS
    | {"n_routed_experts": 4, "v_head_dim": 4, "swa_v_head_dim": 4, "swa_head_dim": 8}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
}
"""Families with attention sinks besides gpt_oss, and what is tiny in them. mimo_v2_flash has sinks
in the layers with a window alone, more keys' heads there, and values narrower than keys."""


def make_with_sinks(folder: Path, kind: str) -> Path:
    """A folder with a tiny model of one of these families."""
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **WITH_SINKS[kind],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    _draw_sinks(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _draw_sinks(model: torch.nn.Module) -> None:
    """Sinks of all sizes: new ones are all near 0."""
    for name, weight in model.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.normal_(weight)


def make_reward_model(
    folder: Path,
    arch: str = "qwen2",
    *,
    template: str | None = CHATML,
    max_len: int = 512,
    pads: bool = True,
    labels: int = 1,
    seed: int = 0,
) -> Path:
    """A folder with a classifier of one label: `arch` is qwen2, qwen3, llama or bert; `pads`: its
    config names a padding token.
    """
    tokenizer = make_tokenizer(template)
    kinds = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "bert": BertConfig}
    config = kinds[arch](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_len,
        pad_token_id=tokenizer.pad_token_id if pads else None,
        eos_token_id=tokenizer.eos_token_id,
        num_labels=labels,
        initializer_range=0.2,  # with the usual 0.02 all scores would be nearly the same
        **({} if arch == "bert" else {"num_key_value_heads": 2}),
    )
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
