"""The page in a real browser: what a reader clicks and types, over the command that serves it."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.buffer.made import experience
from tests.ext.page.made import make_pairs_run, make_run
from tests.ext.page.test_table import ERROR, ended, start
from trireme.buffer.record import Record
from trireme.ext.page.report import write_report
from trireme.monitor.monitor import JsonLinesMonitor
from trireme.pictures import Picture

api = pytest.importorskip("playwright.sync_api", reason="playwright: make test-page installs it")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: make test-page needs chromium"),
]
EVIL = "<img src=x onerror='document.title=1'><script>document.title = 1</script>"
MOST_MS = 30_000
"""How long a busy machine may take for a step of a test."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "job/first", steps=2)
    make_pairs_run(root / "pairs")
    run = make_run(root / "job/second", steps=3)
    record = Record(lines=run / "buffer/experience_buffer.jsonl")
    record._write([experience(3, 9, 0, 5.0, response_text=EVIL, messages=None)])
    record.close()
    file = io.BytesIO()
    Image.new("RGB", (3, 3), "red").save(file, "PNG")
    seen = Picture(file.getvalue(), hashlib.sha256(file.getvalue()).hexdigest(), 2, (1, 2, 4))
    record = Record(lines=root / "job/first/buffer/experience_buffer.jsonl")
    record._write([experience(3, 10, 0, 6.0, messages=None, pictures=(seen,))])
    record.close()
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    words = [sys.executable, "-u", "-m", "trireme", "view", str(root), "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("open ")):
            lines.append(server.stdout.readline())
            assert server.poll() is None, lines
        yield lines[-1].split()[1]
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab in which nothing may fail, and nothing may be asked of another host."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(MOST_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            None
            if re.match(r"(http://127\.0\.0\.1:|file://|data:|blob:)", request.url)
            else wrong.append(request.url)
        ),
    )
    yield page
    context.close()
    assert wrong == []


def opened(tab: Any, url: str, view: str = "", run: str = "job/second") -> Any:
    tab.goto(url)
    tab.wait_for_selector("main[data-ready]")
    if view:
        name, _, query = view.partition("?")
        tab.evaluate("hash => { location.hash = hash }", f"#/{name}?run={run}&{query}")
        tab.wait_for_selector(f"main[data-ready={name}][data-run='{run}']")
    return tab


def test_is_it_learning_and_what_is_wrong(tab: Any, url: str) -> None:
    opened(tab, url, "overview")
    assert "token=" not in tab.url
    assert tab.locator(".tile", has_text="Held-out accuracy").inner_text().split()[-4:-2] == [
        "30.0%",
        "from",
    ]
    warning = tab.locator(".warning").inner_text()
    assert "all rewards are equal." in warning and "What to do: make tasks easier" in warning
    tab.wait_for_selector(".panel .plot canvas")
    titles = tab.locator(".panel h3").all_inner_texts()
    assert titles[:3] == ["Reward", "Distribution of rewards", "Held-out tasks"]
    assert "Entropy" in titles
    assert "KL to the reference" not in titles  # all of it was no number
    tab.get_by_label("Show job/first").check()
    tab.wait_for_function("() => document.querySelector('.bar h2').textContent === '2 runs'")
    figures = tab.locator("main .runs tbody tr").all_inner_texts()
    assert ["0.200" in figures[0], "0.300" in figures[1]] == [True, True]
    plot = tab.locator(".panel", has_text="Reward").first.locator(".plot")
    tab.wait_for_function(
        "plot => plot.chart?.series.filter((s) => s.label.startsWith('job/')).length === 2",
        arg=plot.element_handle(),
    )


def test_a_step_that_ends_appears_without_a_click(tab: Any, url: str, root: Path) -> None:
    opened(tab, url, "overview", run="job/first")
    step = tab.locator(".tile .value").first
    assert step.inner_text() == "2"
    JsonLinesMonitor(root / "job/first/monitor").log({"rollout/reward/mean": 0.9}, 3, "explorer")
    tab.wait_for_function("() => document.querySelector('.tile .value').textContent === '3'")


