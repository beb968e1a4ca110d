"""Model section: the weights to start from, their lengths, and how they sample by default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trireme.config.schema.number import number


@dataclass(frozen=True)
class LoraConfig:
    """One low-rank adapter: only it is trained, and the base weights stay."""

    name: str | None = None
    """Name of the adapter."""
    path: str | None = None
    """An adapter to go on from; not given: a fresh one."""
    base_model_name: str | None = None
    """Name of the model it belongs to, written into its configuration."""
    lora_rank: int = number(32, at_least=1)
    """Rank of the update."""
    lora_alpha: int = number(32, at_least=1)
    """The update is scaled by alpha / rank."""
    lora_dtype: str = "auto"
    """Number format of the adapter; auto: the trainer's."""
    target_modules: str | list[str] = "all-linear"
    """Which linear layers get one: all-linear, or names."""
    exclude_modules: str | list[str] | None = None
    """Which of these get none: names, or a regular expression of whole names."""


@dataclass(frozen=True)
class ModelConfig:
    """What is trained and what it may read and write."""

    model_path: str = ""
    """A folder in the Hugging Face layout, or an id on the hub."""
    critic_model_path: str | None = None
    """Start of the value model; not given: `model_path`."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""
    custom_chat_template: str | None = None
    """A Jinja chat template to use in place of the model's."""
    chat_template_path: str | None = None
    """A file with such a template; `custom_chat_template` goes before it."""
    temperature: float = number(1.0, at_least=0, at_most=100)
    """Default of every taskset's `rollout_args.temperature`; 0 is greedy."""
    top_p: float = number(1.0, above=0, at_most=1)
    """Default of every taskset's `rollout_args.top_p`."""
    top_k: int = number(-1, at_least=-1)
    """Default of every taskset's `rollout_args.top_k`; -1 is off."""
    logprobs: int = number(0, at_least=0, at_most=64)
    """How many likeliest alternatives are reported beside each sampled token."""
    max_model_len: int | None = number(None, at_least=2)
    """Longest sequence, prompt and response together."""
    max_prompt_tokens: int | None = number(None, at_least=1)
    """Longest prompt; not given: what the response leaves of `max_model_len`."""
    max_response_tokens: int | None = number(None, at_least=1)
    """Longest response; not given: what the prompt leaves of `max_model_len`."""
    min_response_tokens: int = number(0, at_least=0)
    """No reply ends before this many tokens."""
    enable_prompt_truncation: bool = True
    """Cut prompts that are too long (they are not trained) instead of failing their rollouts."""
    repetition_penalty: float = number(1.0, at_least=0.01, at_most=100)
    """Divides the logits of tokens that were seen before."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it."""
    lora_configs: list[LoraConfig] | None = None
    """At most one adapter."""
    rope_scaling: dict[str, Any] | None = None
    """Replaces the model's own rotary scaling."""
    rope_theta: float | None = number(None, above=0)
    """Replaces the model's own rotary base."""
    tinker: dict[str, Any] = field(default_factory=dict)
    """Options of the Tinker service."""
    external_model: dict[str, Any] = field(default_factory=dict)
    """A model behind someone else's API, for `bench`."""
