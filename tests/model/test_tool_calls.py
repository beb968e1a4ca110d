"""Tool calls: how they are told apart from a reply's own part, and formats by name."""

from __future__ import annotations

import pytest

from trireme.engines.engine import Completion
from trireme.model.conversation import text_before
from trireme.model.recorder import Call
from trireme.model.tool_calls import format_of


def test_what_stands_before_a_reply_s_own_part_where_its_calls_are_apart() -> None:
    text = 'Hm.<tool_call>\n{"name": "wait"}'
    for shown, content in (("Hm.", "So. Hm."), ("", "So. "), (None, f"So. {text}")):
        reply = {"role": "assistant", "content": content}
        completion = Completion([], [], [], [], "stop", text=text)
        assert text_before(Call(None, [], completion, 1.0, reply=reply, shown=shown)) == "So. "


def test_a_format_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown tool_call_parser 'herms'; did you mean"):
        format_of("herms")
