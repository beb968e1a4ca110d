"""Leader: rank 0 is called like a backend of one process, and the others keep up or are named."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from tests.limits import HANG_S
from tests.trainer.ranks import run, start
from tests.trainer.samples import apart, backend_of, experiences
from trireme.algorithms.recipes import Recipe, get_recipe
from trireme.batch import Batch
from trireme.trainer.leader import (
    GRACE,
    Command,
    Commands,
    Leader,
    RankHeartbeat,
    RankLost,
    follow,
)
from trireme.trainer.learning import TrainState
from trireme.trainer.led import LedModels, Models, commands
from trireme.trainer.ranks import Ranks, RankSpec, connect, free_address
from trireme.trainer.step import train_step

RECIPE = get_recipe(SimpleNamespace(algorithm_type="grpo", kl_loss_fn="none"))


def _commands(path: Path, ranks: Ranks) -> Commands:
    return commands(Models(backend_of(path, ranks), RECIPE, TrainState(RECIPE)))


def _led(path: Path, ranks: Ranks, leader: Leader) -> LedModels:
    backend = leader.guarded(lambda: backend_of(path, ranks, leader=leader))
    return LedModels(leader, backend, RECIPE, TrainState(RECIPE))


def _leads(place: RankSpec, path: Path) -> dict:
    """What rank 0 sees of two steps, a score, the weights, and a score again."""
    if place.rank:
        follow(place, partial(_commands, path))
        return {}
    ranks = Ranks(place)
    leader = Leader(ranks)
    models = _led(path, ranks, leader)
    backend = models.backend
    steps = [models.train_step(experiences(n), version=0) for n in range(2)]
    weights = {name: tensor.clone() for name, tensor in backend.each_weight()}
    next(backend.each_weight())  # the rest is not asked for
    score = backend.score([[5, 6, 7, 8]])
    leader.close()
    return {"loss": [m["actor/loss"] for m in steps], "weights": weights, "score": score}


def test_the_leader_alone_is_called_and_all_follow(tiny_dir, tmp_path):
    alone = backend_of(tiny_dir)
    steps = [train_step(alone, RECIPE, experiences(n), version=0) for n in range(2)]
    led, _ = run(_leads, tmp_path / "ranks", tiny_dir)
    assert led["loss"] == pytest.approx([m["actor/loss"] for m in steps], abs=1e-6)
    assert led["score"][0] == pytest.approx(alone.score([[5, 6, 7, 8]])[0], abs=1e-5)
    assert apart(led["weights"], alone.weights()) < 1e-3


def _until_lost(place: RankSpec, path: Path, how: str, file: Path) -> None:
    """Rank 0 writes the sentence it raises; rank 1 dies, freezes or fails in the second step."""
    if place.rank == 1:
        _break_second_step(how)
    if place.rank:
        follow(place, partial(_commands, path))
        return
    ranks = Ranks(place)
    leader = Leader(ranks)
    models = _led(path, ranks, leader)
    models.train_step(experiences(), version=0)
    with pytest.raises(RankLost) as caught:
        models.train_step(experiences(), version=0)
    with pytest.raises(RankLost, match=re.escape(str(caught.value))):
        models.backend.score([[5, 6, 7, 8]])  # nor does what is asked of the ranks afterwards
    file.write_text(f"{caught.value}")
    leader.close()


def _break_second_step(how: str) -> None:
    """In this process alone."""
    weights, calls = Recipe.weights, itertools.count(1)

    def broken(self: Recipe, batch: Batch, experts: Tensor | None = None) -> Tensor:
        if next(calls) == 2:
            if how == "fails":
                raise MemoryError("no room")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return weights(self, batch, experts)

    Recipe.weights = broken


@pytest.mark.parametrize("how", ["dies", pytest.param("freezes", marks=pytest.mark.large), "fails"])
def test_a_rank_that_is_gone_is_named_and_nothing_hangs(how, tiny_dir, tmp_path):
    address, file = free_address(), tmp_path / "said"
    places = [RankSpec(rank, 3, address, timeout=HANG_S, lost_after=10) for rank in range(3)]
    processes = [start(_until_lost, place, tiny_dir, how, file) for place in places]
    try:
        processes[0].join(HANG_S)
        processes[2].join(HANG_S)
        assert processes[0].exitcode == 0
        assert processes[2].exitcode not in (None, 0)
    finally:
        for process in processes:
            process.kill()
    sentence = file.read_text()
    said = r"failed \(MemoryError: no room\)" if how == "fails" else "on .* died or froze"
    assert re.fullmatch(f"trainer rank 1 {said} during train_step", sentence), sentence


def _fail(after: float) -> None:
    time.sleep(after)
    raise ValueError("on all ranks")


def _fail_together(place: RankSpec, late: float) -> list[str | float]:
    """What rank 0 raises `late` for what all ranks raise, and the seconds in which it then ends."""
    if place.rank:
        with pytest.raises(ValueError, match="on all ranks"):
            follow(place, lambda ranks: {"fail": partial(_fail, 0.0)})
        return []
    leader = Leader(Ranks(place))
    with pytest.raises((ValueError, RankLost)) as caught:
        leader.together(Command("fail"), partial(_fail, late))
    begun = time.monotonic()
    leader.close()
    return [repr(caught.value), time.monotonic() - begun]


def test_ranks_that_failed_are_not_waited_for_one_after_the_other(tmp_path):
    said, seconds = run(_fail_together, tmp_path / "ranks", 0.0, world=4)[0]
    assert said == "ValueError('on all ranks')"
    assert seconds < 2 * GRACE


def test_an_error_of_all_ranks_is_itself_where_another_rank_was_sooner(tmp_path):
    assert run(_fail_together, tmp_path / "ranks", 2.0)[0][0] == "ValueError('on all ranks')"


def _beats(place: RankSpec, folder: Path) -> None:
    """Heartbeats of this rank until the file is there; writes whom it has ever missed."""
    heartbeat, missed = RankHeartbeat(place), set()
    while not (folder / "end").exists():
        missed.update(heartbeat.lost())
        time.sleep(0.01)
    (folder / f"missed_{place.rank}").write_text(f"{sorted(missed)}")


@pytest.mark.large
def test_a_suspended_machine_loses_no_rank(tmp_path):
    address = free_address()
    places = [RankSpec(rank, 2, address, timeout=HANG_S, lost_after=10) for rank in range(2)]
    store = connect(places[0], serve=True)
    processes = [start(_beats, place, tmp_path) for place in places]
    try:
        store.wait(["beat/0", "beat/1"])
        for number, seconds in ((signal.SIGSTOP, 11), (signal.SIGCONT, 2)):
            for process in processes:
                os.kill(process.pid or 0, number)
            time.sleep(seconds)
        (tmp_path / "end").touch()
        for process in processes:
            process.join(HANG_S)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert [(tmp_path / f"missed_{rank}").read_text() for rank in range(2)] == ["[]", "[]"]
