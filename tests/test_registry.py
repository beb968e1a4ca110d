"""Registry: who wins when a name is known twice, and what an unknown one is told."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from trireme.registry import Registry


def make() -> Registry:
    return Registry("workflow", {"counter": "collections.Counter", "broken": "no_such_module.X"})


def test_built_in_names_and_dotted_paths_are_imported_on_first_use() -> None:
    from collections import Counter, OrderedDict

    registry = make()
    assert registry.get("counter") is Counter
    assert registry.get("collections.OrderedDict") is OrderedDict
    assert registry.get("collections:OrderedDict") is OrderedDict
    assert registry.get(None) is None


def test_a_users_name_overrides_a_built_in_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = make()
    with caplog.at_level(logging.WARNING):

        @registry.register_module("counter")
        class Mine: ...

    assert registry.get("counter") is Mine
    assert "'counter' of" in caplog.text and "replaces the built-in one" in caplog.text


def test_two_users_names_collide_loudly() -> None:
    registry = make()
    registry.register_module("mine", int)
    with pytest.raises(ValueError, match="'mine' is registered twice"):
        registry.register_module("mine", str)
    registry.register_module("mine", str, force=True)
    assert registry.get("mine") is str


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown workflow 'countr'; did you mean 'counter'\?"):
        make().get("countr")
    with pytest.raises(ValueError, match="there is no module 'no_such_module'"):
        make().get("broken")
    with pytest.raises(ValueError, match=r"has no 'Countr'; did you mean 'Counter'\?"):
        make().get("collections.Countr")


def test_a_file_in_the_working_folder_is_found_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file_in_folder.py").write_text("thing = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert Registry("thing").get("file_in_folder:thing") == 3
