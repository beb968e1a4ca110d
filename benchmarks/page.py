"""Page: how long the page takes over many rollouts, in a browser and per question.

    python benchmarks/page.py [--rollouts 100000]

Makes a run's folder with that many rollouts, serves it, and prints a table: the first paint and the
first answer in headless Chromium (where playwright and chromium are installed), and what filters
and searches take at the server. Times are the median of `--repeats`; the first read is timed once.
"""

from __future__ import annotations

import argparse
import json
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

from trireme.monitor.monitor import JsonLinesMonitor
from trireme.view.rollouts import Filter, RolloutIndex
from trireme.view.serve import PageOptions, serve

PER_STEP = 512
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
    """First paint, curves, and a filter from the click to the list; empty without a browser."""
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
    paints, filters, searches = [], [], []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(repeats):
            page = browser.new_context().new_page()
            page.goto(ready[0])
            page.wait_for_selector("main[data-ready]")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(page.evaluate(paint))
            page.evaluate("location.hash = '#/rollouts'")
            page.wait_for_selector(".item")
            began = time.perf_counter()
            page.select_option("select[name=order]", "longest")
            page.wait_for_function("() => document.querySelector('select[name=order]').value === "
                                   "'longest' && location.hash.includes('longest')")  # fmt: skip
            page.wait_for_selector(".item")
            filters.append(1000 * (time.perf_counter() - began))
            began = time.perf_counter()
            page.fill("input[name=text]", "seven eggs")
            page.wait_for_function(
                "() => document.querySelector('.reader mark')?.textContent === 'seven eggs'"
            )
            searches.append(1000 * (time.perf_counter() - began))
        browser.close()
    return {
        "browser: first contentful paint": statistics.median(paints),
        "browser: new order, click to list": statistics.median(filters),
        "browser: search, typed to the marked rollout": statistics.median(searches),
    }


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
        for name, wanted in (
            ("filter by reward, newest", Filter(least=1.0)),
            ("filter by step and task", Filter(step=3, task="0:17")),
            ("best of all", Filter(order="best")),
            ("random of all", Filter(order="random")),
            ("search a word that is everywhere", Filter(text="seven EGGS")),
            ("search a word that is nowhere", Filter(text="hippopotamus")),
        ):
            rows[name] = median_ms(
                lambda wanted=wanted: rollouts.rows(rollouts.select(wanted)[:100]), given.repeats
            )
        rows |= in_browser(folder, given.repeats)
    print("| what | ms |\n|-|-|")
    for name, value in rows.items():
        print(f"| {name} | {value:,.0f} |")


if __name__ == "__main__":
    main()
