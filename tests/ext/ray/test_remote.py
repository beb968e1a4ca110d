"""Parts under Ray: called by their own methods, and what they say is heard once and in order."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.e2e.job import small_config
from tests.ext.ray.clusters import named_by_file
from tests.limits import HANG_S
from tests.odd import ALL

pytest.importorskip("ray")

import ray
import torch
import yaml

from trireme.buffer.buffer import OtherSideFailed
from trireme.checkpoint.layout import JobFolder
from trireme.config import load_config
from trireme.config.gpus import Gpus
from trireme.config.schema import ClusterConfig
from trireme.engines.device import Device
from trireme.experience import EID, Experience
from trireme.ext.ray import cluster as ray_cluster
from trireme.ext.ray import remote as ray_remote
from trireme.ext.ray.actors import ExplorerWorker, SideWorker, TrainerWorker
from trireme.ext.ray.cluster import gpus_of
from trireme.ext.ray.remote import (
    Actor,
    Failure,
    Outbox,
    Watched,
    Worker,
    answer,
    decode_event,
    remote,
)
from trireme.ext.ray.run import Actors, environment_of
from trireme.files import write_json
from trireme.launch import GC_THRESHOLDS
from trireme.launch.check import make_plans
from trireme.launch.explorer_side import polled_sync
from trireme.launch.stage import open_stage
from trireme.log import get_logger
from trireme.monitor.console import Console
from trireme.monitor.events import (
    Evaluated,
    Noted,
    RolloutDone,
    Saved,
    StepDone,
    Trained,
)
from trireme.sync.checkpoint import STATE_FILE


class Adder(Worker):
    async def add(self, one: int, other: int) -> int:
        if other < 0:
            raise ValueError("expected a number that is not negative")
        return one + other


def in_process(actor: Any) -> Any:
    """A handle like Ray's of an actor that lives in this process."""
    return SimpleNamespace(call=SimpleNamespace(remote=actor.call))


def test_a_part_elsewhere_returns_and_raises_what_it_does_there(tmp_path: Any) -> None:
    async def main() -> int:
        part = remote(Adder, in_process(Actor(Adder, str(tmp_path / "not_there"))))
        with pytest.raises(ValueError, match="expected a number"):
            await part.add(1, -1)
        return await part.add(1, 2)

    assert asyncio.run(main()) == 3


@pytest.mark.parametrize("here_already", [False, True])
def test_a_folder_that_a_part_made_for_a_while_goes_with_it(
    here_already: bool, tmp_path: Path
) -> None:
    root = tmp_path / "trireme-eval-1"

    class Writer(Worker):
        async def write(self) -> None:
            (root / "log").mkdir(parents=True)
            (root / "log" / "explorer.log").write_text("done\n")

    async def main() -> None:
        if here_already:
            root.mkdir()
        part = remote(Writer, in_process(Actor(Writer, str(tmp_path / "not_there"), str(root))))
        await part.write()
        assert (root / "log" / "explorer.log").exists()
        await part.stop()

    asyncio.run(main())
    assert root.exists() == here_already


def test_what_stands_for_a_part_can_be_copied() -> None:
    assert copy.copy(remote(Adder, None)) is not None


def test_a_side_answers_what_its_part_does_not() -> None:
    class Sided(SideWorker[Any]):
        async def own(self) -> str:
            return "part"

    async def both(part: SideWorker[Any]) -> list[str]:
        return [await part.method("own")(), await part.method("train")()]

    async def train() -> str:
        return "side"

    part = Sided()
    with pytest.raises(AssertionError, match="the side is not open yet"):
        part.method("train")
    part.side = SimpleNamespace(train=train, own=train)
    assert asyncio.run(both(part)) == ["part", "side"]


def test_a_side_in_an_actor_collects_garbage_rarely_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = SimpleNamespace(old_report=None, folder=JobFolder(tmp_path))
    monkeypatch.setattr("trireme.ext.ray.actors.open_stage", lambda *_: nullcontext(stage))
    plan = SimpleNamespace(engine=SimpleNamespace(urls=()))
    spec = SimpleNamespace(plan=plan, plugins=(), model_path="", old_report=None)

    async def main() -> tuple[int, ...]:
        part = TrainerWorker()
        await part._open(cast(Any, spec))
        meanwhile = gc.get_threshold()
        await part.stop()
        return meanwhile

    before = gc.get_threshold()
    assert asyncio.run(main()) == GC_THRESHOLDS
    assert gc.get_threshold() == before


