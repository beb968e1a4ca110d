"""An OpenAI API as an engine, for evaluation: it takes conversations, and its token ids are made
up.

Replies are encoded by the run's tokenizer, so that workflows and rewards work as usual; none of it
can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trireme.engines.engine import Completion, EngineTraits, OnToken, Sampling
from trireme.engines.scripted import ScriptedEngine
from trireme.ext.external_model.asker import choices_of
from trireme.log import get_logger
from trireme.text import as_json, joined

if TYPE_CHECKING:
    import openai

logger = get_logger("api")

CONNECT_S = 10.0
"""Seconds that a connection may take, so that a dead address ends the evaluation."""
OF_THE_REQUEST = (400, 413, 422)
"""Statuses that refuse one conversation; any other one is the API's own failure."""
END = "<|end|>"
_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}" + END + "\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The template that a record shows for a conversation sent to an API as messages."""


class Asked(NamedTuple):
    """A conversation on its way to the API."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None
    tool_choice: Any = None
    """In the API's form, if a tool must be called."""


ASKED: ContextVar[Asked | None] = ContextVar("ASKED", default=None)
"""The request of the current call; a Model's prompts are ids, which an API does not accept."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer whose tokens are bytes: it records text without a model's files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    made.chat_template = _TEMPLATE
    return made


class ApiEngine(ScriptedEngine):
    """An engine that calls an API. It has no weights, and reports one constant log-probability."""

    traits = EngineTraits(model="messages")

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`model` is the model name in requests; `timeout` is per request, in seconds."""
        super().__init__((), tokenizer=tokenizer, max_model_len=max_model_len)
        import openai

        self._model = model
        self._base_url = base_url
        self._failed: str | None = None
        self._told: set[str] = set()
        self._limit = "max_tokens"
        self._timeout, self._connect = timeout, min(CONNECT_S, timeout / 4)
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key or "EMPTY",
            timeout=openai.Timeout(timeout, connect=self._connect),
        )

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: tuple[Any, ...] = (),
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Send the messages of the current call to the API. Raises ValueError if the prompt is not
        a conversation.
        """
        self._check()
        asked = ASKED.get()
        if asked is None:
            raise ValueError(
                f"the API of {self._model} takes conversations: expected model.chat, not generate"
            )
        sent = ("max_tokens", "n", "temperature", "top_p", "stop")
        for name in ("top_k", "min_p", "repetition_penalty", "min_tokens"):
            value, default = getattr(sampling, name), getattr(Sampling, name)
            if value != default and name not in self._told and (name, value) != ("top_k", 0):
                self._told.add(name)
                logger.warning(
                    "%s does not receive %s (%s), which OpenAI's API does not have: it receives %s",
                    self._model, name, value, ", ".join(sent),
                )  # fmt: skip
        options: dict[str, Any] = {"tools": list(asked.tools)} if asked.tools else {}
        if asked.tool_choice is not None:
            options["tool_choice"] = asked.tool_choice
        if sampling.stop:
            options["stop"] = list(sampling.stop)
        answer = await self._ask(
            messages=list(asked.messages),
            n=sampling.n,
            **self._limits(sampling),
            **options,
        )
        made = []
        for choice in choices_of(answer, f"{self._model} ({self._base_url})"):
            calls = [call.function for call in choice.message.tool_calls or ()]
            if asked.tool_choice is not None and not calls and "tool_choice" not in self._told:
                self._told.add("tool_choice")
                logger.warning(
                    "%s answered without a tool call, although tool_choice required one: "
                    "programs receive the text, as from the API itself", self._model,
                )  # fmt: skip
            text = joined("".join([choice.message.content or "", *map(_call_as_text, calls)]))
            encoded = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            assert isinstance(encoded, list)
            cut = choice.finish_reason == "length"
            completion = self._completion(encoded, "length" if cut else "stop")
            completion.text = text
            completion.reported_tokens = _reported_tokens(answer, sampling.n)
            made.append(completion)
        return made

    async def _ask(self, **options: Any) -> Any:
        """Return the API's answer. If the API fails after the client's retries, so does the engine:
        rollouts without an answer say nothing about the model.
        """
        import openai

        create = self._client.chat.completions.create
        try:
            try:
                return await create(model=self._model, **options)
            except openai.BadRequestError as error:
                most = options.get("max_tokens")
                if most is None or not _refuses_max_tokens(error):
                    raise
                dropped = ("max_tokens", *(k for k in ("temperature", "top_p") if options[k] == 1))
                other = {k: v for k, v in options.items() if k not in dropped}
                answer = await create(model=self._model, max_completion_tokens=most, **other)
                self._limit = "max_completion_tokens"
                return answer
        except openai.APIConnectionError as error:
            self._failed = f"{self._base_url}: {self._what_failed(error)}"
            raise
        except openai.APIStatusError as error:
            if error.status_code not in OF_THE_REQUEST:
                self._failed = f"{self._base_url}: {error}"
            raise

    def _what_failed(self, error: Exception) -> str:
        import httpx
        import openai

        if not isinstance(error, openai.APITimeoutError):
            return f"{error} {error.__cause__ or ''}".strip()
        if isinstance(error.__cause__, httpx.ConnectTimeout):
            return f"no connection within {self._connect:g} s"
        return f"no answer within {self._timeout:g} s (explorer.max_timeout)"

    def _limits(self, sampling: Sampling) -> dict[str, Any]:
        """Return the length under the API's name for it, temperature and top_p. A reasoning model
        gets the last two only if they are not 1, its own default.
        """
        limits: dict[str, Any] = {self._limit: sampling.max_tokens}
        for name in ("temperature", "top_p"):
            value = getattr(sampling, name)
            if value != 1 or self._limit == "max_tokens":
                limits[name] = value
        return limits

    def _check(self) -> None:
        super()._check()
        if self._failed is not None:
            raise RuntimeError(self._failed)

    async def close(self) -> None:
        """Fail all later calls, and close the HTTP client."""
        await super().close()
        await self._client.close()


def _refuses_max_tokens(error: openai.BadRequestError) -> bool:
    """Return True if an API does not know the parameter: a prompt that is too long is refused by
    its name as well.
    """
    said = str(error).lower()
    unsupported = "not supported" in said or "unsupported" in f"{said} {error.code}".lower()
    return unsupported and ("max_tokens" in said or error.param == "max_tokens")


def _call_as_text(function: Any) -> str:
    """Write a tool call in the format hermes, which an ApiModel reads."""
    name, arguments = as_json(function.name), function.arguments or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _reported_tokens(answer: Any, samples: int) -> float:
    """Return the token count that an answer reports; NaN if it reports none, or for several
    samples.
    """
    told = getattr(answer.usage, "completion_tokens", None)
    return float(told) if samples == 1 and isinstance(told, int) else math.nan
