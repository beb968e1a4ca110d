"""Conversation: turns recorded calls into experiences, with exactly the sampled ids.

- The sampled tokens of a call are trained in one experience only, however many conversations begin
  with it.
- An experience has one temperature. A conversation that was sampled at several gives one experience
  per temperature, on the same ids, each of which trains the tokens sampled at its own.
- A reply may be cut back, added to and continued. It then holds several sampled segments with
  inserted text between them; each segment is a call. The remainder of a segment keeps its ids,
  log-probabilities and versions; the token that a cut goes through, and all text that was not
  sampled, is encoded and not trained.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from trireme.engines.engine import Completion
from trireme.experience import EID, REPORTED_TOKENS, Experience
from trireme.model.recorder import Call
from trireme.pictures import Picture, album, as_json_messages, shown
from trireme.rewards.reward import number

Decode = Callable[[Sequence[int]], str]
_replies: WeakKeyDictionary[Experience, list[Call]] = WeakKeyDictionary()
"""The calls whose replies an experience trains, until its workflow has returned it."""


def kept_tokens(call: Call, content: str, decode: Decode) -> tuple[int, int] | None:
    """Count how many of the call's sampled tokens match the start of a reply `content`, and the
    characters up to there; None if it differs before the call's sampled part.
    """
    before = text_before(call)
    if not content.startswith(before):
        return None
    ids, rest = call.completion.ids, content[len(before) :]
    text = decode(ids)
    pairs = enumerate(zip(text, rest, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(text), len(rest)))
    count = bisect_right(range(len(ids) + 1), common, key=lambda n: len(decode(ids[:n]))) - 1
    # a token with only some bytes of a character decodes to something else
    while count > 0 and not rest.startswith(decode(ids[:count])):
        count -= 1
    return count, len(before) + len(decode(ids[:count]))


def cut(call: Call, count: int, decode: Decode) -> Call:
    """Return the call as if only its first `count` tokens had been sampled."""
    c = call.completion
    ids = c.ids[:count]
    text = decode(ids)
    routing = c.routed_experts
    shorter = Completion(
        ids,
        c.logprobs[:count],
        c.sampler_logprobs[:count],
        c.versions[:count],
        "length",
        text=text,
        routed_experts=None if routing is None else routing[: len(routing) - len(c.ids) + count],
    )
    weights = None if call.weights is None else call.weights[:count]
    reply = {"role": "assistant", "content": text_before(call) + text}
    origin = call.origin or call
    return replace(
        call, completion=shorter, weights=weights, reply=reply, extended=False, origin=origin
    )


def inserted(parent: Call, ids: Sequence[int], content: str, *, index: int) -> Call:
    """Make a call without sampled tokens: `ids` after the parent's, in a reply `content`.

    `index` is that of the newest call: an edit comes after the call that it edits.
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
    """Return the part of the reply before the call's own part."""
    content = str((call.reply or {}).get("content") or "")
    sampled = call.completion.text
    if not content.endswith(sampled):  # calls are recorded separately
        sampled = call.shown or ""
    return content.removesuffix(sampled)


def token_starts(call: Call, decode: Decode) -> list[int]:
    """Return the position in the reply's text where each sampled token begins."""
    ids, first = call.completion.ids, len(text_before(call))
    return [first + len(decode(ids[:n])) for n in range(len(ids))]


def experiences_of(
    calls: Sequence[Call], orphans: Collection[Call], decode: Decode
) -> list[Experience]:
    """Make one experience per conversation among `calls`; other calls are part of its prompt."""
    left = {call for call in calls if call not in orphans}
    done: dict[Call, int] = {}
    out = []
    for leaf in calls:
        if leaf not in left or any(other.parent is leaf for other in left):
            continue
        left_calls = [call for call in leaf.path if call in left]
        for upto, trained in by_temperature(leaf.path, left_calls):
            made = experience_of(upto, untrained(trained, done), decode)
            _replies[made] = trained
            out.append(made)
        # for later branches these calls are part of the prompt
        left -= set(left_calls[:-1])
    return out


