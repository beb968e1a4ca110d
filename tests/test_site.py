"""The site: every page is in the navigation, generated pages are up to date, nothing is remote.

`make docs` builds the site strictly, so links and anchors are not tested here.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from typing import Any

import yaml

from tests.test_documents import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


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
