"""`trireme view` takes what the documents say: a folder, a store, a number of samples, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_main import invoke
from trireme.cli.main import app
from trireme.ext.page import samples as view
from trireme.ext.page.runs import find_runs


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each function was called with; each returns 3."""
    seen: dict[str, Any] = {}

    def samples(*args: Any, **options: Any) -> int:
        seen["view"] = (*args, options)
        return 3

    def page(*args: Any, **options: Any) -> int:
        seen["page"] = args
        return 3

    monkeypatch.setattr(view, "view", samples)
    monkeypatch.setattr(view, "open_page", page)
    return seen


def test_view_takes_a_number_and_keys(called: dict[str, Any]) -> None:
    assert invoke("view", "--config", "x.yaml", "--sample", "5", "a.b=1", "--no-color") == 3
    *given, options = called["view"]
    assert given == [Path("x.yaml"), None]
    assert options["wanted"].count == 5 and options["overrides"] == ["a.b=1"]
    assert not options["color"]
    assert invoke("view", "--url", "x.db", "five") == 2


def test_view_takes_a_folder_and_which_experiences(called: dict[str, Any], tmp_path: Path) -> None:
    assert invoke("view", str(tmp_path), "--step", "7", "--best", "2") == 3
    *_, options = called["view"]
    assert options["folder"] == tmp_path
    assert (options["wanted"].count, options["wanted"].step) == (2, 7)
    assert options["wanted"].order == "best"
    assert invoke("view", str(tmp_path), "--best", "--worst") == 2
    assert invoke("view", str(tmp_path / "none")) == 2


def test_a_folder_whose_name_looks_like_a_key_is_a_folder(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1e-3").mkdir()
    assert invoke("view", "lr=1e-3") == 3
    assert called["page"][0] == Path("lr=1e-3")
    keys = ["lr=1e-4", f"a.b={'x' * 300}"]
    assert invoke("view", "lr=1e-3", *keys) == 3
    assert called["view"][-1]["folder"] == Path("lr=1e-3")
    assert called["view"][-1]["overrides"] == keys


def test_view_opens_a_page_over_a_folder_unless_samples_are_asked_for(
    called: dict[str, Any], tmp_path: Path
) -> None:
    assert invoke("view", str(tmp_path), "--port", "7000", "--html", "x.html") == 3
    assert called["page"] == (tmp_path, "127.0.0.1", 7000, None, Path("x.html"))
    assert invoke("view", str(tmp_path), "--port", "0") == 3
    assert called["page"][2] == 0  # a free one
    for words in (["--plain"], ["--worst"], ["5"], ["--tokenizer", "x"]):
        called.clear()
        assert invoke("view", str(tmp_path), *words) == 3
        assert called["view"][-1]["folder"] == tmp_path and "page" not in called
    assert invoke("view", str(tmp_path), "5", "--html", "x.html") == 2


def test_a_number_is_the_name_of_a_folder_where_one_has_it(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    starts = tmp_path / "checkpoints" / "toys" / "7" / "run" / "starts.json"
    starts.parent.mkdir(parents=True)
    starts.write_text("{}")
    said = " ".join(CliRunner().invoke(app, ["view", "7"]).output.split())
    assert "7 is a number of samples, since no folder here has this name" in said
    assert "did you mean checkpoints/toys/7?" in said
    with pytest.raises(ValueError, match=r"did you mean checkpoints/toys/7\?$"):
        find_runs(Path("7"))
    monkeypatch.chdir(tmp_path / "checkpoints" / "toys")
    assert invoke("view", "7") == 3
    assert called["page"][0] == Path("7")
    assert invoke("view", "7", "2") == 3
    assert (called["view"][-1]["folder"], called["view"][-1]["wanted"].count) == (Path("7"), 2)
    assert invoke("view", ".", "7") == 3
    assert (called["view"][-1]["folder"], called["view"][-1]["wanted"].count) == (Path("."), 7)
    assert invoke("view", "7", "2", "3") == 2 and invoke("view", "7", "0") == 2
