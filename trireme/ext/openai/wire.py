"""OpenAI wire: reads the sampling options of a request, and formats replies as a response."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trireme.engines.engine import MOST_SAMPLES, Completion, what_is_wrong
from trireme.pictures import IMAGE_PARTS, Picture, source_in
from trireme.registry import did_you_mean

if TYPE_CHECKING:
    from trireme.model.chat_tokens import ChatTokens
    from trireme.model.model import Reply


def wants_tool_calls(body: Mapping[str, Any]) -> bool:
    """Return True if a chat request has tools that may be called."""
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def forced_tool(body: Mapping[str, Any]) -> str | None:
    """Return the tool that a reply must call: its name, or "" for any; None if it need not call
    one.

    Raises ValueError for an invalid `tool_choice`, or one that names an unknown tool.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    names = [(t.get("function") or t).get("name") for t in body.get("tools") or ()]
    if choice == "required" and names:
        return ""
    named = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError(
            f"tool_choice is {choice!r:.80}: expected auto, none, or with tools required or "
            f"{{type: function, function: {{name}}}}; the tools are {', '.join(map(str, names))}"
        )
    return name


class Decode(Protocol):
    """Decodes ids to text."""

    def __call__(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Decode ids; with `skip_special` without the special ones."""
        ...


_B = TypeVar("_B", bound=BaseModel)
MOST_PROMPTS = 1024
"""Most prompts of one request for text completions."""
MOST_MESSAGES, MOST_TOOLS = 4096, 1024
"""Most messages and tools of one conversation."""
Messages = Annotated[
    list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_TOOLS)]
Ids = Annotated[list[int], Field(fail_fast=True)]
"""The first invalid id is the error: a list of a million errors would take seconds."""


def refuse_paths(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages. Raises ValueError for a picture that is not in the request itself: a path
    would be read on this machine.
    """
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                source = source_in(part)
                if isinstance(source, Picture):  # of a reply that is continued
                    continue
                url = source.get("url") if isinstance(source, Mapping) else source
                if not isinstance(url, str) or url[:5].lower() != "data:":
                    raise ValueError(
                        f"a picture is {url!r:.60}: expected a data URL, as in "
                        "{type: image_url, image_url: {url: data:image/png;base64,…}}"
                    )
    return messages


class Wire(BaseModel):
    """A request's body; its sampling options are validated when they become a Sampling.

    Undeclared keys are kept: each API decides which ones it serves.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None


class ChatBody(Wire):
    """`/v1/chat/completions`."""

    messages: Annotated[Messages, AfterValidator(refuse_paths)]
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class TextBody(Wire):
    """`/v1/completions`."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(fail_fast=True, max_length=MOST_PROMPTS)]
    )
    stream_options: dict[str, Any] | None = None
    logprobs: Annotated[int, Field(ge=0, le=64)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


def checked(kind: type[_B], body: Any) -> _B:
    """Validate a body. Raises ValueError that names the field, its value and the allowed values."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise ValueError(what_is_wrong(error.errors())) from None


def refuse_many(prompts: int, n: Any) -> None:
    """Raise ValueError for a request of more samples than allowed."""
    if isinstance(n, int) and prompts * n > MOST_SAMPLES:
        raise ValueError(
            f"{prompts} prompts with n {n} are {prompts * n} samples: expected at most "
            f"{MOST_SAMPLES} in one request"
        )


_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("repetition_penalty", "stop_token_ids", "ignore_eos"),
)
_RENAMED = {"max_completion_tokens": "max_tokens"}
_USED = {
    *("model", "messages", "prompt", "tools", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "return_token_ids", "return_tokens_as_token_ids", "tool_choice"),
    "parallel_tool_calls",
}
# Labels and switches that do not affect sampling.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier"} | {
    "prompt_cache_key",
    "reasoning_effort",
    "verbosity",
    "prompt_cache_retention",
}
# Options that have an effect only at values other than these.
_ONLY: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "chat_template_kwargs": ({},),
}
_INSTEAD = {
    "chat_template_kwargs": "; thinking is switched for all requests, by model.enable_thinking or "
    "--enable_thinking of trireme rollout",
}
KNOWN = {*_SAME, *_RENAMED, *_USED, *_WITHOUT_EFFECT, *_ONLY}
"""The keys of chat and text completions."""
_process = secrets.token_hex(4)  # ids of a restarted server must not match old replies
_ids = itertools.count()


def options_of(body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return the sampling options of a request. Raises ValueError for options that are not
    served.
    """
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
                instead = _INSTEAD.get(name, "")
                raise ValueError(f"'{name}' is not supported: leave it out{instead}")
        elif name not in _USED | _WITHOUT_EFFECT:
            hint = did_you_mean(name, [*_SAME, *_RENAMED, *_USED], ": did you mean '{}'?")
            raise ValueError(f"the request has an unknown key '{name}'{hint}")
    wanted = body.get("top_logprobs") if chat else body.get("logprobs")
    if chat and wanted and not body.get("logprobs"):
        raise ValueError(f"'top_logprobs' is {wanted}: expected 'logprobs' to be true with it")
    if wanted:
        options["logprobs"] = wanted
    return options


def chat_response(
    replies: Sequence[Reply], body: Mapping[str, Any], model: str, chat: ChatTokens
) -> dict[str, Any]:
    """Make a `chat.completion`; each choice has its `token_ids` too."""
    decode = chat.decode
    choices = []
    for index, reply in enumerate(replies):
        calls = (reply.call.reply or {}).get("tool_calls")
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if calls:
            message |= {"content": reply.call.shown or None, "tool_calls": calls}
        elif reply.call.shown is not None:
            message["content"] = reply.call.shown
        if reply.call.thinking and reply.call.reply:
            thought = reply.call.reply["reasoning_content"]
            message |= {"content": message["content"] or None, "reasoning_content": thought}
        ended = "tool_calls" if calls else "stop"
        choice = {
            "index": index,
            "message": message,
            "finish_reason": "length" if reply.stop_reason == "length" else ended,
            "logprobs": None,
            "stop_reason": reply.call.completion.stop,
            "token_ids": reply.tokens,
        }
        if body.get("logprobs"):
            choice["logprobs"] = {
                "content": token_logprobs(reply, token_names(body, decode)),
                "refusal": None,
            }
        choices.append(choice)
    response = _response("chat.completion", "chatcmpl", choices, replies, model)
    if body.get("return_token_ids"):
        response["prompt_token_ids"] = prompt_ids(replies[0], chat)
    return response


def text_response(
    replies: Sequence[Reply], body: Mapping[str, Any], model: str, chat: ChatTokens
) -> dict[str, Any]:
    """Make a `text_completion`."""
    decode = chat.decode
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
            choice["logprobs"] = text_logprobs(token_logprobs(reply, token_names(body, decode)))
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = prompt_ids(reply, chat)
        choices.append(choice)
    return _response("text_completion", "cmpl", choices, replies, model)


def model_entry(model: str) -> dict[str, Any]:
    """Describe the model that is served as `GET /v1/models/{model}` does."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "trireme"}


def prompt_ids(reply: Reply, chat: ChatTokens) -> list[int]:
    """Return the ids that a reply was sampled from, as the client knows them."""
    return chat.outside(reply.call.ids[: reply.prompt_tokens])


def token_names(body: Mapping[str, Any], decode: Decode) -> Decode:
    """Return how log-probabilities name tokens: by their text, or as vLLM names ids."""

    def by_id(ids: Sequence[int], *, skip_special: bool = False) -> str:
        return f"token_id:{ids[0]}"

    return by_id if body.get("return_tokens_as_token_ids") else decode


def _response(
    kind: str, prefix: str, choices: list[Any], replies: Sequence[Reply], model: str
) -> dict[str, Any]:
    calls = {reply.call.index: reply.prompt_tokens for reply in replies}
    prompt, sampled = sum(calls.values()), sum(len(reply.tokens) for reply in replies)
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
    }


def token_logprobs(reply: Reply, decode: Decode) -> list[dict[str, Any]]:
    """Return the sampled tokens in the form of chat completions."""
    return [token_row(*one, decode) for one in each_token(reply.call.completion)]


def each_token(completion: Completion) -> list[tuple[int, float, dict[int, float]]]:
    """Return each sampled token with its log-probability and the requested alternatives."""
    c = completion
    alternatives = c.alternatives or [{} for _ in c.ids]
    return list(zip(c.ids, c.logprobs, alternatives, strict=True))


def token_row(
    token: int, logprob: float, others: Mapping[int, float], decode: Decode
) -> dict[str, Any]:
    """Return one token in the form of chat completions."""
    top = [_token(other, p, decode) for other, p in others.items()]
    return {**_token(token, logprob, decode), "top_logprobs": top}


def text_logprobs(rows: Sequence[dict[str, Any]], offset: int = 0) -> dict[str, Any]:
    """Return tokens in the form of text completions."""
    sizes = (len(row["token"]) for row in rows[:-1])
    return {
        "tokens": [row["token"] for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in rows
        ],
        "text_offset": list(itertools.accumulate(sizes, initial=offset)),
    }


def new_id(prefix: str) -> str:
    """Make a unique id for a response."""
    return f"{prefix}-{_process}-{next(_ids)}"


def _token(token: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
