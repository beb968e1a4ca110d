"""Tool calls: a scheduler that runs the tools that a reply asks for, and shows what they gave.

- Three forms: ReAct (`Action:`, `Action Input:`), Hermes (`<tool_call>{json}</tool_call>`, several
  run side by side), and `tool_calls` of the reply's message where the engine has read them.
- A ReAct result goes into the same turn behind `Observation:`; others come as `tool` messages of a
  new turn, or inside the reply with `style: same_turn`. What a reply says after its call, as if it
  had seen a result, is cut off where results go inside.
- Nothing that a tool does ends the rollout: its error is the result, and is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme.model.tool_calls import (
    CLOSING,
    ToolCall,
    call_of_json,
    object_or_text,
    read_tool_calls,
)
from trireme.registry import MULTI_TURNS
from trireme.workflows.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
)
from trireme.workflows.tools import McpServer, Tool, as_text, python_tool

_REACT = re.compile(
    r"Action:[ \t]*(?P<name>[^\n]*?)\s*\nAction Input:[ \t]*(?P<input>.*?)\s*"
    r"(?=\n(?:Observation|Thought|Action|Final Answer):|Observation:|\Z)",
    re.DOTALL,
)
_STYLES = ("new_turn", "same_turn")


@dataclass
class Asked:
    """What a reply asks for."""

    calls: list[ToolCall] = field(default_factory=list)
    react: bool = False
    upto: int = 0
    """Where in the reply's own text the last call ends."""


def read_calls(choice: RolloutResponseChoice) -> Asked:
    """The calls in a reply, in the order of the text."""
    text = str(choice.message.content or "")
    if choice.message.tool_calls:
        return Asked([_of_message(call) for call in choice.message.tool_calls], upto=len(text))
    calls, end = read_tool_calls(text)
    if calls:
        return Asked(calls, upto=end)
    if match := _REACT.search(text):
        call = ToolCall(match["name"], object_or_text(match["input"]))
        return Asked([call], react=True, upto=match.end())
    return Asked()


@MULTI_TURNS.register("tool_call_scheduler")
class ToolCallScheduler(MultiTurnScheduler):
    """Runs tools until a reply asks for none.

    `tools`: names of TOOLS (`calculator`), or paths (`my_file:function`). `mcp_servers`: name ->
    `{command, args}` or `{url}`. `timeout`: seconds for a call. `style`: new_turn, or same_turn.
    """

    def __init__(
        self,
        max_turns: int | None = None,
        tools: Sequence[Any] = (),
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
        self.infos = {"tool_calls": 0, "tool_errors": 0}
        self._tools = {tool.name: tool for tool in map(python_tool, tools)}
        self._servers = [McpServer(name, given) for name, given in (mcp_servers or {}).items()]

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Connect to the servers, and show all tools to the chat template."""
        for server in self._servers:
            self._tools |= {tool.name: tool for tool in await server.open(self.timeout)}
        [request] = requests
        request.tools = [tool.schema for tool in self._tools.values()]

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Close the servers' sessions, on every way out."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def on_turn_end(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The counts up to here."""
        return {"rollout_infos": dict(self.infos)}

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        """When the reply asks for no tool, or there are no more turns."""
        if not read_calls(result).calls:
            return True
        return super().check_finished(infer_request, result, current_turn)

    async def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        """Run the calls side by side; their results go where the style says."""
        asked, messages = read_calls(result), infer_request.messages
        answers = await asyncio.gather(*(self._answer(call) for call in asked.calls))
        if not asked.react and self.style == "new_turn":
            messages += [_message(c, a) for c, a in zip(asked.calls, answers, strict=True)]
            return infer_request
        own, whole = str(result.message.content or ""), str(messages[-1]["content"])
        kept = whole[: len(whole) - len(own) + asked.upto]
        if asked.react:
            kept, shown = kept.rstrip(), f"\nObservation: {answers[0]}\n"
        else:
            close = "" if kept.endswith(CLOSING) else CLOSING
            parts = (f"\n<tool_response>\n{answer}\n</tool_response>" for answer in answers)
            shown = close + "".join(parts) + "\n"
        messages[-1] = {**messages[-1], "content": kept + shown}
        return infer_request

    async def _answer(self, call: ToolCall) -> str:
        """A call's result as text, or its error."""
        self.infos["tool_calls"] += 1
        try:
            return as_text(await self._run(call))
        except TimeoutError:
            error = f"{call.name} took longer than {self.timeout:g} s"
        except Exception as raised:  # foreign code: the model is told
            error = str(raised) or repr(raised)
        self.infos["tool_errors"] += 1
        return f"Error: {error}"

    async def _run(self, call: ToolCall) -> Any:
        if call.error is not None:
            raise ValueError(call.error)
        tool: Tool | None = self._tools.get(call.name)
        if tool is None:
            raise ValueError(f"unknown tool '{call.name}'. Known: {', '.join(self._tools)}")
        given = call.arguments
        arguments = dict(given) if isinstance(given, Mapping) else {tool.first_argument: given}
        return await asyncio.wait_for(tool.call(arguments), self.timeout)


def _of_message(given: Mapping[str, Any]) -> ToolCall:
    """A call of OpenAI's form."""
    function = given.get("function") or given
    call = call_of_json(json.dumps(dict(function), default=str))
    if isinstance(call.arguments, str):
        return ToolCall(call.name, {}, given.get("id"), f"no JSON object: {call.arguments!r:.80}")
    return ToolCall(call.name, call.arguments, given.get("id"), call.error)


def _message(call: ToolCall, answer: str) -> dict[str, Any]:
    """A result as a message."""
    named = {"name": call.name} if call.name else {}
    named |= {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", **named, "content": answer}
