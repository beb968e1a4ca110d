"""Empty: a model without its weights, of which each rank reads its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from trireme.checkpoint.saved import ExpertRows, FileRows, assign
from trireme.config.lookup import names_in, tensor_files
from trireme.engines.torch.composite import auto_class
from trireme.engines.torch.linear import quicken
from trireme.engines.torch.recurrent import carry_states
from trireme.engines.torch.routing import carry_routing
from trireme.trainer import attention
from trireme.trainer.model import without_dropout


def empty_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    replays: bool = False,
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
    if replays:
        carry_routing(model)
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
