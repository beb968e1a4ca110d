"""Turn: one reply of the assistant's, which may be cut back, added to and gone on with.

A reply that goes on holds several sampled segments with inserted text between them; each segment is
a call. What of a segment is left keeps its ids, log-probabilities and versions; the token that a
cut goes through, and all text that nobody sampled, is encoded and not trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from trireme.engines.engine import Completion
from trireme.model.recorder import Call

Decode = Callable[[Sequence[int]], str]


def kept_tokens(call: Call, content: str, decode: Decode) -> tuple[int, int] | None:
    """How many of the call's sampled tokens a reply `content` begins with, and its characters up to
    there; None where it differs before what the call sampled.
    """
    before = text_before(call)
    if not content.startswith(before):
        return None
    ids, rest = call.completion.ids, content[len(before) :]
    text = decode(ids)
    pairs = enumerate(zip(text, rest, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(text), len(rest)))
    count = bisect_right(range(len(ids) + 1), common, key=lambda n: len(decode(ids[:n]))) - 1
    # a token that holds only some bytes of a character decodes to something else
    while count > 0 and not rest.startswith(decode(ids[:count])):
        count -= 1
    return count, len(before) + len(decode(ids[:count]))


def cut(call: Call, count: int, decode: Decode) -> Call:
    """The call as if only its first `count` tokens had been sampled."""
    c = call.completion
    ids = c.ids[:count]
    text = decode(ids)
    shorter = Completion(
        ids, c.logprobs[:count], c.sampler_logprobs[:count], c.versions[:count], "length", text=text
    )
    weights = None if call.weights is None else call.weights[:count]
    reply = {"role": "assistant", "content": text_before(call) + text}
    origin = call.origin or call
    return replace(
        call, completion=shorter, weights=weights, reply=reply, extended=False, origin=origin
    )


def inserted(parent: Call, ids: Sequence[int], content: str, *, index: int) -> Call:
    """A call in which nothing is sampled: `ids` behind the parent's, in a reply `content`.

    `index` is that of the newest call: an edit comes after what it edits.
    """
    nothing = Completion([], [], [], [], "length")
    reply = {"role": "assistant", "content": content}
    return replace(
        parent,
        parent=parent,
        inserted=list(ids),
        index=index,
        completion=nothing,
        weights=None,
        reply=reply,
        prompt_text=None,
        extended=False,
        origin=None,
    )


def text_before(call: Call) -> str:
    """What stands in the reply before the call's own part of it."""
    content = str((call.reply or {}).get("content") or "")
    return content[: len(content) - len(call.completion.text)]


def token_starts(call: Call, decode: Decode) -> list[int]:
    """Where in the reply's text each sampled token begins."""
    ids, first = call.completion.ids, len(text_before(call))
    return [first + len(decode(ids[:n])) for n in range(len(ids))]
