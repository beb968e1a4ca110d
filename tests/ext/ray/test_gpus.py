"""What the machines of a cluster say of their GPUs, by a driver of ours in their tasks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.config.test_gpus import library as library
from tests.limits import HANG_S
from trireme.config import gpus
from trireme.config.gpus import Gpus
from trireme.config.schema import ClusterConfig

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

from trireme.ext.ray import cluster as ray_cluster

pytestmark = pytest.mark.slow
_memory_here = ray_cluster.memory_here


def of_the_driver() -> int | None:
    """As `memory_here`, with a torch for CUDA, which the tests' one is not, and a Ray that hides
    the GPUs that a task does not take.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus.torch_cuda = lambda: (13, 0)
    return _memory_here()


def test_each_machine_with_gpus_is_asked_for_their_memory(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DRIVER", 13000), ("GPUS", 2), ("INIT", 0)):
        monkeypatch.setenv(f"FAKE_{name}", str(value))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setattr(ray_cluster, "ANSWER_S", HANG_S)  # a busy machine would not say
    head = {"num_cpus": 0, "num_gpus": 2, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        named = ClusterConfig.model_validate({"ray_address": made.address})
        assert ray_cluster.gpus_of(named) == Gpus(2, None)  # torch there is one for the CPU
        monkeypatch.setattr(ray_cluster, "memory_here", of_the_driver)
        assert ray_cluster.gpus_of(named) == Gpus(2, 40 * 2**30)
    finally:
        made.shutdown()
