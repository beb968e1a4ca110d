"""OpenAI wire: which sampling options a request asks for, and how replies look as a response."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.model.model import Reply

Decode = Callable[[Sequence[int]], str]

_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos"),
)
_RENAMED = {"max_completion_tokens": "max_tokens"}
_USED = {"model", "messages", "prompt", "tools", "stream", "stream_options", "logprobs"} | {
    "top_logprobs"
}
# Labels and switches that change nothing of what is sampled.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier"} | {
    "prompt_cache_key",
    "parallel_tool_calls",
}
# What means something only at other values than these.
_ONLY: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
_process = secrets.token_hex(4)  # an id of a server that was restarted is of no reply of this one
_ids = itertools.count()


def options_of(body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """The sampling options of a request. Raises ValueError for what is not served."""
    options: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in _SAME:
            options[name] = value
        elif name in _RENAMED:
            options[_RENAMED[name]] = value
        elif name in _ONLY:
            if value not in _ONLY[name]:
                raise ValueError(f"'{name}' is not served: leave it out")
        elif name not in _USED | _WITHOUT_EFFECT:
            near = get_close_matches(name, [*_SAME, *_RENAMED, *_USED], n=1)
            hint = f": did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"the request has an unknown key '{name}'{hint}")
    wanted = body.get("top_logprobs") if chat else body.get("logprobs")
    if wanted:
        options["logprobs"] = int(wanted)
    return options


def chat_response(
    replies: Sequence[Reply], body: Mapping[str, Any], model: str, decode: Decode
) -> dict[str, Any]:
    """A `chat.completion`; each choice has its `token_ids` too."""
    choices = []
    for index, reply in enumerate(replies):
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": reply.text},
            "finish_reason": "length" if reply.stop_reason == "length" else "stop",
            "logprobs": None,
            "token_ids": reply.tokens,
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": token_logprobs(reply, decode), "refusal": None}
        choices.append(choice)
    return _response("chat.completion", "chatcmpl", choices, replies, model)


def text_response(
    replies: Sequence[Reply], body: Mapping[str, Any], model: str, decode: Decode
) -> dict[str, Any]:
    """A `text_completion`."""
    choices = []
    for index, reply in enumerate(replies):
        choice: dict[str, Any] = {
            "index": index,
            "text": reply.text,
            "finish_reason": "length" if reply.stop_reason == "length" else "stop",
            "logprobs": None,
            "token_ids": reply.tokens,
        }
        if body.get("logprobs") is not None:
            rows = token_logprobs(reply, decode)
            choice["logprobs"] = {
                "tokens": [row["token"] for row in rows],
                "token_logprobs": reply.logprobs,
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in rows
                ],
                "text_offset": list(
                    itertools.accumulate((len(row["token"]) for row in rows[:-1]), initial=0)
                ),
            }
        choices.append(choice)
    return _response("text_completion", "cmpl", choices, replies, model)


def chat_chunks(response: Mapping[str, Any], *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """A response as the chunks of a stream: for each choice its text, then its end."""
    base = {key: response[key] for key in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk"
    for choice in response["choices"]:
        piece = {"index": choice["index"], "delta": choice["message"], "finish_reason": None}
        yield {**base, "choices": [{**piece, "logprobs": choice["logprobs"]}]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**base, "choices": [end]}
    if with_usage:
        yield {**base, "choices": [], "usage": response["usage"]}


def _response(
    kind: str, prefix: str, choices: list[Any], replies: Sequence[Reply], model: str
) -> dict[str, Any]:
    prompt, sampled = replies[0].prompt_tokens, sum(len(reply.tokens) for reply in replies)
    return {
        "id": f"{prefix}-{_process}-{next(_ids)}",
        "object": kind,
        "created": 0,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
    }


def token_logprobs(reply: Reply, decode: Decode) -> list[dict[str, Any]]:
    """Each sampled token with its log-probability and the alternatives that were asked for."""
    alternatives = reply.call.completion.alternatives or [{} for _ in reply.tokens]
    return [
        {
            **_token(token, logprob, decode),
            "top_logprobs": [_token(t, p, decode) for t, p in others.items()],
        }
        for token, logprob, others in zip(reply.tokens, reply.logprobs, alternatives, strict=True)
    ]


def _token(token: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
