"""Reply mask: renders a conversation as token ids, and marks those that a model is trained to
write.

Replies are found by comparing the chat template rendered up to the reply (with its generation
prompt) and with it; templates with `{% generation %}` blocks mark them. The text is cut at those
borders and encoded piece by piece, as when a model continues a prompt.

- A reply's own `weight` or `loss_scale` (or `loss`: true, false) overrides the default; 0 is not
  trained. Templates never see it.
- The token that ends a reply is trained once; text that a template adds after it is not.
- A template may rewrite earlier turns (drop their thinking, for example): such a turn is not
  trained, because the final text differs from what the model should write. `Rendered.rewritten`
  counts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from trireme.pictures import Picture, album, placed
from trireme.text import joined

OWN_KEYS = ("weight", "loss_scale", "loss")
"""Keys of a message that are ours and not the template's."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass
class Rendered:
    """Ids and mask of a conversation, up to the end of its last trained reply."""

    ids: list[int]
    mask: list[bool]
    rewritten: int = 0
    weights: list[float] = field(default_factory=list)
    """The loss weight of each token; 0 if it is not trained."""
    pictures: tuple[Picture, ...] = ()
    """The pictures of `ids`."""
    text: str = ""
    """The text up to the end of the last turn that is to be trained; `ids` may end before it."""
    messages: int = 0
    """The number of messages in that text."""

    def add(self, ids: Sequence[int], trained: int, weight: float = 1.0) -> None:
        """Append ids, the first `trained` of them to be trained."""
        self.ids += ids
        self.mask += [index < trained for index in range(len(ids))]
        self.weights += [weight if index < trained else 0.0 for index in range(len(ids))]

    def show(self, pictures: Sequence[Picture], placeholder: int) -> Rendered:
        """Return the same with pictures in place of the placeholders that are left, in order; their
        tokens are not trained. Raises ValueError for fewer pictures.
        """
        # what follows the last trained reply is left out, and its pictures with it
        shown = pictures[: self.ids.count(placeholder)]
        out = Rendered(placed(self.ids, shown, placeholder), [], self.rewritten)
        out.pictures = tuple(album(shown).values())
        following = iter(zip(self.ids, self.mask, self.weights, strict=True))
        sizes = iter(shown)
        for token, trained, weight in following:
            size = next(sizes).tokens if token == placeholder else 0
            out.mask += [False] * size or [trained]
            out.weights += [0.0] * size or [weight]
        return out


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
    """Render with the last assistant turn trained, or with `all_turns` each of them, unless a turn
    overrides it.

    `end_ids` are the ids at which generation stops; `options` go to the template. Text after the
    last trained turn is left out; without any, nothing is rendered. Raises ValueError for a weight
    that is not a number of at least 0, and if the template refuses the messages.
    """
    wanted = _wanted(messages, all_turns)
    if not wanted:
        return Rendered([], [])
    messages = [
        {key: value for key, value in message.items() if key not in OWN_KEYS}
        for message in messages[: max(wanted) + 1]
    ]
    settings: dict[str, Any] = dict(options or {}) | {"tools": list(tools) if tools else None}
    settings["chat_template"] = template or tokenizer.get_chat_template()
    blocks = _GENERATION.search(settings["chat_template"])
    render = _by_blocks if blocks else _by_comparing
    try:
        full = _text(tokenizer, messages, settings)
        out = render(tokenizer, messages, settings, full, wanted, end_ids)
    except (TemplateError, TypeError) as error:  # such as text and a number, added
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template refuses a conversation of {roles}: {error}") from error
    out.text, out.messages = full, len(messages)
    return out


def _wanted(messages: Sequence[Mapping[str, Any]], all_turns: bool) -> dict[int, float]:
    """Return the indices of the trained replies, each with its weight."""
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    weights = {}
    for index in replies:
        asked_weight = message_weight(messages[index])
        weight = float(all_turns or index == replies[-1]) if asked_weight is None else asked_weight
        if weight:
            weights[index] = weight
    return weights


def message_weight(message: Mapping[str, Any]) -> float | None:
    """Return the weight that a message sets itself; None if it sets none. Raises ValueError."""
    for key in OWN_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"a message's {key} is {value!r}: expected a number of at least 0")
        return float(value)
    return None


