"""Saved: loads a trainer's checkpoint on any number of ranks, however many ranks wrote it.

A tensor is split along its first dimension into runs of ceil(rows / ranks), as FSDP2 does; so each
rank's file has one run of each. If ranks have several copies of the model, the first copy is read.
Files are mapped, not read: each rank takes its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from trireme.checkpoint.layout import REFERENCE, WEIGHTS, rank_file, world_of
from trireme.config.lookup import weight_files


class SavedTensor(Protocol):
    """A whole tensor on disk, of which a rank reads its own rows."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of the whole."""
        ...


@dataclass(frozen=True)
class ShardedRows:
    """One tensor in the files of all ranks: their rows, concatenated."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """The shape of all parts together."""
        return torch.Size([sum(len(part) for part in self.parts), *self.parts[0].shape[1:]])

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop`, joined from the parts."""
        taken, begin = [], 0
        for part in self.parts:
            taken.append(part[max(start - begin, 0) : max(stop - begin, 0)])
            begin += len(part)
        return torch.cat(taken)


@dataclass(frozen=True)
class FileRows:
    """One tensor of an open safetensors file."""

    file: Any
    name: str

    @property
    def shape(self) -> torch.Size:
        """The shape in the file."""
        return torch.Size(self.file.get_slice(self.name).get_shape())

    def rows(self, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` of the file."""
        return self.file.get_slice(self.name)[start:stop]


@dataclass(frozen=True)
class ExpertRows:
    """All experts' weights [E, O, I] from files with separate matrices per expert."""

    files: Mapping[str, Path]
    """The file of each tensor."""
    experts: Sequence[Sequence[str]]
    """The tensors of each expert whose rows follow each other."""

    @property
    def shape(self) -> torch.Size:
        """The shape of all experts as one tensor."""
        parts = [self._part(name) for name in self.experts[0]]
        rows = sum(len(part) for part in parts)
        return torch.Size([len(self.experts), rows, *parts[0].shape[1:]])

    def rows(self, start: int, stop: int) -> Tensor:
        """Read experts `start` to `stop` into one tensor."""
        count = max(stop - start, 0)  # there may be more ranks than experts
        out = torch.empty(count, *self.shape[1:], dtype=self._part(self.experts[0][0]).dtype)
        for expert, names in zip(out, self.experts[start:stop], strict=True):
            begin = 0
            for part in map(self._part, names):
                expert[begin : begin + len(part)] = part
                begin += len(part)
        return out

    def _part(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def assign(target: Tensor, source: Tensor | SavedTensor) -> None:
    """Fill `target`, or this rank's rows of it, from the whole `source`."""
    if isinstance(target, DTensor):
        start, stop = own_rows(target)
        target.to_local().copy_(_rows(source, start, stop))
    elif target.dim() or not isinstance(source, Tensor):
        target.copy_(_rows(source, 0, len(target)))
    else:
        target.copy_(source)


def fill_from_file(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors, or this rank's rows of them, from a safetensors file."""
    with safe_open(path, framework="pt") as file:
        for name, tensor in targets.items():
            assign(tensor, FileRows(file, name))


def like(source: Tensor | SavedTensor, parameter: Tensor) -> Tensor:
    """Return the whole `source` in memory, or this rank's rows of it, as `parameter` is sharded.

    A tensor of another shape than the parameter (a count of steps) is the same on all ranks.
    """
    if source.shape != parameter.shape:
        assert isinstance(source, Tensor)
        return source
    made = torch.empty_like(parameter)
    assign(made, source)
    return made


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """Return the first and last + 1 row of the whole that this rank has."""
    mesh = tensor.device_mesh
    along = mesh.ndim - 1  # another dimension has copies
    length = -(-tensor.shape[0] // mesh.size(along))
    start = min(mesh.get_local_rank(along) * length, tensor.shape[0])
    return start, start + len(tensor.to_local())


def my_parts(shards: Iterable[tuple[str, Tensor]], rank: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yield this rank's share of tensors to write: the name, the first of its rows, and the rows. A
    tensor that every rank has whole is written by the first.
    """
    for name, tensor in shards:
        if isinstance(tensor, DTensor):
            yield name, own_rows(tensor)[0], tensor.to_local()
        elif rank == 0:
            yield name, 0, tensor


def _rows(source: Tensor | SavedTensor, start: int, stop: int) -> Tensor:
    return source[start:stop] if isinstance(source, Tensor) else source.rows(start, stop)


@dataclass(frozen=True)
class Saved:
    """A policy's files."""

    actor: Path
    weights: Mapping[str, Tensor | SavedTensor]
    """By Hugging Face names."""
    optimizer: dict[str, Any]
    """In the form of `Optimizer.state_dict`; a SavedTensor stands for a tensor that was sharded."""
    extra: dict[str, Any]
    """The schedule, random state and LoRA adapter of one rank."""

    def refuse_other(self, *, lora: bool) -> None:
        """Raise ValueError if these were saved with LoRA and the run has none, or the reverse."""
        if ("adapter" in self.extra) != lora:
            was, now = ("without", "with") if lora else ("with", "without")
            raise ValueError(
                f"{self.actor} was saved {was} LoRA (model.lora_configs), and this run trains "
                f"{now} it: expected the same, or another name"
            )

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Load the trained weights, or this rank's part of them.

        Raises ValueError if the names or shapes are those of another model.
        """
        odd = sorted(set(self.weights) ^ set(targets))
        if odd:
            raise ValueError(
                f"{self.actor} belongs to another model: {len(odd)} tensors differ, {odd[0]} first"
            )
        for name, tensor in targets.items():
            theirs = self.weights[name].shape
            if theirs != tensor.shape:  # rows beyond a smaller one's would be left out
                raise ValueError(
                    f"{self.actor} belongs to another model: its {name} is {list(theirs)}, and "
                    f"this one's {list(tensor.shape)}"
                )
        for name, tensor in targets.items():
            assign(tensor, self.weights[name])

    def fill_reference(self, targets: Mapping[str, Tensor]) -> bool:
        """Load the reference model, or this rank's part of it; False if none was saved, since it
        had not moved.
        """
        if not (self.actor / REFERENCE).exists():
            return False
        fill_from_file(self.actor / REFERENCE, targets)
        return True

    def optimizer_for(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, sharded like its parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            index: {
                key: like(value, parameters[index])
                if isinstance(value, Tensor | ShardedRows)
                else value
                for key, value in held.items()
            }
            for index, held in self.optimizer["state"].items()
        }
        return {"state": state, "param_groups": self.optimizer["param_groups"]}


def read(actor: Path, rank: int = 0) -> Saved:
    """Read the files in `actor`; `rank` selects the random state."""
    world = world_of(actor)
    optimizers = [_load(actor / rank_file("optim", world, r)) for r in range(world)]
    file_rank = rank if rank < world else 0
    state = {
        index: {key: _joined([o["state"][index][key] for o in optimizers]) for key in held}
        for index, held in optimizers[0]["state"].items()
    }
    return Saved(
        actor,
        _weights(actor, world),
        {"state": state, "param_groups": optimizers[0]["param_groups"]},
        _load(actor / rank_file("extra_state", world, file_rank)),
    )


def _weights(actor: Path, world: int) -> dict[str, Tensor | SavedTensor]:
    if (actor / rank_file("model", world, 0)).exists():
        models = [_load(actor / rank_file("model", world, r)) for r in range(world)]
        return {name: _joined([model[name] for model in models]) for name in models[0]}
    exact = actor / WEIGHTS
    paths = [exact] if exact.exists() else weight_files(actor / "huggingface")
    if not paths:
        raise ValueError(f"{actor} holds no weights: neither {WEIGHTS} nor model_world_size_*.pt")
    files: list[Any] = [safe_open(path, framework="pt") for path in paths]
    return {name: FileRows(file, name) for file in files for name in file.keys()}  # noqa: SIM118


def _joined(parts: Sequence[Any]) -> Any:
    """Join the values of all ranks' files under one name: sharded, or equal in all of them."""
    if isinstance(parts[0], DTensor):
        places = parts[0]._spec.mesh.mesh  # of ranks: [copies, shards], or [shards]
        first = places.reshape(-1, places.shape[-1])[0].tolist()
        return ShardedRows(tuple(parts[rank].to_local() for rank in first))
    return parts[0]


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that training (dropout, for example) draws from: the
    CPU's, and the device's own if it has one.
    """
    state = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state; on another kind of device, as far as it applies."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
