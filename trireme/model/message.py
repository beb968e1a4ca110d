"""Message: one turn of a conversation, the plain form in which it is kept and compared, and the
conversation that a task's row begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.task import Task

Message = Mapping[str, Any]
NOT_TEXT = ("images", "image", "audios", "audio", "videos", "video")
"""Columns of what no model here can see or hear."""


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is None, its content as one text. Raises ValueError for images."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message must be a dict with 'role' and 'content', not {message!r:.80}")
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        for part in content:
            texts = isinstance(part, Mapping) and isinstance(part.get("text"), str)
            if not texts or part.get("type") != "text":
                raise ValueError(f"a message holds {part!r:.60}: only text is supported")
        plain["content"] = "".join(part["text"] for part in content)
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"a message's content must be text, not {type(content).__name__}")
    if "tool_calls" in plain:
        _check_tool_calls(plain["tool_calls"])
    return plain


def _check_tool_calls(calls: Any) -> None:
    """Raise ValueError for what chat templates could not read."""
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"a message's tool_calls hold {call!r:.60}: expected a list of "
                "{id, type, function: {name, arguments}}"
            )


def conversation_of(task: Task, prompt: Any, system: str | None) -> list[dict[str, Any]]:
    """A task's `prompt`, text or a list of messages, as messages; `system` goes before those that
    have no system message of their own.

    Raises ValueError for a row that is neither, and for one with images, audio or video.
    """
    for name in NOT_TEXT:
        if task.raw_task.get(name):
            raise ValueError(f"the row's column '{name}' is not empty: only text is supported")
    own = prompt is not None and prompt is task.raw_task.get("messages")
    column = "column 'messages'" if own else f"column '{task.prompt_key}' (format.prompt_key)"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"the task's {column} holds {prompt!r:.60}: expected text, or a list of messages. The "
            f"row has: {', '.join(task.raw_task)}"
        )
    try:
        plain = [plain_message(message) for message in messages]
    except ValueError as error:
        raise ValueError(f"the task's {column}: {error}") from error
    if system and plain[0]["role"] != "system":
        plain.insert(0, {"role": "system", "content": system})
    return plain
