"""Sandbox: runs a model's program, scores it by unit tests, or a query by its rows, in a child.

- A helper process, an isolated Python without environment variables, has imported the modules that
  programs may use. It forks a child for each program, which first gives up: new file descriptors
  (no file and no socket can be opened), files of any size, memory beyond 512 MB, and more than 2 s
  of processor time. An audit hook then refuses Python's requests to the system: processes, signals,
  files, imports. After 10 s, or with more than 1 MB of output, the child is killed, and where it
  neither works nor waits for a processor after 2.5 s: sleep counts like processor time.
- If bubblewrap is installed and works, the helper runs behind it: it sees /usr, the system's
  libraries and the folder of Python, read-only, and no other file, no process of the run and no
  network.
- This does not stop an attack on the interpreter itself (with bubblewrap: one on the kernel as
  well). An audit hook is no wall, and without bubblewrap the child is the same user as the run. For
  programs of a model that may be hostile, run the whole of Trireme in a container or as a user who
  owns nothing.
- The child does not know the right results: it sends its own, and they are compared here.
- Equal programs with equal arguments are run once, unless the first was late; a few different ones
  run concurrently.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from trireme.aio import in_thread
from trireme.machine import cores
from trireme.rewards.reward import needs_truth
from trireme.task import Task

_log = logging.getLogger(__name__)
_FENCE = re.compile(r"`{3,}|^[ \t]*~{3,}", re.MULTILINE)
_LANGUAGE = re.compile(r"\s*(?:[A-Za-z][\w.+#-]*)?\s*(?:\{[^{}]*\})?\s*")
"""What may stand after an opening fence: `python3.11`, `c++`, `{.python}`; anything else is
code.
"""

LIMITS = {"seconds": 10.0, "cpu": 2, "memory": 512 << 20, "output": 1 << 20}
LONGEST = 50_000
"""Characters of a program; a longer one is not run, and a warning reports it."""

SHOWN = 4000
"""Characters of a program's output that a tool's result has."""
_OVERHEAD = 256  # bytes of a key and its place

HELPER = """
import _ast, _imp, _strptime, abc, array, base64, binascii, bisect, calendar, cmath, collections
import collections.abc, contextlib, copy, csv, dataclasses, datetime, decimal, difflib, enum
import fractions, functools, graphlib, hashlib, heapq, io, itertools, json, math, numbers, operator
import os, posix, pprint, queue, random, re, resource, select, signal, sqlite3, statistics, string
import struct, sys, textwrap, time, timeit, types, typing, unicodedata, zlib

class Refused(PermissionError, ValueError):
    pass  # namedtuple and typing go on after a ValueError where they get no frame

# in place of a function that says which files there are: os.path.exists and others catch it
def refusing(name):
    def refused(*args, **options):
        raise Refused("os." + name)
    return refused

def forget_unaudited():
    # functions that raise no audit event and reach beyond the child, or load a module afresh
    beyond = [name for name in vars(posix) if name.startswith(("mkfifo", "mknod", "setpriority",
              "sched_set", "pidfd_", "chroot", "unshare", "setns", "sync", "setuid", "setgid",
              "sete", "setre", "setgroups", "initgroups"))]
    for name in beyond:
        vars(posix).pop(name)
        vars(os).pop(name, None)
    for name in ("stat", "lstat", "access", "readlink", "statvfs", "pathconf"):
        setattr(posix, name, refusing(name))
        setattr(os, name, getattr(posix, name))
    for name in [name for name in vars(time) if name.startswith("clock_settime")]:
        vars(time).pop(name)
    os.__all__ = [name for name in os.__all__ if name in vars(os)]
    for name in ("supports_dir_fd", "supports_effective_ids", "supports_fd",
                 "supports_follow_symlinks"):
        setattr(os, name, set())  # they hold such functions
    for name in ("create_builtin", "exec_builtin", "create_dynamic", "exec_dynamic"):
        vars(_imp).pop(name, None)

