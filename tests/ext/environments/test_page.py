"""The page on workflows, whose last example lends environments of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_documents import ROOT
from tests.test_pages import Page
from tests.test_pages import page as page
from tests.workflows.test_workflow import call
from trireme.ext.environments.pool import EnvPool


def test_workflows(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EnvPool] = []
    (tmp_path / "my_games.py").write_text(
        "from page_workflows import Countdown\n\ndef make(number=None):\n    return Countdown()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    module = page("workflows.md")
    pool = module.shared_pool

    def kept(*args: Any, **options: Any) -> EnvPool:
        made.append(pool(*args, **options | {"workers": 1}))
        return made[-1]

    monkeypatch.setattr(module, "shared_pool", kept)
    [guess] = call("guess", ["5", "7"])
    assert guess.reward == 1.0 and guess.metrics["turns"] == 1.0
    by_step = call("guess_by_step", ["1", "7"])
    assert [e.reward for e in by_step] == [1.0, 1.0]
    for workflow in (module.CountdownWorkflow, module.InProcesses):
        steps = call(workflow, ["count", "wait", "count", "count"])
        assert [e.reward for e in steps] == [1.0] * 4
    for each in made:
        each.close()
