"""Message: one turn of a conversation, and the plain form in which it is kept and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is None, its content as one text. Raises ValueError for images."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message must be a dict with 'role' and 'content', not {message!r:.80}")
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise ValueError(f"a message holds {part!r:.60}: only text is supported")
        plain["content"] = "".join(part["text"] for part in content)
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"a message's content must be text, not {type(content).__name__}")
    return plain
