"""Model: computes log-probabilities of a packed micro-batch with a Hugging Face causal language
model.

The base model runs on the flat tokens; logits are made only where an entry needs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from trireme.batch import Batch, of_tokens
from trireme.checkpoint.saved import ExpertRows, FileRows, assign
from trireme.config.lookup import names_in, tensor_files
from trireme.engines.sampling import log_probabilities
from trireme.engines.torch.composite import auto_class, load_whole, text_model
from trireme.engines.torch.linear import quicken
from trireme.engines.torch.recurrent import carry_states
from trireme.engines.torch.specimen import make_specimen
from trireme.trainer import attention, ulysses
from trireme.trainer.head import score_entries
from trireme.trainer.pack import PackedBatch, pack_for
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
) -> PreTrainedModel:
    """Load a folder's model with packed attention; ValueError if its architecture cannot have
    it, or tensors are missing.
    """
    attention.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    prove_architecture(path, device=device, trust_remote_code=trust_remote_code)
    model = load_whole(
        path, config, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    model.eval()
    quicken(model)
    model.set_attn_implementation(attention.NAME)
    carry_states(model)
    without_dropout(model)
    return model


def empty_model(
    path: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel | None:
    """Make a folder's model with packed attention, without its weights: see `fill_rows`.

    They are in float32 without a device; with a `dtype`, in that dtype and on the CPU, so that an
    adapter can be added. None if its files name tensors in a way that `names_in` does not know:
    loading a whole model converts them. `prove_architecture` checks whether it supports packed
    attention.
    """
    from accelerate import init_empty_weights  # slow to import, and needed only by ranks

    attention.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    files = tensor_files(path)
    held = ((names_in(files, name), parameter) for name, parameter in model.named_parameters())
    if set(model.state_dict()) != names or not all(
        where in files if isinstance(where, str) else len(where) == len(parameter)
        for where, parameter in held
    ):
        return None
    if dtype is not None:  # all numbers of a weight are one and the same
        replace_weights(model, lambda w: torch.zeros((), dtype=dtype).expand(w.shape))
    model.set_attn_implementation(attention.NAME)
    quicken(model)
    carry_states(model)
    without_dropout(model)
    return model.eval()


def replace_weights(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace each weight by the result of `make`; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in made:
                made[weight] = nn.Parameter(make(weight), weight.requires_grad)
            module.register_parameter(name, made[weight])


def is_empty(weight: Tensor) -> bool:
    """True for a weight of an `empty_model`."""
    return weight.is_meta or weight.untyped_storage().nbytes() < weight.nbytes


def drop_numbers(model: nn.Module) -> bool:
    """Take the weights of an `empty_model` off their device; False if the model has none such."""
    if not any(map(is_empty, model.parameters())):
        return False

    def off_device(weight: Tensor) -> Tensor:  # an adapter has numbers and exists already
        return weight.new_empty(weight.shape, device="meta") if is_empty(weight) else weight

    replace_weights(model, off_device)
    return True


@torch.no_grad()
def fill_rows(named: Mapping[str, Tensor], path: str | Path) -> None:
    """Read the rows of each weight that this rank has; tensors that the folder lacks stay."""
    files = tensor_files(path)
    for name, parameter in named.items():
        held = names_in(files, name)
        if not isinstance(held, str):
            assign(parameter, ExpertRows(files, held))
        elif held in files:  # opened each time: this releases the pages that were read
            with safe_open(files[held], framework="pt") as file:
                assign(parameter, FileRows(file, held))


def prove_architecture(
    path: str | Path, *, device: str = "cpu", trust_remote_code: bool = False
) -> None:
    """Raise ValueError unless a folder's architecture gives the same log-probabilities with packed
    attention, on a specimen of it.
    """
    attention.register()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    model = make_specimen(config, trust_remote_code=trust_remote_code)
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
    prove_packed(model)


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