def test_what_it_says(tab: Any, url: str) -> None:
    opened(tab, url, "rollouts?by=rollout")
    assert tab.locator(".count").inner_text() == "25 rollouts"
    tab.select_option("select[name=order]", "best")
    tab.wait_for_selector(".reader .facts:has-text('id 3/9/0/0')")
    assert tab.locator(".reader .turn.assistant .said").inner_text() == EVIL  # as text
    assert tab.title() != "1"
    tab.fill("input[name=text]", "reply 2 of step 2")
    tab.wait_for_function("() => document.querySelector('.count').textContent === '2 rollouts'")
    assert tab.evaluate("document.activeElement.name") == "text"
    assert tab.locator(".reader .turn.tool .said").inner_text() == "the sum"
    assert 'add({"a": 1})' in tab.locator(".reader .call").inner_text()
    assert tab.inner_text(".reader .truth").split("\n")[::2] == ["Right answer", "level"]
    first = tab.locator(".reader .facts b").first.inner_text()
    tab.keyboard.press("Escape")
    tab.keyboard.press("j")
    tab.wait_for_function(
        "id => document.querySelector('.reader .facts b').textContent !== id", arg=first
    )
    tab.keyboard.press("g")
    tab.wait_for_selector(".answers .answer >> nth=3")
    assert "4 answers to the same task in step 2. Mean reward 0.500" in tab.inner_text(".reader")
    assert "Right answer" in tab.inner_text(".reader .truth")
    assert "rollout 3" in tab.locator(".answers .answer >> nth=3").inner_text()
    tab.fill("input[name=text]", "")
    tab.get_by_role("button", name="Held out 6").click()
    tab.wait_for_function("() => document.querySelector('.count').textContent.startsWith('6')")
    tab.get_by_role("button", name="Through the steps").click()
    tab.wait_for_selector(".answers .answer >> nth=2")
    assert "Right answer" in tab.inner_text(".reader .truth")
    tab.get_by_role("button", name="Failed 1").click()
    tab.wait_for_selector(".reader .error")
    assert "ValueError: no" in tab.inner_text(".reader")


def test_groups_come_first_with_their_question_and_a_dot_for_each_reward(
    tab: Any, url: str
) -> None:
    opened(tab, url, "rollouts")
    assert tab.locator(".count").inner_text() == "7 groups"
    group = tab.locator(".item.group", has_text="What is 1 + 3?")
    assert group.locator(".dot").count() == 4 and group.locator(".dot.low").count() == 2
    assert "mean 0.50" in group.inner_text() and "row 101" in group.inner_text()
    group.locator(".title").click()
    tab.wait_for_selector(".answers .answer >> nth=3")
    group.locator(".dot >> nth=2").click()
    tab.wait_for_selector(".reader h2:text-is('Step 3, rollout 2')")
    tab.keyboard.press("j")
    tab.wait_for_selector(".item.group[aria-current]:has-text('What is 0 + 3?')")
    tab.get_by_label("Groups that disagree").check()
    tab.wait_for_function("() => document.querySelector('.count').textContent === '6 groups'")
    tab.get_by_role("button", name="Rollouts", exact=True).click()
    tab.wait_for_function("() => document.querySelector('.count').textContent === '24 rollouts'")


def test_each_token_says_its_numbers(tab: Any, url: str) -> None:
    opened(tab, url, "rollouts?tab=tokens&eid=2/1/1/0")
    tab.wait_for_selector(".tokens .token >> nth=5")
    tab.locator(".tokens").focus()
    for _ in range(6):
        tab.keyboard.press("ArrowRight")
    said = " ".join(tab.inner_text(".probe").split())
    for fact in ("5 · id 10", "trained yes", "log-probability -0.400", "new -0.250",
                 "ratio 1.1618", "advantage 1", "weights 1"):  # fmt: skip
        assert fact in said
    tab.get_by_role("button", name="Ratio").click()
    colours = tab.locator(".token").evaluate_all("all => all.map((t) => t.style.background)")
    assert colours[0] == "transparent" != colours[5]
    tab.get_by_role("button", name="Advantage").click()
    tab.wait_for_selector("button[aria-pressed=true]:text-is('Advantage')")
    assert tab.locator(".token >> nth=5").evaluate("t => t.style.background") != "transparent"
    tab.get_by_role("button", name="Table").click()
    assert tab.locator("tbody tr").count() == 6


