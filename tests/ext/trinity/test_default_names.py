"""Trinity-RFT's default names and variables: what lies under them is found, or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.config import load_config
from trireme.config.lookup import plugin_files


@pytest.mark.parametrize(
    ("text", "folder", "words"),
    [
        ("{}", "Trinity-RFT/rft", "project=Trinity-RFT name=rft"),
        ("name: mine", "Trinity-RFT/mine", "project=Trinity-RFT"),
        ("project: lab\ngroup: a", "lab/a/rft", "name=rft"),
    ],
)
def test_a_run_under_the_default_names_is_named(
    tmp_path: Path, text: str, folder: str, words: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"checkpoint_root_dir: {tmp_path / 'out'}\n{text if text != '{}' else ''}\n")
    assert load_config(path)._notes == ()
    (tmp_path / "out" / folder / "monitor").mkdir(parents=True)
    place = tmp_path / "out" / folder
    expected = f"{place} holds a run with Trinity-RFT's default names: {words} resumes it"
    assert load_config(path)._notes == (expected,)
    assert load_config(path, words.split())._notes == ()


def test_its_variable_names_folders_of_plug_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIREME_PLUGIN_DIRS", raising=False)
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(tmp_path))
    (tmp_path / "mine.py").touch()
    assert plugin_files([]) == [tmp_path / "mine.py"]
