"""House: how large `trireme/` and `trinity/` are, and how much of it says nothing new.

    python scripts/house.py              # the table
    python scripts/house.py --list NAME  # what one row counts: heads, once, forwarders, circles,
                                         # strings, defaults

Lengths are reported and not limited: a file sawn in two at a limit is worse than one of 600 lines.
`tests/test_house.py` holds the few laws of `LIMITS`.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"import circles": 0, "methods called by a string": 0}
"""Figures that may not rise above these numbers."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BY_NAME = {"control", "call", "call_all", "data", "ask"}
"""Methods that take the name of another method as their first argument."""


class Source:
    """One file of the package."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.path = path
        self.name = str(path.relative_to(root))
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        parts = path.relative_to(root).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        """All lines, blank ones and comments included."""
        return self.text.count("\n")

    @cached_property
    def code_lines(self) -> int:
        """Lines that hold code: no comment, docstring or blank line."""
        held: set[int] = set()
        silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in silent and token.type != tokenize.ENDMARKER:
                held.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                held.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
        return len(held)

    @property
    def head_lines(self) -> int:
        """Lines before the first function or class."""
        for node in self.tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        return self.lines

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        return (node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS))


def sources(package: str = "trireme", root: Path = ROOT) -> list[Source]:
    """All files of a package, by name."""
    return [Source(path, root) for path in sorted((root / package).rglob("*.py"))]


def used_once(files: list[Source]) -> list[str]:
    """Private functions and methods whose name stands once besides their definition."""
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return [
        f"{file.name}:{node.lineno} {node.name}"
        for file in files
        for node in file.functions()
        if node.name.startswith("_") and not node.name.startswith("__") and uses[node.name] == 1
    ]


def _body(node: Function) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _is_forwarder(node: Function) -> bool:
    """Whether all that a function does is to call another one with its own arguments."""
    body = _body(node)
    if len(body) != 1 or node.decorator_list or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    call = call.value if isinstance(call, ast.Await) else call
    if not isinstance(call, ast.Call):
        return False
    names = {a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}
    given = [*call.args, *(k.value for k in call.keywords)]
    own = [a.value if isinstance(a, ast.Starred) else a for a in given]
    extras = {a.arg for a in (node.args.vararg, node.args.kwarg) if a}
    mine = names - {"self", "cls"} | extras
    return (
        bool(mine)
        and all(isinstance(a, ast.Name) for a in own)
        and {a.id for a in own if isinstance(a, ast.Name)} == mine
    )


def forwarders(files: list[Source]) -> list[str]:
    """Functions that hand their arguments on and do nothing else."""
    return [
        f"{file.name}:{node.lineno} {node.name}"
        for file in files
        for node in file.functions()
        if _is_forwarder(node)
    ]


def _imports(nodes: list[ast.stmt]) -> Iterator[str]:
    """Modules and names imported anywhere in these lines, late in functions too, for types not."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from _imports([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


def circles(files: list[Source]) -> list[str]:
    """Groups of files that import each other."""
    known = {file.module for file in files}
    graph = {file.module: (set(_imports(file.tree.body)) & known) - {file.module} for file in files}
    reached = {name: _reached(name, graph) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted(" ".join(sorted(group)) for group in groups if group)


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    """What a file imports, what that imports, and so on; the file itself where it comes back."""
    seen: set[str] = set()
    pending = [*graph[start]]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += graph[name]
    return seen


def by_string(files: list[Source]) -> list[str]:
    """Calls that name a method by a string, where neither an editor nor a type checker follows."""
    return [
        f"{file.name}:{node.lineno} {node.func.attr}({node.args[0].value!r})"
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in BY_NAME
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and node.args[0].value.isidentifier()
    ]


def _constant(node: ast.expr | None) -> str | None:
    """The text of a default that says something: a number or a text, not None, 0, 1 or a bool."""
    silent = (None, True, False, 0, 1, "", "auto")
    return repr(node.value) if isinstance(node, ast.Constant) and node.value not in silent else None


def _defaults(file: Source) -> Iterator[tuple[str, str, int]]:
    """Each named default of a file: of a class's field, or of an argument."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    value = _constant(line.value)
                    if value:
                        yield line.target.id, value, line.lineno
        elif isinstance(node, FUNCTIONS):
            of = node.args
            places = [
                *zip(reversed([*of.posonlyargs, *of.args]), reversed(of.defaults), strict=False)
            ]
            for argument, default in [*places, *zip(of.kwonlyargs, of.kw_defaults, strict=True)]:
                value = _constant(default)
                if value:
                    yield argument.arg, value, argument.lineno


def repeated_defaults(files: list[Source]) -> list[str]:
    """Keys of the configuration whose default stands in more than one file of the package."""
    at: dict[tuple[str, str], list[str]] = defaultdict(list)
    keys = {
        (name, value)
        for file in files
        if file.module.startswith("trireme.config")
        for name, value, _ in _defaults(file)
    }
    for file in files:
        for name, value, line in _defaults(file):
            if (name, value) in keys:
                at[name, value].append(f"{file.name}:{line}")
    return [
        f"{name}={value}: {' '.join(places)}"
        for (name, value), places in sorted(at.items())
        if len({place.split(":")[0] for place in places}) > 1
    ]


def lists(files: list[Source]) -> dict[str, list[str]]:
    """What the rows count that are lists of places."""
    return {
        "once": used_once(files),
        "forwarders": forwarders(files),
        "circles": circles(files),
        "strings": by_string(files),
        "defaults": repeated_defaults(files),
        "heads": [f"{file.name} {file.head_lines}" for file in files],
    }


def measure(root: Path = ROOT) -> dict[str, float]:
    """Every figure of the table, by its name."""
    files = sources("trireme", root)
    trinity = sources("trinity", root)
    spans = [
        (node.end_lineno or 0) - node.lineno + 1 for file in files for node in file.functions()
    ]
    lines = sum(file.lines for file in files)
    places = lists(files)
    return {
        "trireme files": len(files),
        "trireme lines": lines,
        "trireme code lines": sum(file.code_lines for file in files),
        "mean lines a file": round(lines / len(files), 1),
        "files under 90 lines": sum(file.lines < 90 for file in files),
        "longest file": max(file.lines for file in files),
        "longest function": max(spans),
        "lines in file heads": sum(file.head_lines for file in files),
        "private functions used once": len(places["once"]),
        "forwarders": len(places["forwarders"]),
        "import circles": len(places["circles"]),
        "methods called by a string": len(places["strings"]),
        "defaults in more than one file": len(places["defaults"]),
        "trinity files": len(trinity),
        "trinity lines": sum(file.lines for file in trinity),
    }


def main() -> None:
    """Print the table, or one of its lists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", choices=sorted(lists([])), help="what a row counts")
    options = parser.parse_args()
    if options.list:
        print("\n".join(lists(sources())[options.list]))
        return
    print("| what | now | limit |\n|-|-|-|")
    for name, value in measure().items():
        print(f"| {name} | {value:,} | {LIMITS.get(name, '')} |")


if __name__ == "__main__":
    sys.exit(main())
