"""Worker: the process of a pool's environments. One request per line, one reply per line.

Run as `python -m trireme.ext.environments.worker package.module:factory`. An environment's output
goes to the standard error; only we write to the pipe that the pool reads. It ends when its input
does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer until the pool is gone."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    module, _, name = sys.argv[1].partition(":")
    envs: dict[int, Any] = {}
    for line in requests:
        request = json.loads(line)
        try:
            factory = getattr(importlib.import_module(module), name)
            answer = {"value": _do(factory, envs, request)}
        except Exception as error:  # foreign code: reported to the caller
            shown = f"{type(error).__name__}: {error}"
            answer = {"error": shown, "trace": traceback.format_exc()}
        replies.write(json.dumps(answer, default=_plain) + "\n")
        replies.flush()


def _do(factory: Callable[..., Any], envs: dict[int, Any], request: dict[str, Any]) -> Any:
    """Handle one request: reset (which makes it first), step or close an environment."""
    number, what = request["env"], request["do"]
    if what == "reset" and number not in envs:
        envs[number] = factory(**request["kwargs"])
    if what == "close":
        env = envs.pop(number, None)
        return env.close() if hasattr(env, "close") else None
    return getattr(envs[number], what)(*request["args"])


def _plain(value: Any) -> Any:
    """Convert to a form that JSON has: numpy's numbers to numbers, all else to text."""
    for convert in ("item", "tolist"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    return str(value)


if __name__ == "__main__":
    main()
