"""Engine host: starts the engine processes of a plan, each behind its own server.

- A host starts one process, waits until it serves, watches it and ends it. It knows nothing of a
  run: the local launcher and Ray's actors use it alike. The process ends when this one does,
  whatever the cause: it reads our end of a pipe. Every wait has a time-out; errors name the engine
  and quote the end of its log.
- A keeper restarts an engine that dies during a run, at its old address or, on Ray, wherever there
  is room, at most `cluster.engine_restarts` times; after that its failure ends the run. A restarted
  engine generates only once it has the run's weights, pushed and verified by the run's own sync
  method. Its requests are sent again, see servers.py: no rollout is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from trireme.aio import running
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.engine_kind import SERVER, kind_named, size_of
from trireme.config.lookup import plugin_files
from trireme.engines.make import EngineSpec
from trireme.ext.remote.engine import RemoteEngine
from trireme.ext.remote.pairs import EnginePairs
from trireme.files import for_appending
from trireme.launch.engines import engine_spec
from trireme.log import get_logger
from trireme.registry import PROGRAMS
from trireme.trainer.backend import Backend
from trireme.trainer.lora import Part


def _program() -> str:
    """Return the module that serves an engine as a program. Raises ValueError if it is not
    installed.
    """
    return PROGRAMS.get(SERVER).__module__


def engine_plugins(plan: Plan) -> list[str]:
    """List the plug-in files that a process of the plan's engine loads first; empty for a built-in
    engine.
    """
    if type(kind_named(plan.engine.kind)).__module__.startswith("trireme."):
        return []
    return [str(file.resolve()) for file in plugin_files(plan.config.plugins)]


def engine_hosts(plan: Plan, model_path: str) -> list[EngineHost]:
    """Make the hosts that the local launcher starts, all with one key; empty: the engine is
    embedded.
    """
    log_folder = JobFolder(plan.job_dir, plan.explorer_name).log
    key = plan.config.explorer.rollout_model.api_key or secrets.token_hex(16)
    first_port = plan.config.explorer.rollout_model.base_port
    return [
        EngineHost(
            engine_spec(plan, model_path),
            name=f"{plan.engine.kind} engine {index + 1} of {plan.engine.hosts}",
            log_file=log_folder / f"engine_{index}.log",
            python=plan.engine.python or sys.executable,
            port=0 if first_port is None else first_port + index,
            key=key,
            environment=_devices(plan, index),
            plugins=engine_plugins(plan),
        )
        for index in range(plan.engine.hosts)
    ]


def _devices(plan: Plan, index: int) -> dict[str, str]:
    """Assign an engine's GPUs: the trainer, if any, has the first ones, the engines those after
    them.
    """
    if plan.device != "cuda":
        return {}
    rollout = plan.config.explorer.rollout_model
    size = size_of(rollout)
    begin = (plan.mode == "both" and not plan.sync.takes_turns) + index * size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(begin + size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[begin : begin + size])}


logger = get_logger("launcher")

DYING_S = 0.5
"""A caller of a dying process sees the error this long before the process has ended."""
T = TypeVar("T")


class Kept(Protocol):
    """An engine that can be restarted: see EngineHost, and EngineActor on Ray."""

    name: str

    @property
    def url(self) -> str:
        """Return the engine's address."""
        ...

    def start(self) -> None:
        """Begin to load."""
        ...

    async def ready(self) -> str:
        """Wait until the engine serves; returns its address."""
        ...

    async def examine(self) -> None:
        """Raise RuntimeError if the engine has ended."""
        ...

    async def watch(self) -> None:
        """Wait until the engine is gone; then raise RuntimeError."""
        ...

    async def stop(self, grace: float) -> None:
        """End the engine."""
        ...


class KnownServers(Protocol):
    """The callers of the engines, which are notified when one ends: see Servers, and ServersOfSides
    on Ray.
    """

    async def lose(self, url: str) -> None:
        """Report that the server has ended."""
        ...

    async def loss(self, url: str) -> RuntimeError:
        """Return the reason why the server cannot be called, if there is one."""
        ...

    async def again(self, index: int, new_url: str) -> None:
        """Report that engine `index` was restarted. By index, since a failed attempt may have
        announced its address to some sides and not to others.
        """
        ...

    async def hold_devices(self) -> None:
        """Keep a trainer that shares the engines' devices off them, until `release_devices`."""
        ...

    async def release_devices(self) -> None:
        """Let the trainer have them again."""
        ...

    async def keep_complete(self) -> None:
        """Push the run's weights to it."""
        ...


