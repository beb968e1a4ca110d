"""Shard: spreads a model over the trainer's ranks with FSDP2, block by block.

Each transformer block is a group of its own, whose weights are whole only while it computes. What
lies outside the blocks (embedding, head, last norm; one tensor where they are tied) is the root
group. Functions of the model run inside the root's forward, where that group is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class Root(nn.Module):
    """`root(function, ...)` is `function(model, ...)` with the root group's weights whole."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """See the class."""
        return function(self.model, *args, **options)


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, half: bool, offload: bool) -> Root:
    """The model in shards, which replace its tensors in place.

    `half`: blocks compute in bfloat16; shards, gradients and their sums stay float32. `offload`:
    shards and optimizer lie in the memory of the CPU, which then makes the optimizer's step.
    """
    root = Root(model)
    policy: dict[str, Any] = {"mesh": mesh, "offload_policy": OffloadPolicy()}
    if half:
        policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in blocks(model):
        fully_shard(block, **policy)
    fully_shard(root, **policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the whole batch already: gradients add up over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, as transformers names them; else the longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    if named:
        return named
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered, a collective; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
