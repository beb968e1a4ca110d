"""ScriptedEngine: replies in order or by a function, an end token behind each that fits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.tiny import make_tokenizer
from trireme.engines.engine import Completion, Sampling
from trireme.engines.scripted import LOGPROB, ScriptedEngine

TOKENIZER: Any = make_tokenizer()


def replies(script: Any, *prompts: str, **sampling: Any) -> list[Completion]:
    async def main() -> list[Completion]:
        engine = ScriptedEngine(script, tokenizer=TOKENIZER)
        found = []
        for prompt in prompts:
            found += await engine.generate(TOKENIZER.encode(prompt), Sampling(**sampling))
        return found

    return asyncio.run(main())


def test_a_list_is_said_in_the_order_of_the_calls() -> None:
    assert [c.text for c in replies(["one", "two"], "a", "b")] == ["one", "two"]
    assert [c.text for c in replies(["one", "two"], "a", n=2)] == ["one", "two"]


def test_a_function_is_given_the_prompts_text() -> None:
    assert [c.text for c in replies(str.upper, "ab", "c")] == ["AB", "C"]


def test_a_reply_ends_in_an_end_token_unless_it_is_cut() -> None:
    (whole,) = replies(["hey"], "?")
    assert whole.ids == [*TOKENIZER.encode("hey"), TOKENIZER.eos_token_id]
    assert whole.stop_reason == "stop" and whole.logprobs == [LOGPROB] * 4
    (exact,) = replies(["hey"], "?", max_tokens=3)
    assert exact.ids == TOKENIZER.encode("hey") and exact.stop_reason == "length"


def test_a_script_that_runs_out_says_so() -> None:
    with pytest.raises(
        RuntimeError, match=r"used up \(1 given\), and .*expected one reply for each"
    ):
        replies(["one"], "a", "b")
