"""Labelled replies: what a row is read as, and what is refused of all rows together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import write_jsonl
from tests.tiny import make_tokenizer
from trireme.data.kinds import KtoFormat
from trireme.data.rows import OnError, load_rows
from trireme.experience import EID

TOKENIZER = make_tokenizer()
USER, SO = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def _made(folder: Path, *rows: dict[str, Any], on_error: OnError = "fail", **given: Any) -> Any:
    file = load_rows(str(write_jsonl(folder / "rows.jsonl", list(rows))), None, "train")
    return KtoFormat(file, TOKENIZER, max_model_len=200, format_args=given, on_error=on_error)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "So."},
        {"prompt": [USER], "completion": [SO]},
        {"messages": [USER, SO]},
        {"prompt": "Why?", "response": "So."},
    ],
    ids=["TRL's text", "TRL's messages", "ms-swift's messages", "prompt and response"],
)
def test_a_row_is_a_reply_and_whether_it_is_desirable(row, tmp_path):
    form = _made(tmp_path, row | {"label": True}, row | {"label": False})
    for index, label in enumerate((True, False)):
        e = form(index, eid=EID(0, index))
        assert e.info["desirable"] is label
        assert str(TOKENIZER.decode(e.tokens[: e.prompt_length])).endswith("assistant\n")
        assert TOKENIZER.decode(e.tokens[e.mask]) == "So.<|im_end|>"


def test_the_labels_column_may_have_another_name_and_numbers(tmp_path):
    rows = [{"prompt": "Why?", "completion": "So.", "up": up} for up in (1, 0)]
    form = _made(tmp_path, *rows, label_key="up")
    assert [form(n, eid=EID(0, n)).info["desirable"] for n in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([True, None], "row 1 .*: column 'label' holds None: expected true"),
        ([0, 2], "row 1 .*: column 'label' holds 2: expected true"),
        (["yes", "no"], "row 0 .*: column 'label' holds 'yes'"),
        ([True, True], "column 'label' is true in every row: .* or algorithm_type sft"),
        ([False, False], "column 'label' is false in every row: .* KTO distinguishes$"),
    ],
)
def test_rows_without_two_labels_are_refused(labels, message, tmp_path):
    rows = [{"prompt": "Why?", "completion": "So.", "label": label} for label in labels]
    with pytest.raises(ValueError, match=message):
        _made(tmp_path, *rows)


def test_a_row_without_a_label_may_be_skipped(tmp_path):
    rows = [{"prompt": "Why?", "completion": "So.", "label": x} for x in (True, None, False)]
    form = _made(tmp_path, *rows, on_error="skip")
    assert len(form) == 2 and form.counts["malformed"] == 1
