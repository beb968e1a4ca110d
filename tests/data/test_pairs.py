"""Pairs and plain text: what of a row is the prompt, and what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import write_jsonl
from tests.tiny import make_tokenizer
from trireme.data.kinds import CptFormat, DpoFormat
from trireme.data.rows import load_rows
from trireme.experience import EID

TOKENIZER = make_tokenizer()
ASKED = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def _made(kind: Any, folder: Path, row: dict[str, Any], **given: Any) -> Any:
    rows = load_rows(str(write_jsonl(folder / "rows.jsonl", [row])), None, "train")
    return kind(rows, given.pop("tokenizer", TOKENIZER), **{"max_model_len": 200, **given})


def _texts(form: DpoFormat) -> tuple[str, ...]:
    e = form(0, eid=EID(0, 0))
    assert e is not None and e.chosen is not None and e.rejected is not None
    return tuple(str(TOKENIZER.decode(ids)) for ids in (e.tokens, e.chosen, e.rejected))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": [{"role": "user", "content": "Why?"}], "chosen": "So.", "rejected": "No."},
        {
            "messages": [{"role": "user", "content": "Why?"}],
            "chosen": {"role": "assistant", "content": "So."},
            "rejected": [{"role": "assistant", "content": "No."}],
        },
        {
            "chosen": [
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "So."},
            ],
            "rejected": [
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "No."},
            ],
        },
    ],
    ids=["text", "messages", "replies as messages", "whole conversations"],
)
def test_a_pair_is_a_prompt_and_two_replies_that_end(row, tmp_path):
    assert _texts(_made(DpoFormat, tmp_path, row)) == (ASKED, "So.<|im_end|>", "No.<|im_end|>")


def test_columns_may_have_other_names(tmp_path):
    row = {"question": "Why?", "good": "So.", "bad": "No."}
    names = {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    assert _texts(_made(DpoFormat, tmp_path, row, format_args=names))[0] == ASKED
    with pytest.raises(ValueError, match=r"has no column 'chosen' \(format.chosen_key\)"):
        _made(DpoFormat, tmp_path, row)


def test_the_last_message_of_a_conversation_may_be_the_better_reply(tmp_path):
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    row = {"messages": said, "rejected_response": "No."}
    names = {"chosen_key": "messages", "rejected_key": "rejected_response"}
    form = _made(DpoFormat, tmp_path, row, format_args=names)
    assert _texts(form) == (ASKED, "So.<|im_end|>", "No.<|im_end|>")


def test_a_model_without_a_template_reads_plain_text(tmp_path):
    row = {"prompt": "Why? ", "chosen": "So.", "rejected": "No."}
    form = _made(DpoFormat, tmp_path, row, tokenizer=make_tokenizer(None))
    assert _texts(form) == ("Why? ", "So.<|im_end|>", "No.<|im_end|>")


def test_a_reply_is_cut_and_a_pair_that_leaves_nothing_is_counted(tmp_path):
    row = {"prompt": "Why?", "chosen": "So it is.", "rejected": "No."}
    start = len(TOKENIZER.encode(ASKED))
    assert _texts(_made(DpoFormat, tmp_path, row, max_model_len=start + 2))[1:] == ("So", "No")
    form = _made(DpoFormat, tmp_path, row, max_model_len=start)
    assert form(0, eid=EID()) is None and form.counts["dropped"] == 1
    row = {"prompt": "Why?", "chosen": "So it is.", "rejected": "So it goes."}
    form = _made(DpoFormat, tmp_path, row, max_model_len=start + 4)  # what differs is cut off
    assert form(0, eid=EID()) is None and form.counts["dropped"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Why?", "chosen": "", "rejected": "No."}, "row 0 .*: column 'chosen' holds ''"),
        ({"prompt": 3, "chosen": "So.", "rejected": "No."}, "row 0 .*: column 'prompt' holds 3"),
        (
            {"prompt": [{"content": "Why?"}], "chosen": "So.", "rejected": "No."},
            "row 0 .*: a message",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named(row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _made(DpoFormat, tmp_path, row)


def test_text_is_trained_but_for_its_first_token_and_ends(tmp_path):
    form = _made(CptFormat, tmp_path, {"text": "Once"})
    e = form(0, eid=EID())
    assert e is not None and TOKENIZER.decode(e.tokens) == "Once<|im_end|>"
    assert e.mask.tolist() == [False, True, True, True, True]
    cut = _made(CptFormat, tmp_path, {"text": "Once"}, max_model_len=3)
    short = cut(0, eid=EID())
    assert short is not None and len(short.tokens) == 3 and len(cut) == 2
    with pytest.raises(ValueError, match=r"row 0 .*: column 'text' holds 5: expected text"):
        _made(CptFormat, tmp_path, {"text": 5})


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ([{"role": "user", "content": "Who?"}], "differ before their last reply"),
        ([], "column 'rejected' holds one message, a reply"),
        (None, "column 'rejected' holds 'No.': expected a conversation"),
    ],
)
def test_conversations_without_a_prompt_of_their_own_must_share_one(asked, wrong, tmp_path):
    def conversation(messages: list[dict[str, str]], reply: str) -> list[dict[str, str]]:
        return [*messages, {"role": "assistant", "content": reply}]

    chosen = conversation([{"role": "user", "content": "Why?"}], "So.")
    rejected = "No." if asked is None else conversation(asked, "No.")
    with pytest.raises(ValueError, match=f"row 0.*{wrong}"):
        _made(DpoFormat, tmp_path, {"chosen": chosen, "rejected": rejected})


USER, MORE = {"role": "user", "content": "Why?"}, {"role": "user", "content": "And?"}
SO, NO = {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."}


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": json.dumps([USER, SO]), "rejected": json.dumps([USER, NO])},
        {"prompt": "Why?", "chosen": json.dumps([USER, SO]), "rejected": json.dumps([NO])},
        {"prompt": json.dumps([USER]), "chosen": [USER | {"name": None}, SO], "rejected": "No."},
    ],
    ids=["without a prompt", "with the prompt's text", "with the prompt's messages"],
)
def test_conversations_may_be_json_text_and_begin_with_the_prompt(row, tmp_path):
    assert _texts(_made(DpoFormat, tmp_path, row)) == (ASKED, "So.<|im_end|>", "No.<|im_end|>")


def test_a_reply_that_is_a_json_list_stays_a_text(tmp_path):
    calls = '[{"name": "add", "arguments": {"a": 1}}]'
    row = {"prompt": "Why?", "chosen": calls, "rejected": "[1, 2]"}
    texts = _texts(_made(DpoFormat, tmp_path, row))
    assert texts == (ASKED, f"{calls}<|im_end|>", "[1, 2]<|im_end|>")


def test_no_reply_of_the_prompt_is_trained(tmp_path):
    row = {"prompt": [USER, {**SO, "weight": 1}, MORE], "chosen": "A.", "rejected": "B."}
    every = {"enable_concatenated_multi_turn": True}
    prompt, chosen, _ = _texts(_made(DpoFormat, tmp_path, row, format_args=every))
    assert "And?" in prompt and chosen == "A.<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "chosen", "wrong"),
    [
        ([USER], [SO, MORE, SO], "'chosen' holds 3 messages, and those before the last are not"),
        ("And?", [USER, SO], "'chosen' holds 2 messages, .* not the prompt of column 'prompt'"),
        ("Why?", [USER, MORE], "'chosen' has no assistant turn"),
        (
            "Why?",
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}],
            "'chosen' has a reply with tool calls, which pairs do not read",
        ),
    ],
)
def test_turns_that_would_be_lost_are_refused_with_the_row(prompt, chosen, wrong, tmp_path):
    with pytest.raises(ValueError, match=f"row 0 .*{wrong}"):
        _made(DpoFormat, tmp_path, {"prompt": prompt, "chosen": chosen, "rejected": "No."})
