"""Worker: the process of a pool's environments. One request per line, one reply per line.

Run as `python -m trireme.ext.environments.worker package.module:factory SYS_PATH`, the pool's own
module path as JSON: it finds what the pool's process finds, plug-ins too. An environment's output
goes to the standard error; only we write to the pipe that the pool reads. It ends when its input
does, and with it the processes that environments have left: it leads their group.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer until the pool is gone."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(os.dup(0), requests), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a child of an environment reads no request
    module, _, name = sys.argv[1].partition(":")
    sys.path[:] = dict.fromkeys([*json.loads(sys.argv[2]), *sys.path])
    envs: dict[int, Any] = {}
    while True:
        request = json.loads(requests.get())
        try:
            factory = getattr(importlib.import_module(module), name)
            answer = json.dumps({"value": _do(factory, envs, request)}, default=_plain)
        except Exception as error:  # foreign code, and its values: reported to the caller
            shown = f"{type(error).__name__}: {error}"
            answer = json.dumps({"error": shown, "trace": traceback.format_exc()})
        replies.write(answer + "\n")
        replies.flush()


def _read(requests_fd: int, requests: queue.SimpleQueue[str]) -> None:
    """Pass requests on; when they end, end this process, also in the middle of a call, and those
    that environments started.
    """
    with open(requests_fd, encoding="utf-8") as lines:
        for line in lines:
            requests.put(line)
    os.killpg(os.getpid(), signal.SIGKILL)


def _do(factory: Callable[..., Any], envs: dict[int, Any], request: dict[str, Any]) -> Any:
    """Handle one request: reset (which makes it first), step or close an environment."""
    number, what = request["env"], request["do"]
    if what == "reset" and number not in envs:
        envs[number] = factory(**request["kwargs"])
    if what == "close":
        env = envs.pop(number, None)
        return env.close() if hasattr(env, "close") else None
    returned = getattr(envs[number], what)(*request["args"])
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(
            f"{type(envs[number]).__name__}.{what} is a coroutine, which a worker does not await: "
            "expected a plain method"
        )
    return returned


def _plain(value: Any) -> Any:
    """Convert to a form that JSON has: numpy's numbers and arrays to numbers and lists, all else to
    text.
    """
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    main()
