"""Tool calls: the tools of a model, and a scheduler that runs the calls of a reply.

- Tools are Python functions, with their JSON schemas, and those of MCP servers.
- Three forms: ReAct (`Action:`, `Action Input:`), Hermes (`<tool_call>{json}</tool_call>`, several
  run concurrently), and `tool_calls` of the reply's message if the engine has parsed them.
- A ReAct result goes into the same turn after `Observation:`; others become `tool` messages of a
  new turn, or go into the reply with `style: same_turn`. Text after a call, with an invented
  result, is cut off if results go into the reply.
- A tool never ends the rollout: its error is the result, and is counted.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import logging
import operator
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trireme.aio import OutOfTime, call_user, in_thread, in_time
from trireme.envs.env import extra
from trireme.ext.multi_turn.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
)
from trireme.ext.openai.thinking import END, thinking_length
from trireme.model.tool_calls import (
    CALL,
    CLOSING,
    ToolCall,
    call_of_json,
    read_tool_calls,
)
from trireme.registry import TOOLS
from trireme.syntax import expression_tree
from trireme.task import object_or_text
from trireme.text import joined

logger = logging.getLogger(__name__)

_KEYS = ("command", "args", "env", "cwd", "url")


@dataclass(frozen=True)
class Tool:
    """Something to call by name."""

    schema: dict[str, Any]
    """In the form of chat templates: `{"type": "function", "function": {...}}`."""
    call: Callable[[dict[str, Any], float], Awaitable[Any]]
    """Returns the result for arguments by name, within a number of seconds. Raises OutOfTime."""

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return self.schema["function"]["name"]

    @property
    def first_argument(self) -> str:
        """The argument that receives plain text which names none."""
        properties = self.schema["function"].get("parameters", {}).get("properties", {})
        return next(iter(properties), "input")


def python_tool(tool: str | Callable[..., Any]) -> Tool:
    """Make a tool of a function, by name, path or itself; a plain one runs in a thread.

    A function's attribute `within`, a coroutine that takes `seconds` too, counts the time itself,
    and raises TimeoutError when it is over.

    Raises ValueError if its signature or docstring lacks facts that the model needs.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    function: Any = TOOLS.get(tool) if isinstance(tool, str) else tool
    try:
        schema = get_json_schema(function)
    except Exception as error:  # it has several kinds, without a common base
        raise ValueError(
            f"tool {tool!r} has no JSON schema ({error}): give it type hints, and a docstring "
            "with `Args:` and a line for each argument"
        ) from error

    within = getattr(function, "within", None)

    async def unlimited(arguments: dict[str, Any]) -> Any:
        try:
            away = partial(in_thread, name=f"tool-{function.__name__}")
            return await call_user(partial(function, **arguments), away=away)
        except SystemExit as error:  # would end the run
            raise RuntimeError(f"the tool tried to exit ({error})") from error

    async def call(arguments: dict[str, Any], seconds: float) -> Any:
        if within is not None:
            inspect.signature(function).bind(**arguments)
            try:
                return await within(**arguments, seconds=seconds)
            except TimeoutError as error:
                raise OutOfTime from error
        return await in_time(unlimited(arguments), seconds)

    return Tool(schema, call)


def as_text(result: Any) -> str:
    """Return a tool's result as text for the model."""
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
    return str(_value(expression_tree(expression.strip())))


def _value(node: ast.expr) -> int | float:
    """Evaluate an expression of numbers and operators. Raises ValueError for anything else."""
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
        self.name, self._given = name, dict(given)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout: float) -> list[Tool]:
        """Connect. Raises RuntimeError if the server does not answer."""
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            return await asyncio.wait_for(ready, timeout)
        except TimeoutError as error:
            self._task.cancel()
            raise RuntimeError(f"MCP server '{self.name}' did not start in {timeout} s") from error

    async def close(self, timeout: float = 10.0) -> None:
        """End the session, and the process of a `command`."""
        self._stop.set()
        if self._task is not None:
            _, pending = await asyncio.wait({self._task}, timeout=timeout)
            for task in pending:
                task.cancel()

    async def _live(self, ready: asyncio.Future[list[Tool]]) -> None:
        config = self._given
        target = config.get("url") or self._mcp.StdioServerParameters(**config)
        try:
            async with self._mcp.Client(target) as client:
                tools = await self._tools(client)
                if not ready.done():
                    ready.set_result(tools)
                await self._stop.wait()
        except Exception as error:
            if ready.done():  # calls fail from now on, with an error for the model
                logger.warning("MCP server '%s' ended: %r", self.name, error)
            else:
                failed = RuntimeError(f"MCP server '{self.name}' does not work: {error!r}")
                failed.__cause__ = error
                ready.set_exception(failed)

    async def _tools(self, client: Any) -> list[Tool]:
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


async def _call(client: Any, name: str, arguments: dict[str, Any], seconds: float) -> str:
    result = await in_time(client.call_tool(name, arguments), seconds)
    text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    if result.is_error:
        raise RuntimeError(text)
    return text


_REACT = re.compile(
    r"Action:[ \t]*(?P<name>[^\n]*?)\s*\nAction Input:[ \t]*(?P<input>.*?)\s*"
    r"(?=\n(?:Observation|Thought|Action|Final Answer):|Observation:|\Z)",
    re.DOTALL,
)
_STYLES = ("new_turn", "same_turn")


@dataclass
class Asked:
    """The tool calls of a reply."""

    calls: list[ToolCall] = field(default_factory=list)
    react: bool = False
    upto: int = 0
    """Where in the reply's own text the last call ends."""


