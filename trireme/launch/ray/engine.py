"""Engine: an engine process on one of the cluster's machines, watched and ended with its actor."""

from __future__ import annotations

import sys

import ray

from trireme.checkpoint.layout import JobFolder
from trireme.config import Plan
from trireme.launch.engine_host import EngineHost
from trireme.launch.engine_plan import engine_spec


class EnginePart:
    """One engine host; Ray gives this process, and so its child, the engine's GPUs."""

    def __init__(self) -> None:
        self._host: EngineHost | None = None

    async def open(self, plan: Plan, model_path: str, index: int) -> str:
        """Its address, once it serves. Raises what is wrong with it, or TimeoutError."""
        host = EngineHost(
            engine_spec(plan, model_path),
            name=f"engine_{index}",
            log_file=JobFolder(plan.job_dir, plan.explorer_name).log / f"engine_{index}.log",
            python=plan.engine_python if plan.engine_kind == "vllm" else sys.executable,
            host=ray.util.get_node_ip_address(),
            key=plan.engine_key,
            threads=None if plan.device == "cuda" else plan.engine_size,
        )
        host.start()
        self._host = host  # now: a heartbeat may ask at any moment
        return await host.ready(plan.config.cluster.start_timeout)

    def health(self) -> None:
        """Raise RuntimeError where the engine has ended."""
        if self._host is not None:
            self._host.examine()

    async def stop(self) -> None:
        """End the engine, by force where it does not end."""
        host, self._host = self._host, None
        if host is not None:
            await host.stop()
