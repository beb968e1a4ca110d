"""A device that is none: tensors on it are apart from the CPU's, as a GPU's are, and every time
that the CPU waits for one of them is counted.

The numbers lie in the CPU's memory. Torch calls the device `lazy`, whose backward passes need no
driver.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("lazy", 0)
_aten: Any = torch.ops.aten
_READS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default}
_SIZES = {_aten.nonzero.default, _aten.unique_dim.default, _aten._unique2.default}
"""What the CPU has to know the result of, be it how large it is."""


class OnGpu(Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held.detach()
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        """See Tensor, which knows no subclasses here."""
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **given: Any) -> Tensor:
        """See Tensor, which asks the device's own allocator for it."""
        return torch.tensor(data, dtype=given.get("dtype", self.dtype)).to(DEVICE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of FakeGpu")


class FakeGpu(TorchDispatchMode):
    """Computes for the device; `waits` counts by operator what the CPU waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._lifts = False

    def __enter__(self) -> FakeGpu:
        native: Any = torch._C
        self._lifts = native._only_lift_cpu_tensors()
        native._set_only_lift_cpu_tensors(True)  # or `torch.tensor` goes past every mode
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        native: Any = torch._C
        native._set_only_lift_cpu_tensors(self._lifts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func._can_decompose():  # in inference mode operators come whole
            with self:
                made = func.decompose(*args, **options)
            if made is not NotImplemented:
                return made
        given = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, OnGpu)]
        asked = options.get("device")
        to = torch.device(asked) if asked is not None else None
        if not there and (to is None or to.type != DEVICE.type):
            return func(*args, **options)
        if to is not None:
            options["device"] = torch.device("cpu")
        copies = func in (_aten.copy_.default, _aten._to_copy.default)
        if there and not copies:
            self._refuse_mixed(func, given)
        stays = there and (to is None or to.type == DEVICE.type)
        if func is _aten.copy_.default:
            stays = isinstance(args[0], OnGpu)
        masked = func is _aten.index.Tensor and any(x.dtype == torch.bool for x in there)
        if func in _READS | _SIZES or masked or (there and not stays):
            self.waits[str(func).removeprefix("aten.").partition(".")[0]] += 1
        plain_args, plain = tree_map_only(OnGpu, lambda x: x.held, (args, options))
        out = func(*plain_args, **plain)
        if not stays and there:
            return args[0] if func is _aten.copy_.default else out
        wrapped = tree_map_only(Tensor, OnGpu, out)
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped) if there else wrapped

    @staticmethod
    def _refuse_mixed(func: Any, given: list[Tensor]) -> None:
        """As CUDA does: of the CPU's tensors single numbers alone, and indices."""
        name = str(func)
        for x in given:
            if not isinstance(x, OnGpu) and x.dim() and "index" not in name:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device: {name} has one of the CPU, "
                    f"{list(x.shape)}"
                )


def put(module: nn.Module) -> None:
    """Every tensor of a module onto the device; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                there = nn.Parameter(OnGpu(parameter.data), parameter.requires_grad)
                each._parameters[name] = made.setdefault(id(parameter), there)
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, OnGpu):
                each._buffers[name] = OnGpu(buffer)
