"""Pairs share their prompt; texts are packed; malformed rows are named, or counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_formats import CHAT, rows
from tests.model import templates
from tests.tiny import CHATML, make_tokenizer
from trireme.data.formats import SftFormat
from trireme.data.kinds import CptFormat, DpoFormat
from trireme.data.rows import Rows, load_rows
from trireme.experience import EID, Experience

PLAIN = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
MESSAGES = {
    "messages": CHAT[:3],
    "chosen": [{"role": "assistant", "content": "4"}],
    "rejected": {"role": "assistant", "content": "5"},
}


def pair(row: dict[str, Any], template: str | None = CHATML) -> tuple[str, str, str]:
    """Prompt, chosen and rejected as text."""
    tokenizer = make_tokenizer(template)
    e = DpoFormat(rows(row), tokenizer, max_model_len=512)(0, eid=EID(0, 0))
    assert e is not None and e.chosen is not None and e.rejected is not None
    assert not e.mask.any()
    return tuple(tokenizer.decode(part.tolist()) for part in (e.tokens, e.chosen, e.rejected))  # type: ignore[return-value]


@pytest.mark.parametrize("template", [CHATML, templates.GENERATION, templates.THINKING])
def test_a_pair_shares_its_prompt(template: str) -> None:
    prompt, chosen, rejected = pair(PLAIN, template)
    assert prompt == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert (chosen, rejected) == ("2<|im_end|>", "3<|im_end|>")
    prompt, chosen, rejected = pair(MESSAGES, template)
    assert prompt.endswith("and 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert (chosen, rejected) == ("4<|im_end|>", "5<|im_end|>")


def test_a_pair_for_a_model_without_a_template() -> None:
    assert pair(PLAIN, None) == ("1+1?", "2<|im_end|>", "3<|im_end|>")


def test_a_pair_of_equal_replies_is_refused_or_counted() -> None:
    same = {**PLAIN, "rejected": "2"}
    with pytest.raises(ValueError, match="row 1: columns 'chosen' and 'rejected' hold the same"):
        DpoFormat(rows(PLAIN, same), make_tokenizer(), max_model_len=64)
    kept = DpoFormat(rows(PLAIN, same), make_tokenizer(), max_model_len=64, on_error="skip")
    assert len(kept) == 1 and kept.counts["malformed"] == 1


def test_texts_are_packed_end_to_end() -> None:
    tokenizer = make_tokenizer()
    texts = ["abcd", "ef", "ghijklm"]
    cpt = CptFormat(rows(*({"text": t} for t in texts)), tokenizer, max_model_len=5)
    pieces = [cpt(index, eid=EID(0, index)) for index in range(len(cpt))]
    made = [e for e in pieces if isinstance(e, Experience)]
    end = "<|im_end|>"
    assert [tokenizer.decode(e.tokens.tolist()) for e in made] == [
        f"abcd{end}", f"ef{end}gh", "ijklm",
    ]  # fmt: skip
    assert all(e.mask.tolist() == [False, True, True, True, True] for e in made)
    assert pieces[3] is None  # the last end of sequence alone: nothing to predict
    with pytest.raises(ValueError, match="row 0: column 'text' holds ''"):
        CptFormat(rows({"text": ""}), tokenizer, max_model_len=5)


def test_a_malformed_row_is_named_with_file_line_and_field(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "a", "response": 7}\n')
    where = r"row 1 \(.*chats.jsonl, line 3\): column 'response' holds 7: expected text"
    with pytest.raises(ValueError, match=where):
        SftFormat(load_rows(file), make_tokenizer(), max_model_len=64)


def test_malformed_rows_are_left_out_and_counted_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "chats.jsonl"
    good = '{"prompt": "a", "response": "b"}\n'
    file.write_text(good + "{broken\n" + '{"prompt": "a", "response": 7}\n' + "[1]\n" + good)
    with caplog.at_level(logging.WARNING):
        found = load_rows(file, on_error="skip")
        sft = SftFormat(found, make_tokenizer(), max_model_len=64, on_error="skip")
    assert len(sft) == 2 and sft.counts["malformed"] == 3
    assert "2 lines are not rows and are left out; it has a line that is not JSON" in caplog.text
    assert "1 of 3 rows are malformed and left out" in caplog.text and "line 3" in caplog.text


def test_a_data_set_of_nothing_but_malformed_rows_is_no_data_set() -> None:
    with pytest.raises(ValueError, match="all 1 rows are malformed; the first: x, row 0"):
        found = Rows("x", [{"prompt": 1, "response": "b"}], ["prompt", "response"])
        SftFormat(found, make_tokenizer(), max_model_len=64, on_error="skip")
