"""Formats: turn a row of a data set into an experience for SFT.

The columns of a row: those that `format` names; else the first of `messages`, `message`, `prompt` +
`response`, `prompt` + `completion`, `question` + `answer` that the data set has; a `tokens` column
contains recorded experiences. Prompt and response are text or lists of messages, which may be JSON
text; every reply of the response is trained, and none of the prompt. A row that is too long for the
model is cut at `max_model_len`; if no trained token remains, it is left out. Both are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from trireme.data.reply_mask import (
    OWN_KEYS,
    Rendered,
    message_weight,
    render_conversation,
    render_plain,
)
from trireme.data.rows import OnError, Rows
from trireme.experience import EID, Experience, cut_to
from trireme.pictures import (
    PictureReader,
    is_picture,
    pictures_in,
    refuse_other_places,
    with_placeholders,
    with_read,
    with_row,
)
from trireme.task import with_objects
from trireme.text import from_json, has_half

_MESSAGES = ("messages", "message")
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"))
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles by which a conversation in JSON text is recognized."""
_RECORDED = (
    *("prompt_length", "action_mask", "mask", "logprobs", "versions", "advantages", "returns"),
    *("loss_weight", "reward", "prompt_text", "response_text"),
)
"""The columns of recorded experiences that are read. The temperature at which they were sampled is
not: supervised learning fits the model's own distribution to them."""


@dataclass(frozen=True)
class Columns:
    """The columns that rows are read from: a whole conversation, or a prompt and its response."""

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    recorded: bool = False
    """Whether rows are experiences with their token ids."""
    replies: tuple[str, str] = ("", "")
    """The columns of the better and the worse reply, for pairs."""


def sft_columns(rows: Rows, format_args: Mapping[str, Any]) -> Columns:
    """Choose the columns, as the top of the file says. Raises ValueError listing the columns there
    are.
    """
    messages = format_args.get("messages_key", "message")
    prompt = format_args.get("prompt_key", "prompt")
    response = format_args.get("response_key", "response")
    named_pair = prompt != "prompt" or response != "response"
    if messages != "message":
        rows.require(messages, "format.messages_key")
        return Columns(messages=messages)
    if named_pair or format_args.get("prompt_type") == "plaintext":
        rows.require(prompt, "format.prompt_key")
        rows.require(response, "format.response_key")
        return Columns(prompt=prompt, response=response)
    if "tokens" in rows.columns:
        return Columns(recorded=True)
    for name in _MESSAGES:
        if name in rows.columns:
            return Columns(messages=name)
    for first, second in _PAIRS:
        if first in rows.columns and second in rows.columns:
            return Columns(prompt=first, response=second)
    known = ["messages", "message", *(" + ".join(pair) for pair in _PAIRS)]
    raise ValueError(
        f"{rows.source} has the columns {', '.join(rows.columns)}, and none of {', '.join(known)}: "
        f"name them as format.messages_key, or as format.prompt_key and format.response_key"
    )