class EngineKeeper:
    """A supervisor over all engines of a run."""

    def __init__(self, hosts: Sequence[Kept], servers: KnownServers, *, restarts: int) -> None:
        self._hosts = hosts
        self._servers = servers
        self._restarts = restarts

    async def run(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; if an engine is lost for good, cancel it and raise the
        engine's error.
        """
        keeping = (*map(self._keep, range(len(self._hosts))), self._servers.keep_complete())
        async with running(work, *keeping) as (task, *keepers):
            await asyncio.wait({task, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.exception() is not None:
                await asyncio.sleep(DYING_S)
                for host in self._hosts:  # an engine's end is the cause, if there was one
                    if not self._restarts:
                        await host.examine()
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()
            return await task

    async def _keep(self, index: int) -> None:
        """Restart an engine whenever it ends. Raises RuntimeError at the limit of restarts."""
        host = self._hosts[index]
        for done in range(self._restarts + 1):
            end = await self._end_of(index, again=done > 0)
            what, _, rest = str(end).partition("; ")
            if done == self._restarts:
                limit = f", and cluster.engine_restarts ({done}) is used up" if done else ""
                raise RuntimeError(f"{what}{limit}; {rest}" if rest else what + limit) from end
            logger.warning("%s: it is started again (%d of %d)", what, done + 1, self._restarts)
            await self._servers.lose(host.url)

    async def _end_of(self, index: int, *, again: bool) -> Exception:
        """Start it as attempt `again`, and return why it ended, as seen here or by its callers."""
        host = self._hosts[index]
        try:
            if again:
                await host.stop(grace=0)
                await self._servers.hold_devices()
                try:
                    host.start()
                    await self._servers.again(index, await host.ready())
                finally:
                    await self._servers.release_devices()
            async with running(host.watch(), self._servers.loss(host.url)) as (looks, loss):
                await asyncio.wait({looks, loss}, return_when=asyncio.FIRST_COMPLETED)
                if looks.done():
                    looks.result()
                await asyncio.sleep(DYING_S)
                await host.examine()
                return RuntimeError(f"{host.name}: {loss.result()}")
        except (RuntimeError, TimeoutError) as error:
            return error


def restarts_of(plan: Plan) -> int:
    """Return how often each engine is restarted; 0 for bench, whose weights come by no sync."""
    return 0 if plan.mode == "bench" else plan.config.cluster.engine_restarts


START_S = 600.0
"""Seconds that an engine may take to load its model."""
STOP_S = 20.0
LOOK_S = 2.0
"""Seconds between health checks of a serving engine."""
SILENT_S = 25.0
"""Seconds that a health check may stay unanswered."""
LOG_LINES = 6
ROOT = Path(__file__).parents[2]


class EngineHost:
    """One engine process."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str,
        log_file: Path,
        python: str = sys.executable,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        **serving: Any,
    ) -> None:
        """`python`: an interpreter with the engine's packages; Trireme is put on its path.

        `port` 0: any free port; `key`: the key that clients must send; `environment`: added to this
        process's environment; `serving`: further settings of its program.
        """
        self.name = name
        self.key = key
        self._log_file = log_file
        self._settings = {
            "spec": json.loads(spec.to_json()),
            "host": host,
            "port": port,
            "key": self.key,
            "threads": threads,
            **serving,
        }
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = -1
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Return the address; known once the engine serves."""
        assert self._url is not None, f"{self.name} does not serve yet"
        return self._url

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._answer, theirs = os.pipe()
        os.set_blocking(self._answer, False)
        with for_appending(self._log_file) as log:
            self._process = subprocess.Popen(
                [self._python, "-m", _program(), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                env=self._environment,
                start_new_session=True,  # Ctrl-C is ours to handle; its workers end with it
            )
        os.close(theirs)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended already: `ready` reports it

    async def ready(self, timeout: float = START_S) -> str:
        """Wait for the engine's address. Raises RuntimeError if it failed, TimeoutError if it is
        late.
        """
        deadline = time.monotonic() + timeout
        said = b""
        while not said.endswith(b"\n"):
            said += self._read()
            if not said.endswith(b"\n"):
                await self.examine()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self.name} did not serve in {timeout:g} s{self._log_tail()}"
                    )
                await asyncio.sleep(0.1)
        reply = json.loads(said)
        if "error" in reply:
            raise RuntimeError(f"{self.name} cannot start: {reply['error']}{self._log_tail()}")
        self._url = reply["url"]
        self._settings["port"] = httpx.URL(self.url).port  # a restart uses the same address
        return self.url

    async def examine(self) -> None:
        """Raise RuntimeError if the process has ended."""
        assert self._process is not None, f"{self.name} was not started"
        code = self._process.poll()
        if code is not None:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise RuntimeError(f"{self.name} has ended {how}{self._log_tail()}")

    async def watch(self) -> None:
        """Watch the engine until it ends, fails or stays silent, then raise RuntimeError. Never
        returns.
        """
        answered = time.monotonic()
        async with httpx.AsyncClient(timeout=SILENT_S / 2) as client:
            while True:
                await self.examine()
                try:
                    response = await client.get(f"{self.url}/health")
                    answered = time.monotonic()
                    if response.status_code != 200:
                        raise RuntimeError(f"{self.name}: {response.json()['error']['message']}")
                except httpx.TransportError as error:
                    if time.monotonic() - answered > SILENT_S:
                        raise RuntimeError(
                            f"{self.name} has not answered for {SILENT_S:g} s{self._log_tail()}"
                        ) from error
                await asyncio.sleep(LOOK_S)

    async def stop(self, grace: float = STOP_S) -> None:
        """End the process, by force if it is still running after `grace` seconds."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended before it had read its settings
                process.stdin.close()  # the process reads the end of our pipe and ends
        deadline = time.monotonic() + grace
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too, if any are left
        process.wait()
        os.close(self._answer)
        self._process = None

    def _read(self) -> bytes:
        try:
            return os.read(self._answer, 65536)
        except BlockingIOError:
            return b""

    def _log_tail(self) -> str:
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        last = "\n  ".join(lines[-LOG_LINES:])
        return f"; the end of {self._log_file}:\n  {last}" if last else ""


