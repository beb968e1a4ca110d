"""The sandbox: right programs pass, wrong ones do not, and hostile ones reach nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.limits import HANG_S
from trireme import Task
from trireme.ext.sandbox import programs as sandbox
from trireme.rewards.reward import resolve, score

RIGHT = "def f(a, b):\n return max(a, b)"
ARGUMENTS = [[1, 2], [4, 3]]
PASSED = {"accuracy": 1.0, "note/not_run": 0.0}
NOT_RUN = {"accuracy": 0.0, "note/not_run": 1.0}


def answered(program: str) -> Any:
    return sandbox.run(json.dumps({"program": program, "arguments": ARGUMENTS}))


@pytest.mark.parametrize(
    ("program", "results"),
    [
        (RIGHT, [2, 4]),
        (RIGHT.replace("max", "min"), [1, 3]),
        ("import math\ndef f(a, b):\n return math.gcd(a, b)", [1, 1]),
        ("def f(a, b): return unknown", None),
        ("def g(a, b): return 1", None),
        ("def f(a, b) return 1", None),
        ("def f(a, b): return object()", None),
        (f"print([9, 9])\n{RIGHT}", [2, 4]),  # what it prints is not taken for its results
    ],
)
def test_a_program_gives_its_results(program: str, results: Any) -> None:
    assert answered(program) == results


MODULES = [
    "array",
    "base64",
    "binascii",
    "bisect",
    "calendar",
    "collections",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "graphlib",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "pprint",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "time",
    "timeit",
    "typing",
    "unicodedata",
    "zlib",
]

USUAL = {
    **{module: f"import {module}\ndef f(a, b): return max(a, b)" for module in MODULES},
    "typing": (
        "from typing import List, NamedTuple, Optional\n"
        "class P(NamedTuple):\n    x: int\n    y: int = 0\n"
        "def f(a: int, b: Optional[int]) -> List[int]: return max(P(a), P(b))[0]"
    ),
    "most common": (
        "from collections import Counter\n"
        "def f(a, b): return Counter([a, b, max(a, b)]).most_common(1)[0][0]"
    ),
    "namedtuple": (
        "from collections import namedtuple\n"
        "P = namedtuple('P', 'x y', defaults=[0])\ndef f(a, b): return max(P(a), P(b)).x"
    ),
    "dataclass": (
        "from dataclasses import dataclass, field\n"
        "@dataclass(order=True)\n"
        "class P:\n    x: int\n    y: list = field(default_factory=list)\n"
        "def f(a, b): return max(P(a), P(b)).x"
    ),
    "enum": (
        "from enum import IntEnum\nclass C(IntEnum):\n    ONE = 1\n"
        "def f(a, b): return max(a, b) * C.ONE"
    ),
    "abstract class": (
        "from abc import ABC, abstractmethod\n"
        "class A(ABC):\n    @abstractmethod\n    def g(self): ...\n"
        "class B(A):\n    def g(self): return 0\n"
        "def f(a, b): return max(a, b) + B().g()"
    ),
    "wrapper": (
        "import functools\n"
        "def d(g):\n    @functools.wraps(g)\n    def h(*a): return g(*a)\n    return h\n"
        "@d\ndef f(a, b): return max(a, b)"
    ),
    "does without a module": (
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n"
        "def f(a, b): return max(a, b) if numpy is None else numpy.max([a, b])"
    ),
    "packs and hashes": (
        "import hashlib, struct\n"
        "def f(a, b):\n"
        "    assert hashlib.sha256(b'').hexdigest().startswith('e3b0c442')\n"
        "    return max(struct.unpack('<ii', struct.pack('<ii', a, b)))"
    ),
    "prints at once": f"import sys\nprint(1, flush=True)\nsys.__stdout__.flush()\n{RIGHT}",
    "long": "x = 1\n" * 2000 + RIGHT,
}


@pytest.mark.parametrize("name", USUAL)
def test_a_program_may_use_what_is_usual(name: str) -> None:
    assert answered(USUAL[name]) == [2, 4]
    scored = sandbox.unit_tests(Task(), USUAL[name], tests=[[[1, 2], 2], [[4, 3], 4]])
    assert asyncio.run(scored) == PASSED


def test_a_program_that_is_too_long_is_said(caplog: pytest.LogCaptureFixture) -> None:
    program = f"{RIGHT}\n{'#' * sandbox.LONGEST}"
    assert asyncio.run(sandbox.unit_tests(Task(), program, tests=[])) == NOT_RUN
    assert f"{len(program)} characters is not run" in caplog.text


HOSTILE = {
    "reads a file": "open({path!r}).read()",
    "writes a file": "open({path!r}, 'w').write('x')",
    "removes a file": "import posix\nposix.unlink({path!r})",
    "removes a file by another name": "import sys\nsys.modules['os'].remove({path!r})",
    "renames a file": "import sys\nsys.modules['os'].rename({path!r}, {path!r} + '.gone')",
    "forks for ever": "import posix\nwhile True: posix.fork()",
    "fills the disk": "import os\nos.write(os.open({path!r}, 2), b'x' * (1 << 30))",
    "sleeps": "import time\ntime.sleep(1000)",
    "forks": "import posix\nposix.fork()",
    "runs a shell": "import sys\nsys.modules['os'].system('rm {path}')",
    "becomes another program": "import posix\nposix.execv('/bin/rm', ['rm', {path!r}])",
    "kills its parent": "import posix\nposix.kill(posix.getppid(), 9)",
    "opens a socket": "import socket\nsocket.socket()",
    "calls C": "import ctypes\nctypes.CDLL(None).getpid()",
    "makes code by hand": "f = (lambda: 0)\nf.__code__ = f.__code__.replace(co_code=b'x' * 8)",
    "floods its output": "while True: print('x' * 1000)",
    "writes to what it was given": "import posix\nfor n in range(9): posix.write(n, b'[2, 4]')",
    "closes its output and waits": "import posix, time\nposix.close(1)\ntime.sleep(1000)",
    "takes memory": "x = bytearray(1 << 31)",
    "goes deep": "def g(): return g()\ng()",
    "exits as if all were well": "import posix\nposix._exit(0)",
    "makes a pipe in the file system": "import os\nos.mkfifo({path!r} + '.pipe')",
    "makes one by another name": (
        "import os\n"
        "make = [f for f in os.supports_dir_fd if f.__name__ == 'mkfifo'][0]\n"
        "make({path!r} + '.pipe')"
    ),
    "loads a module afresh": (
        "import sys\ndel sys.modules['posix']\nimport posix\nposix.mkfifo({path!r} + '.pipe')"
    ),
    "slows its parent": "import os\nos.setpriority(0, os.getppid(), 19)",
    "pins its parent": "import os\nos.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
    "sets the clock": (
        "import time\n"
        "try:\n    time.clock_settime(time.CLOCK_MONOTONIC, 0)\n"  # which nobody may set
        "except OSError:\n    pass\n"  # of the kernel: the call has reached it
    ),
    "becomes another user": "import os\nos.setresuid(*os.getresuid())",
    "becomes another group": "import os\nos.setegid(os.getegid())",
    "looks for a file": "import os\nos.stat({path!r})",
    "looks for a file by another name": "import posix\nposix.lstat({path!r})",
    "asks what it may do": "import os\nos.access({path!r}, os.R_OK)",
    "follows a link": "import os\nos.readlink('/proc/self/cwd')",
    "looks at a file's disk": "import posix\nposix.statvfs({path!r})",
    "asks a path's limits": "import os\nos.pathconf({path!r}, 'PC_NAME_MAX')",
    "looks whether a file is there": "import os\nassert os.path.exists({path!r})",
    "imports by a name that equals all": (
        "class Name(str):\n"
        "    __eq__ = lambda self, other: True\n"
        "    __hash__ = lambda self: hash('os')\n"
        "import builtins, sys\n"
        "sys.modules.pop('os')\n"
        "__import__(Name('faulthandler'))"
    ),
    "widens what is allowed": (
        "import os\n"
        "try:\n"
        "    os.listdir('/')\n"
        "except PermissionError as error:\n"
        "    trace = error.__traceback__\n"
        "while trace.tb_next:\n"
        "    trace = trace.tb_next\n"
        "allowed = trace.tb_frame.f_locals['allowed']\n"
        "allowed |= {{'os.remove', 'os.listdir'}}\n"
        "os.remove({path!r})"
    ),
    "escapes by attributes": (
        "names = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileIO']\n"
        "names[0]({path!r}).read()"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "time.sleep" in HOSTILE[name]:  # the others end by themselves, or by another limit
        monkeypatch.setitem(sandbox.LIMITS, "seconds", 2.0)
    kept = tmp_path / "kept"
    kept.write_text("mine")
    program = HOSTILE[name].format(path=str(kept))
    assert answered(f"{program}\n{RIGHT}") in (None, {"refused": "socket"}, {"refused": "ctypes"})
    with contextlib.suppress(RuntimeError):  # by the python tool: what was left is no file
        sandbox.transcript(program, sandbox.LIMITS["seconds"])
    assert kept.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [kept]


def test_a_program_that_imports_what_is_not_there_is_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sandbox._say_refused.cache_clear()
    for number in range(2):
        program = f"import numpy\n{RIGHT}  # {number}"
        assert asyncio.run(sandbox.unit_tests(Task(), program, tests=[[[1, 2], 2]])) == NOT_RUN
    assert caplog.text.count("imports 'numpy', which the sandbox does not have") == 1


def test_a_note_is_a_metric_and_no_part_of_the_reward() -> None:
    notes: dict[str, float] = {}
    given = {"tests": [[[1, 2], 2]]}
    function = resolve("unit_tests", given)
    assert function is not None
    parts = asyncio.run(score(Task(), "import numpy", function, notes=notes))
    assert parts == {"accuracy": 0.0} and notes == {"not_run": 1.0}


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(1)\nx = 2\nx + 3", "1\n5"),
        ("'text'", "'text'"),
        ("x = 1", "(no output)"),
        ("None", "(no output)"),
        ("import sys\nprint(1)\nsys.exit(0)", "1"),
        ("raise SystemExit", "(no output)"),
        (
            "import sys\nprint(1, file=sys.__stdout__, flush=True)\nsys.__stderr__.write('2')",
            "1\n21",
        ),
        ("from math import comb\ncomb(5, 2)", "10"),
        ("def f(n):\n return n\nf(7)", "7"),
        ("print('x' * 5000)", f"{'x' * 4000}\n... (1001 more characters)"),
    ],
)
def test_the_python_tool_shows_what_a_terminal_would(code: str, shown: str) -> None:
    assert sandbox.transcript(code) == shown


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print(1)\n1 / 0", "1\nZeroDivisionError: division by zero (line 2)"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy' in the sandbox (line 1)"),
        ("exit_code = 3\nraise SystemExit(exit_code)", "SystemExit: 3 (line 2)"),
        (
            "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd",
            "Odd: (its __str__ raises an error) (line 3)",
        ),
        ("while True: pass", "it was stopped: a program has 2 s of processor time"),
        ("import posix\nposix._exit(0)", "it was stopped"),
        ("#" * 60_000, "the program has 60000 characters: at most 50000"),
    ],
)
def test_the_python_tool_says_what_went_wrong(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a busy machine 2 s of processor time may take longer than a program has in all
    monkeypatch.setitem(sandbox.LIMITS, "seconds", 300.0)
    with pytest.raises((RuntimeError, ValueError)) as raised:
        sandbox.transcript(code, 300.0)
    assert str(raised.value).startswith(message)


def test_behind_bubblewrap_there_are_no_files_no_processes_and_no_network(tmp_path: Path) -> None:
    if not sandbox.wall():
        pytest.skip("bubblewrap is not installed, or may make no namespace here")
    look = (
        "import json, os, socket\n"
        f"seen = os.path.exists({str(tmp_path)!r})\n"
        "proc = os.listdir('/proc') if os.path.exists('/proc') else []\n"
        "numbers = [name for name in proc if name.isdigit()]\n"
        "print(json.dumps([seen, len(numbers) < 4, [n for _, n in socket.if_nameindex()]]))"
    )
    words = [*sandbox.wall(), *sandbox.PYTHON, "-c", look]
    done = subprocess.run(words, env={}, capture_output=True, text=True, timeout=HANG_S)
    assert json.loads(done.stdout) == [False, True, ["lo"]], done.stderr


@pytest.fixture
def in_place_of_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """Makes a shell script that is found as `bwrap`."""

    def make(script: str) -> Path:
        path = tmp_path / "bwrap"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return path

    sandbox.wall.cache_clear()
    yield make
    sandbox.wall.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_said_and_left_out(
    in_place_of_bubblewrap: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    in_place_of_bubblewrap("echo 'no namespaces here' >&2\nexit 1")
    assert sandbox.wall() == ()
    assert "does not work here, and programs are run without it: no namespaces" in caplog.text


def test_a_bubblewrap_that_may_not_mount_proc_works_without(
    in_place_of_bubblewrap: Callable[[str], Path],
) -> None:
    partial = in_place_of_bubblewrap('case "$*" in *--proc*) exit 1;; esac')
    assert sandbox.wall()[0] == str(partial)
    assert "--proc" not in sandbox.wall()


def test_a_program_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sandbox.LIMITS, "seconds", 0.5)
    monkeypatch.setitem(sandbox.LIMITS, "cpu", 6000)
    assert answered(f"while True: pass\n{RIGHT}") is None


def test_unit_tests_all_have_to_pass() -> None:
    tests = [[[1, 2], 2], [[4, 3], 4]]
    assert asyncio.run(sandbox.unit_tests(Task(), RIGHT, tests=tests)) == PASSED
    sometimes = "def f(a, b):\n return b"
    failed = {"accuracy": 0.0, "note/not_run": 0.0}
    assert asyncio.run(sandbox.unit_tests(Task(), sometimes, tests=tests)) == failed


@pytest.mark.parametrize(
    "answer",
    [
        f"First:\n```\nnothing\n```\nNow:\n```python\n{RIGHT}\n```\nDone.",
        f"```python\n{RIGHT}\n```\nand ```never closed",
        f"```{RIGHT}\n```",
        *(
            f"```{language}\n{RIGHT}\n```"
            for language in (
                "python3.11",
                "py",
                " Python ",
                "python-3",
                "{.python}",
                "python {x=1}",
            )
        ),
        f"````python\n{RIGHT}\n````",
        f"~~~python\n{RIGHT}\n~~~",
        f"1. So:\n   ```python\n{textwrap.indent(RIGHT, '   ')}\n   ```",
    ],
)
def test_the_program_is_the_last_block(answer: str) -> None:
    tests = [[[1, 2], 2]]
    assert asyncio.run(sandbox.unit_tests(Task(), answer, tests=tests)) == PASSED


def test_the_function_may_have_another_name() -> None:
    program, tests = RIGHT.replace("f(", "larger("), [[[1, 2], 2]]
    scored = sandbox.unit_tests(Task(), program, tests=tests, function="larger")
    assert asyncio.run(scored) == PASSED


SCRIPT = "CREATE TABLE people (age, wage); INSERT INTO people VALUES (3, 5), (4, 7), (4, 9);"


@pytest.mark.parametrize(
    ("query", "worth"),
    [
        ("SELECT wage FROM people WHERE age >= 4", 1.0),
        ("SELECT wage FROM people WHERE NOT age < 4", 1.0),
        ("SELECT wage FROM people WHERE age > 4", 0.0),
        ("SELECT wages FROM people", 0.0),
        ("DROP TABLE people", 0.0),
        ("ATTACH '{path}' AS other", 0.0),
        ("SELECT load_extension('{path}')", 0.0),
        ("SELECT wage FROM people WHERE age >= 4; DROP TABLE people", 0.0),
    ],
)
def test_a_query_is_worth_its_rows(tmp_path: Path, query: str, worth: float) -> None:
    task = Task(raw_task={"response": "SELECT wage FROM people WHERE age >= 4"})
    given = query.format(path=tmp_path / "other.db")
    assert asyncio.run(sandbox.same_rows(task, given, databases=[SCRIPT])) == {"accuracy": worth}
    assert list(tmp_path.iterdir()) == []


def test_a_row_whose_own_query_does_not_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="the row's own query does not run"):
        task = Task(raw_task={"response": "SELEC 1"})
        asyncio.run(sandbox.same_rows(task, "SELECT 1", databases=[SCRIPT]))


def test_one_that_waits_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sandbox.LIMITS, "seconds", 4.0)
    waits = f"import posix, time\ntime.sleep(1000)\n{RIGHT}"
    quick = f"# another\n{RIGHT}"

    async def main() -> None:
        tests = [[[1, 2], 2]]
        slow = asyncio.ensure_future(sandbox.unit_tests(Task(), waits, tests=tests))
        assert await sandbox.unit_tests(Task(), quick, tests=tests) == PASSED
        assert not slow.done()
        for helper in list(sandbox.HELPERS.queue):
            assert helper is None or helper._process.poll() is None
        assert await slow == {"accuracy": 0.0, "note/not_run": 0.0}

    asyncio.run(main())


BEGIN_TOGETHER = """
import subprocess
import sys
import textwrap
import threading, time
import trireme.ext.sandbox.programs as sandbox