def give_up(limits):
    for kind, most in ((resource.RLIMIT_CPU, limits["cpu"]), (resource.RLIMIT_FSIZE, 0),
                       (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, limits["memory"]),
                       (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 0)):
        resource.setrlimit(kind, (most, most))
    loaded = frozenset(sys.modules)
    allowed = frozenset(("compile", "exec", "builtins.id", "sqlite3.connect",
                         "sqlite3.connect/handle", "sys._getframemodulename", "time.sleep"))
    # what namedtuple, dataclass and typing set
    harmless = frozenset(("__abstractmethods__", "__bases__", "__defaults__", "__doc__",
                          "__kwdefaults__", "__module__", "__name__", "__qualname__"))
    readable = harmless | frozenset(("__code__",))
    # a program may put others in place of the builtins
    kind_of, text, repr, absent = type, str, ascii, ModuleNotFoundError
    def refuse(event, args):
        if event in allowed:
            return
        # a subclass of str may equal every name
        if event == "import" and kind_of(args[0]) is text and args[0] in loaded:
            return
        if event == "object.__setattr__" and args[1] in harmless:
            return
        if event == "object.__getattr__" and args[1] in readable:
            return
        if event == "import" and kind_of(args[0]) is text:  # programs catch ImportError
            raise absent("No module named " + repr(args[0]) + " in the sandbox", name=args[0])
        raise Refused(event)
    sys.addaudithook(refuse)

def results(job):
    names = {"__name__": "answer"}
    exec(job["program"], names)
    return [names[job.get("function", "f")](*given) for given in job["arguments"]]

# the type and text of an error, which the program may have written
def said(raised):
    name = type.__dict__["__name__"].__get__(type(raised))
    try:
        return name + ": " + str(raised)
    except BaseException:
        return name + ": (its __str__ raises an error)"

# what a program prints, and the value of its last expression, as a terminal shows it
def transcript(job):
    out = sys.stderr = sys.__stderr__ = sys.stdout
    error, names = "", {"__name__": "__main__"}
    try:
        tree = compile(job["code"], "<code>", "exec", _ast.PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and type(tree.body[-1]) is _ast.Expr else None
        exec(compile(tree, "<code>", "exec"), names)
        if last is not None:
            exec(compile(_ast.Interactive(body=[last]), "<code>", "single"), names)
    except BaseException as raised:
        trace = raised.__traceback__.tb_next  # the program's outermost line
        if not isinstance(raised, SystemExit) or raised.code not in (None, 0):
            error = said(raised) + (" (line " + str(trace.tb_lineno) + ")" if trace else "")
    return {"output": out.getvalue(), "error": error}

def rows(job):
    readable = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
                sqlite3.SQLITE_RECURSIVE}
    out = []
    for script in job["databases"]:
        base = sqlite3.connect(":memory:")
        base.executescript(script)
        base.set_authorizer(lambda kind, *_: 0 if kind in readable else 1)
        found = base.execute(job["query"])
        out.append([[{"blob": cell.hex()} if type(cell) is bytes else cell for cell in row]
                    for row in found])
        base.close()
    return out

# the first rows of one query and how many there are, or why there are none
def first_rows(job):
    try:
        out = rows(job)[0]
    except sqlite3.Error as error:
        return {"error": str(error)}
    return {"rows": out[:job["most"]], "count": len(out)}

