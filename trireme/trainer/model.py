"""Model: computes log-probabilities of a packed micro-batch with a Hugging Face causal language
model.

The base model runs on the flat tokens; logits are made only where an entry needs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from trireme.batch import Batch, of_tokens
from trireme.engines.sampling import log_probabilities
from trireme.engines.torch.composite import load_whole, text_model
from trireme.engines.torch.linear import quicken
from trireme.engines.torch.recurrent import carry_states
from trireme.engines.torch.routing import carry_routing, is_routing
from trireme.engines.torch.specimen import make_specimen
from trireme.trainer import attention, ulysses
from trireme.trainer.head import score_entries
from trireme.trainer.pack import PackedBatch, pack_for
from trireme.trainer.passes import hasten
from trireme.trainer.ranks import SequenceGroup

logger = logging.getLogger(__name__)

_PROOF = [
    [7, 2, 3, 5, 1, 4, 6, 2, 3],
    [7, 2, 3, 5, 1, 4, 6, 2, 3],
    [7, 2, 3, 5, 6, 3, 3, 4, 1],
    [7, 2, 4, 4, 5, 1, 2, 3, 6],
]
"""Rows that branch after two tokens, and two tokens later again: fewer than a convolution sees."""
_AGREEMENT = 1e-3  # largest difference from the model's own forward pass, nats, float32


def load_model(
    path: str | Path,
    *,
    device: str,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    replays: bool = False,
) -> PreTrainedModel:
    """Load a folder's model with packed attention; ValueError if its architecture cannot have
    it, or tensors are missing. `replays`: its routers take recorded experts.
    """
    attention.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    prove_architecture(path, device=device, trust_remote_code=trust_remote_code, replays=replays)
    model = load_whole(
        path, config, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    model.eval()
    quicken(model)
    model.set_attn_implementation(attention.NAME)
    carry_states(model)
    without_dropout(model)
    if replays:
        carry_routing(model)
    hasten(model)
    return model


def prove_architecture(
    path: str | Path,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    replays: bool = False,
) -> None:
    """Raise ValueError unless a folder's architecture gives the same log-probabilities with packed
    attention, on a specimen of it; with `replays`, unless its routers take recorded experts.
    """
    attention.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    model = make_specimen(config, trust_remote_code=trust_remote_code)
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    prove_packed(model)
    if replays:
        prove_replay(model)


def once(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict in which tied weights appear under their first name only; not copied."""
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(tensor.data_ptr(), name)
    return {name: named[name].detach() for name in first.values()}


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each block's activations in the backward pass instead of storing them."""
    # transformers 5 renames one to the other on its way to 6.
    older = model.gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", older)
    enable({"use_reentrant": False})


_RANDOM = ("dropout", "_pdrop", "layerdrop", "jitter_noise")  # endings of names of probabilities


def without_dropout(model: nn.Module) -> None:
    """Switch off the model's own dropout in training, so that a probability is the same in
    sampling, scoring and training.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and name.endswith(_RANDOM):
                setattr(module, name, 0.0)


def prove_packed(model: PreTrainedModel) -> None:
    """Switch to packed attention after comparing a small trie with the model's own forward pass.

    Raises ValueError if the two differ: an architecture with extras that are not computed here.
    """
    batch = of_tokens(_PROOF)
    name = model.config.model_type
    with torch.no_grad():
        expected = _own_logprobs(model, batch)
        try:
            model.set_attn_implementation(attention.NAME)
            carry_states(model)
            got, _ = token_logprobs(model, batch)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"model_type '{name}' does not take packed attention: {error}"
            ) from error
    worst = float((got.cpu() - expected).abs().max())
    if not worst < _AGREEMENT:
        raise ValueError(
            f"model_type '{name}': packed attention gives log-probabilities that differ by "
            f"{worst:.3g} from the model's own (at most {_AGREEMENT:g} allowed): the torch trainer "
            f"cannot train it"
        )


@torch.no_grad()
def prove_replay(model: PreTrainedModel) -> None:
    """Raise ValueError unless the routers of a model with packed attention give the experts that
    are recorded.
    """
    shape = carry_routing(model)
    tokens, device = _PROOF[0], next(model.parameters()).device
    draws = torch.rand(
        len(tokens),
        shape.layers,
        shape.experts,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
    )
    recorded = draws.argsort(-1)[..., : shape.chosen].to(shape.dtype)
    recorded[1] = torch.iinfo(shape.dtype).max  # a token without a record
    batch = replace(of_tokens([tokens]), routed_experts=(recorded.numpy(),))
    given: list[Tensor] = []
    for module in model.modules():
        if is_routing(module):
            module.register_forward_hook(lambda _, inputs, out: given.append(out[-1]))
    hidden_states(model, pack_for(model, device, batch))
    known = [n for n in range(len(tokens) - 1) if n != 1]
    agree = [
        torch.equal(chosen[known].cpu(), recorded[known, layer].to(chosen.dtype))
        for layer, chosen in enumerate(given)
    ]
    if len(agree) != shape.layers or not all(agree):
        raise ValueError(
            f"model_type '{model.config.model_type}' has routers that do not take recorded "
            "experts: algorithm.enable_router_replay cannot be true for it"
        )


def token_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    *,
    entropy: bool = False,
    share_prefix: bool = True,
    kernel: attention.Kernel = "sdpa",
    sequence: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log p(target | earlier) of each entry at its temperature [M], and the entropy there
    [1, M].

    Without gradients there is a second row after the entropy: the mean of p (H + log p) over the
    vocabulary. All are float32 at least, on the model's device, and equal on the ranks of a
    `sequence`.
    """
    device = next(model.parameters()).device
    targets, temperatures = batch.targets.to(device), batch.temperatures.to(device)

    def score(hidden: Tensor, at: Tensor, chosen: Tensor | slice) -> list[Tensor]:
        selected = targets[chosen], temperatures[chosen]
        logprobs, entropies = score_entries(model, hidden, at, *selected, entropy=entropy)
        return [logprobs] if entropies is None else [logprobs, *entropies]

    layout = pack_for(model, device, batch, share_prefix=share_prefix, kernel=kernel)
    scored = read_entries(model, layout, sequence, score)
    return scored[0], torch.stack(scored[1:]) if entropy else None


def read_entries(
    model: PreTrainedModel,
    layout: PackedBatch,
    sequence: SequenceGroup | None,
    compute: Callable[[Tensor, Tensor, Tensor | slice], list[Tensor]],
) -> list[Tensor]:
    """Return `compute`'s numbers of all entries [M], see `ulysses.sliced`; without a `sequence` it
    is called once, for all of them.
    """
    if sequence is not None:
        return ulysses.sliced(model, layout, sequence, compute)
    return compute(hidden_states(model, layout), layout.predecessors, slice(None))


def hidden_states(model: PreTrainedModel, layout: PackedBatch) -> Tensor:
    """Return the last hidden states [T, D] of the flat tokens."""
    out = text_model(model)(**layout.inputs(model), use_cache=False, packed=layout)
    return out.last_hidden_state[0]


def _own_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.stack([torch.from_numpy(row) for row in batch.tokens]).to(device)
    logprobs = log_probabilities(model(input_ids=ids, use_cache=False).logits.float()).cpu()
    return logprobs[batch.sample_ids, batch.positions - 1, batch.targets]
