"""A limit in the tests guards against a hang only: none is shorter than HANG_S, and no test
measures how fast this machine is.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHOLE_TEST = PYPROJECT["tool"]["pytest"]["ini_options"]["timeout"]
WAITS = {*("wait_for", "communicate", "wait", "join", "result", "run"),
         *("get", "post", "request", "Client", "AsyncClient")}  # fmt: skip
CLOCKS = {"monotonic", "perf_counter", "time", "process_time"}
EXPIRES = {"raises", "suppress"}  # `with` these, a test sees its limit expire


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    found = node.func if isinstance(node, ast.Call) else None
    if isinstance(found, ast.Attribute):
        return found.attr
    return found.id if isinstance(found, ast.Name) else ""


def short(node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, (int, float)) and value < HANG_S


def reads_a_clock(node: ast.AST) -> bool:
    return any(called(inner) in CLOCKS for inner in ast.walk(node))


def limits(node: ast.AST, expires: bool = False) -> Iterator[tuple[int, str]]:
    """The line and the words of each limit that a slow machine reaches."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        expires |= any(called(item.context_expr) in EXPIRES for item in node.items)
    if isinstance(node, ast.Call):
        whole = ast.unparse(node.func)
        if whole == "pytest.mark.timeout" and ast.literal_eval(node.args[0]) <= WHOLE_TEST:
            yield node.lineno, ast.unparse(node)
        timeouts = [word.value for word in node.keywords if word.arg == "timeout"]
        timeouts += node.args[1:2] if whole == "asyncio.wait_for" else []
        timeouts += node.args[:1] if called(node) == "wait" and "clock" not in whole else []
        if not expires and called(node) in WAITS and any(map(short, timeouts)):
            yield node.lineno, ast.unparse(node)
    match node:
        case ast.BinOp(clock, ast.Add(), seconds) if short(seconds) and called(clock) in CLOCKS:
            yield node.lineno, ast.unparse(node)
        case ast.Compare(ast.BinOp() as time, _, others) if reads_a_clock(time):
            if any(map(short, others)):
                yield node.lineno, ast.unparse(node)
    for inner in ast.iter_child_nodes(node):
        yield from limits(inner, expires)


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.timeout(600)\ndef test(): ...",
        "await asyncio.wait_for(pull, 5)",
        "subprocess.run(words, timeout=60)",
        "process.wait(30)",
        "deadline = time.monotonic() + 20",
        "assert time.perf_counter() - start < 0.5",
    ],
)
def test_a_short_limit_is_found(text: str) -> None:
    assert len(list(limits(ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "with pytest.raises(TimeoutError):\n    await asyncio.wait_for(pull, 0.1)",
        "await asyncio.wait_for(pull, HANG_S)",
        "WeightGroup(Meeting(host, 0, 3, 0, timeout=1))",
        "@pytest.mark.timeout(7200)\ndef test(): ...",
    ],
)
def test_a_limit_that_a_test_sees_expire_or_that_is_long_is_none(text: str) -> None:
    assert not list(limits(ast.parse(text)))


def test_no_test_has_a_limit_that_a_slow_machine_reaches() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "node_modules" not in path.parts]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in files
        for line, words in limits(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)
