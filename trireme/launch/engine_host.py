"""Engine host: the engine processes that a plan asks for, each behind a server of its own.

- A host starts one, waits until it serves, watches it and ends it. It knows nothing of a run: the
  local launcher and Ray's actors use it alike. The process ends with this one, whatever this one
  dies of: it reads our end of a pipe. Every wait has a time-out; what is raised names the engine
  and shows the end of its log.
- A keeper starts an engine that has died in a run again, at its old address or on Ray where there
  is a place, at most `cluster.engine_restarts` times; then its end is the run's. It generates only
  when it has the run's weights, by the run's own way of sync with its proofs. Its requests are sent
  again, see engines/servers.py: no rollout is lost by it.
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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import httpx

from trireme.aio import running
from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.config.engine_kind import SERVER, size_of
from trireme.engines.make import EngineSpec
from trireme.files import for_appending
from trireme.launch.engines import engine_plugins, engine_spec, make_remote_engine
from trireme.log import get_logger
from trireme.registry import PROGRAMS

if TYPE_CHECKING:
    from trireme.engines.remote import RemoteEngine


def _program() -> str:
    """The module that serves an engine as a program. Raises ValueError where it is not here."""
    return PROGRAMS.get(SERVER).__module__


def engine_hosts(plan: Plan, model_path: str) -> list[EngineHost]:
    """The processes that the local launcher starts, with one key for all; none: it is embedded."""
    log_folder = JobFolder(plan.job_dir, plan.explorer_name).log
    key = plan.config.explorer.rollout_model.api_key or secrets.token_hex(16)
    first_port = plan.config.explorer.rollout_model.base_port
    return [
        EngineHost(
            engine_spec(plan, model_path),
            name=f"{plan.engine_kind} engine {index + 1} of {plan.engine_hosts}",
            log_file=log_folder / f"engine_{index}.log",
            python=plan.engine_python or sys.executable,
            port=0 if first_port is None else first_port + index,
            key=key,
            environment=_devices(plan, index),
            plugins=engine_plugins(plan),
        )
        for index in range(plan.engine_hosts)
    ]


def _devices(plan: Plan, index: int) -> dict[str, str]:
    """Its GPUs: the first is the trainer's where there is one, the engines have those after it."""
    if plan.device != "cuda":
        return {}
    rollout = plan.config.explorer.rollout_model
    size = size_of(rollout)
    begin = (plan.mode == "both" and not plan.takes_turns) + index * size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(begin + size)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[begin : begin + size])}


logger = get_logger("launcher")

DYING_S = 0.5
"""Who asks a dying process hears of it before its end can be seen."""
T = TypeVar("T")


class Kept(Protocol):
    """An engine that can be started again: see EngineHost, and EngineActor on Ray."""

    name: str

    @property
    def url(self) -> str:
        """Where it serves."""
        ...

    def start(self) -> None:
        """Begin to load."""
        ...

    async def ready(self) -> str:
        """Its address, once it serves."""
        ...

    async def examine(self) -> None:
        """Raise RuntimeError where it has ended."""
        ...

    async def watch(self) -> None:
        """Until it is gone; then raises RuntimeError."""
        ...

    async def stop(self, grace: float) -> None:
        """End it."""
        ...


class KnownServers(Protocol):
    """What asks the engines, and is told of their ends: see Servers, and ServersOfSides on Ray."""

    async def lose(self, url: str) -> None:
        """It has ended."""
        ...

    async def loss(self, url: str) -> RuntimeError:
        """Why it cannot be asked, once that is so."""
        ...

    async def again(self, index: int, new_url: str) -> None:
        """The engine of this index was started again. By its index, since an attempt that failed
        may have told its address to some sides and not to others.
        """
        ...

    async def keep_complete(self) -> None:
        """Bring it the run's weights."""
        ...


