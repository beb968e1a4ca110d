"""Remote: workers in other processes: their methods, what they report, and whether they live.

- `Actor` is the one actor class. A worker is a plain async class, made empty, so that all processes
  start side by side, and gets its plan by a call. Ray gives each concurrency group an event loop of
  its own; a worker is not made for several. So its work runs on one loop in a thread of ours, and
  Ray's loops only hand calls over and wait. The heartbeat (`ping`) waits for no call.
- `remote` stands for a worker in another process and has its type: a method's name becomes a text
  here alone, where it enters the wire. What a method raises travels as a value (`Failure`).
- `Reports` keeps what a worker says until the command has it: a call whose answer is lost takes
  nothing with it.
- `watch` sees within the heartbeat's time-out that a worker died; `who_died` says which and why.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from trireme.aio import first_failure
from trireme.experience import Experience
from trireme.log import get_logger
from trireme.serialize import encode

T = TypeVar("T")
Event = tuple[Any, ...]
"""A method of Console, and what it is called with."""


class Worker:
    """What runs in an actor."""

    def method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The async method that a call from elsewhere names."""
        return getattr(self, name)

    async def health(self) -> None:
        """Raise RuntimeError where something that belongs to the worker has ended."""

    async def stop(self) -> None:
        """Let go of what is held."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process.

    Ray writes its own form of one as UTF-8, and ends the worker whose error holds half a surrogate
    pair; one that cannot be made anew of its `args` is Ray's error on the other side.
    """

    pickled: bytes
    text: str

    @staticmethod
    def of(error: Exception) -> Failure:
        """The error, as far as it can be read again."""
        text = f"{type(error).__name__}: {error}"
        try:
            data = pickle.dumps(error)
            again = pickle.loads(data)
        except Exception:
            return Failure(b"", text)
        same = type(again) is type(error) and str(again) == str(error)
        return Failure(data if same else b"", text)

    def error(self) -> Exception:
        """What was raised, or a RuntimeError that says it."""
        try:
            return pickle.loads(self.pickled)
        except Exception:  # its class is not here, or could not be made anew there
            return RuntimeError(self.text)


class Actor:
    """One worker in a process of its own."""

    def __init__(self, worker: type[Worker], folder: str, scratch: str | None = None) -> None:
        """`folder`: where the command was given, to which the YAML's paths are relative. `scratch`:
        a folder that goes when the worker stops, unless it is here already: the command's own.
        """
        with suppress(FileNotFoundError):  # another machine may lack it, and need it for nothing
            os.chdir(folder)
        self._scratch = scratch if scratch and not Path(scratch).exists() else None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="worker", daemon=True).start()
        self._worker = worker()

    @ray.method(concurrency_group="calls")
    async def call(self, name: str, *args: Any) -> Any:
        """What the worker's method returns, or the Failure that it raises."""
        try:
            work = self._worker.method(name)(*args)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except Exception as error:
            return Failure.of(error)
        finally:
            if name == "stop" and self._scratch:
                # another worker of this machine may be at it too: what one finds gone is no error
                await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    @ray.method(concurrency_group="beat")
    async def ping(self) -> dict[str, Any] | Failure:
        """Where this process is, or what the worker says is wrong with it."""
        try:
            await self._worker.health()
        except Exception as error:
            return Failure.of(error)
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}


_actor: Any = ray.remote
# calls that wait for an engine's end, one an engine, must leave room for others
RayActor: Any = _actor(concurrency_groups={"calls": 1000, "beat": 4})(Actor)


class _Remote:
    """What stands for a worker in another process: its async methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_"):  # Python's own questions, such as how to copy this
            raise AttributeError(name)
        return lambda *args: answer(self._handle.call.remote(name, *args))


def remote(worker: type[T], handle: Any) -> T:
    """The worker in this actor; its async methods raise here what they raised there."""
    return cast(T, _Remote(handle))


async def answer(reference: Any) -> Any:
    """What a call came to."""
    result = await reference
    if isinstance(result, Failure):
        raise result.error()
    return result


class Reports:
    """A console in another process than the run's. What is said is heard in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._heard = 0
        self._new = asyncio.Event()

    def note(self, text: str) -> None:
        """See Console."""
        self._add("note", text)

    def step(self, part: str, step: int, metrics: Mapping[str, float]) -> None:
        """See Console."""
        self._add("step", part, step, {key: float(value) for key, value in metrics.items()})

    def rollout(self, experience: Experience) -> None:
        """See Console; the experience travels as bytes."""
        self._add("rollout", encode([experience]))

    async def events(self, heard: int, wait: float) -> list[Event]:
        """All but the first `heard` that were said; waits for one, `wait` seconds at most."""
        del self._events[: heard - self._heard]
        self._heard = heard
        if not self._events and wait:
            self._new.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._new.wait(), wait)
        return list(self._events)

    def _add(self, *event: Any) -> None:
        self._events.append(event)
        self._new.set()


logger = get_logger("launcher")

BEATS = 6
"""Heartbeats in a time-out."""
LOOK_S = 3.0
"""Seconds in which a failure's consequences come in, and who is gone can be told."""


class WorkerDied(RuntimeError):
    """A process of the run is gone."""


@dataclass
class Watched:
    """A worker, and what people know it by."""

    name: str
    handle: Any
    """Ray's, of its actor."""
    log: Path
    node: str = ""
    pid: int = 0
    out_of_reach: bool = False
    """Its process or machine does not answer at all; Ray has not said yet that it is dead."""

    async def meet(self) -> None:
        """Learn where it runs."""
        whereabouts = await self._ping()
        self.node, self.pid = whereabouts["node"], whereabouts["pid"]
        logger.info("%s: process %d on node %s", self.name, self.pid, self.node)

    async def beat(self, timeout: float) -> None:
        """One heartbeat. Raises WorkerDied."""
        try:
            await asyncio.wait_for(self._ping(), timeout)
        except TimeoutError:
            reason = f"it has not answered for {timeout:g} s (cluster.heartbeat_timeout)"
        except RayActorError as error:
            reason = self._reason(error)
        except RuntimeError as error:
            reason = str(error).partition("; the end of ")[0]
        else:
            return
        raise WorkerDied(f"{self.name} has died: {reason}; its log is {self.log}")

    async def _ping(self) -> dict[str, Any]:
        """An answer; what cannot be reached for a moment is asked again."""
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
            return f"its machine {lost[0]['NodeManagerAddress']} is lost"
        if "running low on memory" in str(error):
            return f"process {self.pid} was ended for want of memory"
        return f"process {self.pid} is gone"


async def meet_all(workers: Sequence[Watched]) -> None:
    """Learn where those run that have not said it yet."""
    await asyncio.gather(*(worker.meet() for worker in workers if not worker.pid))


async def watch(workers: Sequence[Watched], timeout: float) -> None:
    """For ever; raises WorkerDied for the first that has."""

    async def one(worker: Watched) -> None:
        while True:
            await worker.beat(timeout)
            await asyncio.sleep(timeout / BEATS)

    if not workers:  # a server of agents whose engines are started again watches none
        await asyncio.Event().wait()
    await first_failure(*(one(worker) for worker in workers))


async def who_died(workers: Sequence[Watched], timeout: float) -> WorkerDied | None:
    """The workers that are gone, in one sentence. Who is only busy for LOOK_S is not.

    Of who is out of reach Ray has to say within `timeout` whether it is dead.
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