made = []

class SlowToMake(sandbox.Helpers):
    def __init__(self, count):
        time.sleep(0.2)
        super().__init__(count)

class Counted:
    def __init__(self):
        made.append(self)

    def ask(self, job):
        time.sleep(0.01)
        return "1"

sandbox.Helpers, sandbox.Helper, sandbox.os.cpu_count = SlowToMake, Counted, lambda: 2
threads = [threading.Thread(target=sandbox.answer_of, args=({},)) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(made))
"""


def test_threads_that_begin_together_share_the_helpers() -> None:
    words = [sys.executable, "-c", BEGIN_TOGETHER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert int(done.stdout) <= max(2, min(8, os.cpu_count() or 2))


def test_a_helper_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "wall", tuple)  # which would be killed in the helper's place
    monkeypatch.setattr(sandbox, "HELPERS", sandbox.Helpers(2))
    assert answered(f"# first\n{RIGHT}") == [2, 4]
    free = sandbox.HELPERS.queue
    [*_, helper] = [one for one in free if one is not None]
    helper._process.kill()
    helper._process.wait()
    with pytest.raises(RuntimeError, match="the sandbox's helper ended with -9"):
        for number in range(len(free)):
            answered(f"# {number} again\n{RIGHT}")
    assert answered(f"# after\n{RIGHT}") == [2, 4]


def test_equal_jobs_run_once_but_a_late_one_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = [None, "[2, 4]"]
    monkeypatch.setattr(sandbox, "answer_of", lambda job, left: told.pop(0))
    program = f"# late at first\n{RIGHT}"
    assert [answered(program) for _ in range(3)] == [None, [2, 4], [2, 4]]
    assert told == []


def test_a_helper_says_who_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(program: str, seconds: float) -> str | None:
        limits = {**sandbox.LIMITS, "seconds": seconds}
        return sandbox.answer_of({"program": program, "arguments": ARGUMENTS, "limits": limits})

    assert told("import time\ntime.sleep(1000)", 0.3) is None
    assert told("def f(a) return 1", HANG_S) == ""
    assert told(RIGHT, HANG_S) == "[2, 4]"


def test_answers_are_kept_up_to_a_number_of_bytes() -> None:
    answers = sandbox.Answers(most_bytes=10_000)
    for number in range(10):
        answers.keep(b"%d" % number, "x" * 2000)
        answers.keep(b"%d" % number, "y" * 2000)
        answers.get(b"0")
    kept = [number for number in range(10) if answers.get(b"%d" % number)]
    assert kept == [0, 7, 8, 9]
    assert answers.get(b"9") == "y" * 2000


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.set_int_max_str_digits(0)\ndef f(a, b): return 10 ** 5000",
        "import os\nos.write(1, b'[' * 500_000)\nos._exit(0)",
    ],
)
def test_what_cannot_be_read_is_no_result(program: str) -> None:
    assert answered(program) is None


def test_all_rows_are_compared() -> None:
    numbers = (
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {})"
        " SELECT x FROM n"
    )
    task = Task(raw_task={"response": numbers.format(2000)})
    for most, worth in ((2000, 1.0), (1500, 0.0)):
        scored = sandbox.same_rows(task, numbers.format(most), databases=[SCRIPT])
        assert asyncio.run(scored) == {"accuracy": worth}


def test_a_program_whose_asker_left_while_it_waited_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    free: queue.LifoQueue[Any] = queue.LifoQueue()
    helper = SimpleNamespace(
        ask=lambda job: asked.append(job["code"]) or '{"output": "", "error": ""}'
    )
    monkeypatch.setattr(sandbox, "HELPERS", free)

    async def main() -> None:
        gone = asyncio.ensure_future(sandbox.transcript_within("# gone", 30))
        stays = asyncio.ensure_future(sandbox.transcript_within("# stays", 30))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone})
        free.put(helper)
        assert await asyncio.wait_for(stays, HANG_S) == "(no output)"
        while free.empty():  # the thread of the one that is gone may hold the helper
            await asyncio.sleep(0)

    asyncio.run(main())
    assert asked == ["# stays"]


def test_sleep_counts_like_processor_time() -> None:
    limits = {**sandbox.LIMITS, "seconds": HANG_S, "cpu": 1}
    job = {"program": "import time\ntime.sleep(1000)", "arguments": ARGUMENTS, "limits": limits}
    assert sandbox.answer_of(job) is None
    waits = "import select\nwhile True: select.select([], [], [], 1)"
    assert sandbox.answer_of({**job, "program": waits}) is None


def test_programs_that_hold_all_helpers_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    free = sandbox.Helpers(2)
    held = [free.get(), free.get()]
    monkeypatch.setattr(sandbox, "HELPERS", free)
    assert answered(f"# while both are held\n{RIGHT}") == [2, 4]
    assert held == [None, None] and free.qsize() == 1  # it stays, for the next one
    more = [free.get(), free.get()]
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(free.get()))
    thread.start()
    assert free.empty() and not late  # four are all that there are
    free.put(None)
    thread.join(HANG_S)
    assert late == [None]
    free.put(more[0])
