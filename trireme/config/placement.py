"""Placement: decides how many GPUs each part of a run gets.

A place is a GPU, or on machines without any a CPU process with one thread. Of the
`node_num * gpu_per_node` places an engine takes as many as its tensor, pipeline and data parallel
sizes multiply to, auxiliary models on GPUs take one, and the trainer has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trireme.config import Findings
from trireme.config.engine_kind import SIZES, size_of, sizes_of
from trireme.config.launcher import AUTO, LOCAL, ChosenLauncher, choose_launcher
from trireme.config.stages import StageFacts, note_among_ranks


@dataclass(frozen=True)
class Places:
    """The launcher of a run's parts, and the number of places of each part."""

    launcher: str
    """A name in LAUNCHERS, or `local` if the parts are in one process."""
    present: int
    """The GPUs of each machine."""
    nodes: int
    per_node: int
    """Places that a run takes of each machine; 0: the machine is not known, and the file asks for
    no number."""
    num_engines: int
    engine_size: int
    """Places of one engine."""
    trainer_ranks: int
    auxiliary: int = 0
    """Places for the auxiliary models in the explorer's process: one GPU for all."""
    paired: bool = False
    """Whether a rank and an engine share each place and take turns."""
    elsewhere: bool = False
    """Whether the launcher starts the parts on the machines of a named cluster."""

    @property
    def spread(self) -> bool:
        """True if a launcher starts each part in a process of its own."""
        return self.launcher != LOCAL

    @property
    def total(self) -> int:
        """Return the number of all requested places."""
        return self.nodes * self.per_node

    @property
    def gpus(self) -> dict[str, int]:
        """Return the GPUs of each role; in one process they share one."""
        if not self.spread:
            return dict.fromkeys(("explorer", "trainer"), min(self.present, 1))
        engines = self.num_engines * self.engine_size + self.auxiliary
        some = self.present > 0
        return {"explorer": engines * some, "trainer": self.trainer_ranks * some}

    def taken(self, hosts: int) -> Places:
        """Return the places that the run takes of those that the file asks for: without a launcher
        it is one process, and `hosts` engine processes.
        """
        if self.spread:
            return self
        engines = max(hosts, 1)
        return replace(
            self, nodes=1, per_node=1, num_engines=engines, engine_size=1, trainer_ranks=1
        )

    def split(self) -> str:
        """Format `4 for engines (2 x 2), 4 for the trainer`."""
        parts = []
        if self.paired:
            return f"{self.total} for pairs of a trainer's rank and an engine"
        if self.num_engines:
            taken = self.num_engines * self.engine_size
            parts.append(f"{taken} for engines ({self.num_engines} x {self.engine_size})")
        if self.auxiliary:
            parts.append(f"{self.auxiliary} for auxiliary models")
        if self.trainer_ranks:
            parts.append(f"{self.trainer_ranks} for the trainer")
        return ", ".join(parts)


def places_of(stage: StageFacts, present: int) -> tuple[Places, Findings]:
    """Decide the places of a stage on a machine with `present` GPUs."""
    findings = Findings()
    cluster, model = stage.config.cluster, stage.config.explorer.rollout_model
    chosen = ChosenLauncher()
    if not stage.asks_api:
        chosen = findings.take(choose_launcher(stage.config, present))
    spread = chosen.name != LOCAL
    if stage.colocated and spread:
        return findings.take(_pairs_of(stage, chosen, present)), findings
    engines, size = model.engine_num, size_of(model)
    generates = stage.config.mode != "train" or stage.evaluates
    if stage.remote or stage.asks_api or not generates:
        engines = 0
    loaded = [
        other
        for other in stage.config.explorer.auxiliary_models
        if other.engine_type not in ("remote", "external")
    ]
    explores = generates and stage.config.mode != "serve"  # serve has no explorer
    auxiliary = int(spread and present > 0 and explores and bool(loaded))
    nodes, per_node = max(cluster.node_num, 1), cluster.gpu_per_node
    if not per_node and spread:
        trains = stage.config.mode in ("both", "train")
        per_node = present or engines * size + trains
    rest = max(nodes * per_node - engines * size - auxiliary, 0)
    ranks = rest if stage.config.mode in ("both", "train") else 0
    elsewhere = spread and bool(chosen.cluster_key)
    places = Places(
        chosen.name, present, nodes, per_node, engines, size, ranks, auxiliary, elsewhere=elsewhere
    )
    if places.total > 1 or spread:
        findings.add(_check_split(stage, places))
    here = not chosen.cluster_key and not stage.asks_api and nodes == 1
    if cluster.launcher == AUTO and here:
        findings.add(_check_present(places))
    return places, findings


