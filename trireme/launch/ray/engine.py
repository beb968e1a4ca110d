"""Engine: a rollout server on one of the cluster's machines, watched and ended with its actor."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys

import httpx
import ray

from trireme.config import Plan

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0


class EnginePart:
    """One server as a process that ends when this one does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def open(self, plan: Plan, model_path: str, index: int) -> str:
        """Start it; its address, once it answers. Raises what is wrong with it, or TimeoutError."""
        self._plan, self._model_path = plan, model_path
        self.log = plan.job_dir / "log" / f"engine_{index}.log"
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as probe:
            port = probe.getsockname()[1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(host, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TRIREME_API_KEY": self._plan.engine_key or ""},
                preexec_fn=die_with_parent,
            )
        await self._wait(f"http://{host}:{port}")
        return f"http://{host}:{port}"

    def health(self) -> None:
        """Raise RuntimeError where the server has ended."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise RuntimeError(f"its server ended with {how}")

    async def stop(self) -> None:
        """End the server, by force where it does not."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _command(self, host: str, port: int) -> list[str]:
        plan = self._plan
        seed = plan.config.explorer.rollout_model.seed
        words = {
            "--model": self._model_path,
            "--host": host,
            "--port": port,
            "--dtype": plan.dtype,
            "--max-model-len": plan.max_model_len,
            "--seed": plan.seed if seed is None else seed,
        }
        program = [sys.executable, "-c", "from trireme.cli.main import main; main()", "rollout"]
        return program + [str(word) for pair in words.items() for word in pair]

    async def _wait(self, url: str) -> None:
        limit = self._plan.config.cluster.start_timeout
        headers = {"authorization": f"Bearer {self._plan.engine_key}"}
        deadline = asyncio.get_running_loop().time() + limit
        async with httpx.AsyncClient(headers=headers, timeout=10.0) as client:
            while asyncio.get_running_loop().time() < deadline:
                self.health()
                try:
                    if (await client.get(f"{url}/engine/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)
        raise TimeoutError(
            f"it was not ready after {limit:g} s (cluster.start_timeout): see {self.log}"
        )


def die_with_parent() -> None:
    """In the child: end when the parent does, however that ends. Linux knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
