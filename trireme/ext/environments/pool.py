"""Pool: runs environments in worker processes: those that block, leak, or are not thread-safe.

Invariants:
- Environments of one key (the rollouts of one game, for example) share one worker as long as any
  exists.
- A worker does one call at a time. One that takes longer than `timeout_s` is ended with its worker
  and the processes that this started; so is one whose process dies. Its environments are lost, and
  the pool continues.
- Every lent environment ends in exactly one of the counts: ended, raised, hung or died.
- A worker is replaced after `recycle_after` environments, when none lives on it.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CLOSED = "the pool of environments is closed"


class EnvError(RuntimeError):
    """The environment itself raised; the text ends with its traceback."""


class EnvLost(RuntimeError):
    """The worker in which the environment lived has hung or died."""


class EnvPool:
    """Worker processes that run the environments of one factory."""

    def __init__(
        self,
        factory: str,
        *,
        workers: int = 2,
        timeout_s: float = 60.0,
        recycle_after: int = 500,
    ) -> None:
        """`factory` is `package.module:name`, called in a worker with the arguments of `lend`."""
        self.factory = factory
        self.counts: dict[str, int] = {"lent": 0, "ended": 0, "raised": 0, "hung": 0, "died": 0}
        self._workers = [_Worker(factory, i, timeout_s, recycle_after) for i in range(workers)]
        self._pinned: dict[str, tuple[_Worker, int]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def lend(self, *, key: str = "", **kwargs: Any) -> LentEnv:
        """Return an environment for coroutines; `async with` closes it."""
        return LentEnv(self, key, kwargs)

    def lend_blocking(self, *, key: str = "", **kwargs: Any) -> BlockingEnv:
        """Return an environment for code in another thread; `with` closes it."""
        return BlockingEnv(self, key, kwargs)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()

    def _place(self, key: str) -> tuple[_Worker, int]:
        """Return the worker of a key, else the one with the fewest environments; and a number."""
        with self._lock:
            self.counts["lent"] += 1
            worker, users = self._pinned.get(key, (None, 0)) if key else (None, 0)
            if worker is None:
                worker = min(self._workers, key=lambda w: (w.worn, w.live))
            if key:
                self._pinned[key] = (worker, users + 1)
            worker.live += 1
            return worker, next(self._numbers)

    def _leave(self, key: str, worker: _Worker, fate: str) -> None:
        with self._lock:
            self.counts[fate] += 1
            worker.live -= 1
            if key:
                _, users = self._pinned[key]
                if users > 1:
                    self._pinned[key] = (worker, users - 1)
                else:
                    del self._pinned[key]


class _Lent:
    """One environment of a worker, which is made at its first `reset`."""

    def __init__(self, pool: EnvPool, key: str, kwargs: dict[str, Any]) -> None:
        self._pool, self._key, self._kwargs = pool, key, kwargs
        self._worker, self._number = pool._place(key)
        self._life: int | None = None
        """Which process of the worker it lives in."""
        self._fate: str | None = None
        self._closed = False

    def close(self) -> None:
        """Release it, without waiting. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._worker.ask(self, {"do": "close", "env": self._number})
        self._pool._leave(self._key, self._worker, self._fate or "ended")

    def _reset(self) -> Future[Any]:
        request = {"do": "reset", "env": self._number, "args": [], "kwargs": self._kwargs}
        return self._worker.ask(self, request)

    def _step(self, action: str) -> Future[Any]:
        return self._worker.ask(self, {"do": "step", "env": self._number, "args": [action]})


class LentEnv(_Lent):
    """An environment of the pool with async methods, for any event loop."""

    def blocking(self) -> BlockingEnv:
        """Return an equal environment for threads; this one is returned to the pool."""
        other = BlockingEnv(self._pool, self._key, self._kwargs)
        self.close()
        return other

    async def reset(self) -> tuple[Any, ...]:
        """Return the first observation and its info. Raises EnvError and EnvLost."""
        return _pair(await asyncio.wrap_future(self._reset()))

    async def step(self, action: str) -> Any:
        """Return the result of the environment's own `step`. Raises EnvError and EnvLost."""
        return _values(await asyncio.wrap_future(self._step(action)))

    async def __aenter__(self) -> LentEnv:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release it."""
        self.close()


class BlockingEnv(_Lent):
    """An environment of the pool with blocking methods, for threads."""

    def reset(self) -> tuple[Any, ...]:
        """Begin an episode. Raises EnvError and EnvLost."""
        return _pair(self._reset().result())

    def step(self, action: str) -> Any:
        """Return the result of the environment's own `step`. Raises EnvError and EnvLost."""
        return _values(self._step(action).result())

    def __enter__(self) -> BlockingEnv:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.close()


