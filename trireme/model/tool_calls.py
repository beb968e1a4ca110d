"""Tool calls: reads them out of a model's reply, one format a family, by name or by the template.

Invariants:
- What a family's template renders of a call, its format reads. Text is read with its special
  tokens, which are the marks of some formats.
- Reading takes time in proportion to the text, whatever a model has written.
- A call that was cut has one error, `CUT`, in every format. A reply with a call that cannot be read
  stays text for HTTP clients; a scheduler tells the model why.
- Your own is a function `(text, tools) -> (content, [ToolCall, ...])`, named by its path.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trireme.registry import FORMATS
from trireme.task import NO_JSON, object_or_text
from trireme.text import all_joined, as_json, joined

if TYPE_CHECKING:
    from trireme.model.recorder import Call

OPENING, CLOSING = "<tool_call>", "</tool_call>"
CUT = "the call was cut before its end"
_CALL = re.compile(rf"{OPENING}(.*?)({CLOSING}|\Z)", re.DOTALL)
_call_ids = itertools.count()


@dataclass(frozen=True)
class ToolCall:
    """One call that a reply asks for."""

    name: str
    arguments: Any
    """By name; text is for the first argument."""
    id: str | None = None
    error: str | None = None
    """Why it cannot be read."""

    def __post_init__(self) -> None:
        """A model may write half a surrogate pair, which no server, program or template takes."""
        object.__setattr__(self, "name", joined(self.name))
        object.__setattr__(self, "arguments", all_joined(self.arguments))


Read = tuple[str, list[ToolCall]]
"""What a reply says beside its calls, and these."""
Reader = Callable[[str, Sequence[Any]], Read]


class ToolFormat(NamedTuple):
    """How a family writes calls."""

    read: Reader
    marks: tuple[str, ...] = ()
    """A template that holds one of them is the family's."""
    begin: Callable[[str], str] | None = None
    """What a reply begins with that has to call a tool, of this name or of one yet to be named."""
    openings: tuple[str, ...] = ()
    """What calls begin with in the text that is shown: a stream goes so far. Without any it waits
    for the reply's end."""
    always: bool = False
    """Its replies are not plain text without calls either."""


def tool_format(**options: Any) -> Callable[[Reader], Reader]:
    """Decorate a reader with what else its format has: the other fields of ToolFormat."""

    def mark(read: Reader) -> Reader:
        setattr(read, _FORM, ToolFormat(read, **options))
        return read

    return mark


_FORM = "tool_format"


def format_of(name: str | None, template: str = "") -> ToolFormat:
    """By name or path; else that of the template, which is hermes where it has no other's mark.

    Raises ValueError for an unknown name.
    """
    if name is None:
        known = map(format_of, FORMATS.built_in())
        marked = (f for f in known if any(mark in template for mark in f.marks))
        return next(marked, format_of("hermes"))
    named: Any = FORMATS.get(name)
    if not inspect.isroutine(named):
        raise ValueError(f"tool_call_parser '{name}' is {named!r:.40}: expected a function")
    return getattr(named, _FORM, None) or ToolFormat(named)


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
    for body, end in _CALL.findall(text):
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


@tool_format(
    marks=(OPENING,),
    begin=lambda name: f'{OPENING}\n{{"name": "{name}' + ('", "arguments": ' if name else ""),
    openings=(OPENING,),
)
def hermes(text: str, tools: Sequence[Any]) -> Read:
    """`<tool_call>{"name", "arguments"}</tool_call>`, of Hermes, Qwen2.5 and Qwen3."""
    return text.partition(OPENING)[0], read_tool_calls(text)[0]


def read_tool_calls(text: str) -> tuple[list[ToolCall], int]:
    """The calls in a reply of the format hermes, and where the last one ends.

    A call needs no closing tag at the end of the text: a stop string or a limit may have cut it.
    What follows a `<tool_response>`, as if the model had seen a result, is not read.
    """
    matches = list(_CALL.finditer(text.partition("<tool_response>")[0]))
    calls = [call_of_json(match[1].strip()) for match in matches]
    if calls and calls[-1].error and not matches[-1][2]:
        calls[-1] = replace(calls[-1], error=CUT)
    return calls, matches[-1].end() if matches else 0


def call_of_json(text: str) -> ToolCall:
    """The call `{"name", "arguments"}`; with an `error` where the text is none."""
    try:
        call = json.loads(text)
    except NO_JSON as error:
        return ToolCall("", {}, error=f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, error="the call must be a JSON object with `name` and `arguments`")
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = object_or_text(arguments)
    return ToolCall(call["name"], arguments)


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
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    schema = next((f for f in functions if f.get("name") == name), {})
    properties = (schema.get("parameters") or {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        text = bool(properties) and _kinds(properties.get(key.strip())) <= {"string"}
        arguments[key.strip()] = value if text else _typed(value)
    return ToolCall(name, arguments)


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


def message_of(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": call.name, "arguments": as_json(call.arguments)}
    return {"id": f"call_{next(_call_ids)}", "type": "function", "function": function}


def record_tool_calls(
    call: Call,
    form: ToolFormat,
    decode: Callable[[Sequence[int]], str],
    begun: str = "",
    *,
    wanted: bool = True,
) -> None:
    """Keep a reply's message as the client will send it back: with its calls apart.

    `begun` is what the reply was begun with for the model. All of it stays text, its beginning too,
    where one call cannot be read, and where calls are not `wanted`.
    """
    if call.reply is None:
        return
    if call.reply["content"] != begun + call.completion.text:
        begun = ""  # the whole reply is an API's, which is only asked to begin like this
    whole = begun + sampled_text(call, form, decode)
    content, calls = form.read(whole, call.tools or ())
    if any(c.error or not isinstance(c.arguments, dict) or not wanted for c in calls):
        call.shown = begun + call.completion.text if begun else None
        return
    if calls or (form.always and content != whole):
        call.shown = content
        before = call.reply["content"].removesuffix(call.completion.text).removesuffix(begun)
        made = {"tool_calls": [message_of(c) for c in calls]} if calls else {}
        call.reply = {**call.reply, "content": before + content, **made}


def sampled_text(call: Call, form: ToolFormat, decode: Callable[[Sequence[int]], str]) -> str:
    """What was sampled, but for what ended it, with special tokens where those are marks."""
    c, ids = call.completion, call.completion.ids
    if any(opening in c.text for opening in form.openings):
        return c.text
    if c.stop_reason == "stop" and not isinstance(c.stop, str):
        ids = ids[:-1]
    text = decode(ids)
    cut = text.rfind(c.stop) if isinstance(c.stop, str) else -1
    return text if cut < 0 else text[:cut]
