"""Remote: calls workers in other processes, collects their events, and watches whether they live.

- `Actor` is the one actor class. A worker is a plain async class, made empty, so that all processes
  start concurrently, and gets its plan by a call. Ray gives each concurrency group its own event
  loop, while a worker expects a single one. So its work runs on one loop in a thread of ours, and
  Ray's loops only pass calls on and wait. The heartbeat (`ping`) waits for no call.
- `remote` stands for a worker in another process and has its type: a method's name becomes a text
  only here, where it is sent. Errors of a method are sent as values (`Failure`).
- `Outbox` stores the events of a worker's stream until the command has them: a lost answer loses no
  events.
- `watch` notices within the heartbeat's time-out that a worker died; `who_died` names it and the
  cause.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from trireme.aio import first_failure
from trireme.ext.ray.cluster import headless
from trireme.log import get_logger
from trireme.machine import cores
from trireme.monitor.events import (
    Ended,
    Evaluated,
    Event,
    Noted,
    RolloutDone,
    Saved,
    StepDone,
    light,
)
from trireme.serialize import decode, encode

T = TypeVar("T")


class Worker:
    """The base of objects that run in an actor."""

    def method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the async method that a remote call names."""
        return getattr(self, name)

    async def health(self) -> None:
        """Raise RuntimeError if something that belongs to the worker has ended."""

    async def stop(self) -> None:
        """Release the worker's resources."""


@dataclass(frozen=True)
class Failure:
    """An exception in the form in which it is sent to another process.

    Ray encodes its own form as UTF-8, and ends the worker whose error contains half a surrogate
    pair; an error that cannot be made from its `args` becomes Ray's error on the other side.
    """

    pickled: bytes
    text: str

    @staticmethod
    def of(error: Exception) -> Failure:
        """Convert the error, as far as it can be read again."""
        text = f"{type(error).__name__}: {error}"
        try:
            data = pickle.dumps(error)
            again = pickle.loads(data)
        except Exception:
            return Failure(b"", text)
        same = type(again) is type(error) and str(again) == str(error)
        return Failure(data if same else b"", text)

    def error(self) -> Exception:
        """Return the exception that was raised, or a RuntimeError with its text."""
        try:
            return pickle.loads(self.pickled)
        except Exception:  # its class is missing here, or could not be made there
            return RuntimeError(self.text)


PLACES = "TRIREME_PLACES"
"""The variable with the number of places of a machine, among which its cores are divided."""


def share_cores() -> None:
    """Set this process's threads, and those of its children, to its share of this machine's cores:
    the command's machine may have others. Without PLACES it has been set.
    """
    if not (places := os.environ.get(PLACES)):
        return
    threads = max(cores() // int(places), 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray's own is 1 for each place
    if (torch := sys.modules.get("torch")) is not None:  # which has read it already
        torch.set_num_threads(threads)


class Actor:
    """One worker in a separate process."""

    def __init__(self, worker: type[Worker], folder: str, scratch: str | None = None) -> None:
        """`folder`: the command's working directory, to which the YAML's paths are relative.
        `scratch`: a folder that is deleted when the worker stops, unless it exists already: the
        command's own.
        """
        with suppress(FileNotFoundError):  # another machine may lack it, and need it for nothing
            os.chdir(folder)
        share_cores()
        self._scratch = scratch if scratch and not Path(scratch).exists() else None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="worker", daemon=True).start()
        self._worker = worker()

    @ray.method(concurrency_group="calls")
    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of the worker, and return its result or the Failure that it raised."""
        try:
            work = self._worker.method(name)(*args)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except Exception as error:
            return Failure.of(error)
        finally:
            if name == "stop" and self._scratch:
                # another worker of this machine may delete it too: missing files are no error
                await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    @ray.method(concurrency_group="beat")
    async def ping(self) -> dict[str, Any] | Failure:
        """Return this process's id and node, or the Failure that the health check raised."""
        try:
            await self._worker.health()
        except Exception as error:
            return Failure.of(error)
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}


_actor: Any = ray.remote
# calls that wait for an engine's end, one an engine, must leave room for others
RayActor: Any = _actor(concurrency_groups={"calls": 1000, "beat": 4})(Actor)


class _Remote:
    """A proxy of a worker in another process, with its async methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):  # Python's own questions, such as how to copy this
            raise AttributeError(name)
        return lambda *args: answer(self._handle.call.remote(name, *args))


def remote(worker: type[T], handle: Any) -> T:
    """Return a proxy of the worker in this actor; its async methods raise the worker's errors."""
    return cast(T, _Remote(handle))


async def answer(reference: Any) -> Any:
    """Await a call's result. Raises the exception that it failed with."""
    result = await reference
    if isinstance(result, Failure):
        raise result.error()
    return result


class Outbox:
    """A listener that stores the events of a worker's stream until the run's process has them."""

    name = "the run's process"

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._heard = 0
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def hear(self, event: Event) -> None:
        """Store an event that may cross to another process; each is encoded once."""
        crosses = light(event)
        if crosses is None or isinstance(event, Ended):  # the run emits its own end
            return
        self._keep(encode_event(crosses))

    def warn(self, text: str) -> None:
        """Store a line for the run's console."""
        self._keep(encode_event(Warned(text)))

    def _keep(self, encoded: bytes) -> None:
        self._kept.append(encoded)
        if (waiting := self._waiting) is not None:
            loop, new = waiting
            with suppress(RuntimeError):  # the worker's loop has ended
                loop.call_soon_threadsafe(new.set)

    async def events(self, heard: int, wait: float) -> list[bytes]:
        """Return all events after the first `heard`, in order; wait up to `wait`
        seconds for one.
        """
        del self._kept[: heard - self._heard]
        self._heard = heard
        new = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), new
        if not self._kept and wait:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(new.wait(), wait)
        return list(self._kept)


