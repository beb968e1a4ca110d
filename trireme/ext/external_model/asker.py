"""Asker: one question to a judging model, with retries, a time-out, and a cache of its answers.

The model is one of `explorer.auxiliary_models`, or any behind an OpenAI-compatible endpoint. Equal
questions are asked once, if they are concurrent, or as long as the cache lasts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from trireme.files import write_json
from trireme.log import get_logger
from trireme.task import Task
from trireme.text import all_joined

logger = get_logger("rewards")

Messages = list[dict[str, Any]]
_REMEMBERED = 20_000
"""Most answers in a cache in memory."""
_HELLO_S = 10.0
_REFUSED = (400, 404, 413, 415, 422)
"""Statuses of APIs for a question with pictures that a model cannot be shown."""
TRUTH = """Is the answer right? It is if it says all that the question asks for as the reference \
does; other words and further facts do not matter. Reply with true or false alone.

Question: {question}
Reference: {truth}
Answer: {answer}"""


class Asker:
    """Asks a judging model, on one event loop."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        model: str | None = None,
        api_key: str = "EMPTY",
        auxiliary: int = 0,
        temperature: float = 0.0,
        max_tokens: Annotated[int, Ge(1)] | None = None,
        concurrency: Annotated[int, Ge(1)] = 16,
        timeout: Annotated[float, Gt(0)] = 120.0,
        max_retries: Annotated[int, Ge(0)] = 3,
        cache: str | None = "memory",
    ) -> None:
        """Ask an endpoint, by `base_url` and `model`, else the auxiliary model of that index.

        `timeout` is of one attempt, in seconds. `cache`: memory, a folder, or None for none. Raises
        ValueError if only one of `base_url` and `model` is given.
        """
        if (base_url is None) != (model is None):
            raise ValueError("a judge by base_url needs the name of its model too, and neither "
                             "where it is one of explorer.auxiliary_models")  # fmt: skip
        self._url, self._model, self._api_key = base_url, model, api_key
        self._auxiliary = auxiliary
        self._options: dict[str, Any] = {"temperature": temperature}
        if max_tokens is not None:
            self._options["max_tokens"] = max_tokens
        self._timeout, self._retries = timeout, max_retries
        self._room = asyncio.Semaphore(concurrency)
        self._folder = Path(cache) if cache not in (None, "memory") else None
        self._remembers = cache == "memory"
        self._known: OrderedDict[str, str] = OrderedDict()
        self._asked: dict[str, asyncio.Task[str]] = {}
        self._client: Any = None

    @property
    def auxiliary(self) -> int | None:
        """The index in `explorer.auxiliary_models` of the model to ask; None: a separate
        endpoint.
        """
        return self._auxiliary if self._url is None else None

    def examine(self) -> None:
        """Raise ValueError if nothing answers at the endpoint's address."""
        if self._url is not None:
            refuse_silent(f"the judge {self._model}", self._url)

    def sees(self, models: Sequence[Any]) -> bool:
        """Return False if the model is known to read text alone: one of this run without vision."""
        if self._url is not None or self._auxiliary >= len(models):
            return True
        asked = models[self._auxiliary]
        chat = getattr(asked, "chat_tokens", None)  # an Endpoint has none
        return chat is None or (chat.reader is not None and asked.engine.traits.sees)

    async def ask(self, messages: Messages, models: Sequence[Any] = ()) -> str:
        """Return the answer, without the model's thinking.

        Raises RuntimeError, naming the model, if it gives none.
        """
        client, messages = self._client_of(models), all_joined(messages)
        text = json.dumps([self._url, client.model_path, messages, self._options], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        if (known := self._recall(key)) is not None:
            return known
        joined = key in self._asked
        try:
            answer = await self._together(key, client, messages)
        except RuntimeError:
            if not joined or self._url is not None:
                raise
            # whoever asked first may have failed for a reason of its own: its rollout was given
            # up, and with it its client of an auxiliary model
            answer = await self._together(key, client, messages)
        self._remember(key, answer)
        return answer

    async def _together(self, key: str, client: Any, messages: Messages) -> str:
        """Return the answer to a question that others may ask at the same time."""
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._answer(client, messages))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key, None))
        # another caller that waits for the same answer must not lose it when this one is cancelled
        return await asyncio.shield(self._asked[key])

    async def _answer(self, client: Any, messages: Messages) -> str:
        where = f"the judge {client.model_path}" + (f" at {self._url}" if self._url else "")
        most = (self._timeout + 10) * (self._retries + 1)  # the client's own pauses included
        request = client.with_options(timeout=self._timeout, max_retries=self._retries)
        async with self._room:
            call = request.chat.completions.create(
                model=client.model_path, messages=messages, **self._options
            )
            try:
                reply = await asyncio.wait_for(call, most)
            except TimeoutError:
                raise RuntimeError(f"{where} gave no answer in {most:g} s") from None
            except Exception as error:  # a client has many kinds; the caller needs the model's name
                hint = ""
                if getattr(error, "status_code", 0) in _REFUSED and not _text_alone(messages):
                    hint = "; it was shown pictures: if it takes text alone, set pictures: false"
                raise RuntimeError(f"{where} gave no answer: {error}{hint}") from error
        text = choices_of(reply, where)[0].message.content or ""
        if text.lstrip().startswith("<think>") and "</think>" not in text:
            return ""  # it was cut off while it thought
        return text.rpartition("</think>")[2].strip()

    def _client_of(self, models: Sequence[Any]) -> Any:
        if self._url is not None:
            if self._client is None:
                import openai

                self._client = openai.AsyncOpenAI(base_url=self._url, api_key=self._api_key)
                self._client.model_path = self._model
            return self._client
        if self._auxiliary >= len(models):
            raise ValueError(
                f"a judge asks auxiliary model {self._auxiliary}, and explorer.auxiliary_models "
                f"has {len(models)}: add it, or give the judge base_url and model"
            )
        return models[self._auxiliary].get_openai_async_client()

    def _recall(self, key: str) -> str | None:
        if self._folder is None:
            return self._known.get(key)
        path = self._place(key)
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["answer"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            # damaged: the question is asked again, and the answer takes its place
            logger.warning("the judge's cache: %s holds no answer (%s): asked again", path, error)
            return None

    def _remember(self, key: str, answer: str) -> None:
        if self._folder is not None:
            path = self._place(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"answer": answer})
        elif self._remembers:
            self._known[key] = answer
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def _place(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"


def _text_alone(messages: Messages) -> bool:
    return all(isinstance(message["content"], str) for message in messages)


async def judged_right(task: Task, answer: str, models: Sequence[Any]) -> bool:
    """Return True if the first of the models accepts an answer as the task's truth in other words.

    Raises ValueError for a reply that is neither yes nor no, and for a task without a truth.
    """
    refuse_no_truth(task)
    text = TRUTH.format(question=task.prompt, truth=task.truth, answer=answer)
    said = (await Asker().ask([{"role": "user", "content": text}], models)).strip().lower()
    if said[:4] == "true":
        return True
    if said[:5] == "false":
        return False
    raise ValueError(f"the judge said {said!r:.80}: expected true or false")


def refuse_no_truth(task: Task) -> None:
    """Raise ValueError for a task without a truth: a judge would reject every answer."""
    if task.truth is None:
        raise ValueError(
            f"a judge compares the answer with the row's column '{task.truth_key}' "
            "(format.response_key), which is None: expected the right answer"
        )


def refuse_silent(who: str, url: str) -> None:
    """Raise ValueError, naming `who`, if nothing answers at the address."""
    import httpx

    try:  # any answer will do: not every endpoint lists its models
        httpx.get(f"{url.rstrip('/')}/models", timeout=_HELLO_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"{who} at {url} does not answer ({error}): expected an OpenAI-compatible endpoint "
            "there"
        ) from error


def choices_of(answer: Any, whose: str) -> list[Any]:
    """Return the choices of an API's answer. Raises RuntimeError for an answer without any: some
    APIs report an error so, with status 200.
    """
    if not answer.choices:
        error = getattr(answer, "error", None)
        why = error if isinstance(error, str) else (error or {}).get("message")
        raise RuntimeError(f"{whose} gave no reply: {why or 'its answer has no choices'}")
    return answer.choices
