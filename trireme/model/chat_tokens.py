"""Chat tokens: turns a conversation into token ids, and reuses sampled ids unchanged.

Invariants:
- A later turn is the recorded ids plus the ids of the new text. Old text is never encoded again,
  and only new text costs rendering: the text between two turns is taken from a short conversation
  of placeholders followed by the real new messages.
- Each pattern of roles is tried once to see whether that holds for the template. If the template
  rewrites history (drops thinking from earlier turns, for example), the whole conversation is
  rendered, and `Prompt.extends` is false: it no longer matches the record.
- The end-of-turn tokens that a stop string or a length cut left out are inserted; a sampled one is
  not written twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from trireme.log import get_logger
from trireme.model.tool_calls import ToolFormat, described_format, format_of
from trireme.pictures import (
    IMAGE_PARTS,
    Picture,
    PictureReader,
    Read,
    outside,
    pictures_in,
    placed,
    read_part,
    with_placeholders,
    with_row,
)
from trireme.task import Task, with_objects
from trireme.text import all_joined, joined

logger = get_logger("model")

NOT_TEXT = ("audios", "audio", "videos", "video")
"""Columns with inputs that no model here can process."""

MISREADS_CALLS = (
    "the chat template writes tool calls in a form that is not read, so that calls in replies stay "
    "text: expected an explorer.rollout_model.tool_call_parser that reads it, which may be a "
    "function of your own"
)

DROPS_TOOLS = (
    "the chat template writes nothing of a request's tools, so that the model does not see them: "
    "expected a model whose template does, or a model.custom_chat_template"
)

_MARK = re.compile("<([|\uff5c])[^<>\\s|\uff5c]+\\1>")
"""A text such as `<|end|>`, which is a single token of each model whose template writes it."""

Message = Mapping[str, Any]
ReasoningParser = Literal["deepseek_r1", "qwen3"]
"""Values of `reasoning_parser`."""

_CHARACTERS = 8
"""Characters per token, about: a long text is cut to match before it is encoded."""
_REMEMBERED = 2**17
"""Most characters of a prompt that is cached for the next rollouts of its task; a longer one would
stay in memory for hours."""
_HEAD, _TAIL = 4, 8
"""Patterns with more turns than these are shortened in the middle before they are tried."""


@dataclass(frozen=True)
class Recorded:
    """A recorded conversation that a new prompt may continue."""

    messages: Sequence[Message]
    """The whole conversation, including the last reply."""
    last_ids: Sequence[int]
    """The ids of that reply."""
    ended: bool = False
    """Whether the model ended the reply itself, with an end token."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to sample from: all of them, or only the new ones if the prompt `extends` a
    recording.
    """

    ids: list[int]
    extends: bool = False
    text: str | None = None
    """The text of `ids` before encoding."""
    pictures: tuple[Picture, ...] = ()
    """The pictures of the whole prompt, in a recording too."""


class ChatTokens:
    """Renders messages with the model's chat template and encodes them."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: ReasoningParser | None = None,
        reader: PictureReader | None = None,
    ) -> None:
        """`chat_template` overrides the tokenizer's own; `enable_thinking` is passed to it.

        `tool_call_parser` names the format of tool calls: see `format_of`. `reasoning_parser`
        splits thinking from replies for the API: see thinking.py. `reader` reads pictures; None:
        the model takes none.
        """
        self.reader = reader
        self.tokenizer = tokenizer
        if reader is not None and (own := chat_template or tokenizer.chat_template):
            chat_template = reader.template(own)
        self.reasoning_parser: ReasoningParser | None = reasoning_parser
        self.tool_format = format_of(
            tool_call_parser, str(chat_template or tokenizer.chat_template or ""), tokenizer
        )
        self._asked_tools = False
        self._options: dict[str, Any] = {}
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        if enable_thinking is not None:
            self._options["enable_thinking"] = enable_thinking
        self._template = str(chat_template or tokenizer.chat_template or "")
        self._has_template = bool(self._template)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        # n rollouts of a task begin with the same prompt
        self._render_once = lru_cache(maxsize=256)(
            lambda messages: self.render([dict(message) for message in messages])
        )
        self._encode_prompt = lru_cache(maxsize=256)(
            lambda text, most: tuple(self.encode(text, most=most))
        )
        self._preserves = lru_cache(maxsize=4096)(self._try_pattern)
        described = None if tool_call_parser else described_format(tokenizer)
        if described and self._misreads(self.tool_format) and not self._misreads(described):
            self.tool_format = described

    def encode(self, text: str, *, most: int | None = None, special: bool = False) -> list[int]:
        """Encode rendered text, which contains its own special tokens; otherwise `special` adds
        them.

        Of a text of more than `most` tokens only slightly more than the first `most` are encoded.
        """
        if not text:
            return []
        text = joined(text)
        size = len(text) if most is None else _CHARACTERS * (most + _CHARACTERS)
        while size < len(text):
            ids = self.tokenizer.encode(text[:size], add_special_tokens=special)
            if most is not None and len(ids) > most + _CHARACTERS:
                return ids
            size *= 2  # one long word costs a microsecond per character
        return self.tokenizer.encode(text, add_special_tokens=special)

    @cached_property
    def longest_token(self) -> int:
        """Return the characters of the vocabulary's longest entry; its bytes, if entries stand for
        bytes.
        """
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Decode ids to text, with a placeholder for each picture."""
        if self.reader is not None:
            ids = with_placeholders(ids, self.reader.placeholder)
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    @staticmethod
    def begun_reply(message: Message) -> str:
        """Return the text of a reply that the model continues. Raises ValueError for a picture in
        it.
        """
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(
                "the last message is the assistant's, which the model continues, and it shows a "
                "picture: expected text alone, and pictures in a message of the user or a tool"
            )
        return content

    def outside(self, ids: Sequence[int]) -> list[int]:
        """Return ids as other programs know them, with a placeholder for each token of a
        picture.
        """
        return list(ids) if self.reader is None else outside(ids, self.reader.placeholder)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generate: bool = True,
    ) -> str:
        """Render a conversation as text; with `generate` up to where the model's reply begins.

        If the last message is the assistant's, the model continues it. Raises ValueError if there
        is no template, if it refuses the messages, or if that message shows a picture.
        """
        prefix = ""
        if generate and messages and messages[-1]["role"] == "assistant":
            prefix = self.begun_reply(messages[-1])
            messages = messages[:-1]
        if not self._has_template:
            raise ValueError(
                "the model's tokenizer has no chat template, so it cannot chat: "
                "set model.chat_template_path, or let the workflow call generate"
            )
        copies = [dict(message) for message in messages]
        try:
            text = self._apply([with_objects(message) for message in copies], tools, generate)
        except Exception as error:  # the template is the model's code
            if any(message.get("tool_calls") for message in copies):
                with suppress(Exception):  # some templates want a call's arguments as text
                    return self._apply(copies, tools, generate) + prefix
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(
                f"the chat template refuses a conversation of {roles:.200}: "
                f"{str(error) or type(error).__name__}"
            ) from error
        return text + prefix

    def _apply(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] | None, generate: bool
    ) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generate,
            **self._options,
        )

    @cached_property
    def drops_tools(self) -> bool:
        """Return True if the template leaves out the tools of a call."""
        asked = [_placeholder("user")]
        try:
            return self.render(asked, [_PLACEHOLDER_TOOL]) == self.render(asked)
        except ValueError:
            return False  # it refuses placeholders, so nothing is known

    def names_role(self, *roles: str) -> bool:
        """Return True if the template names one of these roles, in a case for it or where a reply
        begins: others it writes as they are, or leaves out.
        """
        return any(re.search(rf"\b{role}\b", self._template) for role in roles)

    def in_known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with the role `developer`, OpenAI's newer name for it, as `system` if the
        template does not write it: many leave such a message out in silence. One that follows a
        first message of the system continues it: many templates accept no second.
        """
        if all(message.get("role") != "developer" for message in messages):
            return messages
        if self._writes_developer:
            return messages
        known: list[Message] = []
        for message in messages:
            if message.get("role") == "developer":
                message = {**message, "role": "system"}
                if len(known) == 1 and known[0].get("role") == "system":
                    known = [_continued(known[0], message)]
                    continue
            known.append(message)
        return known

    @cached_property
    def _writes_developer(self) -> bool:
        text = "A placeholder of the developer."
        try:
            said = self.render([{"role": "developer", "content": text}, _placeholder("user")])
        except ValueError:
            return False
        return text in said

    @cached_property
    def misreads_calls(self) -> bool:
        """Return True if the template writes tool calls in a form that the tool format
        cannot read.
        """
        return self._misreads(self.tool_format)

    def _misreads(self, form: ToolFormat) -> bool:
        asked, tool = [_placeholder("user")], _PLACEHOLDER_TOOL["function"]["name"]
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": tool, "arguments": "{}"},
        }
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            whole = self.render([*asked, reply], [_PLACEHOLDER_TOOL], generate=False)
            before = [self.render(asked, [_PLACEHOLDER_TOOL], generate=g) for g in (True, False)]
        except ValueError:
            return False  # it refuses placeholders, so nothing is known
        written = [whole.removeprefix(text) for text in before if whole.startswith(text)]
        read = [form.read(text, [_PLACEHOLDER_TOOL])[1] for text in written]
        names = [[call.name for call in calls if not call.error] for calls in read]
        return any(tool in text for text in written) and [tool] not in names

    @cached_property
    def hides_replies(self) -> bool:
        """Return True if the template writes nothing but white space between a prompt and its
        reply.
        """
        asked, reply = _placeholder("user"), _placeholder("assistant")
        try:
            before = self.render([asked])
            whole = self.render([asked, reply], generate=False)
        except ValueError:
            return False  # it refuses placeholders, so nothing is known
        ends = before.rstrip().endswith(asked["content"])  # no generation prompt
        return ends and whole.strip().removeprefix(before.strip()).strip() == reply["content"]

    @cached_property
    def split_mark(self) -> tuple[str, int] | None:
        """Return a mark that the template writes around messages, such as `<|end|>`, and that is no
        token of the tokenizer, with the number of tokens that it becomes; None if there is none.
        """
        asked, reply = _placeholder("user"), _placeholder("assistant")
        try:
            text = self.render([asked, reply], generate=False) + self.render([asked])
        except ValueError:
            return None  # it refuses placeholders, so nothing is known
        for mark in dict.fromkeys(found[0] for found in _MARK.finditer(text)):
            ids = self.encode(mark)
            if len(ids) > 1 or ids == [self.tokenizer.unk_token_id]:
                return mark, len(ids)
        return None

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        continuing: Recorded | None = None,
        *,
        most: int | None = None,
    ) -> Prompt:
        """Return the ids to sample the next reply from; `most`: see `encode`."""
        if tools and not self._asked_tools:
            self._asked_tools = True
            if self.misreads_calls:
                logger.warning(MISREADS_CALLS)
            elif self.drops_tools:
                logger.warning(DROPS_TOOLS)
        if continuing is not None:
            between = self._after(continuing, messages, tools, generate=True, most=most)
            if between is not None:
                return Prompt(between, extends=True)
        text = self._opening(messages, tools)
        if pictures := pictures_in(messages):
            return Prompt(self._placed(self.encode(text), pictures), text=text)
        if len(text) > _REMEMBERED:
            return Prompt(self.encode(text, most=most), text=text)
        return Prompt(list(self._encode_prompt(text, most)), text=text)

    def _opening(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """Render a conversation; cached if it contains nothing but text."""
        key = tuple(tuple(message.items()) for message in messages)
        texts = [value for message in key for _, value in message]
        if tools or not all(isinstance(text, str) for text in texts):
            return self.render(messages, tools)
        short = sum(map(len, texts)) + len(texts) <= _REMEMBERED
        return self._render_once(key) if short else self.render(messages, tools)

    def tail(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, continuing: Recorded
    ) -> list[int] | None:
        """Return the ids after a recorded conversation in `messages`, without the start of a reply.

        None if the template rewrites the recorded part.
        """
        return self._after(continuing, messages, tools, generate=False)

    def _after(
        self,
        recorded: Recorded,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generate: bool,
        most: int | None = None,
    ) -> list[int] | None:
        """Return the ids between the recorded reply and what comes next; None if history is
        rewritten.
        """
        new = messages[len(recorded.messages) :]
        if not new:
            return None
        old = tuple(_kind(message) for message in recorded.messages)
        roles = tuple(_kind(message) for message in new)
        if not self._preserves(_shortened(old), roles, bool(tools), generate):
            return None
        text = self._text_after(old[-2:], new, tools, generate)
        if text is None:
            return None
        pictures = pictures_in(new)
        ids = self.encode(text, most=None if pictures else most)
        ids = self._placed(ids, pictures) if pictures else ids
        return self._without_doubled_end(recorded, ids)

    def _placed(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Return encoded text with pictures in their places."""
        if self.reader is None:
            raise ValueError("a message shows a picture, and this model takes text alone")
        return placed(ids, pictures, self.reader.placeholder)

    def ids_of(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids of a whole conversation, which ends where its last message does."""
        return self.ids_of_text(self.render(messages, tools, generate=False), messages)

    def ids_of_text(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Encode the rendered `text` of plain messages, with the tokens of their pictures."""
        ids, pictures = self.encode(text), pictures_in(messages)
        return self._placed(ids, pictures) if pictures else ids

    def read(self, source: Any) -> Picture:
        """Read a picture. Raises ValueError if that is not possible, or the model takes none."""
        if self.reader is None:
            raise ValueError("a message shows a picture, and this model takes text alone")
        return self.reader.read(source)

    def plain(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as `plain_messages` does, with their pictures read."""
        return plain_messages(messages, self.read)

    def _text_after(
        self,
        kinds: Sequence[str],
        new: Sequence[Message],
        tools: Sequence[Any] | None,
        generate: bool,
    ) -> str | None:
        """Return the text that the template writes after placeholder turns; None if it rewrites
        them.
        """
        old = [_placeholder(kind) for kind in _opened(kinds)]
        before, reply = self._opening(old[:-1], tools), old[-1]["content"]
        whole = self.render([*old, *new], tools, generate=generate)
        if not whole.startswith(before):
            return None
        # white space that a template adds before a reply, or trims from it, does not count as
        # rewriting
        written = whole[len(before) :].lstrip()
        return written[len(reply) :] if written.startswith(reply) else None

    def _try_pattern(
        self, old: tuple[str, ...], new: tuple[str, ...], with_tools: bool, generate: bool
    ) -> bool:
        """Return True if the template leaves turns of these kinds unchanged when others follow."""
        tools = [_PLACEHOLDER_TOOL] if with_tools else None
        following = [_placeholder(kind) for kind in new]
        try:
            whole = self._text_after(old, following, tools, generate)
            return whole is not None and whole == self._text_after(
                old[-2:], following, tools, generate
            )
        except ValueError:
            return False  # it refuses placeholders: the whole conversation is rendered

    def _without_doubled_end(self, recorded: Recorded, ids: list[int]) -> list[int]:
        """Drop the template's end-of-turn token if the model sampled an end token itself."""
        last = recorded.last_ids[-1] if recorded.last_ids else None
        for index, token in enumerate(ids):
            if token in self._special:
                sampled = token == last or (recorded.ended and last in self._special)
                return ids[index + 1 :] if sampled else ids
            if self.decode([token]).strip():
                break
        return ids


_PLACEHOLDER_TOOL = {
    "type": "function",
    "function": {
        "name": "placeholder",
        "description": "A placeholder.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def _kind(message: Message) -> str:
    """Return the features that a template may treat differently: the role, and thinking in
    a reply.
    """
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return str(message["role"])
    opens, closes = "<think>" in content, "</think>" in content
    return f"assistant{'<' * opens}{'>' * closes}"


def _placeholder(kind: str) -> dict[str, Any]:
    role = kind.rstrip("<>")
    thinking = (
        ("<think>\n" if "<" in kind else "") + "T" + ("\n</think>\n\nA" if ">" in kind else "")
    )
    return {"role": role, "content": thinking if kind != role else role[0].upper()}


def _opened(kinds: Sequence[str]) -> Sequence[str]:
    """Begin the placeholders with a user turn if the pattern was cut in the middle."""
    return kinds if len(kinds) > 1 and kinds[0] in ("user", "system") else ("user", kinds[-1])


def _shortened(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Remove the middle of a long pattern, so that the same roles stay adjacent."""
    if len(kinds) <= _HEAD + _TAIL:
        return kinds
    head = kinds[:_HEAD]
    for start in range(len(kinds) - _TAIL, _HEAD, -1):
        if kinds[start - 1] == head[-1]:
            return head + kinds[start:]
    return kinds


def plain_messages(
    messages: Sequence[Mapping[str, Any]], read: Read | None = None
) -> list[dict[str, Any]]:
    """Convert each message with `plain_message`. Raises ValueError for text."""
    if isinstance(messages, str):
        raise ValueError(
            "chat takes a list of messages, not text: expected "
            f"[{{'role': 'user', 'content': {messages!r:.60}}}]"
        )
    return [plain_message(message, read) for message in messages]


def plain_message(message: Mapping[str, Any], read: Read | None = None) -> dict[str, Any]:
    """Return a message without its None values, its content as one text; with pictures, as a list
    of parts `{"type": "image", "image": read(...)}` and text. Raises ValueError for pictures
    without `read`, and for audio or video.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message must be a dict with 'role' and 'content', not {message!r:.80}")
    plain = {
        name: value if name == "content" and isinstance(value, list) else all_joined(value)
        for name, value in message.items()
        if value is not None
    }
    content = plain.get("content")
    if isinstance(content, list):
        parts = [_plain_part(part, read) for part in content]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        plain["content"] = "".join(texts) if len(texts) == len(parts) else parts
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"a message's content must be text, not {type(content).__name__}")
    if "tool_calls" in plain:
        _check_tool_calls(plain["tool_calls"])
    return plain


def _plain_part(part: Any, read: Read | None) -> dict[str, Any]:
    """Return a part of a message's content: text, or a picture in the form of chat templates, of
    OpenAI's chat completions or of its responses.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": joined(part["text"])}
    if kind not in IMAGE_PARTS:
        raise ValueError(f"a message holds {part!r:.60}: only text and pictures are supported")
    if read is None:
        raise ValueError(f"a message holds {part!r:.60}: only text is supported")
    return read_part(part, read)


def as_given(source: Any) -> Any:
    """Return a picture's source: it is read later, by the model that is shown it."""
    return source


def _check_tool_calls(calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"a message's tool_calls hold {call!r:.60}: expected a list of "
                "{id, type, function: {name, arguments}}"
            )


def conversation_of(
    task: Task, prompt: Any, system: str | None, *, with_tags: bool = False
) -> list[dict[str, Any]]:
    """Convert a task's `prompt`, text or a list of messages, to messages; `system` is put in front
    if they have no system message. The row's pictures take the places of its `<image>` tags;
    `with_tags` keeps the tags, one for each picture.

    Raises ValueError if it is neither, or contains audio or video.
    """
    for name in NOT_TEXT:
        if task.raw_task.get(name):
            raise ValueError(
                f"the row's column '{name}' is not empty: only text and pictures are supported"
            )
    from_column = prompt is not None and prompt is task.raw_task.get("messages")
    column = (
        "column 'messages'" if from_column else f"column '{task.prompt_key}' (format.prompt_key)"
    )
    whose = f"row {task.index['index']}" if "index" in task.index else "the task"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{whose}'s {column} holds {prompt!r:.60}: expected text, or a list of messages. The "
            f"row has: {', '.join(task.raw_task)}"
        )
    try:
        plain = plain_messages(messages, as_given)
        plain = with_row(plain, task.raw_task, task.image_key, tags=with_tags)
    except ValueError as error:
        raise ValueError(f"{whose}'s {column}: {error}") from error
    if system and plain[0]["role"] != "system":
        plain.insert(0, {"role": "system", "content": system})
    return plain


def _continued(first: Message, second: Message) -> Message:
    """Return one message with the contents of two, a blank line between them."""
    contents = [message.get("content") or "" for message in (first, second)]
    if all(isinstance(content, str) for content in contents):
        return {**first, "content": "\n\n".join(filter(None, contents))}
    before, after = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents)
    return {**first, "content": [*before, {"type": "text", "text": "\n\n"}, *after]}
