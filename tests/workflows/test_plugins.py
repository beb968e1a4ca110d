from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trireme.config import ConfigError
from trireme.registry import WORKFLOWS
from trireme.workflows.plugins import load_plugins
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
    monkeypatch.setenv("TRIREME_PLUGIN_DIRS", str(tmp_path / "set"))
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
