"""The site: every page is in the navigation, generated pages are up to date, nothing is remote.

`make docs` builds the site strictly, so links and anchors are not tested here.
"""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.test_documents import ROOT
from trireme.config import load_config

pytestmark = pytest.mark.whole

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
CHINESE = {
    "README.zh.md": "README.md",
    **{
        f"docs/zh/{name}.md": f"docs/{name}.md"
        for name in (
            "migrate/ms_swift",
            "migrate/trinity",
            "tutorials/101_first_run",
            "tutorials/201_own_reward",
            "tutorials/301_own_environment",
            "tutorials/302_tools",
        )
    },
}
"""A page in Chinese -> the same in English."""


@pytest.mark.parametrize(("chinese", "english"), CHINESE.items())
def test_both_languages_have_the_same_headings_blocks_and_tables(
    chinese: str, english: str
) -> None:
    one, other = ((ROOT / name).read_text(encoding="utf-8") for name in (chinese, english))
    assert FENCED.findall(one) == FENCED.findall(other), f"the blocks of {chinese} differ"
    for what in (r"^#+ ", r"^\|[-|]+$"):  # headings by their levels, tables by their columns
        left, right = (re.findall(what, FENCED.sub("", text), re.M) for text in (one, other))
        assert left == right, f"{chinese}: {what}"
    rows = [len(re.findall(r"^\|", FENCED.sub("", text), re.M)) for text in (one, other)]
    assert rows[0] == rows[1], f"{chinese} has {rows[0]} rows of tables, {english} {rows[1]}"


def test_every_chinese_page_has_its_english_one() -> None:
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "docs/zh").rglob("*.md")} <= set(CHINESE)


def pages(entry: Any) -> Iterator[str]:
    """The files under an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(inner)


def test_every_page_stands_in_the_navigation_once() -> None:
    there = sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages(CONFIG["nav"])) == there


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(CONFIG)


def test_the_api_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))
    text = page["PAGE"].read_text(encoding="utf-8")
    assert text == page["document"](), "run: python scripts/api_page.py"


def test_the_api_page_has_each_name_once_and_says_how_a_function_is_called() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    names = re.findall(r"^### `(\w+)`$", text, re.M)
    assert len(names) == len(set(names)) == text.count("show_root_toc_entry: false")
    assert "```text\ntrain(\n    *,\n    model: str | Path," in text


def test_the_menu_of_languages_leads_to_pages_that_are_there() -> None:
    links = [entry["link"] for entry in CONFIG["extra"]["alternate"]]
    assert len(links) == 2
    for link in links:
        assert (ROOT / "docs" / link.replace(".html", ".md")).is_file()
    assert {"navigation.tabs", "navigation.sections"} <= set(CONFIG["theme"]["features"])
    assert len(CONFIG["nav"]) <= 8  # tabs in one row


@pytest.mark.parametrize("what", ["texts", "commands"])
def test_the_table_of_what_learned_is_that_of_the_runs_records(what: str) -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "outcomes_page.py"))
    if what == "texts":
        written = page["written"]()
        assert len(written) > 10 and {p.name for p in page["PICTURES"].iterdir()} == {
            path.name for path in written if path.suffix == ".svg"
        }
        for path, text in written.items():
            assert path.read_text(encoding="utf-8") == text, "run: python scripts/outcomes_page.py"
        return
    for rows in page["trainings"]().values():
        words = shlex.split(page["command"](rows[0]))
        yaml_file, *overrides = words[words.index("run") + 1 :]
        assert load_config(ROOT / yaml_file, overrides).seed == rows[0]["seed"]
