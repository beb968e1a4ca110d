"""A checkpoint's own response template reads the calls that no format of ours reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
import regex

from tests.ext.chat_formats.test_formats import CALLS, HEAD, TAIL, TEMPLATES
from tests.ext.openai.test_tool_calls import ARGUMENTS, TOOLS, Telling, ask
from tests.tiny import make_model, make_tokenizer
from trireme.ext.chat_formats import response_template
from trireme.model.chat_tokens import MISREADS_CALLS, ChatTokens
from trireme.model.model import Model
from trireme.model.tool_calls import CUT, ToolCall, ToolFormat, format_of, hermes

# Two forms that no format of ours reads: arguments in tags, and JSON beside the name.
WRITTEN = {
    "invoke": CALLS
    + "{{- '\n<invoke name=\"' + f.name + '\">' }}{%- for k, v in f.arguments | items %}"
    + "{{- '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) }}"
    + "{{- '</parameter>' }}{% endfor %}{{- '</invoke>' }}{% endfor %}",
    "sections": CALLS
    + "{{- '<|call>' + f.name + '<|args|>' }}{{- f.arguments | tojson }}"
    + "{{- '<call|>' }}{% endfor %}",
}
THINKING = {"open": "<think>", "close_pattern": r"</think>\s*"}
ANSWER = {"close_pattern": r"<\|im_end\|>\s*"}
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
READ: dict[str, dict[str, Any]] = {
    "invoke": {
        "open_pattern": r'<invoke name="(?P<name>[^"]+)">',
        "close_pattern": r"</invoke>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'
        },
        "transform": CALL,
    },
    "sections": {
        "open_pattern": r"<\|call>(?P<name>[\w.-]+)<\|args\|>",
        "close": "<call|>",
        "repeats": True,
        "content": "json",
        "transform": CALL,
    },
}


def template_of(name: str, **more: Any) -> dict[str, Any]:
    fields = {"reasoning_content": THINKING, "tool_calls": READ[name], "content": ANSWER}
    return {"start_anchor": "<|im_start|>assistant\n", "fields": fields | more}


def chat_of(name: str, response: Any = None, parser: str | None = None) -> ChatTokens:
    tokenizer: Any = make_tokenizer(HEAD + WRITTEN[name] + TAIL)
    if response is not None:
        tokenizer.response_template = response
    return ChatTokens(tokenizer, tool_call_parser=parser)


def form_of(name: str) -> ToolFormat:
    return chat_of(name, template_of(name)).tool_format


def rendered(name: str, calls: list[ToolCall], said: str) -> str:
    made = [{"function": {"name": c.name, "arguments": json.dumps(c.arguments)}} for c in calls]
    message = {"role": "assistant", "content": said, "tool_calls": made}
    return chat_of(name).render([message], TOOLS, generate=False).removeprefix("|>")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_chat_template_writes_the_response_template_reads(name: str) -> None:
    for said in ("", "I look.", "<think>\nA <b>.\n</think>\n\nI look.", "Hm.</think>I look."):
        for calls in ([ToolCall("look", ARGUMENTS)], [ToolCall("look", ARGUMENTS)] * 2):
            content, found = form_of(name).read(rendered(name, calls, said), TOOLS)
            assert (content.strip(), found) == (said, calls)
    for text in ("A cat { sat.", "<think>\nA\n</think>\n\nB", "", "\0"):
        assert form_of(name).read(text, TOOLS) == (text, [])


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_taken_where_no_format_of_ours_reads_the_calls(name: str) -> None:
    chat = chat_of(name, template_of(name))
    assert chat.tool_format.described and not chat.misreads_calls
    assert chat_of(name).misreads_calls and chat_of(name).tool_format.read is hermes
    other = next(one for one in WRITTEN if one != name)  # it does not read them either
    assert chat_of(name, template_of(other)).tool_format.read is hermes
    assert chat_of(name, {"fields": {}}).tool_format.read is hermes  # transformers refuses it
    chosen = chat_of(name, template_of(name), "glm45")
    assert chosen.tool_format.read is format_of("glm45").read


def test_a_format_that_reads_the_calls_stays() -> None:
    tokenizer: Any = make_tokenizer(HEAD + TEMPLATES["qwen3_coder"] + TAIL)
    tokenizer.response_template = template_of("invoke")
    assert ChatTokens(tokenizer).tool_format.read is format_of("qwen3_coder").read


def test_it_can_be_named_where_the_checkpoint_has_one() -> None:
    chat = chat_of("invoke", template_of("invoke"), "response_template")
    _, [call] = chat.tool_format.read(rendered("invoke", [ToolCall("wait", {})], ""), TOOLS)
    assert call == ToolCall("wait", {})
    with pytest.raises(ValueError, match="the model's tokenizer has no response template"):
        chat_of("invoke", None, "response_template")
    with pytest.raises(ValueError, match="the model's template is refused: response_template"):
        chat_of("invoke", {"fields": {}}, "response_template")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_is_one_error(name: str) -> None:
    text = rendered(name, [ToolCall("look", ARGUMENTS)], "I look.")
    for size in range(text.index("times"), text.index("true") + 3):
        content, calls = form_of(name).read(text[:size], TOOLS)
        assert (content.strip(), [call.error for call in calls]) == ("I look.", [CUT]), text[:size]
    two = rendered(name, [ToolCall("wait", {}), ToolCall("look", ARGUMENTS)], "")
    _, calls = form_of(name).read(two[: two.index("true")], TOOLS)
    assert [call.error for call in calls] == [None, CUT]


def test_a_call_in_json_needs_no_end_and_a_damaged_one_costs_no_other() -> None:
    text = '<|call>wait<|args|>{}<call|><|call>look<|args|>{bad}<call|><|call>wait<|args|>{"a": 1}'
    _, calls = form_of("sections").read(text, TOOLS)
    assert [(call.name, call.arguments) for call in calls] == [
        ("wait", {}),
        ("", {}),
        ("wait", {"a": 1}),
    ]
    error = str(calls[1].error)
    assert error.startswith("the call cannot be read: json parser") and "\n" not in error


def test_a_text_becomes_what_the_tool_s_schema_says() -> None:
    text = '<invoke name="look"><parameter name="at">7</parameter>'
    text += '<parameter name="times">7</parameter></invoke>'
    assert form_of("invoke").read(text, TOOLS)[1] == [ToolCall("look", {"at": "7", "times": 7})]


def test_a_pattern_that_takes_too_long_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_template, "SECONDS", 0.2)
    tag = r'<parameter name="(?P<key>[^"]+)">\s*(?P<value>.*?)\s*</parameter>'
    square = template_of(
        "invoke", tool_calls=READ["invoke"] | {"content_args": {"tag_pattern": tag}}
    )
    cubic = template_of("invoke", reasoning_content={"open_pattern": r"(?=[\s\S]*?</think>)"})
    for template, text in (
        (square, '<invoke name="x">' + '<parameter name="x">' * 5000 + "</invoke>"),
        (cubic, '<invoke name="x"></invoke>' * 5000),
    ):
        tokenizer: Any = make_tokenizer()
        tokenizer.response_template = template
        read = format_of("response_template", tokenizer=tokenizer).read
        _, [call] = read(text, TOOLS)
        assert "response template takes too long" in str(call.error)


def test_a_match_ends_at_the_deadline_as_a_search_does() -> None:
    """transformers matches a field's pattern from 5.24 on."""
    timed = response_template._Timed(regex.compile(r"(x|xx)+$"), lambda: 0.2)
    assert timed.match("axxx", 1).span() == (1, 4)
    with pytest.raises(TimeoutError):
        timed.match("x" * 5000 + "z", 0)


