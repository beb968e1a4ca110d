"""An agent of OpenAI's SDK that plays a game of three guesses: higher, lower, right.

It is written as for any server of this API, and knows nothing of how its model learns. The numbers
that are still possible are seven at first, so that whoever halves them is never wrong.
"""

from __future__ import annotations

import re

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from trireme import Experience, Model, Task, workflow

GUESSES, NUMBERS = 3, 7


def answer(number: int, secret: int) -> str:
    """What a wrong guess is answered with."""
    return f"My number is {'higher' if secret > number else 'lower'} than {number}. Guess again."


async def play(client: AsyncOpenAI, question: str, secret: int) -> tuple[int, bool]:
    """Play a game; returns the guesses made, and whether the last one was right."""
    messages = [{"role": "user", "content": question}]
    for guesses in range(1, GUESSES + 1):
        reply = await client.chat.completions.create(model="any", messages=messages)  # pyright: ignore
        said = reply.choices[0].message.content or ""
        number = re.fullmatch(r"\s*(\d+)\.?\s*", said)
        if number is None or int(number[1]) == secret:
            return guesses, number is not None
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": answer(int(number[1]), secret)},
        ]
    return GUESSES, False


@workflow("guess")
async def guess(task: Task, model: Model) -> list[Experience]:
    """A reward of 1 for the right number within three guesses."""
    http = DefaultAsyncHttpxClient(verify=False)  # no certificates to load for an http address
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=http)
    async with client:
        guesses, right = await play(client, task.prompt, int(task.truth))
    return model.experiences(reward=float(right), guesses=guesses)