@dataclass
class _Job:
    lent: _Lent
    request: dict[str, Any]
    future: Future[Any] = field(default_factory=Future)


class _Worker:
    """One process, and the thread that talks with it."""

    def __init__(self, factory: str, index: int, timeout_s: float, recycle_after: int) -> None:
        self.live = 0
        self.made = 0
        self.life = 0
        self._factory, self._index = factory, index
        self._timeout, self._recycle_after = timeout_s, recycle_after
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words = ""
        self._closed = False
        self._rest = b""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        name = f"env-worker-{index}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def worn(self) -> bool:
        """True if it has made so many environments that it must be replaced."""
        return self.made >= self._recycle_after

    def ask(self, lent: _Lent, request: dict[str, Any]) -> Future[Any]:
        job = _Job(lent, request)
        if self._closed:
            job.future.set_exception(EnvLost(CLOSED))
        else:
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the process; waiting calls fail."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout=5.0)
        self._end()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._do(job.lent, job.request))
            except Exception as error:
                job.future.set_exception(error)
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.future.set_exception(EnvLost(CLOSED))

    def _do(self, lent: _Lent, request: dict[str, Any]) -> Any:
        what = request["do"]
        if what == "reset" and lent._life is None:
            if self._process is None or (self.worn and self.live <= 1):
                self._start()
            self.made += 1
            lent._life = self.life
        elif lent._life != self.life or self._process is None:
            if what == "close":
                return None
            lent._fate = lent._fate or "died"
            raise EnvLost(f"environment worker {self._index} is gone: {self._last_words}")
        try:
            answer = self._exchange(request)
        except EnvLost as error:
            lent._fate = "hung" if isinstance(error, _Hung) else "died"
            self._last_words = str(error)
            self._end()
            raise
        if "error" in answer:
            lent._fate = "raised"
            raise EnvError(f"{self._factory}: {answer['error']}\n{answer['trace'].rstrip()}")
        return answer["value"]

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        what = f"'{request['do']}' of {self._factory} on environment worker {self._index}"
        try:
            process.stdin.write((json.dumps(request) + "\n").encode())
            process.stdin.flush()
        except OSError:
            raise EnvLost(
                f"{what} failed: the worker is dead (exit code {process.wait()})"
            ) from None
        deadline = time.monotonic() + self._timeout
        answers = select.poll()  # `select` itself knows no file number above 1023
        answers.register(process.stdout, select.POLLIN)
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not answers.poll(left * 1000):
                raise _Hung(f"{what} did not return within {self._timeout:g} s")
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EnvLost(f"{what} ended the worker (exit code {process.wait()})")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _start(self) -> None:
        self._end()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # as an argument: an environment that starts another Python must not pass ours on to it
        path = json.dumps([str(folder) for folder in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trireme.ext.environments.worker", self._factory, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # its children end with it
        )
        self.life += 1
        self.made, self._rest = 0, b""

    def _end(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class _Hung(EnvLost):
    """No answer in time."""


_shared: dict[tuple[str, int, float], EnvPool] = {}
_sharing = threading.Lock()


def shared_pool(factory: str, *, workers: int = 2, timeout_s: float = 60.0) -> EnvPool:
    """Return the pool of a factory for all episodes of this process; it ends with the process."""
    key = factory, workers, timeout_s
    with _sharing:  # the first episodes begin at once, in threads
        if key not in _shared:
            _shared[key] = EnvPool(factory, workers=workers, timeout_s=timeout_s)
            atexit.register(_shared[key].close)
        return _shared[key]


def _values(returned: Any) -> Any:
    """Return the tuple that `step` returned, of which JSON has made a list; anything else as it is,
    for the caller to refuse.
    """
    return tuple(returned) if isinstance(returned, list) else returned


def _pair(returned: Any) -> tuple[Any, ...]:
    """Return `(observation, info)` from the result of `reset`; JSON has made a list of the
    tuple.
    """
    if isinstance(returned, list) and len(returned) == 2 and isinstance(returned[1], dict | None):
        return returned[0], returned[1] or {}
    return returned, {}
