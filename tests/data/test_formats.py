"""SFT rows as experiences: columns found, replies masked, ends of turn trained exactly once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tiny import CHATML, make_tokenizer
from trireme.data.formats import SftFormat, sft_columns
from trireme.data.rows import Rows
from trireme.experience import EID, Experience
from trireme.task import with_objects

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4"},
]
TWICE = '{"content": "x", "content": "y"}'
# drops what earlier replies thought, as templates of thinking models do
FORGETFUL = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- set text = message['content'] %}"
    "{%- if message['role'] == 'assistant' and not loop.last %}"
    "{%- set text = text.split('</think>')[-1] %}{%- endif %}"
    "{{- text + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
BLOCKS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{- message['content'] }}"
    "{% endgeneration %}{%- else %}{{- message['content'] }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
NO_END = (
    "{%- for message in messages %}{{- message['role'] + ': ' + message['content'] + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
)


def in_parts(*texts: str) -> list[dict[str, Any]]:
    """Return a content as OpenAI's clients and tables of them have it."""
    return [{"type": "text", "text": text, "image_url": None} for text in texts]


def rows(*data: dict[str, Any]) -> Rows:
    return Rows("dataset 'x'", list(data), dict.fromkeys(key for row in data for key in row))


def made(row: dict[str, Any], template: str | None = CHATML, **options: Any) -> Experience:
    given: dict[str, Any] = {"max_model_len": 512} | options
    experience = SftFormat(rows(row), make_tokenizer(template), **given)(0, eid=EID(0, 0))
    assert experience is not None
    return experience


def text(experience: Experience, trained: bool | None = None) -> str:
    ids = experience.tokens if trained is None else experience.tokens[experience.mask == trained]
    return str(make_tokenizer().decode(ids.tolist()))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT[:2]},
        {"message": CHAT[:2]},
        {"messages": json.dumps(CHAT[:2])},
        {"prompt": "1+1?", "response": "2"},
        {"question": "1+1?", "answer": "2"},
        {"prompt": "1+1?", "completion": "2"},
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
        {"prompt": CHAT[:1], "completion": "2"},
        {"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:2])},
        {
            "messages": [
                {"role": "user", "content": in_parts("1+", "1?")},
                {"role": "assistant", "content": in_parts("2")},
            ]
        },
    ],
)
def test_the_reply_and_its_end_are_trained_and_nothing_else(row: dict[str, Any]) -> None:
    e = made(row)
    assert text(e, trained=False) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert text(e, trained=True) == "2<|im_end|>"
    assert e.tokens[-1] == make_tokenizer().eos_token_id
    assert e.prompt_length == int((~e.mask).sum())
    assert e.response_text == "2<|im_end|>" and e.version == -1


@pytest.mark.parametrize(
    ("row", "template", "wrong"),
    [
        ({"prompt": CHAT[:1], "completion": []}, CHATML, "'completion' must hold a list"),
        ({"prompt": CHAT[:1], "completion": CHAT[2:3]}, CHATML, "'completion' has no assistant"),
        ({"prompt": CHAT[:1], "completion": "2"}, None, "needs a chat template.*'prompt' as text"),
    ],
)
def test_a_prompt_and_its_completion_as_messages_are_checked(row, template, wrong) -> None:
    with pytest.raises(ValueError, match=f"row 0: .*{wrong}"):
        made(row, template)


def test_columns_are_looked_for_in_a_fixed_order() -> None:
    every = {n: "x" for n in ("answer", "question", "response", "prompt", "message", "messages")}
    assert sft_columns(rows(every), {}).messages == "messages"
    del every["messages"]
    assert sft_columns(rows(every), {}).messages == "message"
    del every["message"]
    assert sft_columns(rows(every), {}).prompt == "prompt"
    del every["prompt"]
    assert sft_columns(rows(every), {}).prompt == "question"
    named = {"prompt_key": "question", "response_key": "response"}
    assert sft_columns(rows(every), named).response == "response"


def test_unknown_columns_are_listed_and_the_user_asked() -> None:
    with pytest.raises(
        ValueError, match=r"columns problem, solution.*name them as format\.messages"
    ):
        made({"problem": "1", "solution": "2"})
    with pytest.raises(ValueError, match="no column 'answer'"):
        made({"q": "1", "a": "2"}, format_args={"prompt_key": "q", "response_key": "answer"})


