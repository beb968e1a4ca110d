"""An application with an agent in it: solves word problems, judges its own replies, and says so.

It knows the openai package, an address, and two POST requests. Eight runs of a problem are a group:
what counts for learning is how much better a run was than the other seven.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

RUNS = 8


def result_of(text: str) -> str | None:
    """The number behind the last `####`."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return found[-1] if found else None


class Application:
    """A client of one server."""

    def __init__(self, url: str, key: str, at_once: int) -> None:
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=600)
        self.http = httpx.AsyncClient(
            base_url=url, timeout=600, headers={"authorization": f"Bearer {key}"}
        )
        self.slots = asyncio.Semaphore(at_once)

    async def solve(self, problem: dict[str, str], session: str, temperature: float) -> float:
        """One run in a session of its own: 1 where its result is right, else 0."""
        async with self.slots:
            reply = await self.client.chat.completions.create(
                extra_headers={"x-session-id": session},
                model="any",
                messages=[{"role": "user", "content": problem["question"]}],
                temperature=temperature,
            )
        said = result_of(reply.choices[0].message.content or "")
        return float(said == result_of(problem["answer"]))

    async def learn(self, problem: dict[str, str], number: int) -> float:
        """Eight runs, their rewards, and the commit: the server has them when this returns."""

        async def run(index: int) -> float:
            session = f"problem-{number}-run-{index}"
            reward = await self.solve(problem, session, 1.0)
            body = {"reward": reward, "session_id": session, "run_id": index}
            await self.post("feedback", {**body, "task_id": f"problem-{number}"})
            return reward

        rewards = await asyncio.gather(*map(run, range(RUNS)))
        await self.post("commit", {"task_id": f"problem-{number}"})
        return statistics.fmean(rewards)

    async def measure(self, problems: list[dict[str, str]], name: str) -> str:
        """How many problems are solved at temperature 0; nothing of it is trained."""
        runs = [self.solve(p, f"{name}-{i}", 0.0) for i, p in enumerate(problems)]
        share = statistics.fmean(await asyncio.gather(*runs))
        return f"{share:.1%} of {len(problems)} held-out problems (weights {await self.version()})"

    async def version(self) -> str:
        text = (await self.http.get("/metrics")).text
        found = re.search(r"^trireme_weight_version (\d+)", text, re.MULTILINE)
        return found[1] if found else "unknown"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self.http.post(path, json=body)
        response.raise_for_status()
        return response.json()


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def main(options: argparse.Namespace) -> None:
    url = options.url_file.read_text()
    application = Application(url, options.key, options.at_once)
    train, test = rows(options.problems / "train.jsonl"), rows(options.problems / "test.jsonl")
    chosen = list(
        itertools.islice(itertools.cycle(train), options.first, options.first + options.count)
    )
    print("before:", await application.measure(test, "before"), flush=True)
    queue = iter(enumerate(chosen, options.first))
    solved: list[float] = []

    async def work() -> None:
        for number, problem in queue:
            solved.append(await application.learn(problem, number))
            if (done := len(solved)) % 160 == 0:
                share = f"{statistics.fmean(solved[-160:]):.1%} solved"
                version = await application.version()
                print(f"{done} problems: {share} (weights {version})", flush=True)

    await asyncio.gather(*(work() for _ in range(options.at_once // RUNS)))
    if chosen:
        print("after:", await application.measure(test, "after"), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url_file", type=Path, help="explorer_server_url.txt in the job's folder")
    parser.add_argument("problems", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--count", type=int, default=1280, help="problems to learn from")
    parser.add_argument("--at-once", type=int, default=64, help="runs under way at once")
    parser.add_argument("--key", default="none", help="explorer.rollout_model.api_key, if any")
    asyncio.run(main(parser.parse_args()))