def test_an_advantage_of_zero_is_not_tinted(tab: Any, url: str) -> None:
    found = {"text": ["a", "b"], "ids": [1, 2], "mask": [1, 1], "advantages": [0, 0.5],
             "logprobs": None, "notes": [], "trained_step": 1}  # fmt: skip
    opened(tab, url, "overview")
    tab.route("**/api/tokens*", lambda route: route.fulfill(json=found))
    opened(tab, url, "rollouts?tab=tokens&eid=2/1/1/0")
    tab.get_by_role("button", name="Advantage").click()
    tab.wait_for_selector("button[aria-pressed=true]:text-is('Advantage')")
    zero, other = tab.locator(".token").evaluate_all("all => all.map((t) => t.style.background)")
    assert zero == "transparent" != other


def test_tokens_of_a_held_out_rollout_are_sampled_and_not_trained(tab: Any, url: str) -> None:
    opened(tab, url, "rollouts?kind=eval&tab=tokens&eid=2/held_out/1/0/0")
    tab.wait_for_selector(".tokens .token >> nth=5")
    tab.locator(".tokens .token >> nth=5").hover()
    said = " ".join(tab.inner_text(".probe").split())
    assert "sampled yes" in said and "log-probability -0.400" in said
    assert tab.get_by_role("button", name="Trained").count() == 0


def test_rows_of_a_data_set_are_shown_as_pairs_and_token_by_token(tab: Any, url: str) -> None:
    opened(tab, url, "rollouts?eid=0/1/1/0", run="pairs")
    tab.wait_for_selector(".reader .badge:text-is('rejected')")
    assert tab.inner_text(".count") == "4 rows"
    tab.get_by_role("button", name="Pair", exact=True).click()
    tab.wait_for_selector(".answers .answer >> nth=1")
    answers = tab.locator(".answers .answer").all_inner_texts()
    assert "chosen" in answers[0] and "Yes." in answers[0] and "No." in answers[1]
    tab.get_by_role("button", name="Tokens").click()
    tab.wait_for_selector(".tokens .token >> nth=2")
    tab.locator(".tokens .token >> nth=2").hover()
    said = " ".join(tab.inner_text(".probe").split())
    assert "2 · id 9" in said and "trained yes" in said and "new -0.500" in said


def test_a_selection_is_saved(tab: Any, url: str) -> None:
    opened(tab, url, "rollouts?least=1&step=2&by=rollout")
    tab.wait_for_function("() => document.querySelector('.count').textContent === '4 rollouts'")
    with tab.expect_download() as given:
        tab.get_by_role("link", name="JSONL").click()
    rows = [json.loads(line) for line in Path(given.value.path()).read_text().splitlines()]
    assert len(rows) == 4 and all(row["reward"] == 1 and row["step"] == 2 for row in rows)


def test_where_the_time_goes_and_what_it_was(tab: Any, url: str) -> None:
    opened(tab, url, "timeline")
    lanes = tab.locator("svg.lanes").text_content()
    for lane in ("Model", "Environment", "Evaluation", "Training", "Weights", "Waiting"):
        assert lane in lanes
    assert tab.locator("svg.lanes rect").count() == 18
    opened(tab, url, "run")
    told = tab.inner_text("main")
    assert "algorithm.optimizer.lr" in told and "0.001" in told and "went on from step 2" in told


def test_how_each_run_goes_is_seen_at_a_glance(tab: Any, url: str, root: Path) -> None:
    start(root / "job/broken", **ended("failed", ERROR), time="2026-01-03T00:00:00+00:00")
    opened(tab, url, "overview", run="job/broken")
    said = tab.inner_text("main .ended")
    assert said.startswith("Failed at step 0 of 400")
    assert all(line in said for line in ERROR.split("\n  "))
    assert "failed" in tab.locator("#side .run.main").inner_text()
    below = "run => run.getBoundingClientRect().bottom <= innerHeight"
    tab.set_viewport_size({"width": 1280, "height": 300})
    opened(tab, url, "overview", run="job/broken")
    assert tab.locator("#side .run.main").evaluate(below)
    start(root / "job/broken", time=datetime.now(UTC).isoformat())
    tab.wait_for_selector("#side .run.main .state.running")
    assert "step 0 of 400" in tab.locator("#side .run.main").inner_text()
    shutil.rmtree(root / "job/broken")


