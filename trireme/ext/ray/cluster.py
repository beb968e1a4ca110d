"""Cluster: connects to a Ray cluster or starts one, and reserves the run's places on it.

Invariants:
- Every wait that fails ends with a sentence that names its cause.
- Reservations are released, and a cluster of our own ends with the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from trireme.config import Plan
from trireme.config.gpus import Gpus, gpu_bytes
from trireme.config.schema import ClusterConfig
from trireme.config.section import of
from trireme.ext.ray.keys import RayCluster, RayJob

ANSWER_S = 30.0
"""Seconds in which a cluster has to answer."""
JOIN_S = 60.0
"""Seconds that machines of a cluster get to join it."""
OWN_S = 5.0
"""Seconds that our own cluster, which no machine joins, gets for places that it lacks."""
STORE_BYTES = 2**31
"""Memory for what Ray passes on between our own cluster's processes: by default it takes a third of
the machine's, of which containers have little; a step's experiences are some 100 MB."""
HEAD_S = 45.0
"""Seconds in which a cluster's head that is gone may come back."""
HEAD_LOOKS = 9
"""Looks at the head in that time, each of which counts once: a suspended machine, where this
process did not run either, uses up one of them."""
RAY_ENDS_S = 120
"""Seconds without a head after which Ray ends this process, with words of its own: it would do so
after 60, which leaves the run no time to stop its processes."""
RUNNING = Path("ray/ray_current_cluster")
"""The file in which `ray start` stores the address of the cluster on this machine."""


class HeadGone(RuntimeError):
    """The cluster has no head any more: nothing is asked of it, since Ray would wait for one."""


@contextmanager
def cluster(plan: Plan) -> Iterator[bool]:
    """Connect to the cluster inside the block; yields whether it is our own.

    Raises TimeoutError or RuntimeError if its address does not answer.
    """
    address = None if ray.is_initialized() else address_of(plan)
    connects = not ray.is_initialized()
    if connects:
        _init(plan, address)
    try:
        yield connects and address is None
    finally:
        if connects:
            ray.shutdown()


def address_of(plan: Plan) -> str | None:
    """Return HOST:PORT of the cluster to join; None if there is none and the run starts its own.

    Raises ValueError if RAY_ADDRESS names none, such as a server of `ray job submit`.
    """
    address = of(plan.config.cluster, RayCluster).ray_address
    if address == "local":
        return None
    if address not in ("auto", ""):
        return address
    named = os.environ.get("RAY_ADDRESS", "")
    if named == "local":
        return None
    if named not in ("auto", ""):
        if "://" in named:
            raise ValueError(
                f"the variable RAY_ADDRESS is {named!r}, and cluster.ray_address is auto, which "
                "joins what it names: expected HOST:PORT of a Ray cluster in either, or local"
            )
        return named
    path = _running()
    return path.read_text().strip() or None if path.exists() else None


def _running() -> Path:
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / RUNNING


def _own_instead(address: str | None) -> str:
    """Say how a run does without a cluster that Ray's file alone named; "" if it did not."""
    path = _running()
    if address is None or not path.exists() or path.read_text().strip() != address:
        return ""
    return f"{path} names this cluster, and cluster.ray_address local starts one of the run's own"


async def watch_head() -> None:
    """Watch the cluster's head without end. Raises HeadGone once it has not answered for HEAD_S."""
    failed, gone = 0, None
    while failed < HEAD_LOOKS:
        await asyncio.sleep(HEAD_S / HEAD_LOOKS)
        gone = await headless()
        failed = failed + 1 if gone else 0
    assert gone is not None
    raise gone


async def headless() -> HeadGone | None:
    """Return the error if the cluster's head does not answer now; else None."""
    if not ray.is_initialized():
        return None
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    try:
        asked = asyncio.open_connection(host, int(port))
        (await asyncio.wait_for(asked, HEAD_S / HEAD_LOOKS))[1].close()
        return None
    except (OSError, TimeoutError):
        return HeadGone(
            f"the head of the Ray cluster at {address} does not answer any more: it was stopped or "
            "killed; start a cluster (`ray start --head`), or set cluster.ray_address to local, "
            "and give the same command: it resumes from the last checkpoint"
        )


