"""Formats: reads tool calls as families of models write them; see model/tool_calls.py.

Response templates of transformers do not replace these: one damaged call raises for the whole
reply, a call that was cut can pass for a whole one, and time may grow with the square of the text
(150,000 characters of arguments that are not closed: 55 s, here 0.01 s). A checkpoint that ships
one is read by it where none of these fits: see response_template.py. `openai-harmony` reads only
token ids of gpt-oss' vocabulary, which it downloads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trireme.model.tool_calls import (
    CALL,
    CUT,
    OPENING,
    Read,
    ToolCall,
    call_of_json,
    tool_format,
)
from trireme.task import NO_JSON


@tool_format(
    marks=("<|channel|>",),
    begin=lambda name: (
        f"<|channel|>commentary to=functions.{name}"
        + (" <|constrain|>json<|message|>" if name else "")
    ),
    always=True,
)
def harmony(text: str, tools: Sequence[Any]) -> Read:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`; what is
    said is in the channel `final`.
    """
    said, calls, end = [], [], 0
    for match in _HARMONY.finditer(text):
        to = re.search(r"to=(?:functions\.)?([\w.-]+)", f"{match['head']} {match['channel']}")
        if to is not None:
            calls.append(_of_json(to[1], match["body"]))
        elif match["channel"].strip().startswith(("final", "commentary")):
            said.append(match["body"])
        end = match.end()
    if re.search(r"\bto=", text[end:]):
        calls.append(ToolCall("", {}, error=CUT))
    return ("".join(said) if end else text), calls


