"""Lengths: how many tokens prompt, response and both together may have."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.problem import Problem
from trireme.config.schema import ModelConfig


@dataclass(frozen=True)
class Lengths:
    """All four lengths, in tokens."""

    max_model_len: int
    max_prompt_tokens: int
    max_response_tokens: int
    min_response_tokens: int


def lengths_of(model: ModelConfig, problems: list[Problem]) -> Lengths:
    """What the user gave, and the rest of it: prompt and response share `max_model_len`."""
    total, prompt, response = (
        model.max_model_len,
        model.max_prompt_tokens,
        model.max_response_tokens,
    )
    if total is None:
        if prompt is None or response is None:
            problems.append(
                Problem(
                    "model.max_model_len",
                    "is not given: expected it, or both max_prompt_tokens and max_response_tokens",
                )
            )
            return Lengths(2, 1, 1, 0)
        total = prompt + response
    for name, part in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if part is not None and part >= total:
            problems.append(
                Problem.value(f"model.{name}", part, f"less than model.max_model_len ({total})")
            )
            return Lengths(total, total - 1, 1, 0)
    if prompt is not None and response is not None and prompt + response > total:
        text = f"and max_response_tokens ({response}) make {prompt + response} tokens: expected"
        problems.append(
            Problem(
                "model.max_prompt_tokens",
                f"({prompt}) {text} at most model.max_model_len ({total})",
            )
        )
    if prompt is None and response is None:
        prompt = total // 2
    if response is None:
        response = total - (prompt or 0)
    if prompt is None:
        prompt = total - response
    shortest = model.min_response_tokens
    return Lengths(
        total, prompt, response, shortest if shortest < response else max(response - 1, 0)
    )
