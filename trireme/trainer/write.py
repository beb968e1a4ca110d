"""Write: writes a rank's files of a checkpoint, at once or while the training continues.

Every rank writes its own rows of the exported weights: no rank gathers the model. While the
training continues, a rank writes from a copy in the CPU's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trireme.checkpoint.export import DEFAULT_SHARD_BYTES, SharedFiles, Spec, as_written
from trireme.checkpoint.layout import FSDP_CONFIG, LORA_ADAPTER, rank_file
from trireme.checkpoint.save import write_pt
from trireme.checkpoint.saved import my_parts
from trireme.files import write_json
from trireme.trainer.lora import Adapter, Part
from trireme.trainer.ranks import Team


class Trained(Protocol):
    """The state of a backend that a checkpoint holds."""

    adapter: Adapter | None

    def each_shard(self, part: Part = "merged") -> Iterable[tuple[str, Tensor]]:
        """Each weight's part on this rank."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the rest of the state that a resume needs."""
        ...


class Writing:
    """The files of one checkpoint; all ranks make it, and `end` it, at the same time."""

    def __init__(
        self,
        team: Team,
        trained: Trained,
        actor: Path,
        export: torch.dtype | None,
        *,
        alone: bool,
        behind: bool,
    ) -> None:
        """`export`: the dtype of the exported weights, if there are to be any; `alone`: there is
        only one process.
        """
        plain = trained.each_shard("base" if trained.adapter else "merged")
        files = shared_files(actor, plain, export=export, alone=alone)
        state = trained.state()
        shards: Callable[[], Iterable[tuple[str, Tensor]]] = trained.each_shard
        if behind or not alone:  # with LoRA one merged layer at a time is on a GPU
            kept = {name: _on_host(tensor, copy=behind) for name, tensor in trained.each_shard()}
            shards = kept.items
            state = _on_host(state, copy=True) if behind else state

        def begin() -> None:
            for each in files:
                each.create()
            if not alone:
                write_json(actor / FSDP_CONFIG, {"FSDP_version": 2, "world_size": team.size})

        def write() -> None:
            team.write_own(actor, state)
            if not alone:
                write_pt(actor / rank_file("model", team.size, team.rank), dict(shards()))
            if team.rank == 0 and trained.adapter:
                trained.adapter.save(actor / LORA_ADAPTER, state["adapter"])
            for each in files:
                each.write(my_parts(shards(), team.rank))

        self._team, self._files = team, files
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        team.attempt(begin if team.rank == 0 else lambda: None)
        if behind:
            # a daemon: if the training has failed, the process waits only as long as `Trainer`
            name = "checkpoint"
            self._thread = threading.Thread(target=self._run, args=[write], name=name, daemon=True)
            self._thread.start()
        else:
            self._run(write)

    def wait(self) -> None:
        """Wait until this rank has written its files, or failed to; in any thread."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Wait until all ranks have written everything. Raises any rank's write error."""
        self.wait()
        self._team.agree(self._error)
        self._team.attempt(self._finish if self._team.rank == 0 else lambda: None)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # raised by `end`
            self._error = error

    def _finish(self) -> None:
        for each in self._files:
            each.finish()


def shared_files(
    actor: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    export: torch.dtype | None,
    alone: bool,
) -> list[SharedFiles]:
    """Describe the files of weights besides the ranks' own: the export in its dtype, if there is
    one; and for a single process, which has no other copy, the trained weights. Integers keep their
    dtype. Only names, shapes and dtypes of `weights` are read.
    """
    found = sorted((name, Spec(tuple(tensor.shape), tensor.dtype)) for name, tensor in weights)

    def specs(dtype: torch.dtype) -> dict[str, Spec]:
        return {name: as_written(spec, dtype) for name, spec in found}

    files = []
    if export is not None:
        files.append(SharedFiles(actor / "huggingface", specs(export), DEFAULT_SHARD_BYTES))
    if alone and export != torch.float32:
        files.append(SharedFiles(actor, specs(torch.float32)))
    return files


def _on_host(value: Any, *, copy: bool) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {key: _on_host(inner, copy=copy) for key, inner in value.items()}
    if isinstance(value, list):
        return [_on_host(inner, copy=copy) for inner in value]
    return value
