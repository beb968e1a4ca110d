"""The notebooks of examples/notebooks run from top to bottom, in a kernel of their own."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import ROOT
from tests.limits import HANG_S

pytest.importorskip("nbclient", reason="no nbclient: make setup installs it")
pytest.importorskip("ipykernel", reason="no ipykernel: make setup installs it")
FOLDER = ROOT / "examples" / "notebooks"


def cells_of(name: str) -> list[dict[str, Any]]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def played(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each code cell printed. Raises the error of a cell that fails."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = import_module("nbformat").read(FOLDER / f"{name}.ipynb", as_version=4)
    client = import_module("nbclient").NotebookClient(
        book,
        timeout=int(HANG_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    told = ["".join(out.get("text", "") for out in cell.outputs) for cell in code]
    assert "IProgress" not in "".join(told), told  # a wish of tqdm, of which no bar is shown
    return told


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    assert all(cell["outputs"] == [] for cell in cells_of(path.stem))


@pytest.mark.large
def test_training_with_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = played("train_with_a_reward", tmp_path, monkeypatch)
    assert "reward 1" in told[-2] and "####" in told[-1]
    [summary] = tmp_path.glob("checkpoints/python/grpo*/summary.json")
    figures = json.loads(summary.read_text())
    assert figures["accuracy_rl"] > figures["accuracy_before"] + 0.05


@pytest.mark.slow
def test_trying_a_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = played("try_a_workflow", tmp_path, monkeypatch)
    assert "rollout 0, step 0: reward 0.5" in told[2] and "4 of 21 tokens" in told[2]
    assert "reward 'strict' failed: ValueError" in told[-1]
