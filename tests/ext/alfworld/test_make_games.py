"""Made games, without the engine: which folders they are written to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.ext.alfworld import make_games as module
from trireme.ext.alfworld.data import find_games
from trireme.ext.alfworld.make_games import TASKS, main, make_games


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package" / "data").mkdir(parents=True)
    for name in ("alfred.pddl", "alfred.twl2"):
        (tmp_path / "package" / "data" / name).write_text("UNKNOWN GOAL")
    goal = {"pddl": "(:goal {obj} # {recep})", "templates": ["put {obj} on {recep}", "do it"]}
    package: Any = SimpleNamespace(
        __file__=str(tmp_path / "package" / "__init__.py"), gdict=dict.fromkeys(TASKS, goal)
    )
    monkeypatch.setattr(module, "engine", lambda name: package)


def test_games_of_another_making_are_not_mixed_with_the_new_ones(tmp_path: Path) -> None:
    out = tmp_path / "games"
    first = make_games(out, "train", 8, seed=0)
    texts = [file.read_text() for file in first]
    assert make_games(out, "train", 8, seed=0) == first  # the same ones again
    assert [file.read_text() for file in first] == texts
    more = make_games(out, "train", 10, seed=0)
    assert more[:8] == first and find_games(out, "train") == sorted(more)
    for count, seed in ((8, 0), (10, 1)):
        with pytest.raises(ValueError, match=r"train has \d+ other games, .* would mix them"):
            make_games(out, "train", count, seed=seed)
    assert find_games(out, "train") == sorted(more)
    make_games(out, "valid_seen", 8, seed=1)  # a split of its own


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "games"), "--train", "6", "--test", "0"]
    main(words)
    with pytest.raises(SystemExit):
        main([*words, "--seed", "1"])
    assert "remove them, or name another folder" in capsys.readouterr().err