@pytest.mark.parametrize("streams", [False, True])
def test_calls_reach_clients_apart_from_the_text(streams: bool) -> None:
    text = rendered("sections", [ToolCall("look", {"times": 3})], "Hm.")
    engine: Any = Telling([text])
    chat = chat_of("sections", template_of("sections"))
    found = ask(Model(engine, chat, max_model_len=4000), stream=streams)
    deltas = [choice["delta"] for choice in found] if streams else [found["message"]]
    content = "".join(delta.get("content") or "" for delta in deltas)
    [call] = [c for delta in deltas for c in delta.get("tool_calls") or ()]
    assert (content, call["function"]) == ("Hm.", {"name": "look", "arguments": '{"times": 3}'})


def test_a_checkpoint_s_files_carry_it(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoTokenizer

    written = "{{- tools | tojson if tools else '' }}"  # one that leaves them out is said, too
    folder = make_model(tmp_path / "model", template=written + HEAD + WRITTEN["invoke"] + TAIL)
    asked = [{"role": "user", "content": "hi"}]
    ChatTokens(AutoTokenizer.from_pretrained(folder)).prompt(asked, TOOLS)
    assert caplog.messages == [MISREADS_CALLS]
    caplog.clear()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = template_of("invoke")
    tokenizer.save_pretrained(folder)
    ChatTokens(AutoTokenizer.from_pretrained(folder)).prompt(asked, TOOLS)
    assert not caplog.messages