class SftFormat:
    """Converts rows to experiences whose replies are trained."""

    one_each: ClassVar[bool] = True
    """Whether each row is one experience, unless it is left out."""

    @classmethod
    def columns_of(cls, rows: Rows, format_args: Mapping[str, Any]) -> Columns:
        """Choose the columns, as the top of the file says. Raises ValueError listing the columns
        there are.
        """
        return sft_columns(rows, format_args)

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        *,
        max_model_len: int,
        format_args: Mapping[str, Any] | None = None,
        end_ids: Collection[int] = (),
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
        on_error: OnError = "fail",
        reader: PictureReader | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """`end_ids` are the ids at which the model's generation stops; not given: the tokenizer's.

        `chat_template` and `enable_thinking` are the model's; those of the format override them.
        `reader` reads the rows' pictures; None: the model takes none. `vocabulary` is the number of
        the model's ids, which recorded rows may not exceed; None: not known.
        Raises ValueError for a row that does not fit its columns, before any training; with
        `on_error` skip it is left out, and counted as `malformed`.
        """
        self.counts: Counter[str] = Counter()
        self._format = dict(format_args or {})
        self._columns = self.columns_of(rows, self._format)
        for name in ("image_key", "system_prompt_key", "tools_key"):
            column = self._format.get(name)
            if column and (name, column) != ("tools_key", "tools"):  # which no user has chosen
                rows.require(column, f"format.{name}")
        self._tokenizer = tokenizer
        self._reader = reader
        self._vocabulary = vocabulary
        self._max_len = max_model_len
        eos = tokenizer.eos_token_id
        self._end_ids = list(end_ids) or ([] if eos is None else [eos])
        self._template = self._format.get("chat_template") or chat_template
        if reader is not None and (own := self._template or tokenizer.chat_template):
            self._template = reader.template(own)
        thinking = self._format.get("enable_thinking")
        thinking = enable_thinking if thinking is None else thinking
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        self._has_template = bool(self._template or tokenizer.chat_template)
        self.rows = rows.checked(self._check, on_error)
        self.counts["malformed"] = self.rows.skipped

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Return row `index`; None if it is too long to leave anything to train, or trains
        nothing.
        """
        row = self.rows[index]
        if self._columns.recorded:
            return self._recorded(row, eid)
        with self._naming(index):
            rendered = self._render(row)
        self.counts["rows"] += 1
        self.counts["rewritten_turns"] += rendered.rewritten
        cut = len(rendered.ids) > self._max_len
        ids, mask = rendered.ids[: self._max_len], rendered.mask[: self._max_len]
        if not any(mask):
            self.counts["dropped" if any(rendered.mask) else "untrained"] += 1
            return None
        self.counts["cut"] += cut
        first = mask.index(True)
        weights = rendered.weights[: self._max_len]
        return Experience(
            ids,
            mask=mask,
            loss_weight=weights if {*weights} - {0.0, 1.0} else None,
            prompt_length=first,
            eid=eid,
            truncate_status="response_truncated" if cut else None,
            prompt_text=self._decode(ids[:first]),
            response_text=self._decode(ids[first:]),
            pictures=rendered.pictures,
        )

    def _recorded(self, row: Mapping[str, Any], eid: EID) -> Experience | None:
        """Return the experience that a row holds, cut like any other."""
        whole = self._whole(row, eid)
        cut, trained = len(whole.tokens) > self._max_len, whole.trained_tokens
        experience = cut_to(whole, self._max_len)
        self.counts["rows"] += 1
        if not experience.trained_tokens:
            self.counts["dropped" if trained else "untrained"] += 1
            return None
        self.counts["cut"] += cut
        return experience

    def _whole(self, row: Mapping[str, Any], eid: EID) -> Experience:
        """Return the experience that a row holds. Raises ValueError and TypeError for values that
        do not fit.
        """
        recorded = {name: row[name] for name in _RECORDED if row.get(name) is not None}
        return Experience(row["tokens"], eid=eid, info=row.get("info") or {}, **recorded)

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, with a placeholder for each picture."""
        if self._reader is not None:
            ids = with_placeholders(ids, self._reader.placeholder)
        return self._tokenizer.decode(ids)

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.rows.where(index)}: {error}") from error

    def _render(self, row: Mapping[str, Any], columns: Columns | None = None) -> Rendered:
        columns = columns or self._columns
        if self._has_template:
            messages = self._messages(row, columns)
            messages = with_row(messages, row, self._format.get("image_key"))
            if self._reader is not None:
                messages = [with_read(message, self._reader.read) for message in messages]
            elif pictures_in(messages):
                raise ValueError("the row shows a picture, and the model takes text alone")
            rendered = render_conversation(
                self._tokenizer,
                messages,
                tools=parsed(row.get(self._format.get("tools_key", "tools"))),
                all_turns=bool(self._format.get("enable_concatenated_multi_turn")),
                end_ids=self._end_ids,
                template=self._template,
                options=self._options,
            )
            if self._reader is None or not pictures_in(messages) or not rendered.ids:
                return rendered
            placeholder = self._reader.placeholder
            pictures = pictures_in(messages[: rendered.messages])
            written = self._tokenizer.convert_ids_to_tokens(placeholder)
            refuse_other_places(len(pictures), rendered.text.count(written))
            return rendered.show(pictures, placeholder)
        prompt, response = row[str(columns.prompt)], row[str(columns.response)]
        eos = self._end_ids[0] if self._end_ids else None
        system = self._system(row)
        prompt = f"{system}\n{prompt}" if system else prompt
        return render_plain(self._tokenizer, prompt, response, eos=eos)

    def _messages(self, row: Mapping[str, Any], columns: Columns) -> list[dict[str, Any]]:
        """Return the row's conversation, with the format's system prompt in front if it has
        none.
        """
        if columns.messages:
            messages = parsed(row[columns.messages])
        else:
            prompt, response = row[str(columns.prompt)], row[str(columns.response)]
            asked = [message | {"weight": 0} for message in _as_messages("user", prompt)]
            messages = [*asked, *map(_trained, _as_messages("assistant", response))]
        system = self._system(row)
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return [_plain(message) for message in messages]

    def _system(self, row: Mapping[str, Any]) -> str | None:
        key = self._format.get("system_prompt_key")
        return row.get(key) if key else self._format.get("system_prompt")

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the column, if a row does not fit its columns."""
        columns = self._columns
        if columns.recorded:
            tokens = row.get("tokens")
            ids = isinstance(tokens, list) and all(isinstance(i, int) and i >= 0 for i in tokens)
            if not ids or not tokens:
                raise ValueError(f"column 'tokens' holds {tokens!r:.60}: expected a list of ids")
            if self._vocabulary is not None and max(tokens) >= self._vocabulary:
                raise ValueError(
                    f"column 'tokens' holds the id {max(tokens)} (at {tokens.index(max(tokens))}): "
                    f"expected 0 to {self._vocabulary - 1}, this model's vocabulary"
                )
            try:
                self._whole(row, EID(0, 0))
            except TypeError as error:
                raise ValueError(f"it is no recorded experience: {error}") from error
        elif columns.messages:
            check_messages(columns.messages, row.get(columns.messages))
            tools = str(self._format.get("tools_key", "tools"))
            check_tools(tools, row.get(tools))
            self._check_template("prompt and response columns")
        else:
            for column, replies in ((str(columns.prompt), False), (str(columns.response), True)):
                value = row.get(column)
                if messages_in(value) is not None:
                    check_messages(column, value, replies=replies)
                    self._check_template(f"'{column}' as text")
                elif not isinstance(value, str):
                    raise ValueError(f"column '{column}' holds {value!r:.60}: expected text")
            response = row[str(columns.response)]
            if isinstance(response, str) and not response.strip():
                raise ValueError(f"column '{columns.response}' is empty: expected a reply")

    def _check_template(self, instead: str) -> None:
        if not self._has_template:
            raise ValueError(
                "a conversation needs a chat template, and the model's tokenizer has none: set "
                f"model.chat_template_path, or give {instead}"
            )


def check_messages(column: str, value: Any, *, replies: bool = True) -> None:
    """Raise ValueError unless `value` is a list of messages, ending in a reply if required."""
    messages = _parsed_of(column, value)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"column '{column}' must hold a list of messages, not {value!r:.60}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"a message must have a role and a content, not {message!r:.60} (column '{column}')"
            )
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ValueError(
                f"a message's content is {content!r:.60}: expected text (column '{column}')"
            )
        for part in content if isinstance(content, list) else ():
            if _text_of(part) is None and not is_picture(part):
                raise ValueError(
                    f"a message's content holds {part!r:.60}: only text and pictures are "
                    f"supported (column '{column}')"
                )
        message_weight(message)
        for text in _objects_in(message):
            _parsed_of(column, text)  # which refuses a name that is there twice
    roles = [message["role"] for message in messages]
    if replies and "assistant" not in roles:
        raise ValueError(
            f"the conversation in column '{column}' has no assistant turn: its roles are "
            f"{', '.join(dict.fromkeys(roles))}"
        )
    if replies and roles[-1] != "assistant":
        raise ValueError(
            f"the conversation in column '{column}' ends in a turn of the {roles[-1]}: expected "
            "the assistant's reply at its end"
        )
    if replies and message_weight(messages[-1]) != 0 and not _says(messages[-1]):
        raise ValueError(f"the last reply in column '{column}' is empty: expected a reply")


def _says(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a text, a call, a thought: any value but its role and weight."""
    values = (value for key, value in _plain(message).items() if key not in ("role", *OWN_KEYS))
    return any(value.strip() if isinstance(value, str) else value for value in values)


