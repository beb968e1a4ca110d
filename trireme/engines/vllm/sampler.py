"""Sampler: vLLM's own, which also tells what the Engine contract asks of every token.

vLLM reports one number a token, raw or of the distribution drawn from; the contract has both, the
raw one at the temperature, and the weights' version. So each row of log-probabilities is
[sampled token, (-1 - version, the sampler's), likeliest, second likeliest, ...]. No token has a
negative id.

Written for the Sampler of vLLM 0.10 to 0.32 (vllm/v1/sample/sampler.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_outputs: Any = import_module("vllm.v1.outputs")
Sampler: Any = import_module("vllm.v1.sample.sampler").Sampler

GREEDY_BELOW = 1e-5
"""vLLM's: lower temperatures are greedy."""


class ContractSampler(Sampler):
    """Takes the place of a model runner's sampler."""

    def __init__(self) -> None:
        super().__init__("processed_logprobs")
        self.version = 0
        self.score_temperature = 1.0
        """Of prompts that are scored."""

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        """Sampled ids [B, 1] and rows of log-probabilities, see the module."""
        wanted = sampling_metadata.max_num_logprobs
        greedy = None
        heat = sampling_metadata.temperature  # None: all are greedy
        full = logits.float()
        if heat is not None:
            greedy = heat < GREEDY_BELOW
            full = full / torch.where(greedy, 1.0, heat)[:, None]
        full = full.log_softmax(-1)  # before what follows changes the logits in place
        bent = self.apply_logits_processors(
            logits.to(torch.float32), sampling_metadata, predict_bonus_token
        )
        sampled, drawn = self.sample(bent, sampling_metadata)
        at = sampled.long()[:, None]
        tensors = None
        if wanted:
            assert drawn is not None
            own = drawn.gather(-1, at)
            own = torch.zeros_like(own) if greedy is None else own.masked_fill(greedy[:, None], 0)
            best, likeliest = full.topk(wanted - 1, dim=-1)
            version = torch.full_like(at, -1 - self.version)
            tensors = _outputs.LogprobsTensors(
                torch.cat((at, version, likeliest), dim=1).to(torch.int32),
                torch.cat((full.gather(-1, at), own, best), dim=1),
                torch.zeros_like(at[:, 0]),
            )
        return _outputs.SamplerOutput(
            sampled_token_ids=at.to(torch.int32), logprobs_tensors=tensors
        )

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """log-softmax(logits / temperature) of prompts; and of greedy rows, which don't read it."""
        return (logits.float() / self.score_temperature).log_softmax(-1)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Of the prompt's own tokens [T] alone, without ranks."""
        at = token_ids[:, None]
        ranks = torch.zeros_like(token_ids)
        return _outputs.LogprobsTensors(at.to(torch.int32), logprobs.gather(-1, at), ranks)
