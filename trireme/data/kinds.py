"""Kinds: formats of rows other than solved examples: pairs for DPO, labels for KTO, plain text.

Pairs: the columns that `format` names; else `prompt` + `chosen` + `rejected`, or `messages` for the
prompt. A prompt is text or a list of messages, which may be JSON text. A reply is text, a message,
or a list of the reply alone or of the prompt's messages and the reply. With `chosen_key: messages`
the last message is the better reply, and those before it are the prompt. Without a prompt, `chosen`
and `rejected` are whole conversations that differ only in their last reply.

Labels: the columns of a solved example (formats.py), and `format.label_key`: whether the reply is
desirable, true or false (or 1 or 0).

Text: the column `format.prompt_key`, else `text`, else `prompt`. Texts are concatenated, each
followed by an end of sequence, and cut into pieces of `max_model_len`: a piece may contain several
texts, and a text may span several pieces. Every token of a piece is trained except its first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trireme.data.formats import Columns, SftFormat, check_messages, messages_in
from trireme.data.reply_mask import Rendered, common_length
from trireme.data.rows import Rows
from trireme.experience import EID, Experience

_DIALOGUE = "a whole conversation"


class DpoFormat(SftFormat):
    """Converts rows to experiences whose tokens are the prompt, with `chosen` and `rejected`
    replies.
    """

    @classmethod
    def columns_of(cls, rows: Rows, format_args: Mapping[str, Any]) -> Columns:
        """Choose the columns, as described above. Raises ValueError listing the available ones."""
        chosen = format_args.get("chosen_key") or "chosen"
        rejected = format_args.get("rejected_key") or "rejected"
        rows.require(chosen, "format.chosen_key")
        rows.require(rejected, "format.rejected_key")
        messages = format_args.get("messages_key", "message")
        prompt = format_args.get("prompt_key", "prompt")
        if messages == "message" and prompt == "prompt" and "prompt" not in rows.columns:
            if "messages" not in rows.columns:
                return Columns(replies=(chosen, rejected))
            messages = "messages"
        if messages != "message":
            rows.require(messages, "format.messages_key")
            return Columns(messages=messages, replies=(chosen, rejected))
        rows.require(prompt, "format.prompt_key")
        return Columns(prompt=prompt, replies=(chosen, rejected))

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Return row `index`; None if it is too long to leave anything of both replies, or what
        differs in them.
        """
        row = self.rows[index]
        self.counts["rows"] += 1
        with self._naming(index):
            better, worse = (self._with_reply(row, column) for column in self._columns.replies)
        prompts = (reply.ids[: reply.mask.index(True)] for reply in (better, worse))
        start = common_length(*prompts)
        self.counts["cut"] += max(len(better.ids), len(worse.ids)) > self._max_len
        prompt = better.ids[:start]
        chosen, rejected = (r.ids[start : self._max_len] for r in (better, worse))
        if not chosen or not rejected or not prompt or chosen == rejected:
            self.counts["dropped"] += 1
            return None
        return Experience(
            prompt,
            prompt_length=len(prompt),
            chosen=chosen,
            rejected=rejected,
            eid=eid,
            prompt_text=self._decode(prompt),
            info={"chosen": self._decode(chosen), "rejected": self._decode(rejected)},
            pictures=better.pictures,
        )

    @property
    def _prompt(self) -> str | None:
        """Return the prompt's column; None if the prompt is the common start of both
        conversations.
        """
        return self._columns.messages or self._columns.prompt

    def _prompt_of(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt. Raises ValueError, naming the column, if two conversations have none
        in common.
        """
        if self._prompt is not None and self._prompt == self._columns.replies[0]:
            return self._conversation(row, self._prompt)[:-1]
        if self._prompt is not None:
            return row.get(self._prompt)
        chosen, rejected = (self._conversation(row, column) for column in self._columns.replies)
        if chosen[:-1] != rejected[:-1]:
            raise ValueError(
                "the conversations in columns '{}' and '{}' differ before their last reply: "
                "expected the same prompt in both".format(*self._columns.replies)
            )
        return chosen[:-1]

    def _conversation(self, row: Mapping[str, Any], column: str) -> list[Any]:
        messages = messages_in(row.get(column))
        if messages is None:
            raise ValueError(
                f"column '{column}' holds {row.get(column)!r:.60}: expected a conversation, since "
                "there is no column prompt or messages"
            )
        check_messages(column, row[column])
        if len(messages) < 2:
            raise ValueError(
                f"column '{column}' holds one message, a reply, and there is no column prompt or "
                "messages: expected the prompt's messages before it"
            )
        return messages

    def _with_reply(self, row: Mapping[str, Any], column: str) -> Rendered:
        prompt, reply = self._prompt_of(row), self._reply_of(row, column)
        if not self._has_template:
            return self._render(
                {**row, column: reply}, Columns(prompt=self._prompt, response=column)
            )
        asked = [{**message, "weight": 0} for message in _asked(prompt)]
        whole = [*asked, {"role": "assistant", "content": reply, "weight": 1}]
        return self._render({**row, _DIALOGUE: whole}, Columns(messages=_DIALOGUE))

    def _reply_of(self, row: Mapping[str, Any], column: str) -> str:
        """Return the reply's text. Raises ValueError if there is none, or if other turns precede
        it.
        """
        value = reply = row.get(column)
        messages = messages_in(value)
        if messages is not None:
            check_messages(column, value)
            reply = messages[-1]
            prompt = [_said(message) for message in _asked(self._prompt_of(row))]
            if messages[:-1] and [_said(message) for message in messages[:-1]] != prompt:
                raise ValueError(
                    f"column '{column}' holds {len(messages)} messages, and those before the last "
                    f"are not the prompt of column '{self._prompt}': expected the reply alone, or "
                    "the prompt's messages and the reply"
                )
        if isinstance(reply, Mapping):
            if reply.get("tool_calls"):
                raise ValueError(
                    f"column '{column}' has a reply with tool calls, which pairs do not read: "
                    "expected a reply of text alone"
                )
            reply = reply.get("content")
        if not isinstance(reply, str) or not reply:
            raise ValueError(f"column '{column}' holds {value!r:.60}: expected a reply")
        return reply

    def _check(self, row: Mapping[str, Any]) -> None:
        prompt, name = self._prompt_of(row), self._prompt or self._columns.replies[0]
        if messages_in(prompt) is not None:
            check_messages(name, prompt, replies=False)
            self._check_template("the prompt as text")
        elif not isinstance(prompt, str):
            raise ValueError(f"column '{name}' holds {prompt!r:.60}: expected text")
        chosen, rejected = self._columns.replies
        if self._reply_of(row, chosen) == self._reply_of(row, rejected):
            raise ValueError(
                f"columns '{chosen}' and '{rejected}' hold the same reply: expected a better and a "
                "worse one"
            )


class KtoFormat(SftFormat):
    """Converts rows to experiences whose replies are trained; `info["desirable"]` is the row's
    label.
    """

    @classmethod
    def columns_of(cls, rows: Rows, format_args: Mapping[str, Any]) -> Columns:
        """Choose the columns, as described above. Raises ValueError listing the available ones."""
        rows.require(format_args.get("label_key") or "label", "format.label_key")
        return super().columns_of(rows, format_args)

    def __init__(
        self,
        rows: Rows,
        tokenizer: Any,
        *,
        format_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Read the rows. Raises ValueError if all rows have the same label."""
        self._label = (format_args or {}).get("label_key") or "label"
        self._seen: set[bool] = set()
        super().__init__(rows, tokenizer, format_args=format_args, **options)
        if len(self._seen) == 1:
            label = next(iter(self._seen))
            other = ", or algorithm_type sft, which imitates all" if label else ""
            raise ValueError(
                f"{rows.source}: column '{self._label}' is {str(label).lower()} in every row: "
                f"expected desirable replies and undesirable ones, which KTO distinguishes{other}"
            )

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Return row `index` with its label; None if it leaves nothing to train."""
        experience = super().__call__(index, eid=eid)
        if experience is not None:
            desirable = bool(self.rows[index][self._label])
            experience.info = {**experience.info, "desirable": desirable}
        return experience

    def _check(self, row: Mapping[str, Any]) -> None:
        super()._check(row)
        label = row.get(self._label)
        if not isinstance(label, int | float) or label not in (0, 1):
            raise ValueError(
                f"column '{self._label}' holds {label!r:.60}: expected true (the reply is "
                "desirable) or false"
            )
        self._seen.add(bool(label))


def _asked(prompt: Any) -> list[Any]:
    messages = messages_in(prompt)
    return [{"role": "user", "content": prompt}] if messages is None else messages


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields by which two messages are compared: tables add keys without values."""
    content = message.get("content") or ""
    text = content.strip() if isinstance(content, str) else content
    return message["role"], text, message.get("tool_calls") or None


class CptFormat(SftFormat):
    """Pieces of text to learn; an index is that of a piece."""

    one_each: ClassVar[bool] = False

    @classmethod
    def columns_of(cls, rows: Rows, format_args: Mapping[str, Any]) -> Columns:
        """Choose the columns, as described above. Raises ValueError listing the available ones."""
        column = format_args.get("prompt_key", "prompt")
        if column == "prompt" and "text" in rows.columns:
            column = "text"
        rows.require(column, "format.prompt_key")
        return Columns(prompt=column)

    def __init__(self, rows: Rows, tokenizer: Any, **options: Any) -> None:
        """Read the rows and encode all of them into one sequence of ids."""
        super().__init__(rows, tokenizer, **options)
        self._ids: list[int] = []
        for row in self.rows:
            self._ids += self._tokenizer.encode(row[str(self._columns.prompt)])
            if self._end_ids and self._ids[-1:] != self._end_ids[:1]:
                self._ids.append(self._end_ids[0])
        self.counts["rows"] = len(self.rows)

    def __len__(self) -> int:
        """Return the number of pieces; the last may be shorter."""
        return -(-len(self._ids) // self._max_len)

    def __call__(self, index: int, *, eid: EID) -> Experience | None:
        """Return piece `index`; None if it leaves nothing to predict."""
        ids = self._ids[index * self._max_len : (index + 1) * self._max_len]
        if len(ids) < 2:
            return None
        return Experience(ids, prompt_length=1, eid=eid, response_text=self._tokenizer.decode(ids))

    def _check(self, row: Mapping[str, Any]) -> None:
        text = row.get(str(self._columns.prompt))
        if not isinstance(text, str) or not text:
            raise ValueError(f"column '{self._columns.prompt}' holds {text!r:.60}: expected text")


FORMATS: dict[str, type[SftFormat]] = {
    "sft": SftFormat,
    "dpo": DpoFormat,
    "kto": KtoFormat,
    "cpt": CptFormat,
}
"""The row format of each algorithm that learns from a data set."""
