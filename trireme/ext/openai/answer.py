"""OpenAI answers: answers a request's body with the Model, as one response or chunk by chunk.

A chunk is text that may be sent at once and is never taken back. A character of several tokens is
sent whole. Text that could begin a barrier (a stop string, or the opening of a tool call behind the
thinking) is withheld, and nothing after a barrier is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trireme.aio import one_by_one, running
from trireme.engines.engine import Sampling, with_options
from trireme.ext.openai.thinking import (
    BEGIN,
    END,
    StreamedThinking,
    begins_thinking,
    begun_marks,
    record_thinking,
)
from trireme.ext.openai.tool_calls import record_tool_calls
from trireme.ext.openai.wire import (
    ChatBody,
    TextBody,
    chat_response,
    checked,
    each_token,
    forced_tool,
    new_id,
    options_of,
    prompt_ids,
    refuse_many,
    text_logprobs,
    text_response,
    token_names,
    token_row,
    wants_tool_calls,
)

if TYPE_CHECKING:
    from trireme.model.chat_tokens import ReasoningParser
    from trireme.model.model import Model, Reply

Decode = Callable[[Sequence[int]], str]


class StreamedText:
    """The streamed text of one reply. `decode` leaves out special tokens."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        openings: Sequence[str] = (),
        *,
        thinks: bool = False,
        waits: bool = False,
    ) -> None:
        """`openings` are barriers behind the reply's thinking, which the prompt has begun if it
        `thinks`. `waits`: nothing is sent before the reply's end.
        """
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._openings = [opening for opening in openings if opening]
        self._thinks: bool | None = thinks or (None if self._openings else False)
        """Whether the held text begins with thinking; None if that is not known yet."""
        self._ids: list[int] = []
        self._first = self._known = 0
        self._held = ""
        self._closed = waits
        self.shown = ""
        """All text sent so far."""

    def add(self, token: int) -> str:
        """Add a token and return the text that may be sent now; often nothing."""
        self._ids.append(token)
        if self._closed:
            return ""
        # from a few tokens back: a token's text may depend on the one before it
        before = self._decode(self._ids[self._first : self._known])
        text = self._decode(self._ids[self._first :])
        if text.endswith("\ufffd") or not text.startswith(before):
            return ""
        self._first, self._known = self._known, len(self._ids)
        self._held += text[len(before) :]
        behind = self._behind_thinking()
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        places += [at for o in self._openings if (at := self._held.find(o, behind)) >= 0]
        self._closed = bool(places)
        marks = [*self._stops, *([END] if self._thinks else self._openings)]
        count = min(places) if places else len(self._held) - begun_marks(self._held, marks)
        piece, self._held = self._held[:count], self._held[count:]
        self.shown += piece
        return piece

    def _behind_thinking(self) -> int:
        """Return where the held text is no thinking any more."""
        if self._thinks is None:
            text = (self.shown + self._held).lstrip()
            begun = text.startswith(BEGIN)
            self._thinks = begun if begun or not BEGIN.startswith(text) else None
        if not self._thinks:
            return 0
        end = self._held.find(END)
        self._thinks = end < 0
        return len(self._held) if end < 0 else end + len(END)

    def rest(self, whole: str) -> str:
        """Return the part of the whole text that was not sent yet."""
        return whole[len(self.shown) :] if whole.startswith(self.shown) else ""


Note = Callable[[str, "Sequence[Reply]"], None]
"""Called with the id of a response, and the replies in it."""


async def respond(
    model: Model, body: Mapping[str, Any], *, chat: bool, note: Note | None = None
) -> dict[str, Any]:
    """Return the whole response. Raises ValueError for a request that cannot be served."""
    replies = await _ask(model, body, chat, sampling_of(model, body, chat=chat))
    make = chat_response if chat else text_response
    response = make(replies, body, model.model_path, model.chat_tokens)
    if note is not None:
        note(response["id"], replies)
    return response