def test_runs_are_a_table_and_any_two_are_compared(tab: Any, url: str, root: Path) -> None:
    starts = root / "job/first/run"
    for path in starts.glob("*.yaml"):
        path.write_text(path.read_text().replace("seed: 7", "seed: 8"))
    opened(tab, url, "runs")
    names = "all => all.map((row) => row.querySelector('a').textContent)"
    tab.get_by_role("button", name="Last reward").click()
    tab.wait_for_selector("th[aria-sort=descending]:has-text('Last reward')")
    found = tab.locator(".runs tbody tr").evaluate_all(names)
    assert found.index("job/second") < found.index("pairs") and len(found) >= 3
    tab.get_by_label("Compare job/first").check()
    tab.get_by_label("Compare job/second").check()
    tab.wait_for_selector(".difference")
    rows = [row.split() for row in tab.locator(".difference tbody tr").all_inner_texts()]
    assert ["seed", "8", "7"] in rows
    tab.get_by_label("Compare job/first").uncheck()
    tab.wait_for_selector(".difference", state="detached")


def test_runs_are_found_by_words_and_by_tags_of_their_notes(tab: Any, url: str, root: Path) -> None:
    for name, text in (("job/first", "too fast #sweep"), ("job/second", "#sweep #best")):
        (root / name / "run/note.json").write_text(json.dumps({"text": text, "hidden": False}))
    opened(tab, url, "runs")
    count = "text => document.querySelector('.count').textContent === text"
    tab.get_by_role("button", name="#sweep", exact=True).click()
    tab.wait_for_function(count, arg="2 runs")
    tab.get_by_label("Filter the runs").press("End")
    tab.keyboard.type(" FAST", delay=20)  # drawn anew at each letter
    tab.wait_for_function(count, arg="1 run")
    assert tab.inner_text(".runs tbody a") == "job/first"
    assert tab.evaluate("document.activeElement.value") == "#sweep FAST"
    tab.get_by_role("button", name="#sweep", exact=True).click()
    tab.get_by_role("button", name="#best", exact=True).click()
    tab.wait_for_function(count, arg="0 runs")
    for name in ("job/first", "job/second"):
        (root / name / "run/note.json").unlink()


