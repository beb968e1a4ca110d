"""Notebooks: runs those of examples/notebooks, and writes their outputs into them.

`python scripts/notebooks.py [NAME]...` runs each in a folder of its own; that folder's path becomes
`.` in the outputs, and that of a cell `cell.py`. A test checks that they ran to the end.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"


def run(path: Path) -> None:
    """Run a notebook and write it with its outputs."""
    book: Any = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(
            book, timeout=1800, kernel_name="python3", resources=resources
        ).execute()
        for cell in book.cells:
            cell.metadata.pop("execution", None)  # times of day
            if cell.cell_type == "code":
                cell.outputs = [_without(output, folder) for output in cell.outputs]
    book.metadata = {"kernelspec": book.metadata.get("kernelspec", {})}
    nbformat.write(book, path)


def _without(value: Any, folder: str) -> Any:
    """Replace the folder's path in all texts of an output."""
    if isinstance(value, str):
        return re.sub(r"\S*ipykernel_\d+/\d+\.py", "cell.py", value.replace(folder, "."))
    if isinstance(value, dict):
        changed = {key: _without(inner, folder) for key, inner in value.items()}
        return nbformat.from_dict(changed) if isinstance(value, nbformat.NotebookNode) else changed
    return [_without(inner, folder) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        run(FOLDER / f"{name}.ipynb")