def test_a_template_that_refuses_a_row_is_told_with_the_row() -> None:
    picky = "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}"
    with pytest.raises(ValueError, match=r"row 0: the chat template refuses .* too long"):
        made({"messages": CHAT}, picky)


def test_a_value_that_the_template_cannot_write_is_told_with_the_row() -> None:
    row = {"prompt": "1+1?", "response": "2", "system": 3}
    with pytest.raises(ValueError, match=r"row 0: the chat template refuses .* system, user"):
        made(row, format_args={"system_prompt_key": "system"})


def test_a_text_that_begins_with_many_brackets_is_text() -> None:
    assert text(made({"prompt": "[" * 20_000, "response": "2"}, max_model_len=20_100), True) == (
        "2<|im_end|>"
    )


def test_of_a_conversation_the_last_reply_is_trained() -> None:
    e = made({"messages": CHAT})
    assert text(e, trained=True) == "4<|im_end|>"
    assert text(e).startswith("<|im_start|>user\n1+1?")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"messages": [*CHAT, {"role": "user", "content": "and?"}]},
            "row 0: the conversation in column 'messages' ends in a turn of the user: expected the",
        ),
        (
            {"messages": [{"role": "user", "content": "1"}, {"role": "asistant", "content": "2"}]},
            "no assistant turn: its roles are user, asistant",
        ),
        ({"messages": CHAT, "tools": "add"}, "row 0: column 'tools' holds text that is not JSON"),
        ({"messages": CHAT, "tools": ["add"]}, "column 'tools' holds .'add'.: expected a list of"),
        ({"prompt": "1+1?", "response": " "}, "row 0: column 'response' is empty: expected a repl"),
        (
            {"messages": [*CHAT[:3], {"role": "assistant", "content": " ", "name": None}]},
            "row 0: the last reply in column 'messages' is empty: expected a reply",
        ),
    ],
)
def test_a_row_that_leaves_nothing_to_learn_is_malformed(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made(row)


@pytest.mark.parametrize("every", [False, True])
def test_every_reply_of_a_completion_is_trained_and_none_of_its_prompt(every: bool) -> None:
    options = {"enable_concatenated_multi_turn": every}
    e = made({"prompt": CHAT[:1], "completion": CHAT[1:]}, format_args=options)
    assert text(e, trained=True) == "2<|im_end|>4<|im_end|>" and e.loss_weight is None
    e = made({"prompt": CHAT[:3], "completion": CHAT[3:]}, format_args=options)
    assert text(e, trained=True) == "4<|im_end|>"
    unsure = [CHAT[1] | {"weight": 0}, *CHAT[2:]]
    assert text(made({"prompt": "1+1?", "completion": unsure}), trained=True) == "4<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, BLOCKS])
def test_or_every_reply_each_with_its_end(template: str) -> None:
    every = {"enable_concatenated_multi_turn": True}
    e = made({"messages": CHAT}, template, format_args=every)
    assert text(e, trained=True) == "2<|im_end|>4<|im_end|>"
    assert text(e) == f"{made({'messages': CHAT}).prompt_text}4<|im_end|>"


def test_a_template_that_marks_its_replies_is_believed() -> None:
    e = made({"messages": CHAT}, BLOCKS)
    assert text(e, trained=True) == "4<|im_end|>"


def test_a_turn_that_the_template_rewrites_is_not_trained() -> None:
    chat = [dict(message) for message in CHAT]
    chat[1]["content"] = "hm</think>2"
    data = rows({"messages": chat})
    sft = SftFormat(
        data,
        make_tokenizer(FORGETFUL),
        max_model_len=512,
        format_args={"enable_concatenated_multi_turn": True},
    )
    e = sft(0, eid=EID(0, 0))
    assert e is not None and text(e, trained=True) == "4<|im_end|>"
    assert "hm" not in text(e)
    assert sft.counts["rewritten_turns"] == 1


def test_a_template_without_an_end_of_turn_gets_the_model_s() -> None:
    e = made({"messages": CHAT[:2]}, NO_END)
    assert text(e, trained=True) == "2\n<|im_end|>"


def test_a_turn_that_ends_in_a_token_at_which_the_model_goes_on_gets_the_stop_behind_it() -> None:
    pad = make_tokenizer().pad_token_id
    e = made({"messages": CHAT[:2]}, end_ids=[pad])
    assert text(e, trained=True) == "2<|im_end|><|pad|>"


def test_a_model_without_a_template_learns_the_response_and_its_end() -> None:
    e = made({"prompt": "1+1=", "response": "2"}, None)
    assert (text(e, trained=False), text(e, trained=True)) == ("1+1=", "2<|im_end|>")
    with pytest.raises(ValueError, match="needs a chat template"):
        made({"messages": CHAT}, None)


def test_system_prompts_come_from_the_format_or_the_row() -> None:
    row = {"question": "1+1?", "answer": "2", "rules": "be right"}
    e = made(row, format_args={"system_prompt": "be brief"})
    assert text(e).startswith("<|im_start|>system\nbe brief<|im_end|>")
    e = made(row, format_args={"system_prompt": "be brief", "system_prompt_key": "rules"})
    assert text(e).startswith("<|im_start|>system\nbe right<|im_end|>")


@pytest.mark.parametrize("key", ["system_prompt_key", "tools_key", "image_key"])
def test_a_column_that_the_user_named_must_be_there(key: str) -> None:
    expected = rf"has no column 'mesages' \(format.{key}\); did you mean"
    with pytest.raises(ValueError, match=expected):
        made({"messages": CHAT}, format_args={key: "mesages"})


def test_a_row_that_is_too_long_is_cut_or_left_out_and_counted() -> None:
    data = rows(
        {"question": "1+1?", "answer": "2" * 50},
        {"question": "1" * 50, "answer": "2"},
        {"question": "1+1?", "answer": "2"},
    )
    sft = SftFormat(data, make_tokenizer(), max_model_len=40)
    cut, dropped, whole = (sft(index, eid=EID(0, index)) for index in range(3))
    assert cut is not None and len(cut.tokens) == 40
    assert cut.truncate_status == "response_truncated"
    assert dropped is None
    assert whole is not None and whole.truncate_status is None
    assert (sft.counts["cut"], sft.counts["dropped"], sft.counts["rows"]) == (1, 1, 3)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "answer": None}, r"row 0: column 'answer' holds None"),
        ({"messages": []}, "row 0: column 'messages' must hold a list of messages"),
        ({"messages": CHAT[:1]}, "row 0: the conversation .* has no assistant turn"),
        ({"messages": "[{"}, "row 0: column 'messages' holds text that is not JSON"),
        (
            {"messages": f'[{{"role": "user", "role": "system", {TWICE[1:]}]'},
            "column 'messages' holds text that is not JSON: an object has the name 'role' more",
        ),
        (
            {"prompt": f'[{{"role": "user", {TWICE[1:]}]', "response": "2"},
            "column 'prompt' holds text that is not JSON: an object .* with 'x' and 'y'",
        ),
        (
            {"prompt": "1", "response": f'[{{"role": "assistant", {TWICE[1:]}]'},
            "column 'response' holds text that is not JSON: an object has the name 'content' more",
        ),
        (
            {"messages": CHAT, "tools": f"[{TWICE}]"},
            "row 0: column 'tools' holds text that is not JSON: an object has the name 'content'",
        ),
        (
            {
                "messages": [
                    CHAT[0],
                    CHAT[1] | {"tool_calls": [{"function": {"name": "f", "arguments": TWICE}}]},
                ]
            },
            "column 'messages' holds text that is not JSON: an object has the name 'content' more",
        ),
        ({"messages": [{"content": "x"}]}, "row 0: a message must have a role"),
        ({"messages": "[" * 200_000}, "'messages' holds text that is not JSON: it is nested too"),
        ({"tokens": ["a"]}, r"row 0: column 'tokens' holds \['a'\]: expected a list of ids"),
        ({"tokens": [5, -1], "prompt_length": 1}, "row 0: column 'tokens' holds .*a list of ids"),
        (
            {"tokens": [5, 900, 7], "prompt_length": 1},
            r"row 0: column 'tokens' holds the id 900 \(at 1\): expected 0 to 899, this model",
        ),
        ({"tokens": [5, 6]}, "row 0: Experience needs `mask` or `prompt_length`"),
        ({"tokens": [5, 6], "prompt_length": "1"}, "row 0: it is no recorded experience"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}, CHAT[1]]},
            "row 0: a message's content holds .*'video'.*: only text and pictures",
        ),
    ],
)
def test_a_malformed_row_is_named_before_any_training(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SftFormat(rows(row), make_tokenizer(), max_model_len=64, vocabulary=900)


def test_recorded_experiences_come_back_as_they_were() -> None:
    given = {"prompt_length": 2, "reward": 1, "logprobs": [-1.0, -2.0], "temperature": 0.7}
    e = made({"tokens": [5, 6, 7, 8], "loss_weight": [0.0, 0.0, 0.5, 2.0]} | given)
    assert e.temperature == 1.0 and e.loss_weight is not None
    assert e.loss_weight.tolist() == [0.0, 0.0, 0.5, 2.0]
    assert e.tokens.tolist() == [5, 6, 7, 8] and e.mask.tolist() == [False, False, True, True]
    assert e.reward == 1.0 and e.logprobs is not None and e.logprobs.tolist() == [0, 0, -1, -2]


def test_recorded_experiences_are_cut_and_left_out_like_other_rows() -> None:
    kept = {"tokens": [5, 6, 7, 8], "prompt_length": 2, "logprobs": [-1.0, -2.0]}
    long_prompt = {"tokens": [5, 6, 7, 8], "prompt_length": 3, "logprobs": [-1.0]}
    short = {"tokens": [5, 6, 7], "prompt_length": 2, "logprobs": [-1.0]}
    form = SftFormat(rows(kept, long_prompt, short), make_tokenizer(), max_model_len=3)
    cut, none, whole = (form(index, eid=EID(0, index)) for index in range(3))
    assert cut is not None and none is None and whole is not None
    assert cut.tokens.tolist() == [5, 6, 7] and cut.mask.tolist() == [False, False, True]
    assert cut.logprobs is not None and cut.logprobs.tolist() == [0, 0, -1]
    assert (cut.truncate_status, whole.truncate_status) == ("response_truncated", None)
    assert form.counts == {"rows": 3, "cut": 1, "dropped": 1, "malformed": 0}


def test_rows_without_a_trained_reply_are_not_called_too_long() -> None:
    silent = {"messages": [CHAT[0], CHAT[1] | {"weight": 0}]}
    form = SftFormat(rows(silent), make_tokenizer(), max_model_len=64)
    assert form(0, eid=EID(0, 0)) is None
    assert form.counts == {"rows": 1, "rewritten_turns": 0, "untrained": 1, "malformed": 0}
    masked = {"tokens": [5, 6], "mask": [False, False]}
    form = SftFormat(rows(masked), make_tokenizer(), max_model_len=64)
    assert form(0, eid=EID(0, 0)) is None and form.counts["untrained"] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"at": "x"}', {"at": "x"}),
        ("[1, 2]", "[1, 2]"),
        ("[" * 100_000, "[" * 100_000),
        ('{"at":', '{"at":'),
        ({"at": 1}, {"at": 1}),
    ],
    ids=["object", "list", "deep", "cut", "no text"],
)
def test_arguments_of_a_call_become_the_object_that_they_are(
    arguments: object, expected: object
) -> None:
    function = {"name": "look", "arguments": arguments}
    for call, at in (({"id": "1", "function": function}, "function"), (function, None)):
        (made,) = with_objects({"role": "assistant", "tool_calls": [call]})["tool_calls"]
        pair = with_objects({"role": "assistant", "tool_calls": (call, call)})["tool_calls"]
        assert pair == [made, made]
        assert (made[at] if at else made) == {"name": "look", "arguments": expected}


def test_messages_of_a_table_lose_the_keys_that_only_others_have() -> None:
    e = made({"messages": [{**CHAT[0], "tool_calls": None}, {**CHAT[1], "tool_calls": None}]})
    assert text(e, trained=True) == "2<|im_end|>"