class EngineKeeper:
    """Over all engines of a run."""

    def __init__(self, hosts: Sequence[Kept], servers: KnownServers, *, restarts: int) -> None:
        self._hosts = hosts
        self._servers = servers
        self._restarts = restarts

    async def run(self, work: Awaitable[T]) -> T:
        """The result of `work`; an engine that is gone for good cancels it: its error is raised."""
        keeping = (*map(self._keep, range(len(self._hosts))), self._servers.keep_complete())
        async with running(work, *keeping) as (task, *keepers):
            await asyncio.wait({task, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or task.exception() is not None:
                await asyncio.sleep(DYING_S)
                for host in self._hosts:  # the cause, where the work failed for want of an engine
                    if not self._restarts:
                        await host.examine()
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()
            return await task

    async def _keep(self, index: int) -> None:
        """Start an engine again whenever it ends. Raises RuntimeError where that was often
        enough.
        """
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
        """Start it `again`, and return why it ended, as seen here or by its callers."""
        host = self._hosts[index]
        try:
            if again:
                await host.stop(grace=0)
                host.start()
                await self._servers.again(index, await host.ready())
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
    """How often each engine is started again; bench gives engines weights that no sync has."""
    return 0 if plan.mode == "bench" else plan.config.cluster.engine_restarts


async def with_engines(
    plan: Plan, model_path: str, use: Callable[[RemoteEngine | None], Awaitable[T]]
) -> T:
    """What `use` returns of the engine processes that the plan asks for, or of the user's rollout
    servers; None: the engine is embedded. Processes that die are started again where weights come
    by sync, and all are ended.
    """
    hosts = engine_hosts(plan, model_path)
    try:
        await start_all(hosts)
        urls = tuple(host.url for host in hosts) or plan.engine_urls
        key = hosts[0].key if hosts else plan.engine_key
        engine = make_remote_engine(plan, urls, key) if urls else None
        if not hosts or engine is None:
            return await use(engine)
        restarts = restarts_of(plan)
        engine.servers.restarted = restarts > 0
        return await EngineKeeper(hosts, engine.servers, restarts=restarts).run(use(engine))
    finally:
        await stop_all(hosts)


START_S = 600.0
"""How long an engine may take to load its model."""
STOP_S = 20.0
LOOK_S = 2.0
"""Seconds between looks at an engine that serves."""
SILENT_S = 25.0
"""How long it may leave such a look unanswered."""
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
        """`python`: an interpreter that has what the engine needs; Trireme is put on its path.

        `port` 0: any that is free; `key`: what clients must show; `environment`: laid over this
        process's own; `serving`: further settings of its program.
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
        """Where it serves, once it does."""
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
                start_new_session=True,  # Ctrl-C is ours to deal with, and its workers are its own
            )
        os.close(theirs)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended already: `ready` says so

    async def ready(self, timeout: float = START_S) -> str:
        """Its address. Raises RuntimeError where it has failed, TimeoutError where it is late."""
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
        self._settings["port"] = httpx.URL(self.url).port  # where it is found when started again
        return self.url

    async def examine(self) -> None:
        """Raise RuntimeError where the process has ended."""
        assert self._process is not None, f"{self.name} was not started"
        code = self._process.poll()
        if code is not None:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise RuntimeError(f"{self.name} has ended {how}{self._log_tail()}")

    async def watch(self) -> None:
        """Until it is gone, has failed or is silent: then raises RuntimeError. Never returns."""
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
        """End it, by force where it has not ended after `grace` seconds."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # of settings that it did not live to read
                process.stdin.close()  # it reads the end of our pipe
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
    """Start them side by side, and wait for all. Where one fails all are ended."""
    try:
        for host in hosts:
            host.start()
        await asyncio.gather(*(host.ready(timeout) for host in hosts))
    except BaseException:
        await stop_all(hosts)
        raise


async def stop_all(hosts: Sequence[EngineHost]) -> None:
    """End them side by side."""
    await asyncio.gather(*(host.stop() for host in hosts))