async def start_all(hosts: Sequence[EngineHost], timeout: float = START_S) -> None:
    """Start all hosts concurrently, and wait for all. If one fails, all are ended."""
    try:
        for host in hosts:
            host.start()
        await asyncio.gather(*(host.ready(timeout) for host in hosts))
    except BaseException:
        await stop_all(hosts)
        raise


async def stop_all(hosts: Sequence[EngineHost]) -> None:
    """End all hosts concurrently."""
    await asyncio.gather(*(host.stop() for host in hosts))


class RemoteServers:
    """Implements EngineServers for rollout servers and engine processes."""

    def engine(self, plan: Plan, urls: Sequence[str], key: str | None) -> RemoteEngine:
        """Make the engine that calls the rollout servers at these addresses."""
        return RemoteEngine(
            urls,
            api_key=key,
            timeout=plan.config.explorer.max_timeout,
            sync_timeout=plan.config.synchronizer.sync_timeout,
            seed=plan.seed,
        )

    async def run(
        self, plan: Plan, model_path: str, use: Callable[[RemoteEngine], Awaitable[T]]
    ) -> T:
        """Processes that die are restarted if weights come by sync; at the end all are stopped."""
        hosts = engine_hosts(plan, model_path)
        if not hosts:
            return await use(self.engine(plan, plan.engine.urls, plan.engine.key))
        try:
            await start_all(hosts)
            engine = self.engine(plan, [host.url for host in hosts], hosts[0].key)
            restarts = restarts_of(plan)
            engine.servers.restarted = restarts > 0
            return await EngineKeeper(hosts, engine.servers, restarts=restarts).run(use(engine))
        finally:
            await stop_all(hosts)

    def pair(self, backend: Backend, *, part: Part, parks: bool) -> EnginePairs:
        """Make the pairs of ranks and engines: see EnginePairs."""
        return EnginePairs(backend, part=part, parks=parks)
