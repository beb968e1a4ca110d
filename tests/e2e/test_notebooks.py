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


NOISY = """
import sys
import warnings
import trireme


def never(task, answer):
    if task.task_id % 2:
        warnings.warn("of the reward's own: " + "x" * 300)
    print("\\r7%", end="", file=sys.stderr)
    return 0.0


rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(8)]
run = trireme.train(
    model=MODEL, tasks=rows, reward=never, buffer={"total_steps": 12, "batch_size": 4},
    algorithm="grpo", **{"model.max_response_tokens": 8, "model.max_model_len": 64},
)
"""


@pytest.mark.slow
def test_a_run_with_warnings_has_one_output_of_less_than_20_kb(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nbformat = import_module("nbformat")
    source = f"MODEL = {str(tiny_dir)!r}\n{NOISY}"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    import_module("nbclient").NotebookClient(
        book, timeout=int(HANG_S), resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    path = tmp_path / "saved.ipynb"
    nbformat.write(book, path)
    [output] = json.loads(path.read_text("utf-8"))["cells"][0]["outputs"]
    assert output["output_type"] == "display_data"
    text = "".join(output["data"]["text/plain"])
    assert "warning: explorer step 3: zero_rewards: " in text and "of the reward's own" in text
    assert "\nrun 12/12" in text and "\r" not in text
    assert path.stat().st_size < 20_000 and text.count("\n") <= 61


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
    assert figures["accuracy_rl"] > figures["accuracy_before"] + 0.1


@pytest.mark.slow
def test_trying_a_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = played("try_a_workflow", tmp_path, monkeypatch)
    assert "rollout 0, step 0: reward 0.5" in told[2] and "4 of 21 tokens" in told[2]
    assert "reward 'strict' failed: ValueError" in told[-1]