def answer(job, out):
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (out, 1), (nothing, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    dumps, write, leave = json.dumps, os.write, os._exit
    kind = results if "program" in job else transcript if "code" in job else rows
    kind = first_rows if "most" in job else kind
    try:
        give_up(job["limits"])
        sys.stdout = sys.__stdout__ = io.StringIO()  # descriptor 1 is for results alone
        write(1, dumps(kind(job)).encode())
    except ModuleNotFoundError as error:
        write(1, dumps({"refused": str(error.name)[:80]}).encode())
    except BaseException:
        leave(1)
    leave(0)

# seconds for which a child did not wait for a processor: sleep counts like processor time
def used(child, begun):
    try:
        with open("/proc/" + str(child) + "/schedstat", "rb") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # a kernel or a container without it
        return 0.0
    return time.monotonic() - begun - waited

# None where the time is over
def collect(source, limits, child):
    begun, out = time.monotonic(), b""
    end, most = begun + limits["seconds"], limits["cpu"] + 0.5
    while len(out) <= limits["output"]:
        now = time.monotonic()
        if not select.select([source], [], [], max(min(end - now, 0.25), 0))[0]:
            if time.monotonic() >= end or used(child, begun) > most:
                return None
            continue
        part = os.read(source, 1 << 16)
        if not part:
            return out
        out += part
    return b""

# None where the child had to be killed
def ended_well(child, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

forget_unaudited()
for line in sys.stdin.buffer:
    job = json.loads(line)
    source, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        answer(job, out)
    os.close(out)
    text = collect(source, job["limits"], child)
    os.close(source)
    well = ended_well(child, 1.0 if text else 0.0)  # who has closed its output is about to end
    late = text is None or text and well is None
    told = None if late else text.decode(errors="replace") if well else ""
    print(json.dumps(told), flush=True)
"""


PYTHON = (os.path.realpath(sys.executable), "-I", "-S")
_SEEN = ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.base_exec_prefix)
"""The folders that a helper behind bubblewrap sees, with their contents."""


TMP_MB = 64
"""Of each file system in memory that a helper sees: its root, /tmp and /dev/shm."""


@functools.cache
def wall() -> tuple[str, ...]:
    """Return bubblewrap's words in front of a helper's; none if it is missing or does not work."""
    path = shutil.which("bwrap")
    if path is None:
        return ()
    said = ""
    # many containers do not allow /proc, and bubblewrap before 0.7 has no sizes
    for sized, proc in ((True, True), (True, False), (False, True), (False, False)):
        words = _words(path, TMP_MB if sized else None, (), proc=proc)
        try:
            done = subprocess.run(
                [*words, *PYTHON, "-c", ""],
                env={},
                capture_output=True,
                text=True,
                timeout=60,
            )
            if done.returncode == 0:
                return words
            said = done.stderr.strip()[-200:]
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
    _log.warning("%s does not work here, and programs are run without it: %s", path, said)
    return ()


def wall_around(mounts: Sequence[str], tmp_mb: int) -> list[str]:
    """Return the words of `wall` with these mounts before its own, and file systems of another
    size.
    """
    path, *words = wall()
    size = tmp_mb if "--size" in words else None
    return list(_words(path, size, mounts, proc="--proc" in words))


def _words(path: str, tmp_mb: int | None, mounts: Sequence[str], *, proc: bool) -> tuple[str, ...]:
    size = () if tmp_mb is None else ("--size", str(tmp_mb << 20))
    words = [path, *size, "--tmpfs", "/", *mounts]
    # without --die-with-parent, which means the thread: a helper ends when its input does
    words += ["--unshare-all", "--new-session", "--cap-drop", "ALL", "--chdir", "/"]
    for folder in dict.fromkeys(_SEEN):
        words += ["--ro-bind-try", folder, folder]
    words += ["--dev", "/dev", "--remount-ro", "/dev", *size, "--tmpfs", "/dev/shm"]
    words += [*size, "--tmpfs", "/tmp"]
    return (*words, *(("--proc", "/proc") if proc else ()))


class Helper:
    """A process that forks, one program at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*wall(), *PYTHON, "-c", HELPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={},
            start_new_session=True,
        )

    def ask(self, job: dict[str, Any]) -> str | None:
        """Return the output of the job's child process; None if it was late.

        Raises RuntimeError if the helper is gone.
        """
        source, out = self._process.stdin, self._process.stdout
        assert source is not None and out is not None
        try:
            source.write(json.dumps(job).encode() + b"\n")
            source.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = out.readline()
        if not line:
            raise RuntimeError(f"the sandbox's helper ended with {self._process.wait()}")
        return json.loads(line)


PATIENCE = 0.5


class Helpers(queue.LifoQueue[Helper | None]):
    """Free helpers; None stands for one that is made on demand.

    If all are in use for `PATIENCE` seconds, by programs that sleep for example, another one is
    made, up to twice as many: a new job does not wait for them.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        for _ in range(count):
            self.put(None)
        self._more = threading.Semaphore(count)

    def get(self, block: bool = True, timeout: float | None = None) -> Helper | None:
        """Return a helper for one job."""
        try:
            return super().get(block, PATIENCE if timeout is None else timeout)
        except queue.Empty:
            if timeout is not None or not block:
                raise
        return None if self._more.acquire(blocking=False) else super().get()


HELPERS = Helpers(max(2, min(8, cores())))
"""This process's helpers."""


def answer_of(job: dict[str, Any], left: threading.Event | None = None) -> str | None:
    """Return a child's output; None if it was late.

    A helper that is gone is replaced by the next job. A job is not run if its caller `left` while
    it waited for a helper.
    """
    free = HELPERS
    helper = free.get()
    if left is not None and left.is_set():
        free.put(helper)
        return None
    alive: Helper | None = None
    try:
        alive = helper or Helper()
        return alive.ask(job)
    except RuntimeError:
        alive = None
        raise
    finally:
        free.put(alive)


class Answers:
    """A cache of children's outputs, by a digest of the job; the least recently used goes first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> str | None:
        """Return the text of a stored job."""
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
            return self._texts.get(key)

    def keep(self, key: bytes, text: str) -> None:
        """Store the text of a job, and drop others for it."""
        with self._lock:
            self._bytes += _size(text) - _size(self._texts.pop(key, None))
            self._texts[key] = text
            while self._bytes > self._most_bytes:
                self._bytes -= _size(self._texts.popitem(last=False)[1])


ANSWERS = Answers(most_bytes=64 << 20)


def run(job: str, left: threading.Event | None = None) -> Any:
    """Return the child's answer to a job (JSON); None if it fails, is too slow, or prints no JSON.

    A job that was late is run again at the next request: the machine may have been busy.
    """
    text = text_of(job, LIMITS["seconds"], left)
    return None if text is None else _value(text)


def text_of(job: str, seconds: float, left: threading.Event | None) -> str | None:
    """Return the child's output, None if it was late; equal jobs run once."""
    key = hashlib.sha256(job.encode()).digest()
    text = ANSWERS.get(key)
    if text is None:
        limits = {**LIMITS, "seconds": seconds}
        text = answer_of({**json.loads(job), "limits": limits}, left)
        if text is not None:
            ANSWERS.keep(key, text)
    return text


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # it has failed or printed, or wrote an invalid result
        return None


async def unit_tests(
    task: Task, answer: str, *, tests: list[Any], function: str = "f"
) -> dict[str, float]:
    """1 where the program's function passes all tests: each has arguments and a result.

    The program is the last Markdown block of the answer, or else all of it. The metric `not_run`
    is 1 where it is too long, or imports what the sandbox does not have.
    """
    program = code_of(answer)
    arguments, wanted = [test[0] for test in tests], [test[1] for test in tests]
    if _too_long(program):
        return {"accuracy": 0.0, "note/not_run": 1.0}
    results = await _run(program=program, arguments=arguments, function=function)
    refused = isinstance(results, dict)
    if refused:
        _say_refused(str(results.get("refused"))[:80])
    return {"accuracy": float(results == wanted), "note/not_run": float(refused)}


@needs_truth
async def same_rows(task: Task, answer: str, *, databases: list[str]) -> dict[str, float]:
    """1 where the query gives what the right one (`task.truth`) gives, in all databases.

    The query is the last Markdown block of the answer, or else all of it.
    """
    query = code_of(answer)
    right = await _run(query=task.truth, databases=databases)
    if right is None:
        raise ValueError(
            "the row's own query does not run, takes too long, or gives more than 1 MB of rows: "
            f"{task.truth!r:.80}"
        )
    if _too_long(query):
        return {"accuracy": 0.0}
    rows = await _run(query=query, databases=databases)
    return {"accuracy": float(rows == right)}


async def transcript_within(code: str, seconds: float) -> str:
    """`transcript` in a thread, with a time that begins when a helper is free.

    A program whose asker leaves before that is not run.
    """
    left = threading.Event()
    try:
        return await in_thread(partial(transcript, code, seconds, left), name="tool-python")
    finally:
        left.set()


def transcript(
    code: str, seconds: float = LIMITS["seconds"], left: threading.Event | None = None
) -> str:
    """Return what a program prints, and the value of its last expression.

    Raises RuntimeError if it fails, with what it printed before, or if it takes longer than
    `seconds` (and the sandbox's own limit).
    """
    if len(code) > LONGEST:
        raise ValueError(f"the program has {len(code)} characters: at most {LONGEST}")
    seconds = min(seconds, LIMITS["seconds"])
    text = text_of(json.dumps({"code": code}), seconds, left)
    if text is None:
        asleep = f", or slept for {LIMITS['cpu']} s" if seconds > LIMITS["cpu"] else ""
        raise RuntimeError(f"it was stopped: it took longer than {seconds:g} s{asleep}")
    told = _value(text)
    parts = told if isinstance(told, dict) else {}  # a child may have written anything
    output, error = parts.get("output"), parts.get("error")
    if not isinstance(output, str) or not isinstance(error, str):
        raise RuntimeError(
            f"it was stopped: a program has {LIMITS['cpu']} s of processor time, "
            f"{LIMITS['seconds']:g} s in all, {LIMITS['memory'] >> 20} MB of memory, 1 MB of "
            "output, and no processes"
        )
    if len(output) > SHOWN:
        output = f"{output[:SHOWN]}\n... ({len(output) - SHOWN} more characters)\n"
    if error:
        raise RuntimeError(output + error[:SHOWN])
    return output.rstrip() or "(no output)"


def python(code: str) -> str:
    """Runs a Python program; gives what it prints, and the value of its last expression.

    Each call begins anew: no variable is kept.

    Args:
        code: The program. It has no files and no network; of modules, the standard library's for
            computing (math, itertools, collections, json, re, statistics and the like).
    """
    return transcript(code)


# waiting for a free helper is no time of the program's
vars(python)["within"] = transcript_within


def code_of(answer: str) -> str:
    """Return the last closed Markdown block of a reply without its language and its indentation,
    or else all of it.
    """
    parts = _FENCE.split(answer)
    if len(parts) < 3:
        return answer
    block = parts[(len(parts) - 1) // 2 * 2 - 1]
    language, _, code = block.partition("\n")
    return textwrap.dedent(code) if _LANGUAGE.fullmatch(language) else block


@functools.lru_cache(maxsize=256)
def _say_refused(module: str) -> None:
    _log.warning(
        "a reply's program imports %r, which the sandbox does not have: it scores 0 (not_run)",
        module,
    )


def _size(text: str | None) -> int:
    return 0 if text is None else sys.getsizeof(text) + _OVERHEAD


def _too_long(code: str) -> bool:
    if len(code) <= LONGEST:
        return False
    _log.warning("a reply's code of %d characters is not run and scores 0", len(code))
    return True


async def _run(**job: Any) -> Any:
    left = threading.Event()
    try:
        return await asyncio.to_thread(run, json.dumps(job), left)
    finally:
        left.set()
