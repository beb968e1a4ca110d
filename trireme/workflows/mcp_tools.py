"""MCP tools: those of Model Context Protocol servers, each session for one trajectory alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from trireme.envs.extras import extra
from trireme.workflows.tools import Tool

logger = logging.getLogger(__name__)

_KEYS = ("command", "args", "env", "cwd", "url")


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
