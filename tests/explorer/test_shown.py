"""What evaluations said and what failed is kept for people, and no other line goes for it."""

from __future__ import annotations

import json

from tests.explorer.made import ask, make_runner, run
from trireme.buffer.lines import with_messages
from trireme.experience import EID, Experience
from trireme.explorer.explorer import failure_line
from trireme.explorer.runner import Failed
from trireme.task import SHOWN_ROW, SHOWN_TEXT, Task
from trireme.usercode import Fault
from trireme.workflows.workflow import resolve


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


ROW = {"question": "6 x 7?", "answer": {"value": 42}, "level": 3, "source": "book", "hint": None}
FORMAT = {"prompt_key": "question", "response_key": "answer.value"}


def test_a_rollout_records_the_truth_and_the_other_columns_of_its_row() -> None:
    task = Task(ROW, workflow=ask, format_args=FORMAT, batch_id=1, index={"index": 0})
    outcome = run(make_runner().run(task, resolve(ask), [0]))
    expected = {"truth": "42", "row": {"answer": {"value": 42}, "level": 3, "source": "book"}}
    assert expected.items() <= outcome.experiences[0].info.items()
    fault = Fault("workflow 'mine'", "no", "", lasting=False)
    assert expected.items() <= failure_line(Failed("1/0/0", "error", fault), task)["info"].items()


def test_records_of_rows_are_plain_json_within_a_limit() -> None:
    odd = {"data": b"123", "score": float("nan"), "images": [b"picture"], "of": {1: {2}}}
    long = {f"text {n}": "x" * 5000 for n in range(9)}
    shown = Task({"prompt": "?", "response": "y" * 3000} | odd | long).for_people()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["truth"] == "y" * SHOWN_TEXT + " … (1,000 more characters)"
    row = shown["row"]
    assert row["data"] == "3 bytes" and row["of"] == {"1": "{2}"} and row["text 0"].startswith("x")
    assert row["text 8"] == " … (5,000 more characters)" and not {"score", "images"} & set(row)
    assert sum(map(len, row.values())) < SHOWN_ROW + 9 * 50
