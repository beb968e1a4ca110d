"""The sandbox example: right programs pass, wrong ones do not, and hostile ones reach nothing."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest

from trireme import Task

FILE = Path(__file__).parents[2] / "examples/code_and_sql/sandbox.py"
RIGHT = "def f(a, b):\n return max(a, b)"
ARGUMENTS = [[1, 2], [4, 3]]


@pytest.fixture(scope="module")
def sandbox() -> Any:
    spec = importlib.util.spec_from_file_location("sandbox_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(sandbox: Any, program: str) -> Any:
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
def test_a_program_gives_its_results(sandbox: Any, program: str, results: Any) -> None:
    assert answered(sandbox, program) == results


HOSTILE = {
    "reads a file": "open({path!r}).read()",
    "writes a file": "open({path!r}, 'w').write('x')",
    "removes a file": "import posix\nposix.unlink({path!r})",
    "removes a file by another name": "import sys\nsys.modules['os'].remove({path!r})",
    "renames a file": "import sys\nsys.modules['os'].rename({path!r}, {path!r} + '.gone')",
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
    "escapes by attributes": (
        "names = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileIO']\n"
        "names[0]({path!r}).read()"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nothing(sandbox: Any, tmp_path: Path, name: str) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    program = HOSTILE[name].format(path=str(kept))
    assert answered(sandbox, f"{program}\n{RIGHT}") is None
    assert kept.read_text() == "mine"


def test_a_program_that_does_not_end_is_killed(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sandbox.LIMITS, "seconds", 0.5)
    started = time.monotonic()
    assert answered(sandbox, f"while True: pass\n{RIGHT}") is None
    assert time.monotonic() - started < 60


def test_unit_tests_all_have_to_pass(sandbox: Any) -> None:
    tests = [[[1, 2], 2], [[4, 3], 4]]
    assert sandbox.unit_tests(Task(), RIGHT, tests=tests) == {"accuracy": 1.0}
    sometimes = "def f(a, b):\n return b"
    assert sandbox.unit_tests(Task(), sometimes, tests=tests) == {"accuracy": 0.0}


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
def test_a_query_is_worth_its_rows(sandbox: Any, tmp_path: Path, query: str, worth: float) -> None:
    task = Task(raw_task={"response": "SELECT wage FROM people WHERE age >= 4"})
    given = query.format(path=tmp_path / "other.db")
    assert sandbox.same_rows(task, given, databases=[SCRIPT]) == {"accuracy": worth}
    assert list(tmp_path.iterdir()) == []


def test_a_row_whose_own_query_does_not_run_is_an_error(sandbox: Any) -> None:
    with pytest.raises(ValueError, match="the row's own query does not run"):
        sandbox.same_rows(Task(raw_task={"response": "SELEC 1"}), "SELECT 1", databases=[SCRIPT])
