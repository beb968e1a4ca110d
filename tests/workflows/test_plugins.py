from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme.config import ConfigError
from trireme.registry import WORKFLOWS
from trireme.workflows.plugins import load_plugins
from trireme.workflows.scheduler import MultiTurnScheduler
from trireme.workflows.swift import SwiftORM
from trireme.workflows.workflow import resolve

CODE = """
from trireme import workflow

@workflow("{name}")
async def run(task, model):
    return model.experiences()
"""


def test_a_file_registers_its_workflow_once_and_is_found_by_path(tmp_path: Path) -> None:
    file = tmp_path / "one_plugin.py"
    file.write_text(CODE.format(name="from_a_file"))
    assert load_plugins([file]) == load_plugins([str(file)]) == ["one_plugin"]
    assert WORKFLOWS.get("from_a_file") is sys.modules["one_plugin"].run
    assert resolve("one_plugin:run").name == "one_plugin:run"


def test_a_folder_and_the_environment_s_folders_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("given", "set"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"plugin_{place}.py").write_text(CODE.format(name=f"in_{place}"))
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(tmp_path / "set"))
    assert load_plugins([tmp_path / "given"]) == ["plugin_given", "plugin_set"]
    assert {"in_given", "in_set"} <= set(WORKFLOWS.names())


def test_a_file_that_fails_is_one_sentence_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken_plugin.py"
    file.write_text("import math\nmath.nothing\n")
    with pytest.raises(ConfigError) as caught:
        load_plugins([file])
    first, *trace = str(caught.value).splitlines()
    assert first == (
        f"plugins has {file}, which fails to load: AttributeError: module 'math' has no attribute "
        "'nothing'"
    )
    assert trace == [f"  {file}:2: math.nothing"]
    assert "broken_plugin" not in sys.modules


def test_what_is_not_there_and_what_is_taken_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        load_plugins([tmp_path / "none.py"])
    (tmp_path / "json.py").write_text("")
    with pytest.raises(ConfigError, match="a module 'json' is loaded already, rename the file"):
        load_plugins([tmp_path / "json.py"])


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
