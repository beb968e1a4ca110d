"""Ranks: connects the processes that train one model: meeting point, FSDP2 shards, fair shares.

They meet at a small TCP store of rank 0; tensors travel through a torch.distributed group, and
messages are JSON and plain bytes, never pickle. FSDP2 spreads models over them block by block: a
transformer block's weights are whole only while it computes; the weights outside the blocks
(embedding, head, last norm; one tensor if they are tied) are the root group.

Invariants:
- all ranks run equally many micro-batches: one without its own computes a dummy that weighs 0;
- every sample with an entry goes to exactly one rank, a group to one if it fits into a share;
- results equal those of one process: summed over ranks, never averaged;
- an error on one rank is raised on all of them, between collectives.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.batch import Batch, of_tokens
from trireme.checkpoint.export import SharedFiles, Spec
from trireme.checkpoint.layout import rank_file
from trireme.checkpoint.save import write_pt
from trireme.checkpoint.saved import my_parts
from trireme.engines.rendezvous import choose_interface, open_store
from trireme.engines.torch.composite import text_model
from trireme.engines.torch.routing import routing_of
from trireme.engines.torch.vision import vision_of
from trireme.files import CannotWrite, naming
from trireme.trainer.pack import cut, packed_tokens, refuse_other_experts, refuse_unknown_ids


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite."""

    broken: Sequence[str] = ()
    """The names of weights that are, on any rank: no experience is to blame for these."""


_RAISED = {kind.__name__: kind for kind in (NotFinite, ValueError, CannotWrite)}


@dataclass(frozen=True)
class RankSpec:
    """The number of a process's rank, and the place where all of them meet. Plain values: it can be
    sent to other processes.
    """

    rank: int
    world: int
    address: str
    """host:port of rank 0."""
    sequence: int = 1
    """Ranks that share a sequence: `trainer.ulysses_sequence_parallel_size`."""
    shards: int = -1
    """Ranks that share the model: `trainer.fsdp_size`; -1: all."""
    device: str = "cpu"
    """cpu, cuda:N, or cuda: the process's current one, the only one that a launcher shows."""
    timeout: float = field(kw_only=True)
    """Seconds that a collective, or the meeting, may take: `trainer.collective_timeout`."""
    lost_after: float = field(kw_only=True)
    """Seconds after which a silent rank counts as dead: `cluster.heartbeat_timeout`."""

    def __post_init__(self) -> None:
        if self.world % self.sequence:
            raise ValueError(
                f"trainer.ulysses_sequence_parallel_size is {self.sequence}: expected a divisor of "
                f"the {self.world} ranks that train"
            )
        if self.shards != -1 and (self.shards < 1 or self.world % self.shards):
            raise ValueError(
                f"trainer.fsdp_size is {self.shards}: expected a divisor of the {self.world} ranks "
                "that train, or -1 for all"
            )


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share a sequence, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int


