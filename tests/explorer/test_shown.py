"""What evaluations said and what failed is kept for people, and no other line goes for it."""

from __future__ import annotations

from trireme.buffer.lines import with_messages
from trireme.experience import EID, Experience
from trireme.explorer.explorer import failure_line
from trireme.explorer.runner import Failed
from trireme.task import Task
from trireme.usercode import Fault


def test_a_failed_rollout_says_what_was_asked_and_why_it_failed() -> None:
    task = Task({"prompt": "1 + 1?"}, batch_id="20/held_out", task_id=3, index={"index": 3})
    fault = Fault("workflow 'mine'", "ValueError: no", "mine.py:3", lasting=False)
    line = failure_line(Failed("20/held_out/3/0", "error", fault, "x" * 9000), task)
    assert (line["eid"], line["step"], line["prompt"]) == ("20/held_out/3/0/0", 20, "1 + 1?")
    assert line["failure"]["message"] == "ValueError: no" and len(line["failure"]["trace"]) == 4000


def test_an_evaluated_rollout_keeps_its_messages() -> None:
    e = Experience([1, 2], prompt_length=1, eid=EID("20/held_out", 3), response_text="2")
    assert "messages" not in with_messages(e)
    e.messages = [{"role": "assistant", "content": "2"}]
    assert with_messages(e)["messages"] == e.messages and with_messages(e)["step"] == 20
