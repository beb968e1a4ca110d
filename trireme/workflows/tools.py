"""Tools: what a model may call: Python functions, each with the JSON schema that it is shown by."""

from __future__ import annotations

import ast
import inspect
import json
import operator
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.registry import Registry
from trireme.threads import in_thread


@dataclass(frozen=True)
class Tool:
    """Something to call by name."""

    schema: dict[str, Any]
    """As chat templates want it: `{"type": "function", "function": {...}}`."""
    call: Callable[[dict[str, Any]], Awaitable[Any]]
    """The result for arguments by name."""

    @property
    def name(self) -> str:
        """What the model calls it by."""
        return self.schema["function"]["name"]

    @property
    def first_argument(self) -> str:
        """Where plain text goes that names no argument."""
        properties = self.schema["function"].get("parameters", {}).get("properties", {})
        return next(iter(properties), "input")


TOOLS = Registry("tool", {"calculator": "trireme.workflows.tools.calculator"})


def python_tool(given: str | Callable[..., Any]) -> Tool:
    """A tool of a function, by name, path or itself; a plain one runs in a thread.

    Raises ValueError where its signature or docstring does not say what the model has to know.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    function: Any = TOOLS.get(given) if isinstance(given, str) else given
    try:
        schema = get_json_schema(function)
    except Exception as error:  # it has several kinds, without a base of their own
        raise ValueError(
            f"tool {given!r} has no JSON schema ({error}): give it type hints, and a docstring "
            "with `Args:` and a line for each argument"
        ) from error

    async def call(arguments: dict[str, Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            return await in_thread(lambda: function(**arguments), name=f"tool-{function.__name__}")
        except SystemExit as error:  # would end the run
            raise RuntimeError(f"the tool tried to exit ({error})") from error

    return Tool(schema, call)


def as_text(result: Any) -> str:
    """A tool's result as the model reads it."""
    return result if isinstance(result, str) else json.dumps(result, default=str)


_TWO: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ONE: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST, _LARGEST_POWER = 200, 1000


def calculator(expression: str) -> str:
    """Calculates an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and brackets, for example (2 + 3) * 4.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters: at most {_LONGEST}")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> int | float:
    """Of an expression of numbers and operators. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (
            abs(left) > _LARGEST_POWER or abs(right) > _LARGEST_POWER
        ):
            raise ValueError(f"the power is too large: at most {_LARGEST_POWER} on each side")
        return _TWO[type(node.op)](left, right)
    raise ValueError(f"{ast.unparse(node)!r:.40} is no number, operator or bracket")
