"""Bucket handles: bytes of one process that another process of the same machine reads in place.

On a GPU a handle is CUDA's (IPC), by which the other process maps the same memory; both need it
among the GPUs that they see, and torch of one version. Torch counts who has it mapped, and wraps
the memory once more each time that it is shared: so a bucket is shared once and mapped once, for as
long as a push takes. On a CPU it is a descriptor of shared memory without a name, which lives as
long as its owner: nothing is left behind by a process that is killed, and a container's /dev/shm
may be small. Handles are JSON, never pickle.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trireme.engines.device import EXPANDS, FIXED, allocator_options, set_allocator_options

_NUMBERS = {"offset": 3, "size": 8, "begin": 9, "counter": 12, "waits": 14}
_BYTES = {"memory": 7, "counters": 11, "event": 13}
"""Positions of a CUDA handle's parts in what torch would pickle of a tensor."""


class Lender:
    """Lends buckets of bytes, one at a time: the owner's side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._descriptor = -1
        self._close: Callable[[], object] = lambda: None
        self._shared: dict[str, Any] = {}
        """The handle of a GPU's bucket, once it is made."""

    @property
    def on_gpu(self) -> bool:
        """True if the lent memory is on the GPU; it is allocated again for each push, since memory
        is scarce between pushes.
        """
        return self._device.type == "cuda"

    def new_bytes(self, size: int) -> Tensor:
        """Memory that can be lent, in place of what this made before."""
        self.abort()
        if self.on_gpu:
            with _segments_as_lent():
                return torch.empty(size, dtype=torch.uint8, device=self._device)
        self._descriptor = os.memfd_create("trireme-bucket")
        self._close = weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)
        path = f"/proc/self/fd/{self._descriptor}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def handle(self, flat: Tensor) -> dict[str, Any]:
        """Return what borrowers need, as JSON, to read the first bytes of `new_bytes`, which are
        written.
        """
        if not self.on_gpu:
            size = flat.numel()
            return {"process": os.getpid(), "descriptor": self._descriptor, "size": size}
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()
        if not self._shared:
            parts: Any = reduce_tensor(flat)[1]
            self._shared = {name: int(parts[at]) for name, at in _NUMBERS.items()}
            self._shared |= {name: parts[at].hex() for name, at in _BYTES.items()}
        return self._shared | {"numbers": flat.numel()}

    def abort(self) -> None:
        """Let go of what was lent."""
        self._close()
        self._shared = {}


@contextmanager
def _segments_as_lent() -> Iterator[None]:
    """CUDA lends memory of segments that expand only where the kernel lets processes take each
    other's descriptors, and torch asks for others by this very call.
    """
    options = allocator_options()
    if EXPANDS not in options:
        yield
        return
    set_allocator_options(options.replace(EXPANDS, FIXED))
    try:
        yield
    finally:
        set_allocator_options(options)


class Borrower:
    """Copies what is lent, a bucket after the other: the other side, for one push."""

    def __init__(self) -> None:
        self._bucket: Mapping[str, Any] = {}
        """The handle of what is mapped, without how much of it is written. The next bucket may lie
        in the same segment, so that `memory` alone does not tell one from another.
        """
        self._mapped: Tensor | None = None
        """All of the owner's bucket on a GPU."""

    def copy(self, handle: Mapping[str, Any]) -> Tensor:
        """The lent bytes, on their device; the owner may write over them after this."""
        if "descriptor" in handle:
            return _copy_of_shared(handle)
        bucket = {name: part for name, part in handle.items() if name != "numbers"}
        if self._mapped is None or self._bucket != bucket:
            self.close()
            self._mapped, self._bucket = _mapped(handle), bucket
        copy = self._mapped[: int(handle["numbers"])].clone()
        torch.cuda.current_stream(copy.device).synchronize()
        return copy

    def close(self) -> None:
        """Map nothing any more: the owner may free it."""
        self._mapped = None


def _copy_of_shared(handle: Mapping[str, Any]) -> Tensor:
    process, descriptor, size = (int(handle[name]) for name in ("process", "descriptor", "size"))
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if os.stat(path).st_size < size:
            raise OSError(f"it has fewer than {size} bytes")
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8).clone()
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"the trainer's shared memory cannot be read: {error}") from error


def _mapped(handle: Mapping[str, Any]) -> Tensor:
    """The whole bucket, through CUDA; this process's own number stands for the device."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    numbers = {name: int(handle[name]) for name in _NUMBERS}
    memory, counters, event = (bytes.fromhex(handle[name]) for name in _BYTES)
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([numbers["size"]]),
        (1,),
        numbers["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        torch.cuda.current_device(),
        memory,
        numbers["size"],
        numbers["begin"],
        False,
        counters,
        numbers["counter"],
        event,
        bool(numbers["waits"]),
    )