def _pairs_of(stage: StageFacts, chosen: ChosenLauncher, present: int) -> tuple[Places, Findings]:
    """Decide the places of `mode: colocate` on several devices: a rank and an engine on each."""
    findings = Findings()
    cluster = stage.config.cluster
    nodes, per_node = max(cluster.node_num, 1), cluster.gpu_per_node or max(present, 1)
    total = nodes * per_node
    engines = 0 if stage.reads_file and not stage.evaluates else total
    elsewhere = bool(chosen.cluster_key)
    places = Places(
        chosen.name, present, nodes, per_node, engines, 1, total, paired=True, elsewhere=elsewhere
    )
    findings.add(_check_ranks(stage, total))
    if nodes > 1:
        findings.problem("cluster.node_num", f"is {nodes}: expected 1 in mode colocate")
    if cluster.launcher == AUTO and not chosen.cluster_key:
        findings.add(_check_present(places))
    return places, findings


def note_places(stage: StageFacts, places: Places) -> Findings:
    """Note if the cluster section asks for other machines than the run uses."""
    findings = Findings()
    asked, nodes, present = places.total, places.nodes, places.present
    if stage.asks_api:
        return findings
    if places.spread:
        if not present:
            findings.note(
                f"cluster: this machine has no GPU, so each of the {asked} places is a CPU process "
                f"with one thread"
            )
        if places.trainer_ranks > 1:
            findings.add(note_among_ranks(stage.config))
    elif asked or nodes > 1:
        here = "on one GPU, which explorer and trainer share" if present else "on the CPU"
        wanted = f"{asked} GPUs" if asked else f"{nodes} nodes"
        split = f": {places.split()}" if places.trainer_ranks and places.num_engines else ""
        findings.note(
            f"cluster asks for {wanted} ({nodes} node{'s' * (nodes > 1)} x {places.per_node}"
            f"{split}) and this machine has {present or 'none'}: the run is local, one process, "
            f"{here}"
        )
    return findings


def _check_split(stage: StageFacts, places: Places) -> Findings:
    """Check the rules of places: each side has places, and none spans machines unevenly."""
    findings = Findings()
    model = stage.config.explorer.rollout_model
    taken = places.num_engines * places.engine_size + places.auxiliary
    trains = stage.config.mode in ("both", "train")
    have = f"{places.total} places ({places.nodes} x {places.per_node})"
    asked = f"({model.engine_num}) x tensor_parallel_size ({model.tensor_parallel_size})"
    for name, size in sizes_of(model).items():
        if size > 1 and name != SIZES[0]:
            asked += f" x {name} ({size})"
    asked += " and the auxiliary models' GPU" * bool(places.auxiliary)
    key = "explorer.rollout_model.engine_num"
    if places.num_engines and places.engine_size > places.per_node:
        sizes = sizes_of(model)
        largest = max(sizes, key=lambda name: sizes[name])
        together = f" of {places.engine_size} places" * (sizes[largest] != places.engine_size)
        findings.problem(
            f"explorer.rollout_model.{largest}",
            f"is {sizes[largest]}: an engine{together} has to fit on one machine, which "
            f"has {places.per_node} places",
        )
    elif taken >= places.total and trains:
        findings.problem(
            key,
            f"{asked} takes {taken} of the cluster's {have} and leaves none for the trainer: "
            f"expected at most {places.total - 1 - places.auxiliary}",
        )
    elif taken > places.total:
        findings.problem(key, f"{asked} takes {taken} of the cluster's {have}")
    elif places.trainer_ranks > places.per_node and places.trainer_ranks % places.per_node:
        findings.problem(
            key,
            f"{asked} leaves {places.trainer_ranks} of the cluster's {have} for the trainer: "
            f"expected at most {places.per_node}, or whole machines",
        )
    if places.trainer_ranks:
        findings.add(_check_ranks(stage, places.trainer_ranks))
    return findings


def _check_ranks(stage: StageFacts, ranks: int) -> Findings:
    """Check the sizes that must divide the number of training ranks."""
    findings = Findings()
    window = stage.config.trainer.ulysses_sequence_parallel_size
    if ranks % window:
        findings.problem(
            "trainer.ulysses_sequence_parallel_size",
            f"is {window}: expected a divisor of the trainer's {ranks} places",
        )
    shards = stage.config.trainer.fsdp_size
    if shards != -1 and (not shards or ranks % shards):
        text = f"expected a divisor of the trainer's {ranks} places, or -1 for all"
        findings.problem("trainer.fsdp_size", f"is {shards}: {text}")
    return findings


def _check_present(places: Places) -> Findings:
    """Check that a machine with GPUs has as many as each machine must have."""
    findings, present = Findings(), places.present
    if 0 < present < places.per_node:
        findings.problem(
            "cluster.gpu_per_node",
            f"is {places.per_node} and this machine has {present}: expected at most {present}, or "
            f"cluster.launcher local to share this machine's GPUs",
        )
    return findings
