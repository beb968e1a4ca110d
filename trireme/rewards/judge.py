"""Judge: a language model behind any OpenAI-compatible endpoint says how good a reply is."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from trireme.rewards.orm import ORM

PROMPT = """Judge the last reply of this conversation. {reference}
Answer with one number from 0 (useless) to 1 (perfect), and nothing else.

{dialogue}"""
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


class ModelJudge(ORM):
    """A number from 0 to 1 for each dialogue. A judge that says none gives None, and is counted
    by its absence from the metric.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "EMPTY",
        prompt: str = PROMPT,
        concurrency: int = 16,
        timeout: float = 120.0,
        max_retries: int = 3,
    ) -> None:
        """`prompt` may use {dialogue} and {reference}."""
        import openai

        self._client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, timeout=timeout, max_retries=max_retries
        )
        self._model = model
        self._prompt = prompt
        self._room = asyncio.Semaphore(concurrency)

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """See ORM."""
        truths = kwargs.get("solution") or [None] * len(completions)
        asked = zip(kwargs["messages"], truths, strict=True)
        return list(await asyncio.gather(*(self._ask(m, truth) for m, truth in asked)))

    async def _ask(self, messages: list[dict[str, Any]], truth: Any) -> float | None:
        dialogue = "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)
        reference = "" if truth is None else f"The reference answer is: {truth}"
        text = self._prompt.format(dialogue=dialogue, reference=reference)
        async with self._room:
            reply = await self._client.chat.completions.create(
                model=self._model, messages=[{"role": "user", "content": text}], temperature=0
            )
        found = _NUMBER.search(reply.choices[0].message.content or "")
        return min(float(found[0]), 1.0) if found else None