def gpus_of(config: ClusterConfig) -> Gpus | None:
    """Return the most GPUs of any machine of a named cluster, or of the cluster that this process
    is in, and the memory of the smallest, by the machines' drivers; None if none is named.

    Raises TimeoutError, ValueError or RuntimeError if its address does not answer.
    """
    address = of(config, RayCluster).ray_address
    if address in ("auto", "", "local") or address.startswith("ray://"):
        return None
    joined = ray.is_initialized()
    if not joined:
        _reach(address)
        _join(address, {"log_to_driver": False, "logging_level": logging.ERROR})
    try:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
        return Gpus(
            max((int(node["Resources"]["GPU"]) for node in nodes), default=0),
            _memory_of([node["NodeID"] for node in nodes]),
        )
    finally:
        if not joined:
            ray.shutdown()


def python_path() -> str:
    """Return the folders in which a process of the cluster finds our modules and the user's."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = [os.getcwd(), *named, *filter(os.path.isdir, sys.path[:1])]
    # Ray's processes begin in another folder
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, folders)))


def memory_here() -> int | None:
    """Return the memory of the smallest GPU of this machine, from a task that takes none of them:
    older versions of Ray hide all from it.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return gpu_bytes()


def _memory_of(nodes: Sequence[str]) -> int | None:
    """Return the memory of the smallest GPU of these machines; None if one does not say."""
    task = ray.remote(num_cpus=0)(memory_here)
    path = {"env_vars": {"PYTHONPATH": python_path()}}
    try:
        there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        asked = [task.options(scheduling_strategy=t, runtime_env=path).remote() for t in there]
        sizes = ray.get(asked, timeout=ANSWER_S)
    except RayError:  # the machines lack Trireme, or are too busy to answer
        return None
    known = [size for size in sizes if size is not None]
    return min(known, default=None) if len(known) == len(nodes) else None


def namespace_of(plan: Plan) -> str:
    """Return the run's name in the cluster."""
    config = plan.config
    parts = (config.project, config.group, config.name)
    return of(config, RayJob).ray_namespace or "/".join(filter(None, parts))


def _init(plan: Plan, address: str | None) -> None:
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RAY_ENDS_S))
    options = {"namespace": namespace_of(plan), "log_to_driver": False}
    options["logging_level"] = logging.ERROR
    if address is not None:
        _reach(address)
        _join(address, options)
        return
    # places are processes, and may be more than there are cores
    places = max(plan.places.total, os.cpu_count() or 1)
    # in this thread: Ray's processes end with the one that started them
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options["object_store_memory"] = STORE_BYTES
    ray.init(address="local", num_cpus=places, include_dashboard=False, **options)


def _join(address: str, options: dict[str, Any]) -> None:
    """Call `ray.init`, which may wait forever, in a thread that can be abandoned."""
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address, **options)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=connect, name="ray-init", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    where = f"the Ray cluster at {address} (cluster.ray_address)"
    if thread.is_alive():
        raise TimeoutError(f"{where} did not answer in {ANSWER_S:g} s: is it running?")
    if failures:
        first = str(failures[0]).strip().partition("\n")[0] or type(failures[0]).__name__
        token = "RAY_AUTH_MODE=token where `ray start` said that it is enabled"  # Ray 2.60
        asks = "" if "RAY_AUTH_MODE" in os.environ else f"; set {token}"
        raise RuntimeError(f"{where} cannot be used: {first}{asks}") from failures[0]


