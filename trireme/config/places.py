"""Places: how a run is spread over machines: which launcher, and who gets how many devices.

A place is a GPU, or on machines without any a CPU process with one thread. Engines take
`engine_num * tensor_parallel_size` of the `node_num * gpu_per_node` places, the trainer the rest.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, NamedTuple

from trireme.config.stages import Stage

Launcher = Literal["local", "ray"]
ON_RAY = ("both", "train", "explore")
"""Modes that the Ray launcher knows."""


class Places(NamedTuple):
    """Who gets what; counted in places."""

    launcher: Launcher
    nodes: int
    per_node: int
    """0: the machine is not known, and nothing was asked for."""
    num_engines: int
    engine_size: int
    trainer_ranks: int

    @property
    def total(self) -> int:
        """All that are asked for."""
        return self.nodes * self.per_node

    def split(self) -> str:
        """`4 for engines (2 x 2), 4 for the trainer`."""
        parts = []
        if self.num_engines:
            taken = self.num_engines * self.engine_size
            parts.append(f"{taken} for engines ({self.num_engines} x {self.engine_size})")
        if self.trainer_ranks:
            parts.append(f"{self.trainer_ranks} for the trainer")
        return ", ".join(parts)


def places_of(stage: Stage, present: int) -> Places:
    """The places of a stage on a machine with `present` GPUs. Problems are noted."""
    cluster, model = stage.config.cluster, stage.config.explorer.rollout_model
    launcher = _launcher(stage, present)
    engines, size = model.engine_num, model.tensor_parallel_size
    if stage.remote or not (stage.config.mode != "train" or stage.evaluates):
        engines = 0
    nodes, per_node = max(cluster.node_num, 1), cluster.gpu_per_node
    if not per_node and launcher == "ray":
        trains = stage.config.mode in ("both", "train")
        per_node = present or engines * size + trains
    rest = max(nodes * per_node - engines * size, 0)
    ranks = rest if stage.config.mode in ("both", "train") else 0
    places = Places(launcher, nodes, per_node, engines, size, ranks)
    if places.total > 1 or launcher == "ray":
        _check_split(stage, places)
    here = cluster.ray_address in ("auto", "local") and nodes == 1
    if cluster.launcher == "auto" and here:
        _check_present(stage, places, present)
    return places


def gpus_of(places: Places, present: int) -> dict[str, int]:
    """The GPUs of each role; in one process they share one."""
    if places.launcher == "local":
        return {"explorer": min(present, 1), "trainer": min(present, 1)}
    engines = places.num_engines * places.engine_size
    return {"explorer": engines if present else 0, "trainer": places.trainer_ranks * bool(present)}


def note_places(stage: Stage, places: Places, present: int) -> None:
    """One line where the cluster section asks for other machines than the run uses."""
    asked, nodes = places.total, places.nodes
    if places.launcher == "ray":
        if not present:
            stage.notes.append(
                f"cluster: this machine has no GPU, so each of the {asked} places is a CPU process "
                f"with one thread"
            )
        if stage.config.trainer.trainer_strategy == "megatron" and places.trainer_ranks > 1:
            stage.notes.append(
                "trainer.trainer_strategy (megatron): FSDP2 shards the model in its place"
            )
    elif asked or nodes > 1:
        here = "on one GPU, which explorer and trainer share" if present else "on the CPU"
        wanted = f"{asked} GPUs" if asked else f"{nodes} nodes"
        split = f": {places.split()}" if places.trainer_ranks and places.num_engines else ""
        stage.notes.append(
            f"cluster asks for {wanted} ({nodes} node{'s' * (nodes > 1)} x {places.per_node}"
            f"{split}) and this machine has {present or 'none'}: the run is local, one process, "
            f"{here}"
        )


def _launcher(stage: Stage, present: int) -> Launcher:
    """`auto` is Ray where several GPUs are here and asked for, or a cluster is named."""
    cluster, mode = stage.config.cluster, stage.config.mode
    if cluster.ray_address.startswith("ray://"):
        stage.problem(
            "cluster.ray_address",
            f"is {cluster.ray_address}: expected auto, or HOST:PORT of the cluster's head, from a "
            f"machine of the cluster",
        )
    asked = max(cluster.node_num, 1) * cluster.gpu_per_node
    named = cluster.ray_address not in ("auto", "", "local")
    wanted = cluster.launcher == "ray" or (
        cluster.launcher == "auto" and (named or min(present, asked) > 1)
    )
    if wanted and mode not in ON_RAY:
        stage.notes.append(
            f"cluster.launcher ({cluster.launcher}): mode {mode} runs in this process, without Ray"
        )
        return "local"
    if wanted and find_spec("ray") is None:
        lacks = "the package ray is not installed: pip install -e '.[ray]'"
        if cluster.launcher == "ray" or named:
            stage.problem("cluster.launcher", f"is {cluster.launcher}, and {lacks}")
        else:
            stage.notes.append(f"cluster.launcher ({cluster.launcher}): one process, since {lacks}")
        return "local"
    return "ray" if wanted else "local"


def _check_split(stage: Stage, places: Places) -> None:
    """Trinity's rules: each side has its places, and none is cut across machines."""
    model = stage.config.explorer.rollout_model
    taken = places.num_engines * places.engine_size
    trains = stage.config.mode in ("both", "train")
    have = f"{places.total} places ({places.nodes} x {places.per_node})"
    asked = f"({model.engine_num}) x tensor_parallel_size ({model.tensor_parallel_size})"
    key = "explorer.rollout_model.engine_num"
    if places.num_engines and places.engine_size > places.per_node:
        stage.problem(
            "explorer.rollout_model.tensor_parallel_size",
            f"is {places.engine_size}: an engine has to fit on one machine, which has "
            f"{places.per_node} places",
        )
    elif taken >= places.total and trains:
        stage.problem(
            key,
            f"{asked} takes {taken} of the cluster's {have} and leaves none for the trainer: "
            f"expected at most {places.total - 1}",
        )
    elif taken > places.total:
        stage.problem(key, f"{asked} takes {taken} of the cluster's {have}")
    elif places.trainer_ranks > places.per_node and places.trainer_ranks % places.per_node:
        stage.problem(
            key,
            f"{asked} leaves {places.trainer_ranks} of the cluster's {have} for the trainer: "
            f"expected at most {places.per_node}, or whole machines",
        )
    window = stage.config.trainer.ulysses_sequence_parallel_size
    if places.trainer_ranks and places.trainer_ranks % window:
        stage.problem(
            "trainer.ulysses_sequence_parallel_size",
            f"is {window}: expected a divisor of the trainer's {places.trainer_ranks} places",
        )


def _check_present(stage: Stage, places: Places, present: int) -> None:
    """A machine with GPUs has to have those that are asked of each machine."""
    if 0 < present < places.per_node:
        stage.problem(
            "cluster.gpu_per_node",
            f"is {places.per_node} and this machine has {present}: expected at most {present}, or "
            f"cluster.launcher local to share what is here",
        )