def test_a_run_gets_a_note_and_may_be_hidden(tab: Any, url: str, root: Path) -> None:
    opened(tab, url, "runs")
    row = tab.locator(".runs tbody tr", has_text="pairs")
    row.get_by_role("button", name="Add a note").click()
    tab.get_by_label("Note on pairs").fill("two pairs <b>")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".runs .note:has-text('two pairs <b>')")
    row.get_by_role("button", name="Hide").click()
    tab.wait_for_function("() => !document.querySelector('.runs').textContent.includes('pairs')")
    assert "pairs" not in tab.inner_text("#side")
    note = json.loads((root / "pairs/run/note.json").read_text())
    assert note == {"text": "two pairs <b>", "hidden": True}
    tab.get_by_label("with the 1 hidden").check()
    row.get_by_role("button", name="Show again").click()
    tab.wait_for_selector("#side :text('pairs')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_scroll_down_and_never_sideways(browser: Any, url: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    tab = context.new_page()
    tab.set_default_timeout(MOST_MS)
    views = ("overview", "runs", "rollouts", "rollouts?tab=tokens&eid=2/1/1/0", "timeline", "run")
    for view in views:
        opened(tab, url, view)
        sideways = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.evaluate(sideways) <= 0, view
    opened(tab, url, "runs")
    head = tab.get_by_role("button", name="Last reward").bounding_box()
    assert head["x"] + head["width"] <= 390 and head["height"] < 30, "the reward is in sight"
    ground = tab.evaluate("getComputedStyle(document.body).getPropertyValue('--ground')")
    assert (ground == "#101417") == (scheme == "dark")
    context.close()


def test_a_report_shows_the_same_without_a_server(tab: Any, root: Path, tmp_path: Path) -> None:
    report = write_report(root, tmp_path / "report.html").as_uri()
    opened(tab, report, "overview")
    tab.wait_for_selector(".panel .plot.rewards canvas")
    opened(tab, report, "rollouts?order=best&tab=tokens&eid=2/1/1/0")
    tab.wait_for_selector(".tokens .token >> nth=5")
    tab.fill("input[name=text]", "reply 3")
    tab.wait_for_function("() => document.querySelector('.count').textContent === '6 rollouts'")
    opened(tab, report, "timeline")
    assert tab.locator("svg.lanes rect").count() == 18
    opened(tab, report, "run")
    assert "algorithm.optimizer.lr" in tab.inner_text("main")


def test_a_run_that_only_measures_shows_what_it_measured(tab: Any, tmp_path: Path) -> None:
    monitor = JsonLinesMonitor(tmp_path / "run/monitor")
    for step, right in ((0, 0.25), (2, 0.5)):
        figures = {"bench/sums/accuracy/mean@1": right, "bench/sums/tasks": 4.0}
        monitor.log(figures, step, "bench")
    report = write_report(tmp_path / "run", tmp_path / "report.html").as_uri()
    opened(tab, report, "overview", run="run")
    tab.wait_for_selector(".panel .plot canvas")
    assert tab.locator(".panel h3").all_inner_texts() == ["Held-out tasks"]


def test_a_slow_view_draws_nothing_over_a_newer_one(tab: Any, url: str) -> None:
    opened(tab, url, "overview")
    opened(tab, url, "run")
    held: list[Any] = []
    tab.route("**/api/curves*", lambda route: held.append(route))
    with tab.expect_request("**/api/curves*"):
        tab.evaluate("() => { location.hash = '#/overview?run=job/second' }")
    tab.evaluate("() => { location.hash = '#/rollouts?run=job/second' }")
    tab.wait_for_selector("main[data-ready=rollouts] .list .item")
    with tab.expect_request_finished(lambda request: "/api/curves" in request.url):
        held[0].continue_()
    for _ in range(2):  # by then the older view has read its answer
        tab.evaluate("fetch('/api/meanings?run=job/second').then((answer) => answer.json())")
    assert tab.locator("main .list .item").count() and not tab.locator("main .tiles").count()


def test_a_curve_of_few_steps_labels_each_once(tab: Any, url: str) -> None:
    opened(tab, url, "overview")
    # a view that is drawn again has no chart for a moment
    shown = """() => {
        const plots = [...document.querySelectorAll(".plot")].filter((plot) => plot.chart);
        return plots.length ? plots.map((plot) => plot.chart.axes[0]._values) : null;
    }"""
    for labels in (axes := tab.wait_for_function(shown).json_value()):
        assert len(labels) == len(set(labels)), labels
    assert ["1", "2", "3"] in axes


def test_ticks_are_distinct_and_have_room(tab: Any, url: str) -> None:
    opened(tab, url, "overview")

    def of(call: str) -> Any:
        return tab.evaluate(f"import('/static/charts.js').then((charts) => charts.{call})")

    assert of("percents([0, 0.005, 0.01])") == ["0.0%", "0.5%", "1.0%"]
    assert of("percents([0, 0.25, 0.5])") == ["0%", "25%", "50%"]
    assert of("percents([0.00001, 0.00002])") == ["0.001%", "0.002%"]
    tens = [10.0**power for power in range(-20, 0)]
    assert sum(value is not None for value in of(f"roomy({tens})")) <= 5
    ninths = [number * 1e-5 for number in range(1, 10)]
    shown = [value for value in of(f"roomy({ninths})") if value is not None]
    assert shown == pytest.approx([1e-5, 2e-5, 5e-5])


def test_charts_show_what_is_possible_and_leave_out_what_is_zero(
    tab: Any, url: str, root: Path
) -> None:
    run = root / "job/early"
    monitor = JsonLinesMonitor(run / "monitor")
    for step in (1, 2, 3):
        rewards = {"rollout/reward/mean": 0.1, "rollout/reward/std": 0.3, "rollout/runs": 4.0}
        rewards |= {"rollout/reward/min": 0.0, "rollout/reward/max": 1.0, "rollout/failed": 0.0}
        monitor.log(rewards, step, "explorer")
        monitor.log({"perf/trained_tokens": 2000.0, "actor/entropy": 0.5}, step, "trainer")
    opened(tab, url, "overview", run="job/early")
    reward = tab.locator(".panel", has_text="Reward").first.locator(".plot")
    tab.wait_for_selector(".plot canvas")
    low, high = reward.evaluate("plot => plot.chart.data.slice(1, 3)")
    assert low == [0, 0, 0] and high == pytest.approx([0.1 + 1.96 * 0.15] * 3)
    assert tab.inner_text(".flat") == "Zero at every step: Failed rollouts."
    assert "Failed rollouts" not in tab.locator(".panel h3").all_inner_texts()
    tab.get_by_role("button", name="By tokens").click()
    tab.wait_for_selector("button[aria-pressed=true]:text-is('By tokens')")
    tab.wait_for_selector(".plot canvas")
    assert reward.evaluate("plot => plot.chart.data[0]") == [2000, 4000, 6000]
    tab.locator("summary", has_text="All metrics").click()
    tab.wait_for_selector("details.section")
    sections = tab.locator("details.section > summary b").all_inner_texts()
    assert sections == ["Is it learning?", "The update of the policy", "Rollouts", "Time"]
    tab.locator("details.section summary", has_text="Rollouts").click()
    level = tab.locator("details.section", has_text="Rollouts").locator(".flat")
    assert level.inner_text() == "The same at every step: rollout/failed 0, rollout/runs 4."
    shutil.rmtree(run)


def test_rewards_of_0_and_1_are_two_bands_and_a_click_shows_their_rollouts(
    tab: Any, url: str, root: Path
) -> None:
    run = make_run(root / "job/bimodal")
    opened(tab, url, "overview", run="job/bimodal")
    card = tab.locator(".panel", has_text="Distribution of rewards")
    card.locator(".now:has-text('50% at 0 · 50% at 1')").wait_for()
    at = "card => [...document.querySelectorAll('.panel')].indexOf(card)"
    assert card.evaluate(at) == 1  # beside the mean
    card.locator(".u-over").wait_for()
    shades = """plot => {
        const { ctx, bbox } = plot.chart;
        const shade = (part) => ctx.getImageData(
          bbox.left + 0.1 * bbox.width, bbox.top + part * bbox.height, 1, 1).data[3];
        return [0.05, 0.3, 0.95].map(shade);
      }"""
    top, between, bottom = card.locator(".plot").evaluate(shades)
    assert top > 0 and bottom > 0 and between == 0
    over = card.locator(".u-over")
    box = over.bounding_box()
    assert box is not None
    over.hover(position={"x": 0.2 * box["width"], "y": 0.97 * box["height"]})
    said = card.locator(".tooltip").inner_text().split("\n")
    assert said[:3] == ["step 1", "reward 0", "4 of 8, 50.0%"] and said[-4:] == ["1", "4", "0", "4"]
    over.click(position={"x": 0.2 * box["width"], "y": 0.97 * box["height"]})
    tab.wait_for_selector("main[data-ready=rollouts] .count")
    assert "step=1&least=0&most=0" in tab.url
    dots = tab.locator(".item.group .dot")
    assert tab.locator(".count").inner_text() == "2 groups" and dots.count() == 8
    shutil.rmtree(run)


@pytest.mark.parametrize("axis", ["By step", "By time", "By tokens"])
def test_the_distribution_has_the_axis_of_the_curves(
    tab: Any, url: str, root: Path, axis: str
) -> None:
    run = make_run(root / "job/bimodal")
    monitor = JsonLinesMonitor(run / "monitor")
    for step in (1, 2, 3):
        monitor.log({"perf/trained_tokens": 2000.0}, step, "trainer")
    opened(tab, url, "overview", run="job/bimodal")
    tab.get_by_role("button", name=axis).click()
    tab.wait_for_selector(f"button[aria-pressed=true]:text-is('{axis}')")
    tab.wait_for_function("() => document.querySelectorAll('.plot')[1]?.chart?.data[0].length")
    mean, cells = tab.locator(".plot").evaluate_all(
        "all => all.slice(0, 2).map((plot) => [...plot.chart.data[0]])"
    )
    assert mean == cells
    low, high = tab.locator(".plot >> nth=1").evaluate(
        "plot => [plot.chart.scales.x.min, plot.chart.scales.x.max]"
    )
    assert low < cells[0] < cells[-1] < high
    shutil.rmtree(run)


def test_rewards_of_zero_are_a_chart(tab: Any, url: str, root: Path) -> None:
    run = root / "job/zero"
    monitor = JsonLinesMonitor(run / "monitor")
    for step in (1, 2, 3):
        monitor.log({"rollout/reward/mean": 0.0, "rollout/failed": 0.0}, step, "explorer")
    opened(tab, url, "overview", run="job/zero")
    tab.wait_for_selector(".panel canvas")
    assert tab.locator(".panel h3").all_inner_texts() == ["Reward"]
    assert tab.inner_text(".flat") == "Zero at every step: Failed rollouts."
    shutil.rmtree(run)


def test_a_smoothed_curve_has_what_was_measured_behind_it(tab: Any, url: str) -> None:
    opened(tab, url, "overview")
    tab.wait_for_selector(".panel .plot canvas")
    plot = tab.locator(".panel", has_text="Entropy").locator(".plot")
    measured = plot.evaluate("plot => plot.chart.data.slice(1)")
    tab.get_by_label("Smoothing").fill("0.5")
    plot.evaluate("plot => plot.draw()")
    behind, smoothed = plot.evaluate("plot => plot.chart.data.slice(1)")
    assert [behind] == measured and smoothed[0] == behind[0]
    assert smoothed[1] == pytest.approx((0.5 * behind[0] * 0.5 + 0.5 * behind[1]) / 0.75)
    assert plot.evaluate("plot => plot.chart.series.map((one) => one.label).slice(1)") == [
        "Value",
        "actor/entropy",
    ]


def test_charts_that_left_the_page_are_let_go(tab: Any, url: str) -> None:
    tab.add_init_script("""
        globalThis.listening = 0;
        for (const [name, change] of [["addEventListener", 1], ["removeEventListener", -1]]) {
          const plain = window[name];
          window[name] = function (kind, ...rest) {
            if (kind === "dppxchange") globalThis.listening += change;
            return plain.call(this, kind, ...rest);
          };
        }""")
    opened(tab, url, "overview")
    for axis in ("By time", "By step", "By time"):
        tab.wait_for_selector(".panel .plot canvas")
        tab.get_by_role("button", name=axis).click()
        tab.wait_for_selector(f"button[aria-pressed=true]:text-is('{axis}')")
    tab.wait_for_selector(".panel .plot canvas")
    charts = "document.querySelectorAll('.uplot').length"
    tab.wait_for_function(f"() => listening > 0 && listening <= {charts} + 1")


def test_rollouts_of_a_run_that_has_just_begun(tab: Any, url: str, root: Path) -> None:
    run = make_run(root / "job/late", steps=1)
    shutil.rmtree(run / "buffer")
    opened(tab, url, "rollouts", run="job/late")
    assert "No rollouts are stored" in tab.inner_text("main")
    record, monitor = (
        Record(lines=run / "buffer/experience_buffer.jsonl"),
        JsonLinesMonitor(run / "monitor"),
    )
    record._write([experience(2, task, 0, 1.0) for task in range(120)])
    monitor.log({"rollout/reward/mean": 1.0}, 2, "explorer")
    tab.wait_for_selector(".list .item >> nth=100")
    at = "n => document.querySelectorAll('.list .item')[n].hasAttribute('aria-current')"
    tab.wait_for_function(at, arg=0)
    for _ in range(12):  # the chosen rollout is always in sight, and no key is lost
        tab.keyboard.press("j")
    tab.wait_for_function(at, arg=12)
    inside = """() => {
        const [list, item] = [".list", ".item[aria-current]"].map((name) =>
          document.querySelector(name).getBoundingClientRect());
        return document.querySelector(".list").scrollTop && item.bottom <= list.bottom + 1;
      }"""
    tab.wait_for_function(inside)
    assert tab.locator(".list .item").last.inner_text() == "Show 20 more of 20"
    record._write([experience(3, task, 0, 1.0) for task in range(30)])
    monitor.log({"rollout/reward/mean": 1.0}, 3, "explorer")
    tab.get_by_role("button", name="Show what is new").wait_for()
    tab.locator(".list .item").last.click()  # the pages have moved by 30 rollouts
    tab.wait_for_selector(".list .item >> nth=119")
    ids = tab.locator(".list .item").evaluate_all("all => all.map((item) => item.id)")
    assert sorted(ids) == sorted(f"item 2/{task}/0/0" for task in range(120))
    tab.get_by_role("button", name="Show what is new").click()
    tab.wait_for_function("() => document.querySelector('.count').textContent === '150 rollouts'")
    record.close()


def test_a_rollout_shows_its_picture_in_every_view(tab: Any, url: str) -> None:
    opened(tab, url, "rollouts", run="job/first")
    tab.locator("text=Reply 0 of step 3").first.click()
    for key in ("c", "g"):
        tab.keyboard.press(key)
        shown = tab.wait_for_selector(".pictures img")
        tab.wait_for_function("image => image.complete", arg=shown)
        assert shown.evaluate("image => image.naturalWidth") == 3
