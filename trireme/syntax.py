"""Python source: parsed and read from any thread.

Rewards, tools and operators run on several threads. CPython 3.11 counts the depth of the tree that
`ast.parse` makes in one variable for all threads, and where the garbage collector lets another
thread in meanwhile it raises "SystemError: AST constructor recursion depth mismatch"; `inspect`
parses the file of a class to find it. One lock for both is cheaper than a lost rollout.
"""

from __future__ import annotations

import ast
import inspect
import threading
from typing import Any

_ONE_AT_A_TIME = threading.RLock()  # a finalizer that reads source may run inside


def expression_tree(text: str) -> ast.expr:
    """Return the tree of one expression. Raises what `ast.parse` does, SyntaxError above all."""
    with _ONE_AT_A_TIME:
        return ast.parse(text, mode="eval").body


def source_lines(code: Any) -> tuple[list[str], int]:
    """Return the lines of a function or class and the number of the first in its file.

    Raises OSError or TypeError if there are none: of an interactive session, or compiled.
    """
    with _ONE_AT_A_TIME:
        return inspect.getsourcelines(code)


def source_of(code: Any) -> str:
    """Return the text of a function or class. Raises as `source_lines` does."""
    return "".join(source_lines(code)[0])
