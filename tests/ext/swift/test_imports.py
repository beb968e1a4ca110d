"""The names that plug-ins for ms-swift import, with and without a clone of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import pytest

from trireme.ext.multi_turn.scheduled import make_scheduler
from trireme.ext.multi_turn.scheduler import MultiTurnScheduler
from trireme.ext.swift.imports import NAMES as SWIFT_NAMES
from trireme.ext.swift.imports import Absent, SwiftORM
from trireme.workflows.plugins import load_plugins

MAPS = [n for n in SWIFT_NAMES if n.endswith(("s", "_map")) and n.islower()]
SWIFT = {
    "swift/__init__.py": "",
    "swift/cli/rlhf.py": "",
    "swift/rewards/__init__.py": "import modelscope\nclass ORM: of_the_clone = True\n",
    "examples/clone_plugin.py": (
        "from swift.rewards import ORM\nfrom swift.rollout.multi_turn import MultiTurnScheduler\n"
    ),
}


@pytest.fixture
def without_swift(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No module of ms-swift's is loaded, before and after."""
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "swift"}
    for name in before:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in ("swift", "modelscope")]:
        del sys.modules[name]
    sys.modules.pop("clone_plugin", None)
    sys.modules.update(before)


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.usefixtures("without_swift")
@pytest.mark.parametrize("how", ["trireme", "python -m"])
@pytest.mark.parametrize("files", [SWIFT, {name: SWIFT[name] for name in list(SWIFT)[1:]}])
def test_in_a_clone_of_ms_swift_that_cannot_be_imported_its_names_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, files: dict[str, str]
) -> None:
    """The second is a folder `swift` that is no package."""
    write(files, tmp_path)
    monkeypatch.chdir(tmp_path)
    if how == "python -m":
        sys.path.insert(0, str(tmp_path))
    assert load_plugins(["examples/clone_plugin.py"]) == ["clone_plugin"]
    assert sys.modules["clone_plugin"].ORM is SwiftORM
    assert sys.modules["clone_plugin"].MultiTurnScheduler is MultiTurnScheduler


@pytest.mark.usefixtures("without_swift")
def test_a_clone_of_ms_swift_that_can_be_imported_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = {"examples/clone_plugin.py": "from swift.rewards import ORM"}
    write({**SWIFT, **plugin, "modelscope.py": ""}, tmp_path)
    monkeypatch.chdir(tmp_path)
    load_plugins(["examples/clone_plugin.py"])
    assert sys.modules["clone_plugin"].ORM.of_the_clone


@pytest.mark.parametrize("name", MAPS)
def test_what_ms_swift_has_as_a_dictionary_is_a_mapping_here(name: str) -> None:
    module, _, attribute = SWIFT_NAMES[name].partition(":")
    assert isinstance(getattr(importlib.import_module(module), attribute or name), MutableMapping)


def test_a_scheduler_on_a_base_of_ms_swift_that_is_not_here_is_refused() -> None:
    base = type("PRM", (Absent,), {})
    mine = type("Scored", (base,), {"step": lambda self: None})
    with pytest.raises(ValueError, match="extends ms-swift's PRM, which is not available here"):
        make_scheduler({"scheduler": mine})
