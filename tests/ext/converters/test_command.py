"""The command's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trireme.cli.main import app
from trireme.ext.converters import report


def test_convert_takes_its_short_options(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[Any, ...]] = []

    def convert(*args: Any) -> int:
        called.append(args)
        return 3

    monkeypatch.setattr(report, "convert", convert)
    words = ["convert", "--checkpoint-dir", "job", "--base-model-dir", "base"]
    assert CliRunner().invoke(app, words).exit_code == 3
    assert called.pop() == ([Path("job")], Path("base"), None, 5.0)
    words = ["convert", "-c", "job", "-c", "other", "--dtype", "auto"]
    assert CliRunner().invoke(app, words).exit_code == 3
    assert called.pop() == ([Path("job"), Path("other")], None, "auto", 5.0)
    assert CliRunner().invoke(app, ["convert", "job", "-c", "other"]).exit_code == 3
    assert called.pop() == ([Path("job"), Path("other")], None, None, 5.0)
    for words in (["convert"], ["convert", "--gguf", "a.gguf"]):
        assert CliRunner().invoke(app, words).exit_code == 2
    assert called == []