def test_a_trainer_that_is_ended_finishes_the_checkpoint_that_is_being_written() -> None:
    async def main() -> list[str]:
        part, done = TrainerWorker(), list[str]()

        async def train() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await part._device.run(done.append, "saved")

        part.side = cast(Any, SimpleNamespace(train=train))
        call = asyncio.ensure_future(part.method("train")())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.wait_for(part.stop(), HANG_S)
        call.cancel()
        return done

    assert asyncio.run(main()) == ["saved"]


def test_a_push_gives_up_the_device_when_its_trainer_is_ended() -> None:
    async def main() -> list[str]:
        part, done, given_up = TrainerWorker(), list[str](), threading.Event()

        def send() -> None:  # as over HTTP: it waits for an answer, on the loop
            done.append("given up" if given_up.wait(HANG_S) else "the loop waited for the device")

        async def refresh() -> None:
            try:
                await part._device.run(send)
            finally:
                given_up.set()

        part.side = cast(Any, SimpleNamespace(refresh=refresh))
        call = asyncio.ensure_future(part.method("refresh")())
        await asyncio.sleep(0.05)
        await part.method("stop")()
        await asyncio.wait({call})
        return done

    assert asyncio.run(main()) == ["given up"]


@pytest.mark.extension("sql")
def test_a_trainer_that_fails_while_the_engines_load_is_no_earlier_attempts(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    store = {"name": "shared", "storage_type": "sql"}
    config["buffer"]["trainer_input"] = {"experience_buffer": store}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    [plan] = make_plans(load_config(path, ("mode=explore",)))

    async def main() -> None:
        device, listener = Device(1), Console(live=False)
        with open_stage(plan, plan.model_path, device, listener) as stage:
            specs: list[Any] = []

            async def call(name: str, spec: Any) -> None:
                specs.append(spec)

            actors = Actors(stage)
            actors._explorer = in_process(SimpleNamespace(call=call))
            write_json(stage.folder.root / STATE_FILE, {"trainer": "failed: no data", "step": 0})
            await actors._open()
            part = ExplorerWorker()
            sync = polled_sync(await part._open(specs[0]), cast(Any, SimpleNamespace(servers=None)))
            with pytest.raises(RuntimeError, match="has failed: no data"):
                _ = sync.finished
            await part.stop()
        device.close()

    asyncio.run(main())


def test_events_are_kept_until_they_were_heard_and_cross_whole() -> None:
    rollout = Experience([1, 2, 3], prompt_length=1, eid=EID(2, 4), reward=0.25)
    said = [
        Noted("first"),
        StepDone("trainer", 1, {"loss": 2}),
        Evaluated("eval", 1, {"x": 0.1}, [rollout]),
        RolloutDone(rollout),
        Trained(1, [rollout]),
        Saved(1),
    ]

    async def main() -> None:
        outbox = Outbox()
        for event in said:
            outbox.hear(event)
        first, step, evaluated, shown, saved = map(decode_event, await outbox.events(0, 5.0))
        assert (first, step, saved) == (said[0], said[1], said[5])
        assert evaluated == Evaluated("eval", 1, {"x": 0.1})  # the rollouts stay where they are
        assert isinstance(shown, RolloutDone) and shown.experience.eid == rollout.eid
        assert shown.experience.tokens.tolist() == [1, 2, 3] and shown.experience.reward == 0.25
        lost = await outbox.events(4, 5.0)
        assert lost == await outbox.events(4, 5.0)  # an answer that was lost takes nothing along
        waiting = asyncio.ensure_future(outbox.events(5, HANG_S))
        await asyncio.sleep(0)
        await asyncio.to_thread(outbox.hear, Noted("second"))  # as the stream's thread does
        assert list(map(decode_event, await waiting)) == [Noted("second")]
        assert await outbox.events(6, 0.0) == []

    asyncio.run(main())


def test_a_worker_s_warnings_reach_the_console_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker: SideWorker[Any] = SideWorker()
    stage: Any = SimpleNamespace(folder=JobFolder(tmp_path), plan=None, emit=None)
    worker._forward_warnings(stage)
    logger = get_logger("explorer")
    for part in range(5):
        logger.warning("2 of %d rollouts failed", part)
    logger.info("no line of the console")
    logger.error("the cause of the end, which the command says itself")

    class Handle:
        """Ray's, which can be a key."""

        class call:
            @staticmethod
            async def remote(name: str, *args: Any) -> Any:
                return await worker.method(name)(*args)

    asyncio.run(Actors(stage)._show(Handle, 0.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"warning: 2 of {part} rollouts failed" for part in range(2)]
    assert len(lines) == 3 and f"(more of these: {tmp_path}" in lines[2]
    asyncio.run(worker.stop())
    logger.warning("after the end")
    assert asyncio.run(worker._outbox.events(3, 0.0)) == []


class Cut(Exception):
    """An error that cannot be made anew of its `args`."""

    def __init__(self, page: str, reason: str) -> None:
        super().__init__(f"{page}: {reason}")


class Doubled(Exception):
    """An error that says its beginning twice when it is made anew."""

    def __init__(self, page: str) -> None:
        super().__init__(f"no page: {page}")


@pytest.mark.parametrize(
    ("raised", "heard"),
    [
        (ValueError(f"no page: {ALL}"), ValueError(f"no page: {ALL}")),
        (Cut("page", ALL), RuntimeError(f"Cut: page: {ALL}")),
        (Doubled(ALL), RuntimeError(f"Doubled: no page: {ALL}")),
        (OtherSideFailed("the explorer"), OtherSideFailed("the explorer")),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("by", ["call", "ping"])
def test_an_error_of_any_class_and_text_travels_as_a_value(
    raised: Exception, heard: Exception, by: str, tmp_path: Path
) -> None:
    """As an exception Ray would write it as UTF-8, where half a pair ends the worker."""

    class Failing(Worker):
        async def health(self) -> None:
            try:
                raise KeyError(ALL)
            except KeyError as cause:
                raise raised from cause

    async def main() -> None:
        actor: Any = Actor(Failing, str(tmp_path))
        reply = await (actor.call("health") if by == "call" else actor.ping())
        wire = pickle.loads(pickle.dumps(reply))
        done = asyncio.get_running_loop().create_future()
        done.set_result(wire)
        await answer(done)

    with pytest.raises(type(heard)) as caught:
        asyncio.run(main())
    assert type(caught.value) is type(heard) and str(caught.value) == str(heard)
    assert caught.value.__cause__ is None  # it would be taken for the other side's own error


def test_an_error_whose_class_is_not_here_says_what_it_said_there() -> None:
    with pytest.raises(RuntimeError, match=r"^Mine: no page$"):
        raise Failure(b"cnot_here_at_all\nMine\n.", "Mine: no page").error()


def test_actors_get_what_the_command_was_steered_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PYTORCH_", "OMP_")):
            monkeypatch.delenv(name)
    steered = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "HF_HOME": "/models"}
    steered["TOKENIZERS_PARALLELISM"] = "false"
    kept = {"CUDA_VISIBLE_DEVICES": "3", "VLLM_HOST_IP": "10.0.0.1", "VLLM_PORT": "9000"}
    kept |= {"HF_TOKEN": "secret", "VLLM_API_KEY": "secret", "HF_S3_SECRET": "secret"}
    for name, value in (steered | kept).items():
        monkeypatch.setenv(name, value)
    plan: Any = SimpleNamespace(device="cuda", places=SimpleNamespace(per_node=8, auxiliary=0))
    plan.sync = SimpleNamespace(takes_turns=False)
    trainer, engine = (environment_of(plan, trains=trains) for trains in (True, False))
    assert steered.items() <= trainer.items() and steered.items() <= engine.items()
    assert not kept.keys() & (trainer.keys() | engine.keys())
    assert trainer["TRIREME_PLACES"] == "8" and "OMP_NUM_THREADS" not in trainer
    assert trainer["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in engine  # vLLM's sleep does without it
    theirs = {"TMPDIR": "/fast", "OMP_NUM_THREADS": "2", "MY_KEY": "secret", "PYTHONPATH": "x"}
    plan.config = SimpleNamespace(explorer=SimpleNamespace(env_vars=theirs))
    explorer = environment_of(plan, trains=False, explores=True)
    assert (explorer["TMPDIR"], explorer["OMP_NUM_THREADS"]) == ("/fast", "2")
    assert "MY_KEY" not in explorer and explorer["PYTHONPATH"] == engine["PYTHONPATH"]
    assert explorer["CUDA_VISIBLE_DEVICES"] == ""  # else it sees the GPUs of all others
    theirs["CUDA_VISIBLE_DEVICES"] = "7"
    assert environment_of(plan, trains=False, explores=True)["CUDA_VISIBLE_DEVICES"] == "7"
    del theirs["CUDA_VISIBLE_DEVICES"]
    plan.places.auxiliary = 1  # of which Ray says the number
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(plan, trains=False, explores=True)
    plan.sync.takes_turns = True  # its memory is lent to the engine beside it
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment_of(plan, trains=True)
    plan.device = "cpu"
    assert environment_of(plan, trains=True)["OMP_NUM_THREADS"] == "1"


def test_folders_of_modules_are_those_of_the_command_wherever_a_process_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("src", ".", "/elsewhere", "")))
    here = str(Path.cwd())
    found = ray_cluster.python_path().split(os.pathsep)
    assert found[:3] == [here, f"{here}/src", "/elsewhere"] and all(map(os.path.isabs, found))


def test_an_actor_has_its_share_of_its_own_machines_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may be given on a machine with fewer."""
    found: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRIREME_PLACES", raising=False)
    ray_remote.share_cores()
    assert not found and os.environ["OMP_NUM_THREADS"] == "1"
    for places, threads in (("8", 4), ("64", 1)):
        monkeypatch.setenv("TRIREME_PLACES", places)
        ray_remote.share_cores()
        assert found.pop() == threads and os.environ["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("ranks", "auxiliary", "engines", "size", "turns", "bundles"),
    [
        (4, 0, 2, 2, False, [4, 2, 2]),
        (16, 1, 3, 2, False, [8, 8, 1, 2, 2, 2]),
        (0, 1, 2, 1, False, [1, 1, 1]),
        (2, 0, 2, 1, True, [1, 1]),
        (0, 0, 0, 1, False, None),
    ],
)
def test_all_places_of_a_run_are_reserved_at_once(
    ranks: int,
    auxiliary: int,
    engines: int,
    size: int,
    turns: bool,
    bundles: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs that start together could else hold half of their places each, and both fail."""
    made: list[tuple[list[float], str]] = []

    def group(bundles: list[dict[str, float]], strategy: str) -> object:
        made.append(([bundle["GPU"] for bundle in bundles], strategy))
        return SimpleNamespace(id=None)

    monkeypatch.setattr(ray_cluster, "placement_group", group)
    places = SimpleNamespace(
        trainer_ranks=ranks, per_node=8, auxiliary=auxiliary, num_engines=engines, engine_size=size
    )
    plan: Any = SimpleNamespace(device="cuda", places=places)
    plan.engine, plan.sync = SimpleNamespace(urls=()), SimpleNamespace(takes_turns=turns)
    reserved = ray_cluster.Reservation(plan)
    assert made == ([(bundles, "STRICT_PACK" if turns else "PACK")] if bundles else [])
    if bundles is None:
        assert reserved.explorer() == {"num_cpus": 0}
        return

    def at(options: dict[str, Any]) -> tuple[int, float]:
        strategy = options["scheduling_strategy"]
        return strategy.placement_group_bundle_index, options["num_gpus"]

    share = 0.5 if turns else 1
    if ranks:
        assert [at(reserved.rank(n)) for n in (0, ranks - 1)] == [
            (0, share),
            ((ranks - 1) // 8 if not turns else ranks - 1, share),
        ]
    found = [at(reserved.engine(n)) for n in range(engines)]
    first = 0 if turns else len(bundles) - engines
    assert found == [(first + n, 0.5 if turns else size) for n in range(engines)]
    expected = (first - 1, 1) if auxiliary else (0, 0)
    assert at(reserved.explorer()) == expected


def test_a_process_that_is_in_a_cluster_counts_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"GPU": 4.0}, "NodeID": "a"},
        {"Alive": True, "Resources": {"CPU": 4.0}, "NodeID": "b"},
        {"Alive": False, "Resources": {"GPU": 8.0}, "NodeID": "c"},
    ]
    asked: list[list[str]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("the cluster is not ours to leave"))
    monkeypatch.setattr(ray_cluster, "_memory_of", lambda nodes: asked.append(nodes) or 2**34)
    named = ClusterConfig.model_validate({"ray_address": "10.0.0.1:6379"})
    assert gpus_of(named) == Gpus(4, 2**34)
    assert asked == [["a"]]


