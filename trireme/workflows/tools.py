"""Tools: what a model may call: Python functions with their JSON schemas, and MCP servers."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import operator
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trireme.aio import call_user, in_thread
from trireme.envs.env import extra
from trireme.registry import Registry

logger = logging.getLogger(__name__)

TOOLS = Registry("tool", home=[__name__], by="TOOLS.register")
_KEYS = ("command", "args", "env", "cwd", "url")


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
            away = partial(in_thread, name=f"tool-{function.__name__}")
            return await call_user(partial(function, **arguments), away=away)
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


@TOOLS.register("calculator")
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


class McpServer:
    """A session with a server. One task opens and closes it, which its library demands."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        """`given` has a `command` (with `args`, `env`, `cwd`) or a `url`. Raises ValueError."""
        unknown = sorted(set(given) - set(_KEYS))
        if unknown or ("command" in given) == ("url" in given):
            raise ValueError(
                f"mcp_servers.{name} has {', '.join(given) or 'nothing'}: expected `command` (with "
                "args, env, cwd) or `url`"
            )
        self._mcp = extra("mcp", "the MCP client", "mcp")
        self._name, self._given = name, dict(given)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout: float) -> list[Tool]:
        """Connect. Raises RuntimeError where the server does not answer."""
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            return await asyncio.wait_for(ready, timeout)
        except TimeoutError as error:
            self._task.cancel()
            raise RuntimeError(f"MCP server '{self._name}' was not there in {timeout} s") from error

    async def close(self, timeout: float = 10.0) -> None:
        """End the session, and the process of a `command`."""
        self._stop.set()
        if self._task is not None:
            _, pending = await asyncio.wait({self._task}, timeout=timeout)
            for task in pending:
                task.cancel()

    async def _live(self, ready: asyncio.Future[list[Tool]]) -> None:
        given = self._given
        target = given.get("url") or self._mcp.StdioServerParameters(**given)
        try:
            async with self._mcp.Client(target) as client:
                tools = await self._tools(client)
                if not ready.done():
                    ready.set_result(tools)
                await self._stop.wait()
        except Exception as error:
            if ready.done():  # calls fail from now on, and say so to the model
                logger.warning("MCP server '%s' ended: %r", self._name, error)
            else:
                failed = RuntimeError(f"MCP server '{self._name}' does not work: {error!r}")
                failed.__cause__ = error
                ready.set_exception(failed)

    async def _tools(self, client: Any) -> list[Tool]:
        """All that the server has, page by page."""
        tools: list[Tool] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                schema = {"type": "function", "function": function}
                tools.append(Tool(schema, partial(_call, client, tool.name)))
            if not (cursor := page.next_cursor):
                return tools


async def _call(client: Any, name: str, arguments: dict[str, Any]) -> str:
    """The text of a result. Raises RuntimeError with the text of an error."""
    result = await client.call_tool(name, arguments)
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    if result.is_error:
        raise RuntimeError(text)
    return text