async def stream(
    model: Model, body: Mapping[str, Any], *, chat: bool, note: Note | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the response in chunks, each as soon as its text is known. Ending early aborts."""
    sampling = sampling_of(model, body, chat=chat)
    tokens: asyncio.Queue[tuple[int, int, float, dict[int, float]] | None] = asyncio.Queue()
    chunks = _Chunks(model, body, chat, with_options(model.sampling, sampling).stop)
    telling: dict[str, Any] = {"on_token": lambda *t: tokens.put_nowait(t)}
    if chat:
        telling["on_prompt"] = chunks.begin
    asked = _ask(model, body, chat, sampling, **telling)
    async with running(asked) as (work,):
        work.add_done_callback(lambda _: tokens.put_nowait(None))
        while (token := await tokens.get()) is not None:
            chunk = chunks.add(*token)
            if chunk is not None:
                yield chunk
        replies = await work
    make = chat_response if chat else text_response
    response = {**make(replies, body, model.model_path, model.chat_tokens), "id": chunks.id}
    if note is not None:
        note(chunks.id, replies)
    for choice, reply in zip(response["choices"], replies, strict=True):
        for chunk in chunks.end(choice, reply):
            yield chunk
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**chunks.base, "choices": [], "usage": response["usage"]}


KEPT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Options that a rollout may fix: how tokens are sampled, not how many or until where."""
_BENDS = ("presence_penalty", "frequency_penalty", "logit_bias")
"""Options that are not served; ignored if a rollout fixes its sampling."""


def sampling_of(model: Model, body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return the sampling options of a body. Raises ValueError for anything wrong in it."""
    checked(ChatBody if chat else TextBody, body)
    if model.keeps_sampling:
        body = {name: value for name, value in body.items() if name not in _BENDS}
    options = options_of(body, chat=chat)
    with_options(Sampling(), options)
    if model.keeps_sampling:
        return {name: value for name, value in options.items() if name not in KEPT}
    return options


async def _ask(
    model: Model,
    body: Mapping[str, Any],
    chat: bool,
    options: Mapping[str, Any],
    **telling: Any,
) -> list[Reply]:
    """Call the model. `telling`: `on_token` and `on_prompt` of a stream, see Model."""
    if not chat:
        prompts = body["prompt"]
        if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]  # a text, or ids
        refuse_many(len(prompts), options.get("n", 1))
        if len(prompts) > 1 and telling:
            raise ValueError("'stream' is supported for one prompt only")
        asked = (model.generate_samples(p, **telling, **options) for p in prompts)
        return [reply for replies in await one_by_one(asked) for reply in replies]
    form, begin, forced = model.chat_tokens.tool_format, "", forced_tool(body)
    if forced is not None:
        if form.begin is None:
            raise ValueError("tool_choice: this run's tool_call_parser supports auto and none")
        begin = form.begin(forced)
    messages, tools = model.chat_tokens.in_known_roles(body["messages"]), body.get("tools")
    replies = await model.chat_samples(messages, tools, begin=begin, **telling, **options)
    wanted, parser = wants_tool_calls(body), _parser_of(model, body)
    one = body.get("parallel_tool_calls") is False
    if form.always or wanted:
        for reply in replies:
            decode = model.chat_tokens.decode
            record_tool_calls(
                reply.call, form, decode, begin, wanted=wanted, one=one, parser=parser
            )
    if parser is not None:
        for reply in replies:
            record_thinking(reply.call, parser, model.chat_tokens.decode)
    return replies


def _parser_of(model: Model, body: Mapping[str, Any]) -> ReasoningParser | None:
    """Return the parser of thinking; None also for a request that continues a given text."""
    goes_on = body["messages"][-1].get("role") == "assistant" or forced_tool(body) is not None
    return None if goes_on else model.chat_tokens.reasoning_parser


class _Chunks:
    def __init__(
        self, model: Model, body: Mapping[str, Any], chat: bool, stop: Sequence[str]
    ) -> None:
        self._chat = chat
        self._parser = partial(_parser_of, model, body)
        self._split: Callable[[], StreamedThinking] | None = None
        self._thoughts: dict[int, StreamedThinking] = {}
        self._tokens, self._decode = model.chat_tokens, model.chat_tokens.decode
        self._names = token_names(body, self._decode)
        self._gives_ids = bool(body.get("return_token_ids"))
        self._stops = [*stop]
        self._openings: Sequence[str] = ()
        self._thinks = self._waits = False
        form = model.chat_tokens.tool_format
        if chat and (form.always or wants_tool_calls(body)):
            self._openings = form.openings
            self._waits = not form.openings or forced_tool(body) is not None
        logprobs = body.get("logprobs")
        self._logprobs = bool(logprobs) if chat else logprobs is not None
        self._pieces: dict[int, StreamedText] = {}
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._ids: dict[int, list[int]] = {}
        """Of each sample, the tokens since its last chunk; so are the rows."""
        self._told: dict[int, int] = {}
        self.id = new_id("chatcmpl" if chat else "cmpl")
        kind = "chat.completion.chunk" if chat else "text_completion"
        made = {"id": self.id, "object": kind, "created": int(time.time())}
        self.base = {**made, "model": model.model_path}

    def begin(self, prompt: Sequence[int]) -> None:
        """Receive a prompt's ids before the first token: they may have begun to think."""
        parser = self._parser()
        self._thinks = begins_thinking(prompt, parser, self._decode)
        if parser is not None:
            self._split = partial(StreamedThinking, thinks=self._thinks)

    def add(
        self, sample: int, token: int, logprob: float, others: dict[int, float]
    ) -> dict[str, Any] | None:
        """Return the chunk that a token completes, if any."""
        self._rows.setdefault(sample, []).append(token_row(token, logprob, others, self._names))
        self._ids.setdefault(sample, []).append(token)
        piece = self._of(sample).add(token)
        thinking = self._thinking(sample)
        delta = {"content": piece} if thinking is None else thinking.add(piece)
        return self._chunk(sample, delta) if piece and delta else None

    def end(self, choice: Mapping[str, Any], reply: Reply) -> list[dict[str, Any]]:
        """Return the last chunks of a choice: the rest of its text, its tool calls, its end."""
        index, calls = choice["index"], None
        if self._chat:
            calls = choice["message"].get("tool_calls")
            whole = choice["message"]["content"] or ""
        else:
            whole = choice["text"]
        c = reply.call.completion
        known = self._told.get(index, 0) + len(self._rows.get(index, ()))
        rows = self._rows.setdefault(index, [])
        rows += [token_row(*one, self._names) for one in each_token(c)[known:]]
        self._ids.setdefault(index, []).extend(c.ids[known:])
        rest = self._of(index).rest(whole)
        chunks = []
        if (thinking := self._thinking(index)) is not None:
            rest = thinking.rest("content", whole)
            whole_thought = choice["message"].get("reasoning_content") or ""
            if thought := thinking.rest("reasoning_content", whole_thought):
                chunks.append(self._chunk(index, {"reasoning_content": thought}))
        if rest or (rows and self._logprobs) or index not in self._told:
            chunks.append(self._chunk(index, {"content": rest}))
        if calls:
            numbered = [{"index": n, **call} for n, call in enumerate(calls)]
            chunks.append(self._chunk(index, {"tool_calls": numbered}))
        end = self._chunk(index, {}, choice["finish_reason"])
        end["choices"][0] |= {"stop_reason": c.stop}
        if self._gives_ids:  # where a whole response has them
            place = end if self._chat else end["choices"][0]
            place["prompt_token_ids"] = prompt_ids(reply, self._tokens)
        return [*chunks, end]

    def _thinking(self, sample: int) -> StreamedThinking | None:
        """Return the splitter of a sample; None if no parser splits the reply."""
        if self._split is not None and sample not in self._thoughts:
            self._thoughts[sample] = self._split()
        return self._thoughts.get(sample)

    def _of(self, sample: int) -> StreamedText:
        shown = partial(self._decode, skip_special=True)
        if sample not in self._pieces:
            how = {"thinks": self._thinks and bool(self._openings), "waits": self._waits}
            self._pieces[sample] = StreamedText(shown, self._stops, self._openings, **how)
        return self._pieces[sample]

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        rows, ids = self._rows.pop(index, []), self._ids.pop(index, [])
        first = index not in self._told
        offset = len(self._of(index).shown) - len(delta.get("content", ""))
        self._told[index] = self._told.get(index, 0) + len(rows)
        logprobs: dict[str, Any] | None = None
        if self._logprobs and rows:
            logprobs = (
                {"content": rows, "refusal": None}
                if self._chat
                else text_logprobs(rows, max(offset, 0))
            )
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": logprobs}
        if self._gives_ids:
            choice["token_ids"] = ids
        if self._chat:
            choice["delta"] = {"role": "assistant", **delta} if first else delta
        else:
            choice["text"] = delta.get("content", "")
        return {**self.base, "choices": [choice]}