@dataclass(frozen=True)
class Warned:
    """A worker's warning, as the console of one process shows it."""

    text: str


_EVENTS = {kind.__name__: kind for kind in (Noted, StepDone, Evaluated, RolloutDone, Saved, Warned)}


def encode_event(event: Event | Warned) -> bytes:
    """Encode an event as a line of JSON, with its experience if it has one."""
    fields, data = dict(vars(event)), b""
    fields.pop("rollouts", None)
    if "metrics" in fields:
        fields["metrics"] = {name: float(value) for name, value in fields["metrics"].items()}
    if isinstance(event, RolloutDone):
        data = encode([fields.pop("experience")])
    return json.dumps([type(event).__name__, fields]).encode() + b"\n" + data


def decode_event(encoded: bytes) -> Event | Warned:
    """Decode the event that `encode_event` wrote."""
    line, _, data = encoded.partition(b"\n")
    kind, fields = json.loads(line)
    if data:
        fields["experience"] = decode(data)[0]
    return _EVENTS[kind](**fields)


logger = get_logger("launcher")

BEATS = 6
"""Heartbeats in a time-out."""
LOOK_S = 3.0
"""Seconds in which a failure's consequences arrive, and the lost worker can be identified."""


class WorkerDied(RuntimeError):
    """A process of the run is gone."""


@dataclass
class Watched:
    """A worker, and the name that people know."""

    name: str
    handle: Any
    """Ray's, of its actor."""
    log: Path
    node: str = ""
    pid: int = 0
    out_of_reach: bool = False
    """Whether its process or machine does not answer at all; Ray has not confirmed yet that it is
    dead."""

    async def meet(self) -> None:
        """Find its machine and process."""
        whereabouts = await self._ping()
        self.node, self.pid = whereabouts["node"], whereabouts["pid"]
        logger.info("%s: process %d on node %s", self.name, self.pid, self.node)

    async def beat(self, timeout: float) -> None:
        """Send one heartbeat. Raises WorkerDied.

        The time-out is waited for in parts, of which each counts once: a suspended machine, where
        this process did not run either, uses up one of them.
        """
        ping = asyncio.ensure_future(self._ping())
        try:
            for _ in range(BEATS):
                await asyncio.wait([ping], timeout=timeout / BEATS)
                if ping.done():
                    break
            else:
                raise TimeoutError
            ping.result()
        except TimeoutError:
            reason = f"it has not answered for {timeout:g} s (cluster.heartbeat_timeout)"
        except RayActorError as error:
            if (gone := await headless()) is not None:  # Ray would wait for it to say the reason
                raise gone from error
            reason = self._reason(error)
        except RuntimeError as error:
            reason = str(error).partition("; the end of ")[0]
        else:
            return
        finally:
            ping.cancel()
        raise WorkerDied(f"{self.name} has died: {reason}; its log is {self.log}")

    async def _ping(self) -> dict[str, Any]:
        """Return an answer, retrying while the worker is briefly unreachable."""
        while True:
            try:
                pong = await answer(self.handle.ping.remote())
                self.out_of_reach = False
                return pong
            except ActorUnavailableError:
                self.out_of_reach = True
                await asyncio.sleep(0.5)

    def _reason(self, error: RayActorError) -> str:
        if not self.pid:
            return f"it could not start: {str(error).strip().splitlines()[-1]}"
        lost = [node for node in ray.nodes() if node["NodeID"] == self.node and not node["Alive"]]
        if lost:
            return f"its machine {lost[0]['NodeManagerAddress']} is gone"
        if "running low on memory" in str(error):
            return f"process {self.pid} was killed because the machine ran out of memory"
        return f"process {self.pid} is gone"


async def meet_all(workers: Sequence[Watched]) -> None:
    """Find the places of workers that have not reported theirs yet."""
    await asyncio.gather(*(worker.meet() for worker in workers if not worker.pid))


async def watch(workers: Sequence[Watched], timeout: float) -> None:
    """Watch the workers without end. Raises WorkerDied for the first one that dies."""

    async def one(worker: Watched) -> None:
        while True:
            await worker.beat(timeout)
            await asyncio.sleep(timeout / BEATS)

    if not workers:  # a server of agents whose engines can be restarted watches none
        await asyncio.Event().wait()
    await first_failure(*(one(worker) for worker in workers))


async def who_died(workers: Sequence[Watched], timeout: float) -> WorkerDied | None:
    """Name the workers that are gone, in one sentence. A worker that is merely busy for LOOK_S does
    not count.

    For an unreachable one, wait up to `timeout` for Ray's verdict.
    """
    if not workers:
        return None
    beats = [asyncio.ensure_future(worker.beat(timeout)) for worker in workers]
    await asyncio.wait(beats, timeout=LOOK_S)
    late = [beat for worker, beat in zip(workers, beats, strict=True) if worker.out_of_reach]
    if late:
        await asyncio.wait(late)
    for beat in beats:
        beat.cancel()
    ends = await asyncio.gather(*beats, return_exceptions=True)
    dead = [error for error in ends if isinstance(error, WorkerDied)]
    return WorkerDied("; ".join(map(str, dead))) if dead else None
