"""Shape: the sizes of a decoder, read from its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config.lookup import WITH_STATE, has_states, is_tied, located, model_config

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""The keys for a layer's number of experts."""
_MIXTURES = {"qwen3_moe": "moe_intermediate_size", "mixtral": "intermediate_size"}
"""The model types whose every layer has experts and nothing besides them, and their keys for the
width of an expert."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    """The width of the MLP; in a mixture that of an expert."""
    query_width: int
    """Heads times their width."""
    key_width: int
    vocabulary: int
    tied: bool
    biased: bool
    """Whether query, key and value have a bias."""
    normed: int = 0
    """The width of a head's query and key norms."""
    experts: int = 0
    """Experts of a layer; 0: it is dense."""
    chosen: int = 0
    """Experts that compute a token."""
    stateful: int = 0
    """Layers with a state."""
    attending: int | None = None
    """Layers with keys and values; None: all."""
    state: int = 0
    """The numbers in the state of a sequence in one layer."""
    keeps: float = 1.0
    """What a layer with a state stores for its backward pass, relative to one of attention."""

    @property
    def linear(self) -> int:
        """Return the weights of a layer that an adapter may be on: in a mixture those of
        attention.
        """
        attention = 2 * self.query_width + 2 * self.key_width
        return self.hidden * (attention + 3 * self.intermediate * (not self.experts))

    def adapter(self, rank: int) -> int:
        """Return the numbers of an adapter of this rank on all layers that may have one."""
        attention = 4 * self.hidden + 2 * self.query_width + 2 * self.key_width
        mlp = 3 * (self.hidden + self.intermediate) * (not self.experts)
        return self.layers * rank * (attention + mlp)

    @property
    def of_experts(self) -> int:
        """Return the weights of a layer's experts."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def block(self) -> int:
        """Return the weights of a layer."""
        bias = (self.query_width + 2 * self.key_width) * self.biased
        mixture = self.of_experts + self.hidden * self.experts  # plus the router of the experts
        return self.linear + mixture + bias + 2 * self.hidden + 2 * self.normed

    @property
    def root(self) -> int:
        """Return the weights outside of the layers: embedding, head, last norm."""
        return self.vocabulary * self.hidden * (2 - self.tied) + self.hidden

    @property
    def weights(self) -> int:
        """Return the weights of the whole model."""
        return self.layers * self.block + self.root

    @property
    def kept(self) -> int:
        """Return the numbers per token that a layer stores for its backward pass."""
        attention = 6 * self.hidden + 3 * self.query_width + 2 * self.key_width
        return attention + 4 * self.intermediate * (not self.experts) + self.kept_by_experts

    @property
    def kept_by_states(self) -> float:
        """Return the numbers per token that a layer with a state stores besides `kept`."""
        return self.kept * (self.keeps - 1)

    @property
    def kept_by_experts(self) -> int:
        """Return the experts' part of them, including the inputs and outputs of each."""
        return self.chosen * (2 * self.hidden + 4 * self.intermediate)


_OF_STATES = (
    (("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), 2.5),
    (("linear_num_heads", "linear_head_dim", "linear_head_dim"), 2.5),
    (("mamba_n_heads", "mamba_d_head", "mamba_d_state"), 4.0),
    (("mamba_num_heads", "mamba_head_dim", "ssm_state_size"), 4.0),
    (("hidden_size", "conv_L_cache"), 1.5),
    (("num_attention_heads", "head_dim", "head_dim"), 2.5),
)
"""The keys whose product is the size of a state, for the first that a configuration has; and
`ModelShape.keeps`: measured with transformers' own code for a CPU, at a width of 512."""


def _states_of(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a shape about layers with a state; None if their size is unknown."""
    if not has_states(facts.get):
        return {}
    kinds = facts.get("layer_types") or ["hybrid"] * facts["num_hidden_layers"]
    sized = (both for both in _OF_STATES if all(facts.get(key) for key in both[0]))
    keys, keeps = next(sized, ((), 0.0))
    if not keys:
        return None
    return {
        "stateful": sum(kind in WITH_STATE for kind in kinds),
        "attending": sum(
            ("attention" in k and k not in WITH_STATE) or k == "hybrid" for k in kinds
        ),
        "state": math.prod(facts[key] for key in keys),
        "keeps": keeps,
    }


def shape_of(facts: Mapping[str, Any], folder: Path | None = None) -> ModelShape | None:
    """Read the shape from config.json's facts; None if the type of decoder is unknown.

    `folder` has the weights, which show whether there is a separate head if the configuration does
    not.
    """
    facts = {**facts, **(facts.get("text_config") or {})}
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    kind = facts.get("model_type")
    experts = experts_of(facts)
    if experts:
        sparse = facts.get("decoder_sparse_step", 1) == 1 and not facts.get("mlp_only_layers")
        if kind not in _MIXTURES or not sparse:
            return None
        sizes = (*sizes[:2], _MIXTURES[kind], sizes[3])
    heads, chosen = facts.get("num_attention_heads"), facts.get("num_experts_per_tok")
    if not all(isinstance(facts.get(name), int) for name in (*sizes, "num_attention_heads")) or (
        experts and not isinstance(chosen, int)
    ):
        return None
    assert isinstance(heads, int)
    if (of_states := _states_of(facts)) is None:
        return None
    width = facts.get("head_dim") or facts["hidden_size"] // heads
    return ModelShape(
        *(facts[name] for name in sizes[:3]),
        query_width=heads * width,
        key_width=(facts.get("num_key_value_heads") or heads) * width,
        vocabulary=facts["vocab_size"],
        tied=is_tied(facts, folder),
        biased=bool(facts.get("attention_bias", kind == "qwen2")),
        normed=width if kind in ("qwen3", "qwen3_moe") else 0,
        experts=experts,
        chosen=chosen if experts and isinstance(chosen, int) else 0,
        **of_states,
    )


def experts_of(facts: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer by config.json; 0: none."""
    facts = {**facts, **(facts.get("text_config") or {})}
    return next((count for name in _EXPERTS if (count := facts.get(name))), 0)


def shape_at(path: str | None) -> ModelShape | None:
    """Return the shape of the model at a path; None if it is not on this machine, or no known
    decoder.
    """
    facts = model_config(path)
    return shape_of(facts, located(path, "models")) if path and facts else None