def check_tools(column: str, value: Any) -> None:
    """Raise ValueError unless `value` is a list of tools, or nothing."""
    tools = _parsed_of(column, value)
    if tools and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        raise ValueError(f"column '{column}' holds {value!r:.60}: expected a list of tools")


def _parsed_of(column: str, value: Any) -> Any:
    try:
        return parsed(value)
    except ValueError as error:
        raise ValueError(f"column '{column}' holds text that is not JSON: {error}") from error


def _objects_in(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments of a message's calls that are JSON text; other text stays as it is."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                json.loads(arguments)
                yield arguments


def messages_in(value: Any) -> list[Any] | None:
    """Return a list of messages, also from JSON text; None for other text, JSON or not."""
    if isinstance(value, list):
        return value
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None  # text that begins with a bracket
    # a reply may itself be a JSON list: of numbers, of function calls, of people with their roles
    chat = any(isinstance(each, Mapping) and each.get("role") in _ROLES for each in found)
    return found if chat else None


def _as_messages(role: str, value: Any) -> list[dict[str, Any]]:
    messages = messages_in(value)
    return [{"role": role, "content": value}] if messages is None else messages


def _trained(message: dict[str, Any]) -> dict[str, Any]:
    """Mark a message as trained, unless it says otherwise itself."""
    return message if message_weight(message) is not None else message | {"weight": 1}


def _text_of(part: Any) -> str | None:
    """Return the text of a part of a message's content; None if it is another part."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keys that are None: a column of `datasets` gives every message the keys of all. Join
    a content of texts alone: templates of models that do not see take one text.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(parts := kept.get("content"), list):
        texts = [text for part in parts if (text := _text_of(part)) is not None]
        kept["content"] = "".join(texts) if len(texts) == len(parts) else parts
    return {"content": ""} | with_objects(kept)


def parsed(value: Any) -> Any:
    """Parse messages and tools if they are JSON text."""
    if not isinstance(value, str) or not value.strip():
        return value
    if has_half(made := from_json(value)):
        raise ValueError("it holds half of a surrogate pair")
    return made
