"""Do a server and a run hold no more after hours than after minutes?

`python benchmarks/soak.py --minutes 20` starts `trireme rollout` and `trireme run` on tiny models.
It asks the server all that the fuzz and the border's tests know and more that is good, and leaves
in the middle of some; the run takes one step after the other, with evaluations and checkpoints.
Each half minute it prints what each process holds: memory, handles, threads. After the warm-up (a
third of the time; the server's at most until 4,096 sessions are there, which are all that are kept)
they have to be flat: otherwise, or where a good request is not answered or the run ends, the exit
code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's own path is its folder

from tests.e2e.job import command as run_command
from tests.e2e.job import small_config
from tests.ext.http import bad, fuzz
from tests.ext.http.made import command
from tests.tiny import make_model

CLIENTS, SAMPLE_S, PATIENCE_S = 6, 30.0, 600.0
MIX = {"good": 4, "same": 1, "session": 3, "bad": 3, "raw": 1, "gone": 2}
LEAST_SESSIONS = 4096
GROWTH = {"rss_mb": 0.05, "handles": 0.25, "threads": 0.25}
"""How much more than after the warm-up the end may hold, as a share; and a little beside it."""
SLACK = {"rss_mb": 15.0, "handles": 8.0, "threads": 4.0}


class Soak:
    """Clients of one server, and what they saw."""

    def __init__(self, url: str, until: float) -> None:
        self.url, self.until = url, until
        self.statuses: Counter[str] = Counter()
        self.bad = [*bad.agents_requests(), *bad.trainers_requests()]
        self.good = [(path, body) for path, bodies in fuzz.BODIES.items() for body in bodies]
        self.expected: list[int] | None = None

    async def client(self, number: int) -> None:
        """One client: a request after the other until the time is up."""
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as http:
            while time.monotonic() < self.until:
                [kind] = rng.choices(list(MIX), list(MIX.values()))
                await getattr(self, f"_{kind}")(http, rng)

    async def _good(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        path, body = rng.choice(self.good)
        answer = await http.post(path, json=body)
        self._count("good", answer)

    async def _same(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        answer = await http.post("/v1/completions", json=bad.GOOD)
        self._count("same", answer)
        ids = answer.json()["choices"][0]["token_ids"]
        self.expected = self.expected or ids
        if ids != self.expected:
            raise RuntimeError(f"the same request gives {ids} now, and {self.expected} before")

    async def _session(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """A conversation of three turns, rewarded and handed out."""
        name, messages = f"s{rng.random()}", [*bad.HI]
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 6}
            answer = await http.post(f"/s/{name}/v1/chat/completions", json=body)
            self._count("session", answer)
            message = answer.json()["choices"][0]["message"]
            messages = [*messages, message, {"role": "user", "content": "go on"}]
        await http.post("/feedback", json={"reward": 1.0, "session_id": name})
        self._count("session", await http.post("/commit", json={"session_id": name}))

    async def _bad(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        path, body = rng.choice(self.bad)
        self._count("bad", await http.post(path, json=body))

    async def _raw(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        path, body = rng.choice(bad.raw_requests())
        kind = {"content-type": rng.choice(["application/json", "text/plain"])}
        self._count("bad", await http.post(path, content=body, headers=kind))

    async def _gone(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Leave in the body, while the answer is made, or in the middle of a stream."""
        self.statuses["gone"] += 1
        if rng.random() < 0.3:
            address = httpx.URL(self.url)
            _, writer = await asyncio.open_connection(address.host, address.port)
            head = "POST /infer/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{"
            writer.write(head.encode())
            await writer.drain()
            writer.transport.abort()
            return
        body = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "n": rng.choice([1, 4])}
        body |= {"stream": rng.random() < 0.5}
        with suppress(httpx.TimeoutException):
            await http.post("/v1/completions", json=body, timeout=rng.choice([0.01, 0.1, 0.3]))

    def _count(self, kind: str, answer: httpx.Response) -> None:
        self.statuses[f"{kind} {answer.status_code // 100}xx"] += 1
        status, path = answer.status_code, answer.request.url.path
        if status >= 500 or (kind in ("same", "session") and status != 200):
            raise RuntimeError(f"{path}: {status} {answer.text[:300]}")


