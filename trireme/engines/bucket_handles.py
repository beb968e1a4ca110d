"""Bucket handles: bytes of one process that another process of the same machine reads in place.

On a GPU a handle is CUDA's (IPC), by which the other process maps the same memory; both need it
among the GPUs that they see, and torch of one version. On a CPU it is a descriptor of shared memory
without a name, which lives as long as its owner: nothing is left behind by a process that is
killed, and a container's /dev/shm may be small. Handles are JSON, never pickle.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_NUMBERS = {"offset": 3, "size": 8, "begin": 9, "counter": 12, "waits": 14}
_BYTES = {"memory": 7, "counters": 11, "event": 13}
"""Where torch has the parts of a CUDA handle, in what it would pickle of a tensor."""


class Lender:
    """Lends buckets of bytes, one at a time: the owner's side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._descriptor = -1
        self._close: Callable[[], object] = lambda: None

    @property
    def lends_all(self) -> bool:
        """Whether any tensor of the device can be lent; else those of `new_bytes` alone."""
        return self._device.type == "cuda"

    def new_bytes(self, size: int) -> Tensor:
        """Memory that can be lent, in place of what this made before."""
        if self.lends_all:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        self.abort()
        self._descriptor = os.memfd_create("trireme-bucket")
        self._close = weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)
        path = f"/proc/self/fd/{self._descriptor}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def handle(self, flat: Tensor) -> dict[str, Any]:
        """Of bytes that are written: what `borrow` needs, as JSON."""
        if not self.lends_all:
            size = flat.numel()
            return {"process": os.getpid(), "descriptor": self._descriptor, "size": size}
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()
        parts: Any = reduce_tensor(flat)[1]
        found = {name: int(parts[at]) for name, at in _NUMBERS.items()}
        found |= {name: parts[at].hex() for name, at in _BYTES.items()}
        return found | {"numbers": flat.numel()}

    def abort(self) -> None:
        """Let go of what was lent."""
        self._close()


def borrow(handle: Mapping[str, Any]) -> Tensor:
    """A copy of the lent bytes, on their device; the owner may write over them after this."""
    if "descriptor" in handle:
        process, descriptor, size = (
            int(handle[name]) for name in ("process", "descriptor", "size")
        )
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            if os.stat(path).st_size < size:
                raise OSError(f"it has fewer than {size} bytes")
            return torch.from_file(path, shared=True, size=size, dtype=torch.uint8).clone()
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"the trainer's shared memory cannot be read: {error}") from error
    return _borrow_of_gpu(handle)


def _borrow_of_gpu(handle: Mapping[str, Any]) -> Tensor:
    """Through CUDA; this process's own number stands for the device."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    numbers = {name: int(handle[name]) for name in (*_NUMBERS, "numbers")}
    memory, counters, event = (bytes.fromhex(handle[name]) for name in _BYTES)
    device = torch.cuda.current_device()
    lent = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([numbers["numbers"]]),
        (1,),
        numbers["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        memory,
        numbers["size"],
        numbers["begin"],
        False,
        counters,
        numbers["counter"],
        event,
        bool(numbers["waits"]),
    )
    copy = lent.clone()
    torch.cuda.current_stream(device).synchronize()
    return copy
