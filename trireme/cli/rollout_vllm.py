"""`trireme rollout --engine vllm`: the server is a child process, of vLLM's environment."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trireme.cli.rollout import RolloutOptions, say, stopped
from trireme.config.engines import VARIABLE, find_vllm
from trireme.launch.engine_host import EngineHost
from trireme.server.engine_spec import EngineSpec


async def serve_vllm(options: RolloutOptions, spec: EngineSpec, plugins: Sequence[Path]) -> int:
    """Serve until a signal comes; the exit code. Raises RuntimeError where the child has ended."""
    try:
        found = find_vllm(options.engine_python)
    except ValueError as error:
        raise ValueError(f"--engine-python {options.engine_python}: {error}") from error
    if found is None:
        raise ValueError(
            f"--engine vllm: no Python here has vLLM: name one by --engine-python, or {VARIABLE}"
        )
    handle, log = tempfile.mkstemp(prefix="trireme-rollout-", suffix=".log")
    os.close(handle)
    print(f"vLLM {found.version} of {found.python}; its log is {log}", file=sys.stderr)
    host = EngineHost(
        spec,
        name="the vllm engine",
        log_file=Path(log),
        python=found.python,
        host=options.host,
        port=options.port,
        key=options.api_key,
        plugins=[str(file.resolve()) for file in plugins],
        most=options.max_requests,
    )
    stopped_by: list[int] = []
    serving = asyncio.ensure_future(_hosted(options, host))

    def stop(number: int) -> None:
        stopped_by.append(number)
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await serving
    except asyncio.CancelledError:
        if not stopped_by:
            raise
    finally:
        await host.stop()
    return stopped(stopped_by)


async def _hosted(options: RolloutOptions, host: EngineHost) -> None:
    """Until it is cancelled. Raises RuntimeError where the process has ended."""
    host.start()
    say(options, await host.ready())
    await host.watch()
