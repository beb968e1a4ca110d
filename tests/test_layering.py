"""Imports point one way: each layer may import what lies below it, and itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "trireme"

# From top to bottom. Parts of one layer do not import each other, except in that of the words.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("ext",),
    ("cli",),
    ("launch", "demo"),
    ("explorer", "trainer"),
    ("workflows", "sync", "pipeline"),
    ("model",),
    ("engines", "buffer", "checkpoint", "monitor"),
    ("envs",),
    ("rewards",),
    ("data",),
    ("algorithms",),
    ("batch",),
    (
        "experience",
        "serialize",
        "task",
        "log",
        "aio",
        "files",
        "processes",
        "usercode",
        "config",
    ),
    ("registry", "text", "pictures", "cache", "syntax", "machine"),
    ("extensions",),
)
HEAVY = {"torch", "transformers", "datasets", "ray", "vllm", "peft", "numpy", "pandas"}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(module: str) -> str:
    """`trireme.sync.probe` -> `sync`; the package itself -> ``."""
    return [*module.split("."), ""][1]


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module of everything that is imported when the file is, `if TYPE_CHECKING` aside."""
    pending: list[ast.stmt] = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "trireme":
                yield from ((node.lineno, f"trireme.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.dump(node.test):
                pending += node.body
            pending += node.orelse
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *node.finalbody]
            pending += [line for handler in node.handlers for line in handler.body]
        elif isinstance(node, ast.ClassDef | ast.With):
            pending += node.body


def level(part: str) -> int:
    """The layer of a part; the package itself stands above all."""
    return next((i for i, layer in enumerate(LAYERS) if part in layer), -1)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_below_it(file: Path) -> None:
    own = part_of(module_of(file))
    assert own == "" or level(own) >= 0, f"'{own}' has no place in LAYERS"
    for line, module in imports(file):
        if not module.startswith("trireme"):
            continue
        other = part_of(module)
        base = level("experience")
        allowed = (
            other == own
            or level(other) > level(own)
            or (level(own) == base == level(other) and own != "config")
        )
        assert allowed, f"{file}:{line}: {own} imports {other}, which does not lie below it"


@pytest.mark.parametrize(
    "file",
    [f for f in FILES if part_of(module_of(f)) in ("", "config", "cli", "log", "registry", "task")],
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_configuration_and_command_line_load_nothing_heavy(file: Path) -> None:
    found = {module.split(".")[0] for _, module in imports(file)} & HEAVY
    assert not found, f"{file} imports {', '.join(sorted(found))} at module level"


def test_no_part_of_the_order_is_missing() -> None:
    there = {part_of(module_of(f)) for f in FILES} - {""}
    assert there <= {part for layer in LAYERS for part in layer}
