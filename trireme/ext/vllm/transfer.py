"""Transfer: implements vLLM's weight transfer with our weight group as transport.

Each worker makes one by the name that `weight_transfer_config` gives, and vLLM's calls drive it:
init, start, update, finish. vLLM's own transports need a GPU: its NCCL engine is written on CUDA's
communicators, and its IPC engine takes pickled handles. Ours supports gloo, NCCL, lent memory and
files. It is written for vLLM 0.32 (vllm/distributed/weight_transfer/base.py).

New weights may lack a composite's towers: vLLM leaves a layer that gets no weights as it is, and
the towers keep their fingerprints of the last push, at first those of the files.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trireme.config.lookup import names_in, weight_files
from trireme.engines.adapter import is_adapter
from trireme.engines.torch.composite import towers_in_files
from trireme.engines.weights import fingerprint
from trireme.ext.remote.weight_group import Meeting, WeightGroup
from trireme.ext.vllm.options import TRANSFER

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_factory: Any = import_module("vllm.distributed.weight_transfer.factory")
_reload: Any = import_module("vllm.model_executor.model_loader.reload")
# it warns of each layer that gets no weights; what must not be missing is an error of ours
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: "Failed to load weights" not in str(record.msg)
)


@dataclass
class Joining(_base.WeightTransferInitInfo):
    """A weight group to join."""

    meeting: dict[str, Any]
    """The meeting of the engine's first worker; each worker has its own rank."""
    leader: str
    """The leader of the group."""


@dataclass
class Arriving(_base.WeightTransferUpdateInfo):
    """The source of new weights: a group, or a file or folder of safetensors."""

    leader: str | None = None
    path: str | None = None


class GroupTransfer(_base.WeightTransferEngine):
    """A weight transfer engine of vLLM's that receives from a trainer's group or reads files."""

    init_info_cls, update_info_cls = Joining, Arriving
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.names: set[str] = set()
        """Those of the files that vLLM loaded: it knows its layers by them."""
        self.marks: dict[str, float] = {}
        """Fingerprints of the weights as of the last push, see engines/weights.py."""
        self._before: dict[str, float] = {}
        """Those as of the push before."""
        self._groups: dict[str, WeightGroup] = {}
        self._missing: set[str] = set()

    def init_transfer_engine(self, init_info: Joining) -> None:
        """Join a weight group."""
        parallel, meeting = self.parallel_config, init_info.meeting
        # data_parallel_rank is 0 in every replica of a dense model; the index tells them apart
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        place = replica * parallel.world_size + parallel.rank
        group = WeightGroup(Meeting(**meeting | {"rank": meeting["rank"] + place}))
        group.connect()
        self._groups[init_info.leader] = group

    def start_weight_update(self) -> None:
        """Let layers load their new weights as they arrive, each into the memory of its old
        ones.
        """
        self._before, self.marks, self._missing = self.marks, {}, set(self.names)
        _reload.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights from one source. vLLM's own method does not support a CPU: it waits
        for a GPU.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Arriving) -> None:
        """Overwrite the model's weights, tensor by tensor."""
        self.model.load_weights(self._noted(self.arriving(update_info, adapter=False)))

    def finish_weight_update(self) -> None:
        """Raises RuntimeError if weights are missing, except all of a composite's towers."""
        _reload.finalize_layerwise_reload(self.model, self.model_config)
        folder = Path(self.model_config.model)
        stay = towers_in_files(folder) if self._missing else {}
        if self._missing != set(stay.values()):
            first = min(self._missing)
            raise RuntimeError(f"the new weights lack {len(self._missing)} tensors, {first} first")
        if not stay.keys() <= self._before.keys():
            names = {held: name for name, held in stay.items()}
            for held, tensor in read(folder, names):
                self._before |= fingerprint({names[held]: tensor}, self._dtype)
        self.marks |= {name: self._before[name] for name in stay}

    def shutdown(self) -> None:
        """Leave the groups."""
        self._groups.clear()

    def arriving(self, update_info: Arriving, *, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the received tensors. Raises RuntimeError if they are an adapter and should not be,
        or the reverse.
        """
        if update_info.path is not None:
            tensors = read(Path(update_info.path))
        else:
            tensors = self._groups[str(update_info.leader)].receive()
        first = next(tensors, None)
        if adapter != bool(first and is_adapter([first[0]])):
            kinds = ("all weights", "a LoRA adapter")
            raise RuntimeError(
                f"this vLLM expects {kinds[adapter]}, and received a push of "
                f"{kinds[not adapter]} (explorer.rollout_model.enable_lora)"
            )
        return itertools.chain([first] if first else [], tensors)

    @property
    def _dtype(self) -> str:
        return str(self.model_config.dtype).removeprefix("torch.")

    def _noted(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors under their file names, and record fingerprints under
        their own.
        """
        for name, tensor in tensors:
            self.marks |= fingerprint({name: tensor}, self._dtype)
            for part, weight in _in_files(name, tensor, self.names):
                self._missing.discard(part)
                yield part, weight


def _in_files(name: str, tensor: Tensor, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight in the form of these file names: one for all experts becomes one per
    expert.
    """
    held = names_in(names, name)
    if isinstance(held, str):
        yield held, tensor
        return
    for parts, expert in zip(held, tensor, strict=True):
        yield from zip(parts, expert.chunk(len(parts)), strict=True)


def read(folder: Path, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder's safetensors files, or of one file; all, or those named."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 - it is no mapping
                if only is None or name in only:
                    yield name, held.get_tensor(name)


_factory.WeightTransferEngineFactory.register_engine(TRANSFER, GroupTransfer)
