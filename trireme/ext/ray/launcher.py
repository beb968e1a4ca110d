"""Ray as a launcher: decides which stages it starts, and checks their settings."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trireme.config import Plan, Problem
from trireme.config.gpus import Gpus
from trireme.config.launcher import AUTO, KEY, LauncherChoice
from trireme.config.schema import ClusterConfig, Config
from trireme.config.section import of
from trireme.ext.ray.keys import ADDRESS, RayCluster

if TYPE_CHECKING:
    from trireme.explorer.metrics import Evaluated
    from trireme.launch.results import StageResult
    from trireme.launch.stage import Stage
    from trireme.launch.stop import Stop

NAME = "ray"


class RayLauncher:
    """The launcher `ray`: places trainer, explorer and engines in actors of a cluster."""

    def examine(self, config: Config, gpus: int) -> LauncherChoice:
        """Decide whether Ray starts the run. `auto` does if several GPUs are present and requested,
        or if a cluster is named.
        """
        cluster, problems = config.cluster, list[Problem]()
        address = of(cluster, RayCluster).ray_address
        if address.startswith("ray://"):
            text = (
                f"is {address}: expected auto, or HOST:PORT of the cluster's head, "
                "from a machine of the cluster"
            )
            problems.append(Problem(ADDRESS, text))
        asked = max(cluster.node_num, 1) * cluster.gpu_per_node
        named = ADDRESS if names_cluster(cluster) else ""
        automatic = cluster.launcher == AUTO and (bool(named) or min(gpus, asked) > 1)
        starts = cluster.launcher == NAME or automatic
        if not starts or find_spec("ray") is not None:
            notes = _note_token(config) if starts and named else ()
            return LauncherChoice(starts, notes, problems, named)
        lacks = "the package ray is not installed: pip install 'trireme-rl[ray]'"
        if cluster.launcher == NAME or named:
            problems.append(Problem(KEY, f"is {cluster.launcher}, and {lacks}"))
            return LauncherChoice(False, problems=problems, cluster_key=named)
        note = f"{KEY} ({cluster.launcher}): one process, since {lacks}"
        return LauncherChoice(False, [note], problems, named)

    def gpus_of(self, cluster: ClusterConfig) -> Gpus | None:
        """Return the GPUs of the named cluster; None if none is named."""
        if not names_cluster(cluster):
            return None
        _quiet()
        from trireme.ext.ray.cluster import gpus_of

        return gpus_of(cluster)

    async def run(self, stage: Stage, stop: Stop, measure_end: bool) -> StageResult:
        """Run a stage on the cluster."""
        _quiet()
        from trireme.ext.ray.run import run_on_ray

        return await run_on_ray(stage, stop, measure_end)

    async def evaluate(self, plan: Plan, rollouts: int | None) -> list[Evaluated]:
        """Run `trireme eval` on the cluster."""
        _quiet()
        from trireme.ext.ray.run import evaluate_on_ray

        return await evaluate_on_ray(plan, rollouts)


def names_cluster(cluster: ClusterConfig) -> bool:
    """Return whether the section gives the address of a cluster."""
    return of(cluster, RayCluster).ray_address not in ("auto", "", "local")


def _note_token(config: Config) -> tuple[str, ...]:
    """Note that the hub's token, if it is set here and may be needed, does not reach other
    machines.
    """
    path = config.model.model_path
    if not os.environ.get("HF_TOKEN") or os.path.isdir(path):
        return ()
    return (
        "HF_TOKEN stays on this machine, since Ray shows an actor's environment to everyone who "
        f"sees the cluster: if {path} is gated, set it, or run hf auth login, on each machine, or "
        "give model.model_path a folder that all see",
    )


def _quiet() -> None:
    """Silence Ray's messages: it would print pages about the end of each of its processes. A dead
    process is named in one sentence, with the cause in error.log. Ray reads this setting at import.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
