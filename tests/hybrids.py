"""Tiny hybrids: models whose layers have a state beside or in place of attention, with random
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import make_tokenizer

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **_EXPERTS,
        "layer_types": _DELTA["layer_types"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
        "n_routed_experts": 4,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": _MIXED,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-9,
        "time_step_max": 0.1,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "lfm2": {**_CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "minimax": {
        "layer_types": _MIXED,
        "block_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Families with such layers, and what is theirs in a tiny model."""


@torch.no_grad()
def calm(model: torch.nn.Module) -> None:
    """Make states last for some tokens, as trained ones do."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-3, 0)
        elif name.endswith("dt_bias"):
            weight.uniform_(-2, 1)


def make_hybrid(folder: Path, family: str, *, seed: int = 0, **changed: Any) -> Path:
    """A folder that transformers loads, of four layers; `changed`: keys of its configuration."""
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(family, **sizes | HYBRIDS[family] | changed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    calm(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
