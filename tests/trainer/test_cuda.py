"""What a GPU demands of ranks, shown without one: device indices, and a thread that fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch._utils import _get_device_index

from tests.limits import HANG_S
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of
from trireme.launch import models
from trireme.launch.models import make_rank_spec
from trireme.trainer import ranks as ranks_module
from trireme.trainer.leader import Leader, follow
from trireme.trainer.ranks import Ranks, RankSpec

PLAN: Any = SimpleNamespace(
    device="cuda",
    config=SimpleNamespace(
        trainer=SimpleNamespace(
            ulysses_sequence_parallel_size=1, collective_timeout=30.0, fsdp_size=-1
        ),
        cluster=SimpleNamespace(heartbeat_timeout=60.0),
    ),
)


@contextmanager
def fake_cuda() -> Iterator[list[tuple[str, int]]]:
    """torch's own rule of what `set_device` takes, over gloo; the devices set, by thread."""
    chosen: list[tuple[str, int]] = []
    group, mesh = dist.init_process_group, ranks_module.init_device_mesh

    def set_device(device: Any) -> None:
        chosen.append((threading.current_thread().name, _get_device_index(device)))

    with (
        patch("torch.cuda.set_device", set_device),
        patch("torch.cuda.current_device", lambda: 0),
        patch.object(dist, "init_process_group", lambda _, **given: group("gloo", **given)),
        patch.object(ranks_module, "init_device_mesh", lambda _, shape: mesh("cpu", shape)),
    ):
        yield chosen


def _meet(place: RankSpec) -> dict[str, Any]:
    """A plan's ranks say where they compute; rank 0 does its part in a thread of its own."""
    with fake_cuda() as chosen:
        if place.rank:
            follow(make_rank_spec(PLAN, place.rank, place.world, place.address), lambda _: {})
            return {"chosen": chosen}
        ranks = Ranks(make_rank_spec(PLAN, 0, place.world, place.address))
        leader = Leader(ranks)
        answer = leader.guarded(lambda: 7)
        leader.close()
        return {"answer": answer, "chosen": chosen, "device": str(ranks.device)}


def test_ranks_of_a_plan_on_gpus_set_a_device_with_an_index(tmp_path: Path) -> None:
    first, second = run(_meet, tmp_path / "ranks")
    assert first["answer"] == 7
    assert first["device"] == "cuda:0"
    assert first["chosen"] == [("MainThread", 0), ("trainer-rank-0", 0)]
    assert second["chosen"] == [("MainThread", 0)]


def test_a_deterministic_step_on_a_gpu_adds_in_one_order(tiny_dir: Path) -> None:
    """Only within the step: sampling writes keys and values by index, which the flag makes slow."""
    seen: list[tuple[bool, bool]] = []
    for deterministic in (True, False):
        backend = backend_of(tiny_dir, deterministic=deterministic)
        backend.device = torch.device("cuda", 0)
        with backend.in_order():
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            seen.append((torch.are_deterministic_algorithms_enabled(), warns))
        assert not torch.are_deterministic_algorithms_enabled()
    assert seen == [(True, True), (False, False)]


@pytest.mark.parametrize("said", ["", "max_split_size_mb:512"])
def test_a_gpus_memory_grows_in_place_except_in_colocate_or_where_the_user_has_a_say(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one process may follow each other: what is lent to an engine must not expand."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    switches: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", switches.append)
    recipe: Any = SimpleNamespace(needs_reference=False, needs_critic=False, parts={})
    for takes_turns in (False, True, False):
        plan: Any = SimpleNamespace(
            config=None,
            device="cuda",
            deterministic=False,
            places=SimpleNamespace(spread=False),
            sync=SimpleNamespace(takes_turns=takes_turns),
        )
        with patch.object(models, "_settings"):
            models.make_models(plan, "", recipe, make=MagicMock())
    each = [f"expandable_segments:{expands}" for expands in (True, False, True)]
    assert told == ([] if said else each)
    assert switches == [5e-4] * 3  # threads beside the launches get shorter turns


def _fails_in_its_thread(place: RankSpec) -> str:
    """What rank 0's caller sees of a device that its thread cannot have."""
    with fake_cuda():
        ranks = Ranks(make_rank_spec(PLAN, 0, 1, place.address))
        heard: list[str] = []

        def lost(device: Any) -> None:
            raise RuntimeError("CUDA error: invalid device ordinal")

        with patch("torch.cuda.set_device", lost):
            leader = Leader(ranks)

            def call() -> None:
                try:
                    leader.guarded(lambda: 7)
                except RuntimeError as error:
                    heard.append(str(error))

            caller = threading.Thread(target=call, daemon=True)
            caller.start()
            caller.join(HANG_S)
        leader.close()
        return heard[0] if heard else "nothing in 10 s"


def test_a_failure_in_the_thread_of_rank_0_reaches_its_caller(tmp_path: Path) -> None:
    assert run(_fails_in_its_thread, tmp_path / "ranks", world=1) == [
        "CUDA error: invalid device ordinal"
    ]
