"""Page: how long the page takes over many rollouts, in a browser and per question.

    python benchmarks/page.py [--rollouts 100000]

Makes a run's folder with that many rollouts in thousands of steps, serves it, and prints a table:
the views in headless Chromium (where playwright and chromium are installed), and what filters and
searches take at the server. Times are the median of `--repeats`; the first read is timed once.
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
from trireme.ext.page.runs import Curves, find_runs
from trireme.ext.page.serve import PageOptions, serve
from trireme.monitor.monitor import FILE_NAME

PER_STEP = 32
METRICS = 60
"""Of each part at each step."""
RARE = "axolotl"
"""In one reply of all, the oldest."""
WORDS = ["the", "model", "has", "seven", "eggs", "and", "three", "stamps", "then", "lost", "five"]


def make_folder(folder: Path, count: int) -> None:
    """A run with `count` rollouts of about 150 words, groups of 8."""
    (folder / "buffer").mkdir(parents=True)
    (folder / "monitor").mkdir()
    draw = random.Random(0)
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
    for step in range(1, 1 + count // PER_STEP):
        add_step(folder, step)


def add_step(folder: Path, step: int) -> None:
    """The metrics of one step of the explorer and of the trainer."""
    draw = random.Random(step)
    explored = {f"rollout/x{i}/mean": draw.random() for i in range(METRICS)}
    explored |= {"rollout/reward/mean": draw.random(), "rollout/reward/std": 0.5}
    explored |= {"rollout/reward/min": 0.0, "rollout/reward/max": 1.0}
    trained = {f"actor/x{i}": draw.random() for i in range(METRICS)}
    trained |= {"actor/entropy": draw.random(), "perf/trained_tokens": 3200.0}
    with (folder / "monitor" / FILE_NAME).open("a") as file:
        for part, metrics in (("explorer", explored), ("trainer", trained)):
            row = {"time": step, "part": part, "step": step, "metrics": metrics}
            file.write(json.dumps(row) + "\n")


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of a call, the median of some."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def in_browser(folder: Path, repeats: int) -> dict[str, float]:
    """The views from a click to what is seen, searches from key to mark; empty without a browser.

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
    seen: dict[str, list[float]] = {}

    def add(what: str, milliseconds: float) -> None:
        seen.setdefault(f"browser: {what}", []).append(milliseconds)

    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for repeat in range(repeats):
            page = browser.new_context().new_page()
            began = time.perf_counter()
            page.goto(ready[0])
            page.wait_for_function("() => document.querySelector('.panel .plot canvas')")
            add("overview, opened to its first curve", since(began))
            page.wait_for_function("() => document.querySelector('.plot.rewards canvas')")
            add("overview, opened to the distribution of rewards", since(began))
            began = time.perf_counter()
            page.evaluate("[...document.querySelectorAll('summary')].at(-1).click()")
            page.wait_for_function("() => document.querySelector('details.section .panel canvas')")
            add("all metrics, click to the first curve", since(began))
            began = time.perf_counter()
            page.evaluate("location.hash = '#/rollouts'")
            page.wait_for_function("() => document.querySelector('.reader .answers, .reader h2')")
            add("groups, click to the first group", since(began))
            page.evaluate("location.hash = '#/rollouts?by=rollout'")
            page.wait_for_function("() => document.querySelector('.item:not(.group)')")
            page.wait_for_selector(".reader h2")
            page.evaluate("document.querySelector('.list').dataset.old = 'yes'")
            began = time.perf_counter()
            page.select_option("select[name=order]", "longest")
            # a wait for a selector looks less and less often, up to every 500 ms
            page.wait_for_function("() => document.querySelector('.list:not([data-old]) .item')")
            add("new order, click to list", since(began))
            page.wait_for_selector(".reader h2")
            text = f"{WORDS[repeat]} {WORDS[-1]}"
            add("two words in most replies, typed to marked", typed(page, text))
            add("a word in one reply, typed to marked", typed(page, RARE[repeat % 5 :]))
            page.context.close()
        browser.close()
    return {what: statistics.median(times) for what, times in seen.items()}


def since(began: float) -> float:
    """Milliseconds since then."""
    return 1000 * (time.perf_counter() - began)


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
    return since(began)


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
        disagree = Filter(kind="train", disagree=True)
        rows["groups that disagree, the first 100"] = median_ms(
            lambda: rollouts.groups(disagree, 0, 100), given.repeats
        )
        rows["distribution of rewards"] = median_ms(rollouts.rewards, given.repeats)
        (run,) = find_runs(folder)
        curves, step = Curves(), itertools.count(1 + given.rollouts // PER_STEP)
        rows["curves, once"] = median_ms(lambda: curves.of(run), 1)

        def one_more() -> None:
            add_step(folder, next(step))
            curves.of(run)

        rows["curves, after one more step"] = median_ms(one_more, given.repeats)
        rows |= in_browser(folder, given.repeats)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n| what | ms |\n|-|-|")
    for name, value in rows.items():
        print(f"| {name} | {value:,.0f} |")


if __name__ == "__main__":
    main()
