"""Bucket handles: let a process read bytes of another one on the same machine in place.

On a GPU a handle is CUDA's (IPC), with which the other process maps the same memory; both must see
that GPU and use the same version of torch. Torch counts the mappings, and wraps the memory once
more each time that it is shared: so a bucket is shared once and mapped once, for the duration of a
push. On a CPU it is a descriptor of unnamed shared memory, which exists as long as its owner: a
killed process leaves nothing behind, and a container's /dev/shm may be small. Handles are JSON,
never pickle.
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
"""Positions of a CUDA handle's parts in torch's pickled form of a tensor."""


class Lender:
    """Lends buckets of bytes, one at a time; used by the owner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._descriptor = -1
        self._close: Callable[[], object] = lambda: None
        self._shared: dict[str, Any] = {}
        """The handle of a GPU's bucket, once it exists."""

    @property
    def on_gpu(self) -> bool:
        """True if the lent memory is on the GPU; it is allocated again for each push, since memory
        is scarce between pushes.
        """
        return self._device.type == "cuda"

    def new_bytes(self, size: int) -> Tensor:
        """Allocate memory that can be lent, in place of the last allocation."""
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
        """Return the handle, as JSON, with which borrowers read the first bytes of `new_bytes`,
        which are written.
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
        """Release the lent memory."""
        self._close()
        self._shared = {}


@contextmanager
def _segments_as_lent() -> Iterator[None]:
    """Allocate in segments that can be lent: CUDA lends memory of expandable segments only if the
    kernel lets processes take each other's descriptors, and torch requests others by this very
    call.
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
    """Copies lent buckets one after the other; used by the other side, for one push."""

    def __init__(self) -> None:
        self._bucket: Mapping[str, Any] = {}
        """The handle of the mapped memory, without the number of written bytes. The next bucket may
        be in the same segment, so that `memory` alone does not distinguish them."""
        self._mapped: Tensor | None = None
        """The owner's whole bucket on a GPU."""

    def copy(self, handle: Mapping[str, Any]) -> Tensor:
        """Return the lent bytes, on their device; the owner may then overwrite them."""
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
        """Unmap everything, so that the owner may free it."""
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
    """Return the whole bucket, through CUDA; the device is replaced by this process's own
    number.
    """
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
