"""Real ranks for trainer tests: processes of their own that meet over gloo."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.e2e.job import forkserver
from tests.limits import HANG_S
from trireme.trainer.ranks import RankSpec, free_address


def start(function: Callable[..., Any], place: RankSpec, *args: Any) -> BaseProcess:
    """`function(place, *args)` in a new process with one thread."""
    words = (function, place, *args)
    process = forkserver().Process(target=_one_thread, args=words, daemon=True)
    process.start()
    return process


def run(function: Callable[..., Any], folder: Path, *args: Any, **place: Any) -> list[Any]:
    """`function(place, *args)` on all ranks at once; what each returns (plain values, tensors)."""
    world, limit = place.pop("world", 2), place.pop("limit", HANG_S)
    address, place = free_address(), {"timeout": limit, "lost_after": limit} | place
    places = [RankSpec(rank, world, address, **place) for rank in range(world)]
    folder.mkdir(exist_ok=True)
    files = [folder / f"rank_{p.rank}.pt" for p in places]
    processes = [
        start(_keep, p, function, file, args) for p, file in zip(places, files, strict=True)
    ]
    for process in processes:
        process.join(limit)
        process.kill()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, f"exit codes {codes}: -9 is a rank that took over {limit:g} s"
    return [torch.load(file, weights_only=True) for file in files]


def _keep(place: RankSpec, function: Callable[..., Any], file: Path, args: tuple[Any, ...]) -> None:
    torch.save(function(place, *args), file)


def _one_thread(function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    function(*args)