_HARMONY = re.compile(
    r"(?P<head>(?:(?:\A|<\|start\|>)[^<]*)?)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


@tool_format(
    marks=("<\uff5ctool▁calls▁begin\uff5c>",),
    begin=lambda name: (
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>"
        + (f"{name}\n```json\n" if name else "")
    ),
)
def deepseek(text: str, tools: Sequence[Any]) -> Read:
    """`function<sep>NAME` and a block of JSON; since V3.1 `NAME<sep>{...}`; each in its marks."""
    before, _, rest = text.partition("<\uff5ctool▁calls▁begin\uff5c>")
    calls = []
    for match in _DEEPSEEK.finditer(rest):
        name, arguments = match["head"].strip(), match["rest"]
        if name == "function":
            name, _, arguments = arguments.partition("\n")
            arguments = re.sub(r"\A\s*```(?:json)?\n|\n?```\s*\Z", "", arguments)
        call = _of_json(name.strip(), arguments)
        calls.append(replace(call, error=CUT) if call.error and not match["end"] else call)
    if rest.count("<\uff5ctool▁call▁begin\uff5c>") > len(calls):
        calls.append(ToolCall("", {}, error=CUT))
    return before, calls


_DEEPSEEK = re.compile(
    r"<\uff5ctool▁call▁begin\uff5c>(?P<head>[^<]*)<\uff5ctool▁sep\uff5c>(?P<rest>.*?)"
    r"(?P<end><\uff5ctool▁call▁end\uff5c>|\Z)",
    re.DOTALL,
)


@tool_format(
    marks=("[TOOL_CALLS]",),
    begin=lambda name: f'[TOOL_CALLS][{{"name": "{name}' + ('", "arguments": ' if name else ""),
)
def mistral(text: str, tools: Sequence[Any]) -> Read:
    """`[TOOL_CALLS][{"name", "arguments"}, ...]`; since v11 `[TOOL_CALLS]NAME[ARGS]{...}` each."""
    before, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for part in parts:
        named = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{|\Z)", part)
        if named is not None:
            calls.append(_of_json(named[1], part[named.end() :]))
            continue
        try:
            parsed, _ = json.JSONDecoder().raw_decode(part.strip())
        except NO_JSON:
            calls.append(ToolCall("", {}, error=CUT))
            continue
        objects = parsed if isinstance(parsed, list) else [parsed]
        calls += [call_of_json(json.dumps(one)) for one in objects]
    return before, calls


@tool_format(
    marks=("<arg_key>",),
    begin=lambda name: f"{OPENING}{name}" + ("\n" if name else ""),
    openings=(OPENING,),
)
def glm(text: str, tools: Sequence[Any]) -> Read:
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` each."""
    calls = []
    for body, end in CALL.findall(text):
        name, _, rest = body.partition("<arg_key>")
        pairs = _GLM_PAIR.findall(f"<arg_key>{rest}")
        calls.append(_of_texts(name.strip(), pairs, tools, cut=not end))
    return text.partition(OPENING)[0], calls


_GLM_PAIR = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL
)


@tool_format(
    marks=("<function=",),
    begin=lambda name: f"{OPENING}\n<function={name}" + (">\n" if name else ""),
    openings=(OPENING, "<function="),
)
def qwen3_coder(text: str, tools: Sequence[Any]) -> Read:
    """`<tool_call><function=NAME>` with `<parameter=KEY>VALUE</parameter>` each, of Qwen3-Coder and
    Qwen3.5. A value whose closing tag was forgotten ends where the next one begins.
    """
    calls = []
    for name, body, end in re.findall(r"<function=([^<>\n]*)>(.*?)(</function>|\Z)", text, re.S):
        pairs = []
        for part in re.split(r"<parameter=(?=[^<>\n]*>)", body)[1:]:
            key, _, rest = part.partition(">")
            value, closed, _ = rest.partition("</parameter>")
            value = value.removeprefix("\n")
            pairs.append((key, value.removesuffix("\n") if closed else value.rstrip()))
        calls.append(_of_texts(name.strip(), pairs, tools, cut=not end))
    if not calls and OPENING in text:
        calls.append(ToolCall("", {}, error=CUT))
    return re.split(f"{OPENING}|<function=", text, maxsplit=1)[0], calls


@tool_format(
    marks=("<|python_tag|>", "<|start_header_id|>"),
    begin=lambda name: f'{{"name": "{name}' + ('", "parameters": ' if name else ""),
)
def llama3_json(text: str, tools: Sequence[Any]) -> Read:
    """A reply that is `{"name", "parameters"}`, or several with `;` between them. Any other JSON is
    an answer.
    """
    rest = text.replace("<|python_tag|>", "").strip()
    calls: list[ToolCall] = []
    while rest.startswith("{"):
        try:
            parsed, end = json.JSONDecoder().raw_decode(rest)
        except NO_JSON:
            if not calls and _LLAMA_BEGUN.match(rest) is None:
                return text, []
            return "", [*calls, ToolCall("", {}, error=CUT)]
        named = parsed.get("function", parsed) if isinstance(parsed, dict) else {}
        if not isinstance(named, dict) or "name" not in named:
            break
        arguments = [named[key] for key in ("parameters", "arguments") if key in named]
        if not arguments:
            break
        calls.append(call_of_json(json.dumps({"name": named["name"], "arguments": arguments[0]})))
        rest = rest[end:].lstrip("; \n")
    return ("" if calls else text), calls


def _beginnings(form: str) -> str:
    """A pattern of `form` and of all that it begins with: a blank is white space, `~` a name."""
    pattern = ""
    for character in reversed(form):
        one = {" ": r"\s*", "~": r'[^"]*'}.get(character, re.escape(character))
        pattern = rf"(?:{one}{pattern}|\Z)"
    return pattern


_LLAMA_TYPE = '"type" : "function" , '

_LLAMA_BEGUN = re.compile(
    "|".join(
        _beginnings(rf'{{ {outer}"name" : "~" , "{key}" :')
        for outer in ("", _LLAMA_TYPE, '"function" : { ', f'{_LLAMA_TYPE}"function" : {{ ')
        for key in ("parameters", "arguments")
    )
)


def _of_json(name: str, arguments: str) -> ToolCall:
    """A call whose arguments are JSON, which nothing but its own end closes."""
    try:
        value, _ = json.JSONDecoder().raw_decode(arguments.strip())
    except NO_JSON as error:
        at_end = getattr(error, "pos", 0) >= len(arguments.strip())
        unfinished = at_end or arguments.count("{") > arguments.count("}")
        return ToolCall(name, {}, error=CUT if unfinished else f"the call is no JSON: {error}")
    if not isinstance(value, dict):
        return ToolCall(name, {}, error="the call's arguments must be a JSON object")
    return ToolCall(name, value)


def _of_texts(
    name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Any], *, cut: bool
) -> ToolCall:
    """A call whose arguments are texts, each made what the tool's schema says that it is."""
    if cut or not name:
        return ToolCall(name, {}, error=CUT)
    return ToolCall(name, typed_by_schema(name, {k.strip(): v for k, v in pairs}, tools))


def typed_by_schema(
    name: str, arguments: Mapping[str, Any], tools: Sequence[Any]
) -> dict[str, Any]:
    """Return a call's arguments, each text made what the tool's schema says that it is."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    schema = next((f for f in functions if f.get("name") == name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}

    def typed(key: str, value: Any) -> Any:
        text = bool(properties) and _kinds(properties.get(key)) <= {"string"}
        return value if text or not isinstance(value, str) else _typed(value)

    return {key: typed(key, value) for key, value in arguments.items()}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows, those of its alternatives too, but for null."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type", ["any"] if "$ref" in schema else [])
    kinds = {types} if isinstance(types, str) else set(types)
    for key in ("anyOf", "oneOf", "allOf"):
        kinds.update(*map(_kinds, schema.get(key) or ()))
    return kinds - {"null"}


def _typed(text: str) -> Any:
    try:
        return json.loads(text)
    except NO_JSON:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