async def sample(process: psutil.Process, soak: Soak, rows: list[dict[str, float]]) -> None:
    """What the server holds, each half minute."""
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=soak.url, timeout=PATIENCE_S) as http:
        while time.monotonic() < soak.until:
            await asyncio.sleep(min(SAMPLE_S, max(soak.until - time.monotonic() - 1, 0.1)))
            figures = (await http.get("/metrics")).text
            sessions = next(
                float(line.split()[1])
                for line in figures.splitlines()
                if line.startswith("trireme_sessions_open ")
            )
            requests = float(sum(soak.statuses.values()))
            row = {"requests": requests, "sessions": sessions, **held(process, start)}
            rows.append(row)
            show("server", row)


def held(process: psutil.Process, start: float) -> dict[str, float]:
    """What a process holds, and since when it is looked at."""
    return {
        "minute": (time.monotonic() - start) / 60,
        "rss_mb": process.memory_info().rss / 2**20,
        "handles": float(process.num_fds()),
        "threads": float(process.num_threads()),
    }


def show(what: str, row: dict[str, float]) -> None:
    """One line."""
    figures = "  ".join(f"{name} {value:8.1f}" for name, value in row.items())
    print(f"{what:6}  {figures}", flush=True)


async def watch_run(minutes: float, folder: Path) -> list[str]:
    """A run that goes on and on, until it is stopped; what is not as it should be."""
    config = small_config(folder)
    config["buffer"] |= {"total_steps": 10**6, "total_epochs": 10**6}
    config["trainer"] = {"save_interval": 50, "max_checkpoints_to_keep": 2}
    config["explorer"] |= {"eval_interval": 100}
    log = folder / "run.txt"
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *run_command(folder, config), stdout=output, stderr=subprocess.STDOUT
        )
    rows, start = [], time.monotonic()
    try:
        while (left := start + 60 * minutes - time.monotonic()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left))
            if process.returncode is not None:
                return [f"the run ended with {process.returncode}: {log.read_text()[-500:]}"]
            rows.append(held(psutil.Process(process.pid), start))
            show("run", rows[-1])
        process.terminate()
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    print(f"run: {log.read_text().strip().splitlines()[-1]}")
    stopped = [] if code == 128 + signal.SIGTERM else [f"SIGTERM ended the run with {code}"]
    return [*stopped, *grown("run", rows[len(rows) // 3 :])]


async def watch_server(url: str, process: psutil.Process, minutes: float) -> list[str]:
    """What is not as it should be."""
    soak = Soak(url, time.monotonic() + 60 * minutes)
    rows: list[dict[str, float]] = []
    await asyncio.gather(sample(process, soak, rows), *map(soak.client, range(CLIENTS)))
    print(json.dumps(dict(sorted(soak.statuses.items()))))
    warm = rows[len(rows) // 3 :]
    full = [row for row in warm if row["sessions"] >= LEAST_SESSIONS * 7 / 8]
    warm = full or warm
    return grown("server", warm)


def grown(what: str, warm: list[dict[str, float]]) -> list[str]:
    """What a process holds more of at the end than after the warm-up."""
    third = max(len(warm) // 3, 1)
    wrong = []
    for name, share in GROWTH.items():
        first = sum(row[name] for row in warm[:third]) / third
        last = sum(row[name] for row in warm[-third:]) / third
        print(f"{what} {name}: {first:.1f} after the warm-up, {last:.1f} at the end")
        if last > first * (1 + share) + SLACK[name]:
            wrong.append(f"{what}: {name} grew from {first:.1f} to {last:.1f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes: Any = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        with command(Path(folder), model, "--max-model-len", "512") as (process, url):
            wrong = asyncio.run(both(url, psutil.Process(process.pid), minutes, Path(folder)))
    print("; ".join(wrong) or "flat")
    return 1 if wrong else 0


async def both(url: str, server: psutil.Process, minutes: float, folder: Path) -> list[str]:
    """The server and the run side by side."""
    found = await asyncio.gather(
        watch_server(url, server, minutes), watch_run(minutes, folder / "run")
    )
    return [*found[0], *found[1]]


if __name__ == "__main__":
    sys.exit(main())
