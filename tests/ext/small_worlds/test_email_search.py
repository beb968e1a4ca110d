"""A question to a mailbox: its tools, its reward, its judge."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.model.fake import make
from tests.workflows.made import examine_rows
from trireme.algorithms.recipes import get_recipe
from trireme.config.schema import AlgorithmConfig
from trireme.experience import Experience
from trireme.ext.small_worlds.mailbox import Mailbox, main, make_mail, write_mailbox
from trireme.task import Task
from trireme.workflows.examine import examine_taskset
from trireme.workflows.workflow import resolve

EMAILS, ROWS = make_mail(40, 0)
ROW, KEY = ROWS[0], EMAILS[0].message_id


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mail") / "mail.db"
    write_mailbox(file, EMAILS)
    return file


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def final(answer: str, *sources: str) -> str:
    return call("return_final_answer", answer=answer, sources=list(sources))


WORDS = EMAILS[0].subject.split()[1:]
SEARCH, READ = call("search_emails", keywords=WORDS), call("read_email", message_id=KEY)


def play(file: Path, *replies: str, judge: str | None = None, **changes: Any) -> Experience:
    task = Task(
        {**ROW, **changes},
        format_args={"prompt_key": "question", "response_key": "answer"},
        workflow_args={"mailbox": str(file), "max_turns": 5},
    )
    spec = resolve("email_search_workflow")
    assert spec.examine is not None
    spec.examine(task)
    model = make(list(replies), auxiliary=[make([judge])] if judge is not None else [])
    [e] = asyncio.run(spec.call(task, model, 1, 0))
    return e


def test_a_right_answer_by_its_sources(mailbox: Path) -> None:
    e = play(mailbox, SEARCH, READ, final(ROW["answer"], KEY))
    assert e.reward == pytest.approx(1 + 0.3 + 0.1 + 0.1 * (1 - 3 / 5))
    assert e.metrics["found_right_email"] == e.metrics["read_right_email"] == 1.0
    seen = [json.loads(m["content"]) for m in e.messages or [] if m["role"] == "tool"]
    assert KEY in [result["message_id"] for result in seen[0]]
    assert seen[1]["body"] == EMAILS[0].body and seen[1]["to"] == [ROW["inbox_address"]]


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        ((final("7", "<other>"),), -1.0),
        ((SEARCH, READ, final("7", KEY, "<other>")), -0.7),
        ((SEARCH, final("I don't know")), 0.1),
        ((SEARCH, final("I don\u2019t know.")), 0.1),
        ((SEARCH, final(" ", KEY)), 0.2),
        (("I give up.",), 0.0),
        ((SEARCH,) * 5, 0.1),
        ((call("return_final_answer", answer=3), "Well."), 0.0),
    ],
)
def test_the_ladder(replies: tuple[str, ...], reward: float, mailbox: Path) -> None:
    assert play(mailbox, *replies).reward == pytest.approx(reward)


@pytest.mark.parametrize(("judge", "correct"), [("true", 1.0), (" False.", 0.0)])
def test_the_judge_goes_before_the_sources(judge: str, correct: float, mailbox: Path) -> None:
    e = play(mailbox, final(ROW["answer"], "<other>"), judge=judge)
    assert e.metrics["answer_correct"] == correct
    assert e.reward == pytest.approx(1 + 0.1 + 0.1 * 0.8 if correct else -1.0)


def test_a_judge_that_says_something_else_is_a_failure(mailbox: Path) -> None:
    with pytest.raises(ValueError, match="the judge said 'perhaps'"):
        play(mailbox, final("7", KEY), judge="Perhaps")


def test_a_judge_without_a_right_answer_to_compare_is_refused(mailbox: Path) -> None:
    with pytest.raises(ValueError, match=r"'answer' \(format.response_key\), which is None"):
        play(mailbox, final("7", KEY), judge="false", answer=None)
    examine = resolve("email_search_workflow").examine
    assert examine is not None
    task = Task(ROW, workflow_args={"mailbox": str(mailbox)})
    with pytest.raises(ValueError, match=r"'response' \(format.response_key\), which is None"):
        examine(replace(task, reward_fn_args={"llm_as_a_judge": True}))


@pytest.mark.parametrize("day", ["2025/01/01", "01-01-2025", "January 1", "2025-1-1", "yesterday"])
def test_a_day_in_another_form_is_an_error_and_finds_nothing_by_chance(
    day: str, mailbox: Path
) -> None:
    mine = Mailbox(mailbox, ROW["inbox_address"])
    for after, before, name in ((day, None, "sent_after"), (None, day, "sent_before")):
        with pytest.raises(ValueError, match=f"{name} is '{day}': expected a day as YYYY-MM-DD"):
            mine.search(WORDS, after, before)
    assert mine.search(WORDS, "20250101", "") == mine.search(WORDS, "2025-01-01", None) != []
    assert mine.search(WORDS, "2025-01-01T08:00:00", None) == mine.search(WORDS, None, None)
    wrong = call("search_emails", keywords=WORDS, sent_after=day)
    e = play(mailbox, wrong, final("I don't know"))
    assert any("expected a day" in m["content"] for m in e.messages or [] if m["role"] == "tool")


def test_a_mailbox_shows_its_owner_alone_and_takes_any_word(mailbox: Path, tmp_path: Path) -> None:
    mine = Mailbox(mailbox, ROW["inbox_address"])
    found = {
        one["message_id"] for thing in ("the", "hello") for one in mine.search([thing], None, None)
    }
    theirs = [e.message_id for e in EMAILS if ROW["inbox_address"] not in (*e.to, e.sender)]
    assert found and not found & set(theirs)
    assert mine.read(theirs[0]) is None and mine.read(KEY) is not None
    sender = Mailbox(mailbox, EMAILS[0].sender).read(KEY)
    assert sender is not None and sender["from"] == EMAILS[0].sender
    assert mine.search(['x" OR the'], None, None) == []
    day = EMAILS[0].date[:10]
    assert mine.search(WORDS, "2030-01-01", None) == mine.search(WORDS, None, "2025-01-01") == []
    assert KEY in [one["message_id"] for one in mine.search(WORDS, day, None)]
    assert mine.search(" ".join(WORDS), None, None) == mine.search(WORDS, None, None) != []
    for none in ([], [""], " "):
        with pytest.raises(ValueError, match="at least one keyword"):
            mine.search(none, None, None)
    for no_words in ([5], 5):
        with pytest.raises(ValueError, match="expected a list of words"):
            mine.search(no_words, None, None)  # type: ignore[arg-type]
    (tmp_path / "no.db").write_text("this is no database at all, but only a text")
    with pytest.raises(ValueError, match="no e-mails as expected"):
        play(tmp_path / "no.db")


@pytest.mark.parametrize("number", ["500", "-3", "0"])
def test_a_number_of_emails_that_cannot_be_made_is_refused(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), f"--emails={number}"])
    assert f"--emails: {number} e-mails: expected from 1 to 192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward_fn": "math_reward"}, "name no reward"),
        ({"reward_fn_args": {"llm_as_a_judge": "false"}}, "expected true or false"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    options: dict[str, Any], said: str, mailbox: Path
) -> None:
    examine = resolve("email_search_workflow").examine
    assert examine is not None
    task = Task(ROW, workflow_args={"mailbox": str(mailbox)})
    examine(task)
    with pytest.raises(ValueError, match=said):
        examine(replace(task, **options))


def test_a_judge_that_there_is_not_is_refused(mailbox: Path) -> None:
    task = Task(
        ROW,
        workflow="email_search_workflow",
        format_args={"response_key": "answer"},
        workflow_args={"mailbox": str(mailbox)},
        reward_fn_args={"llm_as_a_judge": True},
    )
    tasks: Any = SimpleNamespace(kinds=lambda: [task], all=lambda: [task])
    for models in ([], ["one"]):
        explorer = SimpleNamespace(auxiliary_models=models)
        plan: Any = SimpleNamespace(config=SimpleNamespace(explorer=explorer))
        with nullcontext() if models else pytest.raises(ValueError, match="add a model"):
            examine_taskset(tasks, plan, get_recipe(AlgorithmConfig()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"message_ids": "[]"}, "expected a list of ids"),
        ({"message_ids": "[5, 6]"}, r"message_ids are 5, 6: the mailbox .*mail.db has no such"),
        ({"inbox_address": ""}, "inbox_address"),
        ({"inbox_address": "nobody@example.org"}, "has no such e-mail of nobody@example.org"),
    ],
)
def test_a_row_that_lacks_something_is_refused(
    changes: dict[str, Any], said: str, mailbox: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        play(mailbox, **changes)


def test_a_later_row_is_examined_before_the_run(mailbox: Path) -> None:
    args = {"mailbox": str(mailbox)}
    wrong = {**ROW, "message_ids": '["<gone>"]'}
    with pytest.raises(ValueError, match="dataset 'x', row 1: the row's message_ids are <gone>"):
        examine_rows("email_search_workflow", [ROW, wrong], args)