@pytest.mark.parametrize(
    ("there", "engine", "may_grow", "limit"),
    [
        (1, 1, False, "0.1"),
        (1, 1, True, "0.3"),
        (2, 1, False, None),
        (2, 1, True, None),
        (4, 2, True, "0.3"),
    ],
)
def test_places_that_the_cluster_has_are_waited_for_and_lacking_ones_briefly(
    there: int,
    engine: int,
    may_grow: bool,
    limit: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Two CPUs that another run holds for more than half a second: both limits are shorter."""
    looks: list[float] = []

    def wait(seconds: float) -> bool:
        time.sleep(0.01)
        looks.append(seconds)
        return len(looks) > 60

    group = SimpleNamespace(bundle_specs=[{"CPU": 1}, {"CPU": engine}], wait=wait)
    monkeypatch.setattr(ray_cluster, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(ray_cluster, "OWN_S", 0.1)
    monkeypatch.setattr(ray_cluster, "JOIN_S", 0.3)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": there})
    machine = {"Alive": True, "Resources": {"CPU": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [machine] * there)
    places = SimpleNamespace(
        trainer_ranks=1,
        per_node=2,
        auxiliary=0,
        num_engines=1,
        engine_size=engine,
        total=2,
        nodes=1,
    )
    plan: Any = SimpleNamespace(device="cpu", places=places)
    plan.engine, plan.sync = SimpleNamespace(urls=()), SimpleNamespace(takes_turns=False)
    plan.config = SimpleNamespace(cluster=ClusterConfig(start_timeout=HANG_S))
    ready = ray_cluster.Reservation(plan).ready(may_grow=may_grow, note=print)
    if limit is None:
        asyncio.run(ready)
        return
    apart = "; 2 have to be on one machine, and the largest has 1" if engine > 1 else ""
    own = ""
    if there == 4:  # Ray's file named the cluster, which another run may have started
        file = named_by_file(tmp_path, monkeypatch, "127.0.0.1:6379")
        own = f"; {file} names this cluster, and cluster.ray_address local starts one of the run's"
    said = rf"has {there} CPUs on {there} machines, {there} of them free{apart} after {limit} s"
    with pytest.raises(RuntimeError, match=f"{said}{own}" if own else f"{said}$"):
        asyncio.run(ready)


def test_a_heartbeat_counts_no_time_in_which_this_process_did_not_run(tmp_path: Path) -> None:
    async def ping() -> dict[str, Any]:
        time.sleep(0.5)  # of the loop that waits: the machine was suspended
        await asyncio.sleep(0.02)
        return {"pid": 1, "node": "here"}

    handle = SimpleNamespace(ping=SimpleNamespace(remote=ping))
    asyncio.run(Watched("trainer", handle, tmp_path / "trainer.log").beat(0.3))


@pytest.mark.parametrize(
    ("dies", "kept", "named"),
    [
        ("engine_0", False, "engine_0 has died: CUDA error; its log is"),
        ("engine_0", True, None),  # it is started again
        ("explorer", False, "explorer has died: CUDA error; its log is"),
        ("explorer", True, "explorer has died: CUDA error; its log is"),
    ],
)
def test_who_dies_ends_the_work_but_for_an_engine_that_is_started_again(
    tmp_path: Path, dies: str, kept: bool, named: str | None
) -> None:
    def worker(name: str) -> Watched:
        async def ping() -> dict[str, Any]:
            if name == dies and met:
                raise RuntimeError("CUDA error")
            return {"pid": 1, "node": "here"}

        handle = SimpleNamespace(ping=SimpleNamespace(remote=ping))
        return Watched(name, handle, tmp_path / f"{name}.log")

    met: list[bool] = []
    cluster = ClusterConfig(heartbeat_timeout=0.3, start_timeout=10.0)
    stage: Any = SimpleNamespace(plan=SimpleNamespace(config=SimpleNamespace(cluster=cluster)))
    actors: Any = Actors(stage)
    actors._watched = [worker(name) for name in ("engine_0", "trainer", "explorer")]
    actors._engines = [SimpleNamespace(name="engine_0")]

    async def work() -> str:
        while not all(each.pid for each in actors._watched[int(kept) :]):
            await asyncio.sleep(0.01)
        met.append(True)
        await asyncio.sleep(600 if named else 0.5)
        return "done"

    async def main() -> str:
        return await asyncio.wait_for(actors._guarded(work(), kept=kept), HANG_S)

    if named:
        with pytest.raises(RuntimeError, match=named):
            asyncio.run(main())
    else:
        assert asyncio.run(main()) == "done"


def test_a_head_that_does_not_answer_for_a_while_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is back in time is not."""
    monkeypatch.setattr(ray_cluster, "HEAD_S", 0.9)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    came = []

    async def go() -> None:
        async with await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0
        ) as s:
            port = s.sockets[0].getsockname()[1]
        where = SimpleNamespace(gcs_address=f"127.0.0.1:{port}")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: where)
        assert isinstance(await ray_cluster.headless(), ray_cluster.HeadGone)
        watched = asyncio.ensure_future(ray_cluster.watch_head())
        await asyncio.sleep(0.5)

        async def hear(_: Any, writer: asyncio.StreamWriter) -> None:
            came.append(1)
            writer.close()

        async with await asyncio.start_server(hear, "127.0.0.1", port):
            await asyncio.sleep(0.7)
            assert came and not watched.done() and await ray_cluster.headless() is None
        said = f"cluster at 127.0.0.1:{port} does not answer any more: .* give the same command"
        with pytest.raises(ray_cluster.HeadGone, match=said):
            await asyncio.wait_for(watched, HANG_S)

    asyncio.run(go())
