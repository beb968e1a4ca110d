"""House: how large the kernel and the extensions are, and how much of them says nothing new.

    python scripts/house.py              # the table
    python scripts/house.py --list ROW   # what one row counts, such as hubs

Lengths are reported and not limited: a file sawn in two at a limit is worse than one of 600 lines.
`tests/test_house.py` holds the few laws of `LIMITS` and `KERNEL_LIMITS`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "import circles": 0,
    "methods called by a string": 0,
    "lines that name another system": 0,
}
"""Figures that may not rise above these numbers, kernel and extensions together."""
KERNEL_LIMITS = {"hubs": 8}
"""Figures that the kernel alone may not raise above these numbers."""
PUBLIC = "trireme"
"""The public API: all that its module does is to name what users import, so it is no hub."""
MANY_NAMES = 20
MANY_PARAMETERS = 10
RELATIVE = re.compile(
    r"(Of|What|Whose|Who|Whom|Where|Which|When|Whether|That|Those|This|For|By|From|In|On|To|With|See)\b"
)
FOREIGN = re.compile(r"\b(vllm|ray|swift|megatron|verl|webshop|trinity|harbor|alfworld)\b", re.I)

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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, walked once: most of the figures look at them."""
        return list(ast.walk(self.tree))

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
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                held.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
        return len(held)

    @property
    def is_kernel(self) -> bool:
        """Whether the file belongs to no extension."""
        return self.module.split(".")[:2] != ["trireme", "ext"]

    def functions(self) -> Iterator[Function]:
        """Every function and method."""
        return (node for node in self.nodes if isinstance(node, FUNCTIONS))


def sources(package: str = "trireme", root: Path = ROOT) -> list[Source]:
    """All files of a package, by name."""
    return [Source(path, root) for path in sorted((root / package).rglob("*.py"))]


def used_once(files: list[Source]) -> list[str]:
    """Private functions and methods whose name stands once besides their definition."""
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for file in files
        for node in file.nodes
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
        for node in file.nodes
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
    for node in file.nodes:
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


def hubs(files: list[Source]) -> list[str]:
    """Files that import more than `MANY_NAMES` of our own names, those for types included."""
    found = [(len(_own_names(file)), file.name) for file in files if file.module != PUBLIC]
    return [f"{name} {count}" for count, name in sorted(found, reverse=True) if count > MANY_NAMES]


def _own_names(file: Source) -> set[str]:
    return {
        f"{node.module}.{alias.name}"
        for node in file.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trireme"
        for alias in node.names
    }


def long_signatures(files: list[Source]) -> list[str]:
    """Functions that take more than `MANY_PARAMETERS`, `self` left out."""
    return [
        f"{file.name}:{node.lineno} {node.name} {count}"
        for file in files
        for node in file.functions()
        if (count := len(_parameters(node))) > MANY_PARAMETERS
    ]


def _parameters(node: Function) -> list[str]:
    of = node.args
    names = [a.arg for a in [*of.posonlyargs, *of.args, *of.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls")]


def short_functions(files: list[Source]) -> list[str]:
    """Functions whose body is one statement."""
    return [
        f"{file.name}:{node.lineno} {node.name}"
        for file in files
        for node in file.functions()
        if len(_body(node)) == 1
    ]


def relative_docstrings(files: list[Source]) -> list[str]:
    """Docstrings that begin with a relative word or a preposition, not a verb or a noun."""
    return [
        f"{file.name}:{getattr(node, 'lineno', 1)} {text[:60].splitlines()[0]}"
        for file in files
        for node in file.nodes
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
        and RELATIVE.match(text := ast.get_docstring(node) or "")
    ]


def foreign_words(files: list[Source]) -> list[str]:
    """Lines of the kernel that name another system, which an extension is for."""
    return [
        f"{file.name}:{number} {line.strip()[:80]}"
        for file in files
        if file.is_kernel
        for number, line in enumerate(file.text.splitlines(), 1)
        if FOREIGN.search(line)
    ]


LISTS = {
    "hubs": hubs,
    "long signatures": long_signatures,
    "functions of one statement": short_functions,
    "private functions used once": used_once,
    "forwarders": forwarders,
    "docstrings that begin with a relative word": relative_docstrings,
    "lines that name another system": foreign_words,
    "import circles": circles,
    "methods called by a string": by_string,
    "defaults in more than one file": repeated_defaults,
}
"""The rows that count places, each with what lists them."""


def measure(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Every figure of the table by its name: the kernel's and the extensions'.

    What several files make together, such as a circle, belongs to the extensions where the kernel
    alone does not have it.
    """
    files = sources("trireme", root)
    kernel = [file for file in files if file.is_kernel]

    def counted(rows: list[list[str]]) -> tuple[int, int]:
        return len(rows[0]), len(rows[1]) - len(rows[0])

    def summed(of: list[int], whole: list[int]) -> tuple[int, int]:
        return sum(of), sum(whole) - sum(of)

    figures = {
        "files": (len(kernel), len(files) - len(kernel)),
        "lines": summed([f.lines for f in kernel], [f.lines for f in files]),
        "code lines": summed([f.code_lines for f in kernel], [f.code_lines for f in files]),
        "functions": summed(
            [len([*f.functions()]) for f in kernel], [len([*f.functions()]) for f in files]
        ),
    }
    return figures | {
        name: counted([places(kernel), places(files)]) for name, places in LISTS.items()
    }


def main() -> None:
    """Print the table, or one of its lists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", choices=sorted(LISTS), metavar="ROW", help="what a row counts")
    options = parser.parse_args()
    if options.list:
        print("\n".join(LISTS[options.list](sources())))
        return
    print("| what | kernel | extensions | limit |\n|-|-|-|-|")
    for name, (kernel, extensions) in measure().items():
        limit = LIMITS.get(name, f"kernel {KERNEL_LIMITS[name]}" if name in KERNEL_LIMITS else "")
        print(f"| {name} | {kernel:,} | {extensions:,} | {limit} |")


if __name__ == "__main__":
    sys.exit(main())
