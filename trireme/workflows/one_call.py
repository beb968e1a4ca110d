"""One call: a conversation with tools whose next reply is to hold the right calls, and no more.

The calls are not made: `tool_call_reward` compares them with those of the row. A row has the tools'
schemas (`tools`, a JSON list), a system prompt (`raw_system`), what was said so far
(`conversations`, each with `from` and `value`) and the calls that are right (`answer`, a JSON list
of `name` and `arguments`), as ToolACE's rows are prepared for Tool-N1 (arXiv:2505.00024).
"""

from __future__ import annotations

import json
from typing import Any

from trireme.registry import workflow
from trireme.rewards.math import expected_calls
from trireme.task import Task
from trireme.workflows.single_turn import SimpleWorkflow

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
}
ASKED = """
Each line is a tool that you may call:
<tools>
{tools}
</tools>
Think first, between <think> and </think>. Then give all calls in one JSON list between <tool_call>
and </tool_call>, as in
<think>Ann has to be told, and milk is needed.</think>
<tool_call>[{{"name": "send", "arguments": {{"to": "Ann", "text": "back at six"}}}}, \
{{"name": "buy", "arguments": {{"item": "milk", "count": 2}}}}]</tool_call>
Arguments have the types that the tool names."""


@workflow("tool_call_workflow")
@workflow("toolcall_workflow")
class ToolCallWorkflow(SimpleWorkflow):
    """A conversation with tools, continued by one reply whose calls are compared with the row's."""

    default_reward = "tool_call_reward"
    reads_prompt = False

    def format_messages(self) -> list[dict[str, Any]]:
        """The system prompt with the tools, and what was said."""
        return messages_of(self.task)

    @classmethod
    def examine(cls, task: Task) -> None:
        """Raise ValueError for a row without its columns, and for a wrong reward."""
        messages_of(task)
        if task.reward_fn is None:
            expected_calls(task)
        super().examine(task)


def messages_of(task: Task) -> list[dict[str, Any]]:
    """A row's conversation. Raises ValueError for what it lacks."""
    row = task.raw_task
    said, tools = row.get("conversations"), row.get("tools")
    if not isinstance(said, list) or not said:
        raise ValueError(
            f"the row's column 'conversations' is {said!r:.60}: expected a list of entries with "
            "'from' and 'value'"
        )
    schemas = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(schemas, list):
        raise ValueError(f"the row's column 'tools' is {tools!r:.60}: expected a JSON list")
    lines = (json.dumps({"type": "function", "function": schema}) for schema in schemas)
    system = str(row.get("raw_system") or "") + ASKED.format(tools="\n".join(lines))
    return [{"role": "system", "content": system}, *map(_turn, said)]


def _turn(entry: Any) -> dict[str, Any]:
    speaker = entry.get("from") if isinstance(entry, dict) else None
    if speaker not in _ROLES:
        raise ValueError(
            f"the row's column 'conversations' holds {entry!r:.60}: expected 'from' to be one of "
            f"{', '.join(_ROLES)}"
        )
    value = entry.get("value")
    return {
        "role": _ROLES[speaker],
        "content": value if isinstance(value, str) else json.dumps(value),
    }
