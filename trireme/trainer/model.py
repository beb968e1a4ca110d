"""Model: log-probabilities of a packed micro-batch from a Hugging Face causal language model.

The base model runs on the flat tokens; logits are made only where an entry needs them, in chunks
that are computed again in the backward pass, so that no [M, V] tensor outlives its chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trireme.batch import Batch, of_tokens
from trireme.engines.torch.shell import refuse_recurrent
from trireme.trainer import attention
from trireme.trainer.pack import Layout, pack_on

logger = logging.getLogger(__name__)

# How much float32 logits may take at once, in numbers: 64 MiB.
_LOGIT_NUMBERS = 2**24
_AGREEMENT = 1e-3  # largest difference to the model's own forward pass, nats, float32


def load_model(
    path: str | Path, *, device: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a folder in float32 with packed attention; ValueError if it cannot have it."""
    attention.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    refuse_recurrent(config, "the torch trainer cannot train it")
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    model.to(torch.device(device)).eval()  # pyright: ignore[reportArgumentType]
    prove_packed(model)
    return model


def once(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which tied weights appear under their first name only; not copied."""
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(tensor.data_ptr(), name)
    return {name: named[name].detach() for name in first.values()}


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Compute each block's activations again in the backward pass instead of keeping them."""
    # transformers 5 renames the one to the other on its way to 6.
    older = model.gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", older)
    enable({"use_reentrant": False})


def prove_packed(model: PreTrainedModel) -> None:
    """Switch to packed attention, having compared a small trie with the model's own forward pass.

    Raises ValueError where the two differ: an architecture with extras that are not computed here.
    """
    batch = of_tokens([[7, 2, 3, 5], [7, 2, 3, 5], [7, 4, 3, 6]])
    name = model.config.model_type
    with torch.no_grad():
        expected = _own_logprobs(model, batch)
        try:
            model.set_attn_implementation(attention.NAME)
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


def token_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    *,
    entropy: bool = False,
    share_prefix: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Of each entry log p(target | earlier) at its temperature [M], and the entropy there [1, M].

    Without gradients there is a second row beside the entropy: the mean of p (H + log p) over the
    vocabulary. All are float32 at least, and on the model's device.
    """
    device = next(model.parameters()).device
    layout = pack_on(device, batch, share_prefix=share_prefix)
    hidden = hidden_states(model, layout)
    targets, temperatures = batch.targets.to(device), batch.temperatures.to(device)
    return score_entries(model, hidden, layout.predecessors, targets, temperatures, entropy=entropy)


def score_entries(
    model: PreTrainedModel,
    hidden: Tensor,
    predecessors: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `token_logprobs`; `predecessors` [M] are where the entries' tokens lie in `hidden`."""
    chunk = max(1, _LOGIT_NUMBERS // model.config.get_text_config().vocab_size)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(targets), chunk):
        at = slice(start, start + chunk)
        inputs = (model, hidden, predecessors[at], targets[at], temperatures[at], entropy)
        if len(targets) > chunk and torch.is_grad_enabled():
            parts.append(checkpoint(_score, *inputs, use_reentrant=False))
        else:
            parts.append(_score(*inputs))
    logprobs, entropies = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return logprobs, entropies if entropy else None


def hidden_states(model: PreTrainedModel, layout: Layout) -> Tensor:
    """Last hidden states [T, D] of the flat tokens."""
    out = model.base_model(
        input_ids=layout.tokens[None],
        position_ids=layout.positions[None],
        use_cache=False,
        packed=layout,
    )
    return out.last_hidden_state[0]


def _score(
    model: PreTrainedModel,
    hidden: Tensor,
    predecessors: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` gives of a chunk of entries; no entropy where it is not asked for.

    Entries that follow the same token at the same temperature (equal rollouts) share their logits.
    """
    nodes, node_of = predecessors.unique(return_inverse=True)
    at_node = torch.empty_like(nodes, dtype=torch.float32).index_copy_(0, node_of, temperatures)
    shared = bool((at_node[node_of] == temperatures).all())
    if not shared:
        nodes, node_of, at_node = predecessors, torch.arange(len(predecessors)), temperatures
        node_of = node_of.to(predecessors.device)
    logits = _logits(model, attention.select(hidden, nodes)) / at_node[:, None]
    log_sums = logits.logsumexp(-1)
    flat_index = node_of * logits.shape[1] + targets
    logprobs = logits.view(-1)[flat_index] - log_sums[node_of]
    if not entropy:
        return logprobs, logprobs.new_empty(0)
    p = logits.softmax(-1)
    entropies = log_sums - (p * logits).sum(-1)
    rows = [entropies]
    if not torch.is_grad_enabled():
        rows.append((p.square() * ((entropies - log_sums)[:, None] + logits)).sum(-1))
    return logprobs, torch.stack(rows)[:, node_of]


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Float32 logits [M, V], with the scale or soft cap that a few architectures put on them."""
    head = model.get_output_embeddings()
    assert head is not None
    logits = head(hidden)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    config = model.config
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


def _own_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The entries' log-probabilities by the model's own forward pass, a row per sample."""
    device = next(model.parameters()).device
    ids = torch.stack([torch.from_numpy(row) for row in batch.tokens]).to(device)
    logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1).cpu()
    return logprobs[batch.sample_ids, batch.positions - 1, batch.targets]