def read_calls(choice: RolloutResponseChoice, *, in_thinking: bool = False) -> Asked:
    """Return the calls in a reply, in the order of the text; of those in its thinking only with
    `in_thinking`.
    """
    text = str(choice.message.content or "")
    if choice.message.tool_calls:
        return Asked([_of_message(call) for call in choice.message.tool_calls], upto=len(text))
    size = 0 if in_thinking else _thinking_length(text)
    calls, end = read_tool_calls(text[size:])
    if calls:
        return Asked(calls, upto=size + end)
    # an action is written into the reply, so that it may be part of thinking that is still open
    if match := _REACT.search(text, size if END in text else 0):
        call = ToolCall(match["name"], object_or_text(match["input"]))
        return Asked([call], react=True, upto=match.end())
    return Asked()


def _thinking_length(text: str) -> int:
    """Return how much of a reply is thinking, which the prompt may have begun: an end mark tells,
    unless a call's arguments contain it.
    """
    end = text.find(END)
    calls = (match for match in CALL.finditer(text) if match.start() < end < match.end())
    return thinking_length(text, thinks=end >= 0 and all(call_of_json(m[1]).error for m in calls))


class ToolCallScheduler(MultiTurnScheduler):
    """Runs tools until a reply asks for none.

    `tools`: names of TOOLS (`calculator`), or paths (`my_file:function`). `mcp_servers`: name ->
    `{command, args}` or `{url}`. `timeout`: seconds for a call, without a program's wait for the
    sandbox. `style`: new_turn, or same_turn.
    """

    def __init__(
        self,
        max_turns: int | None = None,
        tools: str | Sequence[Any] = (),
        mcp_servers: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = 30.0,
        style: str = "new_turn",
    ) -> None:
        super().__init__(max_turns)
        if style not in _STYLES:
            raise ValueError(f"style is '{style}': expected {' or '.join(_STYLES)}")
        if not tools and not mcp_servers:
            raise ValueError("tool_call_scheduler has no tools: give `tools` or `mcp_servers`")
        self.timeout, self.style = timeout, style
        # a result may be put into the thinking that asks for it
        self.calls_in_thinking = style == "same_turn"
        self.infos = {"tool_calls": 0, "tool_errors": 0}
        named = [tools] if isinstance(tools, str) else tools
        self._tools: dict[str, Tool] = {}
        self._add("tools", map(python_tool, named))
        self._servers = [McpServer(name, config) for name, config in (mcp_servers or {}).items()]

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Connect to the servers, and show all tools to the chat template."""
        for server in self._servers:
            self._add(f"mcp_servers.{server.name}", await server.open(self.timeout))
        [request] = requests
        request.tools = [tool.schema for tool in self._tools.values()]

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Close the servers' sessions, on every way out."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def on_turn_end(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Return the counts so far."""
        return {"rollout_infos": dict(self.infos)}

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        """End the conversation if the reply calls no tool, or no turns are left."""
        if not self._read(result).calls:
            return True
        return super().check_finished(infer_request, result, current_turn)

    async def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        """Run the calls concurrently; the style decides where their results go."""
        asked, messages = self._read(result), infer_request.messages
        answers = await asyncio.gather(*(self._answer(call) for call in asked.calls))
        if not asked.react and self.style == "new_turn":
            messages += [_message(c, a) for c, a in zip(asked.calls, answers, strict=True)]
            return infer_request
        reply_text, whole = str(result.message.content or ""), str(messages[-1]["content"])
        kept = whole[: len(whole) - len(reply_text) + asked.upto]
        if asked.react:
            kept, shown = kept.rstrip(), f"\nObservation: {answers[0]}\n"
        else:
            close = "" if kept.endswith(CLOSING) else CLOSING
            parts = (f"\n<tool_response>\n{answer}\n</tool_response>" for answer in answers)
            shown = close + "".join(parts) + "\n"
        messages[-1] = {**messages[-1], "content": kept + shown}
        return infer_request

    def _add(self, key: str, tools: Iterable[Tool]) -> None:
        """Add tools of a key of `workflow_args`. Raises ValueError for a name that there is."""
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(
                    f"{key} has a tool '{tool.name}', and there is one of that name already: "
                    "expected each name once, since the model calls a tool by it"
                )
            self._tools[tool.name] = tool

    def _read(self, result: RolloutResponseChoice) -> Asked:
        return read_calls(result, in_thinking=self.calls_in_thinking)

    async def _answer(self, call: ToolCall) -> str:
        self.infos["tool_calls"] += 1
        try:
            return joined(as_text(await self._run(call)))
        except OutOfTime:
            error = f"{call.name} took longer than {self.timeout:g} s"
        except Exception as raised:  # foreign code: the model gets the error
            error = str(raised) or repr(raised)
        self.infos["tool_errors"] += 1
        return joined(f"Error: {error}")

    async def _run(self, call: ToolCall) -> Any:
        if call.error is not None:
            raise ValueError(call.error)
        tool: Tool | None = self._tools.get(call.name)
        if tool is None:
            raise ValueError(f"unknown tool '{call.name}'. Known: {', '.join(self._tools)}")
        as_given = call.arguments
        arguments = (
            dict(as_given) if isinstance(as_given, Mapping) else {tool.first_argument: as_given}
        )
        return await tool.call(arguments, self.timeout)


def _of_message(call_message: Mapping[str, Any]) -> ToolCall:
    function = call_message.get("function") or call_message
    call = call_of_json(json.dumps(dict(function), default=str))
    if isinstance(call.arguments, str):
        return ToolCall(
            call.name, {}, call_message.get("id"), f"no JSON object: {call.arguments!r:.80}"
        )
    return ToolCall(
        call.name, call.arguments, call_message.get("id"), call.error or call_message.get("error")
    )


def _message(call: ToolCall, answer: str) -> dict[str, Any]:
    named = {"name": call.name} if call.name else {}
    named |= {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", **named, "content": answer}
