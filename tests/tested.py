"""What is tested of each family of models, beyond the plain ones: tests are parametrized by it, and
scripts/models_page.py writes it into docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterable

DELTA = ("qwen3_5_text", "qwen3_next", "olmo_hybrid")
MAMBA = ("granitemoehybrid", "nemotron_h", "falcon_h1", "bamba")
CONVOLUTIONS = ("lfm2", "lfm2_moe")
HYBRIDS = (*DELTA, "kimi_linear", *MAMBA, *CONVOLUTIONS, "minimax")
COMPOSITES = ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3")
SINKS = ("gpt_oss", "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash")

CHUNKS = ("llama4_text",)

KINDS: dict[str, tuple[str, ...]] = {
    "composites, trained on text": COMPOSITES,
    "attention sinks": SINKS,
    "chunked attention": CHUNKS,
    "gated delta rule": DELTA,
    "delta attention of Kimi": ("kimi_linear",),
    "Mamba 2": MAMBA,
    "short convolutions": CONVOLUTIONS,
    "lightning attention": ("minimax",),
}
ONE_OF_EACH = ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2", "minimax")
"""A family of each kind of layer with a state."""

TRAINER = "trainer: packed and shared is single, with gradients"
ENGINE = "embedded engine samples what transformers computes"
REPLAY = "router replay"
LORA, RANKS, RESUME, VLLM = "LoRA", "FSDP2, two ranks", "kill -9 and resume by bytes", "vLLM (CPU)"
DEMO = "learns the demo"
TESTED: dict[str, tuple[str, ...]] = {
    TRAINER: (*COMPOSITES, *SINKS, *CHUNKS, *HYBRIDS),
    ENGINE: (*COMPOSITES, *SINKS, *CHUNKS, *HYBRIDS),
    LORA: (*COMPOSITES, "gpt_oss", *ONE_OF_EACH),
    RANKS: ("gemma3", "qwen3_vl", "qwen3_5", "gpt_oss", "qwen3_5_text", "lfm2"),
    RESUME: ("gemma3", "qwen3_vl", "qwen3_5", "gpt_oss", "qwen3_5_text", "granitemoehybrid"),
    VLLM: ("idefics3", "lfm2", "granitemoehybrid"),
    DEMO: ("gpt_oss", "qwen3_5_text"),
    REPLAY: (
        *("gpt_oss", "flint", "granitemoe_swa", "mimo_v2_flash"),
        *("qwen3_next", "kimi_linear", "lfm2_moe", "minimax"),
    ),
}


def families(what: str, among: Iterable[str]) -> list[str]:
    """Those of some families of which it is tested."""
    return [family for family in among if family in TESTED[what]]
