"""Packed training against transformers' own forward pass, one row after the other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.samples import gap
from trireme.batch import Batch
from trireme.engines.sampling import log_probabilities
from trireme.trainer.model import checkpoint_activations, load_model, token_logprobs


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    """The gradients of a weighted sum, with the numbers themselves."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    (logprobs * weights).sum().backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return named | {"logprobs": logprobs.detach()}


def packed_gap(
    folder: Path,
    batch: Batch,
    *,
    share: bool = True,
    needed: str = "",
    again: bool = False,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The largest difference of packed training: log-probabilities, and gradients relative to the
    largest of their tensor; among these is one whose name ends with `needed`. `again`: activations
    are computed again in the backward pass.
    """
    experts: Any = {"experts_implementation": "eager"}
    own = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype, **experts
    )
    parts = []
    for row, ids in enumerate(batch.tokens):
        logits = own(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        at = batch.positions[batch.sample_ids == row] - 1
        scores = logits[at] / batch.temperatures[batch.sample_ids == row, None]
        targets = batch.targets[batch.sample_ids == row, None]
        parts.append(log_probabilities(scores).gather(1, targets)[:, 0])
    expected = gradients(own, torch.cat(parts))
    model = load_model(folder, device="cpu", dtype=dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    if again:
        checkpoint_activations(model.train())
    got = gradients(model, token_logprobs(model, batch, share_prefix=share)[0])
    assert any(name.endswith(needed) for name in got)
    difference = float((got.pop("logprobs") - expected.pop("logprobs")).abs().max())
    return max(difference, gap(got, expected))


class _Wide:
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(folder: Path) -> Iterator[None]:
    """Let transformers' code of a model compute in float64 where it casts to float32 whatever the
    model's dtype.
    """
    config = AutoConfig.from_pretrained(folder)
    name = type(config).__module__.replace("configuration", "modeling")
    plain, softmax = Tensor.float, torch.nn.functional.softmax

    def wide(self: Tensor) -> Tensor:
        inside = "transformers" in sys._getframe(1).f_code.co_filename
        return self.double() if inside else plain(self)

    def wide_softmax(x: Tensor, dim: int, dtype: Any = None, **_: Any) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.float64)

    with (
        patch.object(importlib.import_module(name), "torch", _Wide()),
        patch.object(Tensor, "float", wide),
        patch.object(torch.nn.functional, "softmax", wide_softmax),
    ):
        yield
