"""Keys: declares the keys of the YAML that only Ray reads."""

from typing import Annotated

from trireme.config.section import After, Mapped, NoEffect, Section

ADDRESS = "cluster.ray_address"
_ELSEWHERE = Mapped("this run is one process and uses no Ray", on="spread")


class RayCluster(Section, defer_build=True):
    """The cluster that a run joins."""

    ray_address: Annotated[str, After("launcher"), _ELSEWHERE] = "auto"
    """HOST:PORT of a Ray cluster; auto: the one that runs here, or one started for the run; local:
    always one of its own. An address starts a run of `launcher: auto` there."""


class RayJob(Section, defer_build=True):
    """The run as a job of a cluster."""

    ray_namespace: Annotated[str, After("continue_from_checkpoint"), _ELSEWHERE] = ""
    """Name of the job in a Ray cluster."""


class RayMonitor(Section, defer_build=True):
    """Ray's own records of a run."""

    enable_ray_timeline: Annotated[bool, NoEffect()] = False
    """Write Ray's timeline."""
