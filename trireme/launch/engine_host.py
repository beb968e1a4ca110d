"""Engine host: one engine in a process of its own, behind the routes of `trireme rollout`.

Starts it, waits until it serves, watches it, ends it. Knows nothing of a run: the local launcher
and Ray's actors use it alike. Invariants:
- The process ends with this one, whatever this one dies of: it reads our end of a pipe.
- Every wait has a time-out; what is raised names the engine and shows the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from trireme.server.engine_spec import EngineSpec

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
        process's own; `serving`: further settings of server/process.py.
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
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._answer, theirs = os.pipe()
        os.set_blocking(self._answer, False)
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "trireme.server.process", str(theirs)],
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
                self.examine()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self.name} did not serve in {timeout:g} s{self._log_tail()}"
                    )
                await asyncio.sleep(0.1)
        found = json.loads(said)
        if "error" in found:
            raise RuntimeError(f"{self.name} cannot start: {found['error']}{self._log_tail()}")
        self._url = found["url"]
        self._settings["port"] = httpx.URL(self.url).port  # where it is found when started again
        return self.url

    def examine(self) -> None:
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
                self.examine()
                try:
                    found = await client.get(f"{self.url}/health")
                    answered = time.monotonic()
                    if found.status_code != 200:
                        raise RuntimeError(f"{self.name}: {found.json()['error']['message']}")
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
        """The last lines that it has written."""
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
