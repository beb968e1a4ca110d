"""Pairs: every rank lends the same weights, and an engine that does not take them is named."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composites import make_composite
from tests.limits import HANG_S
from tests.trainer.ranks import run
from tests.trainer.samples import backend_of, experiences
from tests.trainer.test_follow import RECIPE
from trireme.engines.weights import fingerprint
from trireme.ext.remote.pairs import EnginePairs
from trireme.ext.remote.push import HOST
from trireme.ext.remote.weight_group import Meeting, WeightGroup
from trireme.trainer.backend import Backend
from trireme.trainer.leader import Commands, Leader, follow
from trireme.trainer.learning import TrainState
from trireme.trainer.led import LedModels, LedPairs, Models, commands
from trireme.trainer.lora import Part
from trireme.trainer.ranks import Ranks, RankSpec
from trireme.trainer.source import PartSource
from trireme.trainer.step import train_step


class EngineEnd:
    """An engine beside a rank: takes every push, from the second meeting on where it is `late`."""

    def __init__(self) -> None:
        self.taken: list[dict[str, float]] = []
        self._threads: list[threading.Thread] = []

    def join(self, port: int) -> None:
        group = WeightGroup(Meeting(HOST, port, 2, 1, "ipc", timeout=HANG_S))
        group.connect()

        def take() -> None:
            self.taken.append(fingerprint(dict(group.receive()), "float32"))

        self._threads.append(threading.Thread(target=take, daemon=True))
        self._threads[-1].start()

    def wait(self) -> list[dict[str, float]]:
        for thread in self._threads:
            thread.join(HANG_S)
        return self.taken


class Beside(EnginePairs):
    """A rank with its engine in the same process; `late`: that does not come to the first push."""

    def __init__(
        self, backend: Backend, *, part: Part, late: bool = False, parks: bool = False
    ) -> None:
        super().__init__(backend, part=part, parks=parks)
        self.engine, self._late = EngineEnd(), late

    def meet(self) -> list[int]:
        ports = super().meet()
        assert self._group is not None
        if not (self._late and self._meetings == 1):
            self.engine.join(self._group.port)
        return ports


def _ranked(path: Path, made: list[Beside], late: bool, part: Part, ranks: Ranks) -> Commands:
    backend = backend_of(path, ranks)
    made.append(Beside(backend, part=part, late=late, parks=True))
    return commands(Models(backend, RECIPE, TrainState(RECIPE)), made[0])


def _lends(
    place: RankSpec, path: Path, late: bool = False, part: Part = "merged"
) -> dict[str, Any]:
    """A step and a push, twice: what each rank's engine has, and what failed."""
    made: list[Beside] = []
    if place.rank:
        follow(place, partial(_ranked, path, made, late, part))
        return {"taken": made[0].engine.wait()}
    ranks = Ranks(place)
    leader = Leader(ranks)
    backend = leader.guarded(lambda: backend_of(path, ranks, leader=leader))
    models = LedModels(leader, backend, RECIPE, TrainState(RECIPE))
    ours = Beside(backend, part=part, parks=True)
    pairs = LedPairs(leader, ours)
    failed, weights = "", []
    for n in range(2):
        models.train_step(experiences(n), version=0)
        weights.append(fingerprint(dict(backend.each_weight(part=part)), "float32"))
        ports = pairs.meet()
        pairs.make_room()
        timer = threading.Timer(1, pairs.give_up) if late and n == 0 else None
        if timer is not None:
            timer.start()
        try:
            pairs.send("float32", iter)
        except RuntimeError as error:
            failed = str(error)
    rest = PartSource(backend, part).unmoved("float32") if part == "text" else {}
    leader.close()
    return {
        "rest": rest,
        "taken": ours.engine.wait(),
        "weights": weights,
        "failed": failed,
        "ports": len(set(ports)),
    }


def test_each_ranks_engine_has_the_weights_of_one_process_after_every_push(
    tiny_dir: Path, tmp_path: Path
) -> None:
    first, second = run(_lends, tmp_path / "ranks", tiny_dir)
    assert first["ports"] == 2 and not first["failed"]
    assert first["taken"] == second["taken"] == first["weights"]
    alone = backend_of(tiny_dir)
    for n in range(2):
        train_step(alone, RECIPE, experiences(n), version=0)
    ours = fingerprint(alone.weights(), "float32")
    assert first["weights"][1] == pytest.approx(ours, abs=1e-2)
    assert first["weights"][0] != first["weights"][1]


def test_ranks_lend_the_text_of_a_composite_and_leave_its_towers_at_home(tmp_path: Path) -> None:
    folder = make_composite(tmp_path / "model", "gemma3")
    first, second = run(_lends, tmp_path / "ranks", folder, False, "text")
    assert not first["failed"] and first["taken"] == second["taken"] == first["weights"]
    alone = backend_of(folder)
    assert first["rest"] == PartSource(alone, "text").unmoved("float32")
    assert first["rest"].keys() | first["weights"][1].keys() == alone.weights().keys()
    assert first["rest"].keys().isdisjoint(first["weights"][1])


def test_a_rank_whose_engine_does_not_come_is_named_and_the_ranks_go_on(
    tiny_dir: Path, tmp_path: Path
) -> None:
    first, second = run(_lends, tmp_path / "ranks", tiny_dir, True)
    assert first["failed"] == "trainer rank 1: the push was given up"
    assert second["taken"] == first["taken"][-1:] == first["weights"][1:]


def test_what_is_parked_takes_no_memory_and_comes_back_for_the_next_step(tiny_dir: Path) -> None:
    backend, parking = backend_of(tiny_dir), backend_of(tiny_dir)
    pairs = EnginePairs(parking, parks=True)
    for n in range(3):
        for each in (backend, parking):
            train_step(each, RECIPE, experiences(n), version=0)
        pairs.make_room()
        pairs.make_room()
        states = parking.optimizer.inner.state.values()
        moments = [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]
        assert moments and not any(m.untyped_storage().nbytes() for m in moments)
    theirs = parking.weights()
    assert all(torch.equal(theirs[name], weight) for name, weight in backend.weights().items())
    saved, kept = parking.optimizer.state(), backend.optimizer.state()
    for key, values in kept["optimizer"]["state"].items():
        for name, value in values.items():
            assert torch.equal(saved["optimizer"]["state"][key][name], value)
