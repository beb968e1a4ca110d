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
    assert all(len(cell.outputs) <= 1 for cell in code)  # a run's is updated in place
    told = ["".join(out.get("text", "") for out in cell.outputs) for cell in code]
    assert "IProgress" not in "".join(told), told  # a wish of tqdm, of which no bar is shown
    return told


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_a_run_to_its_end(path: Path) -> None:
    cells = cells_of(path.stem)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        written = json.dumps(cell["outputs"])
        assert len(written) < 20_000 and len(cell["outputs"]) <= 1, cell["source"]
        assert "/tmp/" not in written and str(Path.home()) not in written
        assert "Error" not in [output["output_type"] for output in cell["outputs"]]


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