def _reach(address: str) -> None:
    """Raise TimeoutError or ValueError if no server listens on the address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"cluster.ray_address is {address!r}: expected HOST:PORT of a Ray cluster")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S / 3).close()
    except OSError as error:
        remedy, own = "`ray start --head` starts one", _own_instead(address)
        if own:
            remedy += f"; {own}, since this one may have been killed"
        raise TimeoutError(
            f"the Ray cluster at {address} (cluster.ray_address) does not answer: "
            f"{error.strerror or error}; {remedy}"
        ) from error


class Reservation:
    """The run's places, reserved at once: of two runs that start together one gets all of its own,
    not each a part.

    A bundle for each engine, the trainer's on one or on whole machines; or a bundle for each place,
    of which a rank and an engine have half each.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._gpu = plan.device == "cuda"
        self._kind = "GPU" if self._gpu else "CPU"
        places, self._group = plan.places, None
        ranks, per_node = places.trainer_ranks, places.per_node
        self._ranks_per_bundle = 1 if plan.sync.takes_turns else min(ranks, per_node)
        sizes: list[int] = []
        strategy = "PACK"
        self._auxiliary = self._engines = 0
        """Indices of the auxiliary models' bundle, and of the first engine's."""
        if plan.sync.takes_turns:
            sizes, strategy = [1] * ranks, "STRICT_PACK"
        else:
            sizes += [self._ranks_per_bundle] * (max(ranks // per_node, 1) if ranks else 0)
            self._auxiliary = len(sizes)
            sizes += [places.auxiliary] * bool(places.auxiliary)
            self._engines = len(sizes)
            if not plan.engine.urls:
                sizes += [places.engine_size] * places.num_engines
        if sizes:  # without a name: commands of one job share a namespace
            bundles = [self._bundle(size) for size in sizes]
            self._group = placement_group(bundles, strategy=strategy)

    async def ready(self, *, may_grow: bool, note: Any) -> None:
        """Wait until all places are reserved. Raises RuntimeError with the requested and the
        available resources.

        Places that the cluster has, held by another run or on a slow machine, may take
        `cluster.start_timeout`; for places that it lacks, machines may join if it `may_grow`.
        `note(text)` reports the wait.
        """
        if self._group is None:
            return
        limit = self._plan.config.cluster.start_timeout
        if self._there() < self._needed() or self._largest() < self._on_one():
            limit = min(limit, JOIN_S if may_grow else OWN_S)
        begun, noted = time.monotonic(), False
        while not await asyncio.to_thread(self._group.wait, 0.5):
            waited = time.monotonic() - begun
            if waited > limit:
                own = _own_instead(address_of(self._plan))
                raise RuntimeError(f"{self._lack()} after {limit:g} s{own and f'; {own}'}")
            if not noted and 3 < waited < limit - 3:
                noted = True
                note(f"{self._lack()}: waiting {limit:g} s for places")

    def engine(self, index: int) -> dict[str, Any]:
        """Return options of the actor that hosts an engine."""
        places = 0.5 if self._plan.sync.takes_turns else self._plan.places.engine_size
        return self._options(self._engines + index, places)

    def rank(self, index: int) -> dict[str, Any]:
        """Return options of the actor of a trainer rank."""
        places = 0.5 if self._plan.sync.takes_turns else 1
        return self._options(index // self._ranks_per_bundle, places)

    def explorer(self) -> dict[str, Any]:
        """Return options of the explorer's actor: a place for its auxiliary models, else next to
        the trainer, so that losing an engine's machine does not end the explorer too.
        """
        if not self._plan.places.auxiliary:
            beside = self._plan.places.trainer_ranks > 0
            return self._options(0, 0) if beside else {"num_cpus": 0}
        return self._options(self._auxiliary, 1)

    def release(self) -> None:
        """Release all places."""
        if self._group is not None:
            remove_placement_group(self._group)

    def _bundle(self, places: int) -> dict[str, float]:
        return {"GPU": places, "CPU": places} if self._gpu else {"CPU": places}

    def _options(self, bundle: int, places: float) -> dict[str, Any]:
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        return {
            "num_cpus": places,
            "num_gpus": places if self._gpu else 0,
            "scheduling_strategy": strategy,
        }

    def _needed(self) -> int:
        """Return the places that all bundles ask for."""
        bundles = self._group.bundle_specs if self._group is not None else ()
        return sum(int(bundle.get(self._kind, 0)) for bundle in bundles)

    def _on_one(self) -> int:
        """Return the most places that one machine has to have."""
        bundles = self._group.bundle_specs if self._group is not None else ()
        sizes = [int(bundle.get(self._kind, 0)) for bundle in bundles]
        return sum(sizes) if self._plan.sync.takes_turns else max(sizes, default=0)

    def _largest(self) -> int:
        """Return the places of the cluster's largest machine, free or not."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return max((int(resources.get(self._kind, 0)) for resources in alive), default=0)

    def _there(self) -> int:
        """Return the places of the cluster's machines, free or not."""
        return int(ray.cluster_resources().get(self._kind, 0))

    def _lack(self) -> str:
        kind, needed, there = self._kind, self._needed(), self._there()
        free = int(ray.available_resources().get(kind, 0))
        asked, nodes = self._plan.places.total, self._plan.places.nodes
        alive = sum(node["Alive"] for node in ray.nodes())
        on_one, largest = self._on_one(), self._largest()
        apart = ""
        if largest < on_one:
            apart = f"; {on_one} have to be on one machine, and the largest has {largest}"
        return (
            f"this run takes {needed} of the {asked} places of one {kind} each that `cluster` "
            f"describes ({nodes} x {self._plan.places.per_node}), and the Ray cluster has {there} "
            f"{kind}s on {alive} machines, {free} of them free{apart}"
        )