def trained_twice(experiences: Sequence[Experience]) -> tuple[int, int] | None:
    """Return the places of two experiences that train the same reply, if there are such: those of
    two calls of `experiences()`, for example.
    """
    first: dict[Call, int] = {}
    for place, experience in enumerate(experiences):
        for call in _replies.pop(experience, ()):
            before = experiences[first.setdefault(call, place)]
            end = len(call.ids) if before is not experience else 0
            its = slice(end - len(call.completion.ids), end)
            if end and bool((experience.mask[its] & before.mask[its]).any()):
                return first[call], place
    return None


def by_temperature(
    path: Sequence[Call], calls: Sequence[Call]
) -> Iterator[tuple[Sequence[Call], list[Call]]]:
    """Divide the calls of a conversation by their temperatures, of which an experience has one;
    yields each part with the conversation up to its last call.
    """
    for temperature in dict.fromkeys(call.temperature for call in calls):
        part = [call for call in calls if call.temperature == temperature]
        yield path[: path.index(part[-1]) + 1], part


def untrained(calls: Sequence[Call], done: dict[Call, int]) -> dict[Call, int]:
    """Find the token from which on each call is trained: `done` counts its tokens that are trained
    elsewhere, and is updated. Calls that were cut share their beginning.
    """
    starts = {}
    for call in calls:
        origin = call.origin or call
        starts[call] = done.get(origin, 0)
        done[origin] = max(starts[call], len(call.completion.ids))
    return starts


def experience_of(
    path: Sequence[Call], trained: Mapping[Call, int], decode: Decode, eid: EID | None = None
) -> Experience:
    """Make the experience of a conversation, which trains the sampled tokens of the calls
    `trained`, each from a given token on.
    """
    last = path[-1]
    if len(path) == 1 and last.truncated:
        return _prompt_truncated(last, decode, eid)
    # lists, each converted once: an array's slice takes as long to fill as a whole row
    ids, versions, logprobs = list[int](), list[int](), list[float]()
    places: list[tuple[int, int, int]] = []  # of a call: first sampled, first trained token, end
    for call in path:
        c = call.completion
        ids += call.inserted
        versions += [-1] * len(call.inserted)
        logprobs += [0.0] * len(call.inserted)
        first = len(ids)
        ids += c.ids
        versions += c.versions
        logprobs += c.logprobs
        places.append((first, min(first + trained.get(call, len(c.ids)), len(ids)), len(ids)))
    total = len(ids)
    tokens, mask = np.array(ids, np.int64), np.zeros(total, bool)
    for _, start, end in places:
        mask[start:end] = True
    bent = any(call.completion.sampler_logprobs != call.completion.logprobs for call in path)
    sampler_logprobs = np.zeros(total if bent else 0, np.float32)
    weighted = any(call.weights for call in path)
    weights = np.zeros(total if weighted else 0, np.float32)
    for call, (first, start, end) in zip(path, places, strict=True) if bent or weighted else ():
        if bent:
            sampler_logprobs[first:end] = call.completion.sampler_logprobs
        if weighted:
            own = np.array(call.weights[start - first :] if call.weights else 1.0)
            weights[start:end], mask[start:end] = own, own != 0
    if weighted:
        prompt_length = int(mask.argmax()) if mask.any() else total
    else:
        prompt_length = next((start for _, start, end in places if start < end), total)
    only = len(path) == 1
    weighted = weighted and not np.isin(weights, (0.0, 1.0)).all()
    return Experience(
        torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        prompt_length=prompt_length,
        logprobs=torch.from_numpy(np.array(logprobs, np.float32)),
        sampler_logprobs=torch.from_numpy(sampler_logprobs) if bent else None,
        versions=torch.from_numpy(np.array(versions, np.int32)),
        eid=eid,
        loss_weight=torch.from_numpy(weights) if weighted else None,
        temperature=last.temperature,
        stop_reason=last.completion.stop_reason,
        truncate_status=_truncation(last),
        prompt_text=path[0].prompt_text
        if only and path[0].prompt_text
        else decode(ids[:prompt_length]),
        response_text=last.completion.text if only else decode(ids[prompt_length:]),
        messages=as_json_messages(last.conversation) or None,
        tools=last.tools,
        pictures=_pictures(path, ids),
        routed_experts=_routing([c.completion for c in path], [end for _, _, end in places], total),
        metrics={"conversation/tools_dropped": 1.0} if last.tools_dropped else {},
        info=_reported([call for call in path if trained.get(call) == 0]),
    )


