"""Reply mask: a conversation as token ids, and which of them a model is trained to write.

What a reply is comes from comparing the chat template rendered up to the reply (with its
generation prompt) and with it; templates with `{% generation %}` blocks say it themselves. The
text is cut at those borders and encoded piece by piece, as it is when a model continues a prompt.

- The token that ends a reply is trained once; what a template puts behind it is not.
- A template may rewrite earlier turns (drop their thinking, say): such a turn is not trained,
  because what stands in the final text is not what the model is to write. `Rendered.rewritten`
  counts them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass
class Rendered:
    """Ids and mask of a conversation, up to the end of its last trained reply."""

    ids: list[int]
    mask: list[bool]
    rewritten: int = 0

    def add(self, ids: Sequence[int], trained: int) -> None:
        """Append ids, the first `trained` of them to be trained."""
        self.ids += ids
        self.mask += [index < trained for index in range(len(ids))]


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    all_turns: bool = False,
    end_ids: Collection[int],
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Rendered:
    """The last assistant turn trained, or with `all_turns` each of them.

    `end_ids` are the ids at which generation stops; `options` go to the template. The messages must
    hold an assistant turn; what follows the last one is left out.
    """
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = list(messages[: replies[-1] + 1])
    wanted = replies if all_turns else replies[-1:]
    settings: dict[str, Any] = dict(options or {}) | {"tools": list(tools) if tools else None}
    source = template or tokenizer.get_chat_template()
    settings["chat_template"] = source
    if _GENERATION.search(source):
        return _by_blocks(tokenizer, messages, settings, all_turns, end_ids)

    def text(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt, **settings
        )

    full = text(len(messages), False)
    out = Rendered([], [])
    done = 0
    for place in wanted:
        after = full if place == len(messages) - 1 else text(place + 1, False)
        start = _common_length(text(place, True), after)
        if not full.startswith(after) or start < done:
            out.rewritten += 1
            continue
        out.add(_encode(tokenizer, full[done:start]), 0)
        last = place == wanted[-1]
        ids, trained = _reply(tokenizer, full[start : len(after)], end_ids, last=last)
        out.add(ids, trained)
        done = len(after)
    return out


def render_plain(tokenizer: Any, prompt: str, response: str, *, eos: int | None) -> Rendered:
    """For a model without a chat template: prompt, response, end of sequence."""
    out = Rendered([], [])
    out.add(tokenizer.encode(prompt), 0)
    ids = _encode(tokenizer, response)
    # an encoder that adds the end itself would double it here, and end the prompt
    if eos is not None:
        while out.ids and out.ids[-1] == eos:
            out.ids.pop()
            out.mask.pop()
        ids += [eos] if not ids or ids[-1] != eos else []
    out.add(ids, len(ids))
    return out


def _common_length(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def _reply(
    tokenizer: Any, text: str, end_ids: Collection[int], *, last: bool
) -> tuple[list[int], int]:
    """A reply's ids, and how many of them are trained: up to the token that ends it.

    A template may close a turn with a special token at which this model does not stop, or with
    none at all: then the last reply ends in the model's own end token too, or it would never
    learn to stop.
    """
    ids = _encode(tokenizer, text)
    trained = len(ids)
    special = set(tokenizer.all_special_ids) | set(end_ids)
    while (
        trained
        and ids[trained - 1] not in special
        and not tokenizer.decode(ids[trained - 1 : trained]).strip()
    ):
        trained -= 1  # the white space behind the end of the turn
    if not trained or ids[trained - 1] not in special:
        trained = len(ids)  # no end token: the white space is the reply's own
    if not last:
        return ids, trained
    ids = ids[:trained]
    if end_ids and (not ids or ids[-1] not in end_ids):
        ids.append(next(iter(end_ids)))
    return ids, len(ids)


def _by_blocks(
    tokenizer: Any,
    messages: list[Mapping[str, Any]],
    settings: dict[str, Any],
    all_turns: bool,
    end_ids: Collection[int],
) -> Rendered:
    """Where the template marks what the model writes."""
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **settings
    )
    ids, mask = list(found["input_ids"]), [bool(flag) for flag in found["assistant_masks"]]
    if not any(mask):
        return Rendered([], [])
    ends = [i + 1 for i in range(len(mask)) if mask[i] and mask[i + 1 : i + 2] != [True]]
    for end in ends:  # blocks that leave the end of the turn outside
        if ids[end - 1] not in end_ids and end < len(ids) and ids[end] in end_ids:
            mask[end] = True
    length = max(index for index, flag in enumerate(mask) if flag) + 1
    ids, mask = ids[:length], mask[:length]
    if not all_turns:
        start = length
        while start and mask[start - 1]:
            start -= 1
        mask[:start] = [False] * start
    return Rendered(ids, mask)
