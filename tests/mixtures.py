"""Tiny mixtures of experts: of several families, with four experts of which two compute a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.hybrids import HYBRIDS, make_hybrid
from tests.tiny import WITH_SINKS, make_model, make_tokenizer, make_with_sinks

_GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GLM |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_GLM, "head_dim": 8},
    "deepseek_v3": {**_GLM, **_MLA, "v_head_dim": 16, "num_key_value_heads": 4},
}


def make_mixture(folder: Path, family: str) -> Path:
    """A folder with a tiny mixture of three layers, whose routers differ clearly between tokens."""
    if family in ("qwen3_moe", "mixtral", "gpt_oss"):
        return make_model(folder, family, layers=3)
    if family in WITH_SINKS:
        return make_with_sinks(folder, family)
    if family in HYBRIDS:
        return make_hybrid(folder, family)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokenizer = make_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), **(sizes | special | OTHERS[family])
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):  # some are 0 in a new model
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def routers_of(model: torch.nn.Module) -> list[Any]:
    """The routers of a model that nobody has changed, layer by layer."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
