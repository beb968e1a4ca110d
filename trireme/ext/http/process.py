"""Process: starts an engine behind a server as a child process, and ends it with its parent.

`python -m trireme.ext.http.process FD` reads its settings as one line of JSON from standard input,
`EngineSpec` among them, writes one line of JSON to the file descriptor FD when it serves (`url`) or
has failed (`error`), and ends when standard input does: the child ends with the parent, however the
parent ended. It imports neither the configuration nor the command line, which vLLM's environment
may lack.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trireme.launch import GC_THRESHOLDS, before_exit
from trireme.processes import ending_leftovers
from trireme.text import say

if TYPE_CHECKING:
    from trireme.engines.make import EngineSpec
    from trireme.ext.http.app import AppServer


@asynccontextmanager
async def engine_server(
    spec: EngineSpec,
    tokenizer: Any,
    listener: socket.socket,
    *,
    key: str | None,
    most: int,
    threads: int | None = None,
) -> AsyncIterator[AppServer]:
    """Start a server over an engine of this process, which is closed after it."""
    from trireme.engines.device import Device
    from trireme.engines.make import make_engine
    from trireme.ext.http.app import AppServer, create_app
    from trireme.ext.http.rollouts import Rollouts
    from trireme.model.chat_tokens import ChatTokens

    device = Device(threads)
    try:
        engine = await make_engine(spec, tokenizer, device)
        chat = ChatTokens(
            tokenizer,
            chat_template=spec.chat_template,
            enable_thinking=spec.enable_thinking,
            tool_call_parser=spec.tool_call_parser,
        )
        rollouts = Rollouts(
            engine,
            chat,
            spec.model,
            spec.max_model_len,
            scheduler=dict(spec.scheduler),
            use_async_engine=spec.use_async_engine,
            seed=spec.seed,
        )
        note = partial(say, file=sys.stderr)
        led = spec.scheduler.get("scheduler")  # a user's, which may start programs
        try:
            with ending_leftovers(note) if led else nullcontext():
                yield AppServer(create_app(rollouts, key=key, most=most), listener)
        finally:
            await engine.close()
    finally:
        device.close()


END_S = 15.0
"""Seconds that an engine may take to end; then its whole process group is killed."""


def main() -> int:
    """Serve until asked to end; returns the exit code."""
    # What is imported, so after this, and the weights are so many objects that looking at all of
    # them, again and again, would take a fifth of the start, and hold up replies later.
    gc.set_threshold(*GC_THRESHOLDS)
    answer = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    settings = json.loads(sys.stdin.readline())
    try:
        asyncio.run(_serve(settings, answer))
    except Exception as error:
        if not answer.closed:  # after that the parent uses HTTP
            print(json.dumps({"error": f"{error}" or type(error).__name__}), file=answer)
        raise
    finally:
        before_exit()
    return 0


async def _serve(settings: dict[str, Any], answer: TextIO) -> None:
    from transformers import AutoTokenizer

    from trireme.engines.make import EngineSpec
    from trireme.ext.http.app import MOST, listen

    parent = ParentWatch()
    spec = EngineSpec(**settings["spec"])
    tokenizer = AutoTokenizer.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    with listen(settings["host"], settings["port"]) as listener:
        for file in map(Path, settings.get("plugins", ())):
            sys.path.insert(0, str(file.parent))
            import_module(file.stem)
        key, most = settings["key"], settings.get("most", MOST)
        async with engine_server(
            spec, tokenizer, listener, key=key, most=most, threads=settings["threads"]
        ) as server:
            server.stop_on_signals()
            loop = asyncio.get_running_loop()
            parent.then(lambda: loop.call_soon_threadsafe(server.stop))
            host, port = listener.getsockname()[:2]
            gc.freeze()
            print(json.dumps({"url": f"http://{host}:{port}"}), file=answer)
            answer.close()
            try:
                await server.serve()
            finally:
                kill_group_in(END_S)


class ParentWatch:
    """Notices the end of standard input, and so of the parent, in a thread that nothing blocks."""

    def __init__(self) -> None:
        self._stop = kill_group
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def then(self, stop: Callable[[], object]) -> None:
        """Set the callable that ends this process from now on; until then it is killed."""
        self._stop = stop

    def _watch(self) -> None:
        while sys.stdin.buffer.read(1):
            pass
        kill_group_in(END_S)
        self._stop()


def kill_group_in(seconds: float) -> None:
    """Kill the group after `seconds`, unless the process has ended by then."""
    timer = threading.Timer(seconds, kill_group)
    timer.daemon = True
    timer.start()


def kill_group() -> None:
    """Kill this process and the group that it leads, which includes the engine's workers."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