def _by_comparing(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    settings: Mapping[str, Any],
    full: str,
    wanted: Mapping[int, float],
    end_ids: Collection[int],
) -> Rendered:
    """Find each reply as the text that its turn adds to the text that ends in the generation
    prompt; `full` is the text of all messages.
    """
    out = Rendered([], [])
    done = 0
    for number, weight in wanted.items():
        last = number == len(messages) - 1
        after = full if last else _text(tokenizer, messages[: number + 1], settings)
        start = common_length(_text(tokenizer, messages[:number], settings, prompt=True), after)
        if not full.startswith(after) or start < done:
            out.rewritten += 1
            continue
        out.add(_encode(tokenizer, full[done:start]), 0)
        ids, trained = _reply(tokenizer, full[start : len(after)], end_ids, last=last)
        out.add(ids, trained, weight)
        done = len(after)
    return out


def _text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    prompt: bool = False,
) -> str:
    """Render a conversation with the template; with `prompt` up to the start of a reply."""
    return tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **settings
    )


def render_plain(tokenizer: Any, prompt: str, response: str, *, eos: int | None) -> Rendered:
    """Render for a model without a chat template: prompt, response, end of sequence."""
    out = Rendered([], [])
    out.add(tokenizer.encode(joined(prompt)), 0)
    ids = _encode(tokenizer, response)
    # an encoder that adds the end itself would double it here, and end the prompt
    if eos is not None:
        while out.ids and out.ids[-1] == eos:
            out.ids.pop()
            out.mask.pop()
        ids += [eos] if not ids or ids[-1] != eos else []
    out.add(ids, len(ids))
    return out


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Count the characters, or ids, of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(joined(text), add_special_tokens=False) if text else []


def _reply(
    tokenizer: Any, text: str, end_ids: Collection[int], *, last: bool
) -> tuple[list[int], int]:
    """Return a reply's ids, and the number of trained ones: up to the token that ends it.

    A template may close a turn with a special token at which this model does not stop, or with none
    at all: then the model's own end token is added to the last reply, or it would never learn to
    stop.
    """
    ids = _encode(tokenizer, text)
    trained = len(ids)
    special = set(tokenizer.all_special_ids) | set(end_ids)
    while (
        trained
        and ids[trained - 1] not in special
        and not tokenizer.decode(ids[trained - 1 : trained]).strip()
    ):
        trained -= 1  # white space after the end of the turn
    if not trained or ids[trained - 1] not in special:
        trained = len(ids)  # no end token: the white space is part of the reply
    if not last:
        return ids, trained
    ids = ids[:trained]
    if end_ids and (not ids or ids[-1] not in end_ids):
        ids.append(next(iter(end_ids)))
    return ids, len(ids)


def _by_blocks(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    settings: Mapping[str, Any],
    full: str,
    wanted: Mapping[int, float],
    end_ids: Collection[int],
) -> Rendered:
    """Render with the template's own marks of replies; `full` is the text of all messages."""
    ids, mask = _marked(tokenizer, messages, settings)
    if not any(mask):
        return Rendered([], [])
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    places = [index for index, flag in enumerate(mask) if flag]
    weights = [0.0] * len(ids)
    rewritten = begun = 0
    for number, following in zip(replies, [*replies[1:], len(messages)], strict=True):
        # up to the next reply: text that the template drops from this one is missing there too
        last = following == len(messages)
        upto = len(places) if last else sum(_marked(tokenizer, messages[:following], settings)[1])
        if not last and not full.startswith(_text(tokenizer, messages[: number + 1], settings)):
            rewritten += number in wanted
        else:
            for index in places[begun:upto]:
                weights[index] = wanted.get(number, 0.0)
        begun = upto
    for index in [i for i, weight in enumerate(weights) if weight]:
        # blocks that leave the end of the turn outside
        inside = index + 1 < len(ids) and not mask[index + 1]
        if inside and ids[index] not in end_ids and ids[index + 1] in end_ids:
            weights[index + 1] = weights[index]
    if not any(weights):
        return Rendered([], [], rewritten)
    length = max(index for index, weight in enumerate(weights) if weight) + 1
    ids, weights = ids[:length], weights[:length]
    if end_ids and ids[-1] not in end_ids:
        ids.append(next(iter(end_ids)))
        weights.append(weights[-1])
    return Rendered(ids, [weight > 0 for weight in weights], rewritten, weights)


def _marked(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and which of them are in the template's blocks."""
    encoded = tokenizer.apply_chat_template(
        list(messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **settings,
    )
    return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