class Ranks:
    """A process's connection to all ranks; made by all of them at once."""

    def __init__(self, spec: RankSpec) -> None:
        """Waits for all, `spec.timeout` at most. Raises TimeoutError naming the missing ones."""
        self.spec = spec
        self.rank, self.world = spec.rank, spec.world
        self.device = torch.device(spec.device)
        if (
            self.device.type == "cuda" and self.device.index is None
        ):  # torch sets only numbered ones
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.store = connect(spec, serve=spec.rank == 0)
        self.store.set(f"here/{self.rank}", socket.gethostname())
        self._meet()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        choose_interface(spec.address.rpartition(":")[0])
        self._timeout = timedelta(seconds=spec.timeout)
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            timeout=self._timeout,
        )
        self.mesh: DeviceMesh = self._mesh()
        # Neighbours share a sequence: their traffic is the heaviest.
        self.sequence: SequenceGroup | None = None
        if spec.sequence > 1:
            group, _ = dist.new_subgroups(spec.sequence, timeout=self._timeout)
            assert isinstance(group, dist.ProcessGroup)
            self.sequence = SequenceGroup(group, self.sequence_rank, spec.sequence)

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of a batch."""
        return self.rank // self.spec.sequence

    @property
    def data_world(self) -> int:
        """The number of shares of a batch."""
        return self.world // self.spec.sequence

    @property
    def sequence_rank(self) -> int:
        """The index of this rank's slice of a sequence."""
        return self.rank % self.spec.sequence

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of each rank, on every rank. Collective."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = int(torch.cat(sizes).max())
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [
            json.loads(row[: int(size)].numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def broadcast(self, data: bytes | None, size: int) -> bytes:
        """Send rank 0's bytes to every rank; the others know their number already. Collective."""
        row = torch.empty(size, dtype=torch.uint8)
        if data is not None:
            row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(row, 0)
        return row.numpy().tobytes()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _mesh(self) -> DeviceMesh:
        """Return all ranks in a row; or one row of neighbours per copy of the model, under the
        names that FSDP2 needs and sharded checkpoints have.
        """
        shards = self.spec.shards
        if shards in (-1, self.world):
            return init_device_mesh(self.device.type, (self.world,))
        places = torch.arange(self.world).view(-1, shards)
        groups: list[dist.ProcessGroup] = []
        for members in (places.T, places):  # a mesh's own groups would have torch's time-out
            made, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=self._timeout)
            assert isinstance(made, dist.ProcessGroup)
            groups.append(made)
        names = "ddp", "fsdp"
        return DeviceMesh.from_group(groups, self.device.type, places, mesh_dim_names=names)

    def _meet(self) -> None:
        for rank in range(self.world):
            try:
                self.store.wait([f"here/{rank}"], timedelta(seconds=self.spec.timeout))
            except dist.DistStoreError as error:
                raise TimeoutError(
                    f"trainer rank {self.rank} waited {self.spec.timeout:g} s "
                    f"(trainer.collective_timeout) for rank {rank} of {self.world} to start"
                ) from error


def connect(spec: RankSpec, *, serve: bool = False) -> TCPStore:
    """Open a separate connection to the store of rank 0, which `serve`s it."""
    host, _, port = spec.address.rpartition(":")
    return open_store(host, int(port), serve=serve, timeout=spec.timeout)


def free_address(host: str = "127.0.0.1") -> str:
    """Return an address of this machine with a port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


class Root(nn.Module):
    """A module whose `root(function, ...)` is `function(model, ...)` with the root group's weights
    whole.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `function` with the model, whose root weights are whole meanwhile."""
        return function(self.model, *args, **options)


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, half: bool, offload: bool) -> Root:
    """Shard the model in place.

    `half`: blocks compute in bfloat16; shards, gradients and their sums stay float32. `offload`:
    shards and optimizer are in the CPU's memory, and the CPU makes the optimizer's step.
    """
    root = Root(model)
    policy: dict[str, Any] = {"mesh": mesh, "offload_policy": OffloadPolicy()}
    if half:
        # Inputs stay as they are: hidden states are in bfloat16 from the embedding on, while a cast
        # would round the batch's temperatures and copy every layout, without a named mask's shape.
        policy["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in blocks(model):
        fully_shard(block, **policy)
    fully_shard(root, **policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the whole batch already: gradients are summed over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


@torch.no_grad()
def materialize(root: Root, device: torch.device | str) -> None:
    """Allocate device memory for shards without numbers; all else is unchanged."""
    buffers = dict(root.named_buffers())
    weights = {n: w.detach().clone() for n, w in root.named_parameters() if not w.is_meta}
    root.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        root.get_submodule(owner)._buffers[leaf] = buffer
    for name, numbers in weights.items():
        root.get_parameter(name).copy_(numbers)


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks, as transformers names them; else the longest list of
    modules. Without those of a tower that sees: ranks look at different numbers of pictures, and a
    block that one rank calls alone would wait for the others.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    called = model if vision_of(model) is None else text_model(model)
    named = [module for module in called.modules() if type(module).__name__ in names]
    if named:
        return named
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, a collective; any other is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def my_part(tensor: Tensor) -> Tensor:
    """Return the local part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Team:
    """A rank's part in computing a batch together."""

    def __init__(
        self,
        ranks: Ranks | None,
        model: PreTrainedModel,
        *,
        max_token_len: int,
        share_prefix: bool,
    ) -> None:
        """`ranks` None: one process. `max_token_len` is the tokens that a rank computes at
        a time.
        """
        self.rank, self.size = (ranks.rank, ranks.world) if ranks else (0, 1)
        self._ranks = ranks
        self._max_token_len = max_token_len
        self._share_prefix = share_prefix
        self._vocabulary = model.config.get_text_config().vocab_size
        self._routing = routing_of(model)

    def parts(self, batch: Batch) -> list[Batch | None]:
        """Cut this rank's share into micro-batches, the largest first; None pads to the largest
        number on any rank. Raises ValueError on all of them for ids and experts that the model does
        not have.
        """
        refuse_unknown_ids(batch, self._vocabulary)  # each rank has the whole batch
        refuse_other_experts(batch, self._routing)
        if self._ranks is None:
            return list(cut(batch, self._max_token_len, share_prefix=self._share_prefix))
        shares = deal(batch, self._ranks.data_world, share_prefix=self._share_prefix)
        my_share = batch.select(shares[self._ranks.data_rank])
        limit = self._max_token_len * self._ranks.spec.sequence
        parts = list(cut(my_share, limit, share_prefix=self._share_prefix))
        parts.sort(key=lambda part: -packed_tokens(part, share_prefix=self._share_prefix))
        rounds = max(self.gather(len(parts)))
        return [*parts, *[None] * (rounds - len(parts))]

    def rounds(self, batch: Batch, root: Root) -> Iterator[Batch | None]:
        """Yield the `parts` for backward passes through `root`. Copies of the model add their
        gradients up after the last one alone: until then the shards of each do, and little travels
        between machines.
        """
        parts = self.parts(batch)
        for number, part in enumerate(parts, 1):
            if isinstance(root, FSDPModule):
                root.set_requires_all_reduce(number == len(parts))
            yield part

    def scores(
        self,
        batch: Batch,
        root: Root,
        compute: Callable[[Batch], Sequence[Tensor | None]],
        *,
        num: int = 1,
    ) -> Tensor:
        """Return the `num` numbers of each entry, [num, M], on every rank's CPU.

        `compute(part)` returns those of a micro-batch, in rows and blocks of rows [M of the part],
        through `root`.
        """
        out = torch.zeros(num, batch.num_tokens, dtype=torch.float32)
        numbered = batch.with_fields(entry=torch.arange(batch.num_tokens))
        for part in self.parts(numbered):
            got = compute(part or dummy())
            if part is not None and (self._ranks is None or self._ranks.sequence_rank == 0):
                rows = torch.vstack([values for values in got if values is not None])
                out[:, part.fields["entry"]] = rows.cpu()
        if isinstance(root, FSDPModule):
            # Without a backward pass its weights stay whole: they take memory, and a later forward
            # pass would compute with them though an optimizer step has changed the shards.
            root.reshard()
        if self._ranks is not None:
            dist.all_reduce(out)  # each entry is 0 on all ranks but one
        return out

    def gather(self, value: Any, *, every: bool = False) -> list[Any]:
        """Gather a JSON value of each rank that has its own share of the batch, or of
        `every` rank.
        """
        if self._ranks is None:
            return [value]
        return self._ranks.gather(value)[:: 1 if every else self._ranks.spec.sequence]

    def agree(self, error: Exception | None) -> None:
        """Raise any rank's error: the error itself there, a report of it on the others."""
        ranks = self._ranks
        reports = ranks.gather(error and [type(error).__name__, str(error)]) if ranks else []
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                kind, text = report
                if kind in _RAISED:
                    raise _RAISED[kind](text)
                raise RuntimeError(f"trainer rank {rank}: {kind}: {text}")

    def attempt(self, work: Callable[[], None]) -> None:
        """Run `work()`; an error of a disk or a file on one rank is raised on all."""
        error: Exception | None = None
        try:
            work()
        except (OSError, ValueError) as raised:
            error = raised
        self.agree(error)

    def write_own(self, folder: Path, state: dict[str, Any]) -> None:
        """Write this rank's files of a checkpoint; `state` is that of a backend or a critic."""
        extra = dict(state)
        write_pt(folder / rank_file("optim", self.size, self.rank), extra.pop("optimizer"))
        write_pt(folder / rank_file("extra_state", self.size, self.rank), extra)

    def write_whole(self, folder: Path, shards: Mapping[str, Tensor]) -> None:
        """Write the weights into one file, each rank its own rows. Collective."""
        specs = {name: Spec(tuple(shards[name].shape), torch.float32) for name in sorted(shards)}
        file = SharedFiles(folder, specs)

        def create() -> None:
            with naming(folder):
                folder.mkdir(parents=True, exist_ok=True)
            file.create()

        self.attempt(create if self.rank == 0 else lambda: None)
        self.attempt(lambda: file.write(my_parts(shards.items(), self.rank)))


def dummy() -> Batch:
    """Make a batch for a rank to compute while others have another micro-batch."""
    # Not token 0: if that is padding, tests would not notice a weight above 0.
    return of_tokens([[1, 1]])


def deal(batch: Batch, ranks: int, *, share_prefix: bool = True) -> list[list[int]]:
    """Assign samples to ranks; returns the sample numbers of each rank's share, in order."""
    groups: dict[str, list[int]] = {}
    for n, (group, count) in enumerate(zip(batch.groups, batch.counts, strict=True)):
        if count:
            groups.setdefault(group, []).append(n)
    if ranks == 1:
        return [sorted(n for members in groups.values() for n in members)]
    pieces = [(_tokens(batch, members, share_prefix), members) for members in groups.values()]
    fair = -(-sum(size for size, _ in pieces) // ranks)
    pieces = [
        part
        for size, members in pieces
        for part in (
            [(size, members)]
            if size <= fair or len(members) == 1
            else _split(batch, members, fair, share_prefix)
        )
    ]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # The largest first, each to the smallest share; ties by order, equal everywhere.
    for size, members in sorted(pieces, key=lambda piece: -piece[0]):
        least = loads.index(min(loads))
        shares[least] += members
        loads[least] += size
    return [sorted(share) for share in shares]


def _split(
    batch: Batch, members: list[int], limit: int, share_prefix: bool
) -> list[tuple[int, list[int]]]:
    """Split a group into parts of at most `limit` computed tokens."""
    numbered = batch.with_fields(sample=batch.sample_ids).select(members)
    parts = [
        part.fields["sample"].unique().tolist()
        for part in cut(numbered, limit, share_prefix=share_prefix)
    ]
    return [(_tokens(batch, part, share_prefix), part) for part in parts]


def _tokens(batch: Batch, members: list[int], share_prefix: bool) -> int:
    return packed_tokens(batch.select(members), share_prefix=share_prefix)
