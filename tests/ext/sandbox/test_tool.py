"""The tool python, as a model calls it."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from tests.ext.multi_turn.test_tool_calls import call, play, results
from tests.model.fake import make
from trireme.ext.sandbox import programs as sandbox


def test_what_a_program_waits_for_the_sandbox_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free: queue.LifoQueue[Any] = queue.LifoQueue()
    monkeypatch.setattr(sandbox, "HELPERS", free)
    threading.Timer(3.0, free.put, [None]).start()  # all are busy for longer than the time-out
    experience = play(
        make([call("python", code="print(6 * 9)"), "54"]), tools=["python"], timeout=2.0
    )
    assert results(experience) == ["54"]


def test_a_program_has_the_time_out_of_the_tools() -> None:
    asked = call("python", code="import time\ntime.sleep(60)")
    [said] = results(play(make([asked, "late"]), tools=["python"], timeout=0.5))
    assert said == "Error: it was stopped: it took longer than 0.5 s"


def test_half_a_surrogate_pair_is_shown_as_the_character_for_what_is_none() -> None:
    programs = ["print('a' + chr(0xd83d))", "raise ValueError(chr(0xd83d))"]
    asked = [call("python", code=program) for program in programs]
    experience = play(make([*asked, "42"]), tools=["python"])
    assert results(experience) == ["a\ufffd", "Error: ValueError: \ufffd (line 1)"]


def test_a_program_runs_in_the_sandbox_and_every_call_begins_anew() -> None:
    programs = ["x = 6 * 7\nprint(x)\nx", "x", "open('/etc/passwd').read()"]
    model = make([*(call("python", code=program) for program in programs), "42"])
    experience = play(model, tools=["python"])
    first, second, third = results(experience)
    assert first == "42\n42"
    assert second == "Error: NameError: name 'x' is not defined (line 1)"
    assert third.startswith("Error: Refused: open")
    infos = experience.info["rollout_infos"]
    assert infos == {"tool_calls": 3, "tool_errors": 2, "num_turns": 4}
    assert {name: experience.metrics[name] for name in infos} == infos
