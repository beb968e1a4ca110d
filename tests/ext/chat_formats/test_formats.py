"""What a family's template renders, its format reads; cut calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ext.openai.test_tool_calls import ARGUMENTS, TOOLS, ask, model_of
from tests.tiny import make_tokenizer
from trireme.model.chat_tokens import ChatTokens
from trireme.model.tool_calls import CUT, FORMATS, ToolCall, format_of

# The assistant's turns as the families' templates write them, without the rest of a template.
HEAD = "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '|>' + m.content }}"
TAIL = "{%- endif %}{% endfor %}"
CALLS = "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}"
TEMPLATES = {
    "hermes": CALLS
    + '{{- \'\n<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}'
    + "{{- f.arguments | tojson }}{{- '}\n</tool_call>' }}{% endfor %}",
    "qwen3_coder": CALLS
    + "{{- '\n<tool_call>\n<function=' + f.name + '>\n' }}"
    + "{%- for k, v in f.arguments | items %}{{- '<parameter=' + k + '>\n' }}"
    + "{{- v if v is string else v | tojson }}{{- '\n</parameter>\n' }}{% endfor %}"
    + "{{- '</function>\n</tool_call>' }}{% endfor %}",
    "llama3_json": "{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}"
    + '{{- \'{"name": "\' + f.name + \'", "parameters": \' }}{{- f.arguments | tojson }}'
    + "{{- '}' }}{{- '' if true else '<|python_tag|>' }}{% endif %}",
    "deepseek_v3": "{%- if m.tool_calls %}{{- '<\uff5ctool▁calls▁begin\uff5c>' }}{% endif %}"
    + CALLS
    + "{{- '<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>' + f.name }}"
    + "{{- '\n```json\n' }}"
    + "{{- f.arguments | tojson }}{{- '\n```<\uff5ctool▁call▁end\uff5c>' }}{% endfor %}"
    + "{%- if m.tool_calls %}{{- '<\uff5ctool▁calls▁end\uff5c>' }}{% endif %}",
    "deepseek_v31": "{%- if m.tool_calls %}{{- '<\uff5ctool▁calls▁begin\uff5c>' }}{% endif %}"
    + CALLS
    + "{{- '<\uff5ctool▁call▁begin\uff5c>' + f.name + '<\uff5ctool▁sep\uff5c>' }}"
    + "{{- f.arguments | tojson }}{{- '<\uff5ctool▁call▁end\uff5c>' }}{% endfor %}"
    + "{%- if m.tool_calls %}{{- '<\uff5ctool▁calls▁end\uff5c>' }}{% endif %}",
    "glm45": CALLS
    + "{{- '\n<tool_call>' + f.name + '\n' }}{%- for k, v in f.arguments | items %}"
    + "{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
    + "{{- v if v is string else v | tojson }}{{- '</arg_value>\n' }}{% endfor %}"
    + "{{- '</tool_call>' }}{% endfor %}",
    "mistral": "{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{% endif %}"
    + CALLS
    + '{{- \'{"name": "\' + f.name + \'", "arguments": \' }}{{- f.arguments | tojson }}'
    + "{{- ', \"id\": \"123456789\"}' }}{{- '' if loop.last else ', ' }}{% endfor %}"
    + "{%- if m.tool_calls %}{{- ']' }}{% endif %}",
    "mistral_v11": CALLS
    + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{- f.arguments | tojson }}{% endfor %}",
    "harmony": CALLS
    + "{{- '<|start|>assistant<|channel|>commentary to=functions.' + f.name }}"
    + "{{- ' <|constrain|>json<|message|>' }}{{- f.arguments | tojson }}"
    + "{{- '<|call|>' }}{% endfor %}",
}
ALIAS = {"mistral_v11": "mistral"}


def rendered(name: str, calls: list[ToolCall], content: str = "") -> str:
    """A message with calls, as the family's template writes it."""
    chat = ChatTokens(make_tokenizer(HEAD + TEMPLATES[name] + TAIL))
    made = [
        {"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for c in calls
    ]
    message = {"role": "assistant", "content": content, "tool_calls": made}
    return chat.render([message], TOOLS, generate=False).removeprefix("|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_its_format_reads(name: str) -> None:
    alone = name in ("llama3_json", "harmony")  # what is said beside calls is elsewhere there
    form = format_of(ALIAS.get(name, name))
    for count in (1,) if name == "llama3_json" else (1, 2):
        calls = [ToolCall("look", ARGUMENTS), ToolCall("wait", {})][:count]
        said = "" if alone else "I look."
        text = rendered(name, calls, said)
        content, found = form.read(text, TOOLS)
        assert (content.strip(), found) == (said, calls), text
    assert form.read("A cat { sat.", TOOLS) == ("A cat { sat.", [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_which_format_it_is(name: str) -> None:
    template = HEAD + TEMPLATES[name] + TAIL
    assert format_of(None, template).read is format_of(ALIAS.get(name, name)).read
    assert format_of(None, "{{ messages }}").read is format_of("hermes").read


def test_a_template_whose_calls_are_not_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tail = TAIL + "{% if add_generation_prompt %}|>{% endif %}"
    for name, template in TEMPLATES.items():
        tokenizer = make_tokenizer(HEAD + template + tail)
        chat = ChatTokens(tokenizer, tool_call_parser=ALIAS.get(name, name))
        assert not chat.misreads_calls, name
        other = "hermes" if name != "hermes" else "glm45"
        assert ChatTokens(tokenizer, tool_call_parser=other).misreads_calls, name
    unknown = CALLS + "{{- '<|call>' + f.name + f.arguments | tojson }}{% endfor %}"
    asked = [{"role": "user", "content": "hi"}]
    chat = ChatTokens(make_tokenizer(HEAD + unknown + TAIL))
    chat.prompt(asked)
    assert not caplog.messages
    for _ in range(2):
        chat.prompt(asked, TOOLS)
    [said] = caplog.messages
    assert "writes tool calls in a form that is not read" in said
    silent = ChatTokens(make_tokenizer(HEAD + TAIL))
    assert not silent.misreads_calls  # it writes no calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_is_cut_is_one_error_everywhere(name: str) -> None:
    form, text = format_of(ALIAS.get(name, name)), rendered(name, [ToolCall("look", ARGUMENTS)])
    for size in range(text.index("look") + 5, text.index("true") + 3):
        _, calls = form.read(text[:size], TOOLS)
        assert [call.error for call in calls] == [CUT], text[:size]


def test_several_calls_of_llama_and_what_harmony_says() -> None:
    text = '<|python_tag|>{"name": "look", "parameters": {"times": 1}}; '
    text += '{"name": "wait", "parameters": {}}'
    assert format_of("llama3_json").read(text, TOOLS) == (
        "",
        [ToolCall("look", {"times": 1}), ToolCall("wait", {})],
    )
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7"
    assert format_of("harmony").read(text, TOOLS) == ("7", [])


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Alice", "age": 30}',
        '{"name": "Alice"}',
        '{"name": "Alice", "age": 3',
        '{"names": ["Ali',
        '{"function": "f", "x": {',
        "{x}",
    ],
)
def test_json_that_is_no_call_of_llama_is_an_answer(answer: str) -> None:
    assert format_of("llama3_json").read(answer, TOOLS) == (answer, [])


def test_a_cut_call_of_llama_with_its_wrappings() -> None:
    read = format_of("llama3_json").read
    text = '{ "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}'
    for size in range(1, len(text)):
        assert read(text[:size], TOOLS) == ("", [ToolCall("", {}, error=CUT)]), text[:size]
    assert read(text, TOOLS) == ("", [ToolCall("look", {"at": "x"})])


@pytest.mark.parametrize("name", FORMATS.built_in())
def test_long_text_takes_no_time_that_grows_with_its_square(name: str) -> None:
    parts = ["a", " ", "\n", "<tool_call>", "<function=", "<function=x>", "<parameter=x>"]
    parts += ["<arg_key>", "<arg_key>a</arg_key><arg_value>", "{", '{"name":', "<|channel|>"]
    parts += ["<|start|>a", "<\uff5ctool▁call▁begin\uff5c>", "[TOOL_CALLS]", "```", "</arg_key>"]
    for part in parts:
        for begin in ("", "<tool_call>", "<tool_call>x<arg_key>", "<function=x><parameter=y>"):
            if part != "[TOOL_CALLS]" or name != "mistral":  # each may be a call
                format_of(name).read(begin + part * (150_000 // len(part)) + "x", TOOLS)


def test_a_parameter_that_was_not_closed_ends_at_the_next_one() -> None:
    text = "<tool_call>\n<function=look>\n<parameter=at>\na b\n<parameter=times>\n3\n"
    for end in ("", "</parameter>\n"):
        _, calls = format_of("qwen3_coder").read(f"{text}{end}</function>\n</tool_call>", TOOLS)
        assert calls == [ToolCall("look", {"at": "a b", "times": 3})]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ({"type": ["integer", "null"]}, 7),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7"),
        ({"$ref": "#/$defs/X"}, 7),
        ({"enum": ["7"]}, "7"),
    ],
)
def test_a_text_becomes_what_one_of_the_schema_s_types_says(schema: Any, expected: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    text = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    assert format_of("glm45").read(text, tools)[1] == [ToolCall("f", {"x": expected})]


@pytest.mark.parametrize("streams", [False, True])
def test_a_reader_of_one_s_own_and_those_of_families_serve_http(streams: bool) -> None:
    xml = "Hm.<tool_call>\n<function=look>\n<parameter=times>\n3\n</parameter>\n</function>\n"
    for parser, text, expected in (
        ("tests.ext.openai.test_tool_calls:mine", "Hm.CALL wait", ("wait", {})),
        ("qwen3_coder", xml + "</tool_call>", ("look", {"times": 3})),
        ("qwen3_coder", xml.replace("<tool_call>\n", ""), ("look", {"times": 3})),
    ):
        found = ask(model_of([text], parser), stream=streams)
        if streams:
            deltas = [choice["delta"] for choice in found]
            content = "".join(delta.get("content") or "" for delta in deltas)
            [call] = [c for delta in deltas for c in delta.get("tool_calls") or ()]
            ended = found[-1]["finish_reason"]
        else:
            content, [call] = found["message"]["content"], found["message"]["tool_calls"]
            ended = found["finish_reason"]
        assert (content, ended) == ("Hm.", "tool_calls")
        function = call["function"]
        assert (function["name"], json.loads(function["arguments"])) == expected


@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "none"}])
@pytest.mark.parametrize("streams", [False, True])
def test_harmony_makes_no_call_that_nobody_asked_for(more: Any, streams: bool) -> None:
    text = rendered("harmony", [ToolCall("look", ARGUMENTS)])
    found = ask(model_of([text], "harmony"), **more, stream=streams)
    if streams:
        deltas = [choice["delta"] for choice in found]
        assert not any("tool_calls" in delta for delta in deltas)
        assert "".join(delta.get("content") or "" for delta in deltas) == text
    else:
        assert found["message"] == {"role": "assistant", "content": text}
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7"
    found = ask(model_of([said], "harmony"), **more)
    assert found["message"]["content"] == "7" and found["finish_reason"] == "stop"


def test_a_call_of_qwen3_coder_that_is_cut_before_its_name_is_one_error() -> None:
    text = "I look.\n<tool_call>\n<function="
    for size in range(text.index(">") + 1, len(text) + 1):
        content, calls = format_of("qwen3_coder").read(text[:size], TOOLS)
        assert (content, [call.error for call in calls]) == ("I look.\n", [CUT]), text[:size]
    whole = f"{text}wait>\n</function>\n</tool_call>"
    assert format_of("qwen3_coder").read(whole, TOOLS)[1] == [ToolCall("wait", {})]


def test_the_names_of_formats() -> None:
    assert {"hermes", "qwen3_coder", "openai"} <= {*FORMATS.names()}
