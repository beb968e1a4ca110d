"""The site: every page is in the navigation, generated pages are up to date, nothing is remote.

`make docs` builds the site strictly, so links and anchors are not tested here.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.limits import HANG_S
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
            "index",
            "migrate/index",
            "migrate/ms_swift",
            "migrate/trinity",
            "quick_start",
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
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| `(trireme/[\w/]+\.py)` \|$", text, re.M)
    assert [name for name, _, _ in rows] == names  # what each is, where the page is no site
    assert "```text\ntrain(\n    *,\n    model: str | Path," in text


def test_the_menu_of_languages_leads_to_pages_that_are_there() -> None:
    links = [entry["link"] for entry in CONFIG["extra"]["alternate"]]
    assert len(links) == 2
    for link in links:
        assert (ROOT / "docs" / link.replace(".html", ".md")).is_file()
    assert {"navigation.tabs", "navigation.sections"} <= set(CONFIG["theme"]["features"])
    assert len(CONFIG["nav"]) <= 8  # tabs in one row


def test_each_language_has_its_own_navigation_and_leads_to_the_same_page_of_the_other(
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "theme", tmp_path / "theme")
    for name in pages(CONFIG["nav"]):
        page = tmp_path / "docs" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"# {name}\n")
    config = CONFIG | {"plugins": ["search"], "validation": {}}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    words = [sys.executable, "-m", "zensical", "build", "--clean"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=HANG_S)
    seen = {}
    for name in ("quick_start", "view", "zh/quick_start", "zh/migrate/trinity"):
        text = (tmp_path / f"site/{name}.html").read_text(encoding="utf-8")
        language = re.findall(r'<html lang="(\w+)"', text)[0]
        assert '<body dir="ltr"' in text
        tabs = re.findall(r'class="md-tabs__link">\s*(.*?)\s*</a>', text)
        others = dict(re.findall(r'<a href="(.*)" hreflang="(.*)" class="md-select__link">', text))
        seen[name] = language, tabs, {value: key for key, value in others.items()}
    english = [next(iter(section)) for section in CONFIG["nav"]][:-1]
    chinese = [next(iter(section)) for section in CONFIG["nav"][-1]["中文"]]
    assert english[0] == "Home" and chinese[0] == "首页"
    assert seen == {
        "quick_start": ("en", english, {"en": "quick_start.html", "zh": "./zh/quick_start.html"}),
        "view": ("en", english, {"en": "view.html", "zh": "./zh/index.html"}),
        "zh/quick_start": ("zh", chinese, {"en": "../quick_start.html", "zh": "quick_start.html"}),
        "zh/migrate/trinity": (
            "zh", chinese, {"en": "../../migrate/trinity.html", "zh": "trinity.html"}
        ),
    }  # fmt: skip


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


def test_the_badges_are_those_of_the_package() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))["badges"]()
    path = ROOT / "docs/images/badges.svg"
    assert path.read_text(encoding="utf-8") == made, (
        f"run: python scripts/pictures.py badges {path}"
    )
    for page in ("README.md", "README.zh.md"):
        assert "](docs/images/badges.svg)" in (ROOT / page).read_text(encoding="utf-8")
