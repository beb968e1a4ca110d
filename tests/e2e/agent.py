"""An agent as an application has it: the openai package, two POST requests, and no trireme.

`python agent.py URL_FILE FIRST LAST`: rounds FIRST to LAST of 4 tasks x 4 runs. Each round waits
for the weights that the round before has trained.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.limits import HANG_S

TASKS = RUNS = 4


def until(ready: Any, wanted: str) -> Any:
    """What `ready` returns, once that is something."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"waited for {wanted}")


def serving(url_file: Path) -> str | None:
    """The server's URL, once it answers."""
    if not url_file.exists():
        return None
    url = url_file.read_text()
    try:
        return url if httpx.get(f"{url}/health").is_success else None
    except httpx.TransportError:
        return None


def version(url: str) -> int:
    found = re.search(r"^trireme_weight_version (\d+)$", httpx.get(f"{url}/metrics").text, re.M)
    assert found
    return int(found[1])


async def episode(url: str, http: httpx.AsyncClient, name: str, task: str, run: int) -> None:
    """Two turns in a session of its own, and what they were worth."""
    client = AsyncOpenAI(base_url=f"{url}/s/{name}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"How many are {task}?"}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
    reward = (sum(map(ord, text)) % 17) / 16
    body = {"reward": reward, "session_id": name, "task_id": task, "run_id": run}
    (await http.post(f"{url}/feedback", json=body)).raise_for_status()


async def play_round(url: str, number: int, tasks: int) -> None:
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        await asyncio.gather(
            *(
                episode(url, http, f"{number}-{task}-{run}", f"{number} and {task}", run)
                for task in range(tasks)
                for run in range(RUNS)
            )
        )
        for expected in (tasks * RUNS, 0):
            answer = (await http.post(f"{url}/commit", json={})).json()
            assert answer == {"committed": expected}, answer
        again = await http.post(f"{url}/commit", json={"session_id": f"{number}-0-0"})
        assert again.json() == {"committed": 0}, again.text


if __name__ == "__main__":
    first, last = int(sys.argv[2]), int(sys.argv[3])
    url = until(lambda: serving(Path(sys.argv[1])), "the server")
    for number in range(first, last + 1):
        until(lambda at=number: version(url) >= at - 1, f"the weights of round {number - 1}")
        asyncio.run(play_round(url, number, TASKS if number < 4 else TASKS // 2))
