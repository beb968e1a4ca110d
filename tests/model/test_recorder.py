"""Recorder: which call a conversation continues, and what a continuing prompt needs of it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.model.fake import TOKENIZER, assistant, engine_of, make, user
from trireme.engines.engine import Completion
from trireme.model.recorder import Call, Recorder


def call(
    messages: list[dict[str, Any]] | None, reply: str, *, truncated: bool = False, **options: Any
) -> Call:
    ids = TOKENIZER.encode(reply)
    sampled = Completion(ids, [-0.5] * len(ids), [-0.5] * len(ids), [0] * len(ids), "stop")
    return Call(
        None, [1, 2], sampled, 1.0, messages=messages, reply=assistant(reply),
        truncated=truncated, **options,
    )  # fmt: skip


def test_a_conversation_continues_one_of_the_same_beginning_and_no_other() -> None:
    """Both got the same reply to the same question, by other instructions."""
    model = make(["4", "4", "5"])
    brief, long = ({"role": "system", "content": text} for text in ("Be brief.", "Be thorough."))
    asked = user("2+2?")

    async def talk() -> None:
        await model.chat([brief, asked])
        await model.chat([long, asked])
        await model.chat([brief, asked, assistant("4"), user("and 1?")])

    asyncio.run(talk())
    prompt = TOKENIZER.decode(engine_of(model).prompts[2])
    assert "Be brief." in prompt and "Be thorough." not in prompt
    strange = [{"role": "system", "content": "Be rude."}, asked, assistant("4"), user("and 1?")]
    assert model.recorder.by_messages(strange, None) is None


def test_a_continuing_prompt_is_given_the_thinking_behind_all_that_came_before() -> None:
    asked = [user("2+2?"), assistant("3"), user("Sure?")]
    recorded = call(asked, "4", thinking="<think>two and two</think>").recorded()
    assert recorded.messages == [*asked, assistant("<think>two and two</think>4")]
    assert recorded.ended


def test_what_has_no_messages_or_no_reply_is_no_branch() -> None:
    recorder = Recorder()
    by_ids, too_long = call(None, "a"), call([user("?")], "", truncated=True)
    first, last = call([user("!")], "b"), call([user("!")], "c")
    for one in (by_ids, too_long, first, last):
        recorder.add(one)
    recorder.drop_branches()
    assert recorder.orphans() == {first}
