"""Colocate: which places ranks and engines share, and what cannot work on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.made import plan_of, problems_of
from tests.config.test_placement import machine
from trireme.launch.engines import engine_spec

__all__ = ["machine"]  # a fixture
pytestmark = pytest.mark.usefixtures("spreads")
ENGINE = "explorer.rollout_model"


def test_colocate_is_one_device_whose_engine_reads_the_trainers_weights(tmp_path: Path) -> None:
    found = plan_of(tmp_path, "mode=colocate", "synchronizer.sync_method=checkpoint")
    assert (found.mode, found.engine.hosts, found.sync.method) == ("both", 0, "memory")
    assert found.sync.share_tensors and not found.sync.takes_turns
    assert any(
        "sync_method (checkpoint): in mode colocate" in note and "in memory" in note
        for note in found.notes
    )
    said = problems_of(tmp_path, "mode=colocate", f"{ENGINE}.engine_num=2")
    assert said == [f"{ENGINE}.engine_num is 2: expected 1 in mode colocate"]


PAIRS = ("mode=colocate", "cluster.launcher=ray", "cluster.gpu_per_node=2")


def test_colocate_on_several_places_is_a_rank_and_an_engine_on_each(tmp_path: Path) -> None:
    found = plan_of(tmp_path, *PAIRS)
    assert (found.places.launcher, found.places.trainer_ranks, found.places.num_engines) == (
        "ray",
        2,
        2,
    )
    assert found.sync.takes_turns and found.sync.lock_step and not found.sync.share_tensors
    assert not found.deterministic and found.sync.method == "memory"
    assert not any("sync_method" in note for note in found.notes)
    for method, noted in (("checkpoint", True), ("memory", False)):
        notes = plan_of(tmp_path, *PAIRS, f"synchronizer.sync_method={method}").notes
        assert any("sync_method (" in note for note in notes) == noted
    one = plan_of(tmp_path, "mode=colocate")
    assert found.engine.runners == 2 * one.engine.runners
    assert plan_of(tmp_path, *PAIRS, f"{ENGINE}.engine_num=2").places.num_engines == 2
    assert "enable_sleep_mode" not in engine_spec(found, "model").options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"{ENGINE}.engine_num=3", "is 3: expected 1 or 2, one on each of the 2 places, in mode"),
        ("cluster.node_num=2", "cluster.node_num is 2: expected 1 in mode colocate"),
        ("algorithm.algorithm_type=sft", "mode is 'colocate': expected train, since sft reads"),
        (
            "deterministic=true",
            "deterministic is true: expected one process (cluster.launcher local), not Ray",
        ),
        ("trainer.fsdp_size=3", "trainer.fsdp_size is 3: expected a divisor of the trainer's 2"),
        (f"{ENGINE}.tensor_parallel_size=2", "is 2: expected 1 in mode colocate"),
        ("synchronizer.sync_interval=2", "take turns: expected synchronizer.sync_style fixed"),
        ("synchronizer.sync_style=fully_async", "take turns: expected synchronizer.sync_style"),
        ("buffer.train_batch_size=1", "a train_batch_size of batch_size x repeat_times ("),
    ],
)
def test_what_pairs_cannot_do_is_refused(tmp_path: Path, given: str, said: str) -> None:
    found = problems_of(tmp_path, *PAIRS, given)
    assert any(said in problem for problem in found), found


def test_checkpoints_are_not_written_behind_where_places_take_turns(tmp_path: Path) -> None:
    notes = plan_of(tmp_path, *PAIRS, "trainer.save_behind=true").notes
    assert [note for note in notes if "save_behind" in note] == [
        "trainer.save_behind: checkpoints are still written at once, since trainer and "
        "engine take turns on their device"
    ]


def test_one_process_has_one_gpu_in_colocate(tmp_path: Path, machine: Any) -> None:
    machine(4)
    (said,) = problems_of(tmp_path, "mode=colocate")
    assert "in one process with 4 GPUs: expected cluster.gpu_per_node 4" in said
    found = plan_of(tmp_path, "mode=colocate", "cluster.gpu_per_node=4")
    assert (found.places.launcher, found.places.trainer_ranks, found.places.num_engines) == (
        "ray",
        4,
        4,
    )


def test_an_optimizer_that_nobody_needs_parked_is_told(tmp_path: Path) -> None:
    parked = "trainer.park_optimizer=true"
    assert not any("park_optimizer" in note for note in plan_of(tmp_path, *PAIRS, parked).notes)
    alone = plan_of(tmp_path, parked).notes
    assert any("park_optimizer: without effect, since no engine" in note for note in alone)
    always = plan_of(tmp_path, *PAIRS, parked, "trainer.offload=true").notes
    assert any("trainer.offload keeps the optimizer in the CPU" in note for note in always)
