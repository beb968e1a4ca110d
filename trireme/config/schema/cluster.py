"""Cluster section: the machines that the configuration asks for."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.schema.number import number


@dataclass(frozen=True)
class ClusterConfig:
    """Placement: where these machines are not there, the run maps onto what is."""

    ray_address: str = "auto"
    """Address of a Ray cluster."""
    node_num: int = number(0, at_least=0)
    """Number of machines; 0 detects them."""
    gpu_per_node: int = number(0, at_least=0)
    """GPUs of each machine; 0 detects them."""