def _routing(
    completions: Sequence[Completion], ends: Sequence[int], total: int
) -> torch.Tensor | None:
    """Return the experts of the tokens of a conversation, whose calls end at `ends`: those of the
    call that computed a token first, since later ones read what it computed.
    """
    parts = [
        (c.routed_experts, end)
        for c, end in zip(completions, ends, strict=True)
        if c.routed_experts is not None
    ]
    if not parts:
        return None
    first = parts[0][0]
    unknown = np.iinfo(first.dtype).max
    routing = np.full((total, *first.shape[1:]), unknown, first.dtype)
    for part, end in reversed(parts):
        routing[end - 1 - len(part) : end - 1] = part
    return torch.from_numpy(routing)


def _reported(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the number of sampled tokens that an API reports; empty if the ids are the sampled
    ones.
    """
    counts = [call.completion.reported_tokens for call in calls]
    reported = [count for count in counts if count is not None]
    if not reported:
        return {}
    return {REPORTED_TOKENS: None if math.isnan(sum(reported)) else sum(reported)}


def of_call(call: Call, decode: Decode, *, run: int = 0) -> Experience:
    """Make the experience of one call: everything before it is its prompt."""
    experience = experience_of(call.path, {call: 0}, decode, EID(run=run))
    _replies[experience] = [call]
    experience.response_text = call.completion.text
    if call.parent is None and experience.prompt_length <= len(call.inserted):
        return experience  # nothing in its prompt was sampled
    if experience.versions is not None:
        experience.versions[: experience.prompt_length] = -1
    if experience.logprobs is not None:
        experience.logprobs[: experience.prompt_length] = 0
    if experience.sampler_logprobs is not None:
        experience.sampler_logprobs[: experience.prompt_length] = 0
    return experience


def with_metrics(experiences: Sequence[Experience], metrics: dict[str, Any]) -> None:
    """Add numbers to the metrics of each experience."""
    for experience in experiences:
        experience.metrics.update({name: float(value) for name, value in metrics.items()})


def rewarded(
    experiences: list[Experience], rewards: Sequence[Any] | None, metrics: dict[str, Any]
) -> list[Experience]:
    """Set the rewards of experiences that have none, one each, and add metrics. Raises ValueError
    for what is no number.
    """
    whose = "experiences(reward=...) has"
    if rewards is not None:
        numbers = [number(reward, whose) for reward in rewards]
        if len(numbers) != len(experiences):
            raise ValueError(
                f"{whose} {len(numbers)} numbers: expected {len(experiences)}, one for each reply "
                "of the model"
            )
        for experience, its in zip(experiences, numbers, strict=True):
            if experience.reward is None:
                experience.reward = its
    with_metrics(experiences, metrics)
    return experiences


def _truncation(call: Call) -> str | None:
    if call.truncated:
        return "prompt_truncated"
    return "response_truncated" if call.completion.stop_reason == "length" else None


def _prompt_truncated(call: Call, decode: Decode, eid: EID | None) -> Experience:
    return Experience(
        call.inserted,
        eid=eid,
        prompt_length=len(call.inserted) - 1,
        mask=[False] * len(call.inserted),
        logprobs=[0.0] * len(call.inserted),
        reward=0.0,
        temperature=call.temperature,
        stop_reason="length",
        truncate_status="prompt_truncated",
        prompt_text=decode(call.inserted),
        response_text="",
        messages=as_json_messages(call.conversation) or None,
        tools=call.tools,
        pictures=_pictures([call], call.inserted),
    )


def _pictures(path: Sequence[Call], tokens: Sequence[int]) -> list[Picture]:
    """Return the pictures that the tokens of a conversation show."""
    known = album(picture for call in path for picture in call.pictures)
    return list(shown(tokens, known).values()) if known else []
