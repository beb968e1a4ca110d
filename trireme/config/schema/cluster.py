"""Cluster section: the machines that the configuration asks for, and who starts the parts there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.config.schema.number import number


@dataclass(frozen=True)
class ClusterConfig:
    """Placement: engines take `engine_num * tensor_parallel_size` places, the trainer the rest."""

    launcher: Literal["auto", "local", "ray"] = "auto"
    """One process, or Ray's actors; auto: Ray where several GPUs are here and asked for, or
    `ray_address` names a cluster."""
    ray_address: str = "auto"
    """HOST:PORT of a Ray cluster; auto: the one that runs here, or one started for the run; local:
    always one of its own."""
    node_num: int = number(0, at_least=0)
    """Number of machines; 0 is 1."""
    gpu_per_node: int = number(0, at_least=0)
    """GPUs of each machine, or CPU processes where it has none; 0: what is there or needed."""
    heartbeat_timeout: float = number(30.0, above=0)
    """Seconds without an answer after which a part of a Ray run counts as dead."""
    engine_restarts: int = number(3, at_least=0)
    """How often each engine process that dies is started again (not on Ray); then the run ends."""
    stop_timeout: float = number(25.0, above=0)
    """Seconds that a run told to stop (SIGTERM, SIGHUP, Ctrl-C) gets to save a checkpoint and end;
    Slurm and Kubernetes kill after 30 s."""
    start_timeout: float = number(600.0, above=0)
    """Seconds that places, actors and engines of a Ray run get to be there."""
