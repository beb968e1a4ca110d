"""Page: how long the page takes over many rollouts, in a browser and per question.

    python benchmarks/page.py [--rollouts 100000]

Makes a run's folder with that many rollouts, serves it, and prints a table: the first paint and the
first answer in headless Chromium (where playwright and chromium are installed), and what filters
and searches take at the server. Times are the median of `--repeats`; the first read is timed once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from trireme.ext.page.rollouts import Filter, RolloutIndex, Selection
from trireme.ext.page.serve import PageOptions, serve
from trireme.monitor.monitor import JsonLinesMonitor

PER_STEP = 512
RARE = "axolotl"
"""In one reply of all, the oldest."""
WORDS = ["the", "model", "has", "seven", "eggs", "and", "three", "stamps", "then", "lost", "five"]


def make_folder(folder: Path, count: int) -> None:
    """A run with `count` rollouts of about 150 words, groups of 8."""
    (folder / "buffer").mkdir(parents=True)
    draw = random.Random(0)
    monitor_lines = []
    with (folder / "buffer/experience_buffer.jsonl").open("w") as file:
        for n in range(count):
            step, place = 1 + n // PER_STEP, n % PER_STEP
            line = {
                "eid": f"{step}/{place // 8}/{place % 8}/0", "step": step,
                "reward": float(draw.random() < 0.5), "prompt": " ".join(draw.choices(WORDS, k=30)),
                "response": " ".join(draw.choices(WORDS, k=120)), "prompt_length": 40,
                "response_length": draw.randrange(20, 400), "trained_tokens": 100,
                "model_version": step - 1, "stop_reason": "stop", "truncate_status": None,
                "metrics": {"accuracy": 1.0},
                "info": {"task_index": {"index": draw.randrange(5000), "taskset_id": 0}},
            }  # fmt: skip
            if not n:
                line["response"] += f" {RARE}"
            file.write(json.dumps(line) + "\n")
    for step in range(1, 2 + count // PER_STEP):
        metrics = {f"rollout/x{i}/mean": draw.random() for i in range(60)}
        metrics |= {"rollout/reward/mean": draw.random(), "rollout/reward/std": 0.5}
        row = {"time": step, "part": "explorer", "step": step, "metrics": metrics}
        monitor_lines.append(json.dumps(row))
    JsonLinesMonitor(folder / "monitor").path.write_text("\n".join(monitor_lines) + "\n")


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of a call, the median of some."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def in_browser(folder: Path, repeats: int) -> dict[str, float]:
    """First paint, a filter from click to list, searches from key to mark; empty without a browser.

    A server remembers what it has searched: no text is typed twice.
    """
    try:
        api: Any = import_module("playwright.sync_api")
    except ImportError:
        return {}
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return {}
    ready: list[str] = []
    options = PageOptions(folder, port=0)
    threading.Thread(target=serve, args=(options, ready.append), daemon=True).start()
    while not ready:
        time.sleep(0.01)
    for thread in threading.enumerate():
        if thread.name == "view-index":  # reads the run, then imports torch: seconds, once
            thread.join()
    paints, filters, searches, rare = [], [], [], []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for repeat in range(repeats):
            page = browser.new_context().new_page()
            page.goto(ready[0])
            page.wait_for_selector("main[data-ready]")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(page.evaluate(paint))
            page.evaluate("location.hash = '#/rollouts'")
            page.wait_for_selector(".reader h2")
            page.evaluate("document.querySelector('.list').dataset.old = 'yes'")
            began = time.perf_counter()
            page.select_option("select[name=order]", "longest")
            # a wait for a selector looks less and less often, up to every 500 ms
            page.wait_for_function("() => document.querySelector('.list:not([data-old]) .item')")
            filters.append(1000 * (time.perf_counter() - began))
            page.wait_for_selector(".reader h2")
            searches.append(typed(page, f"{WORDS[repeat]} {WORDS[-1]}"))
            rare.append(typed(page, RARE[repeat % 5 :]))
        browser.close()
    return {
        "browser: first contentful paint": statistics.median(paints),
        "browser: new order, click to list": statistics.median(filters),
        "browser: two words in most replies, typed to marked": statistics.median(searches),
        "browser: a word in one reply, typed to marked": statistics.median(rare),
    }


def first_of(places: Selection | None) -> Selection:
    """What a list shows first of them."""
    assert places is not None, "a text that most rollouts have is found among the first"
    return places[:100]


def typed(page: Any, text: str) -> float:
    """Milliseconds from a text in the search box to its mark in the rollout that is shown."""
    began = time.perf_counter()
    page.fill("input[name=text]", text)
    page.wait_for_function(
        "text => document.querySelector('.reader mark')?.textContent === text", arg=text
    )
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        make_folder(folder, given.rollouts)
        size = (folder / "buffer/experience_buffer.jsonl").stat().st_size
        rollouts = RolloutIndex(folder)
        rows = {f"index of {given.rollouts:,} rollouts ({size / 1e6:.0f} MB), once": median_ms(
            rollouts.refresh, 1)}  # fmt: skip
        fresh = (f" {n}" for n in itertools.count())  # what has been searched is remembered
        pairs = (" ".join(pair) for pair in itertools.product(WORDS, WORDS))
        for name, places in (
            ("filter by reward, newest", lambda: rollouts.select(Filter(least=1.0))),
            ("filter by step and task", lambda: rollouts.select(Filter(step=3, task="0:17"))),
            ("best of all", lambda: rollouts.select(Filter(order="best"))),
            ("random of all", lambda: rollouts.select(Filter(order="random"))),
            ("two words in most rollouts, the first 100",
             lambda: rollouts.leading(Filter(text=next(pairs)), 100)),
            ("two words in most rollouts, all", lambda: rollouts.select(Filter(text=next(pairs)))),
            ("a word that is nowhere",
             lambda: rollouts.select(Filter(text="hippopotamus" + next(fresh)))),
        ):  # fmt: skip
            rows[name] = median_ms(
                lambda places=places: rollouts.rows(first_of(places())), given.repeats
            )
        rows |= in_browser(folder, given.repeats)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n| what | ms |\n|-|-|")
    for name, value in rows.items():
        print(f"| {name} | {value:,.0f} |")


if __name__ == "__main__":
    main()
