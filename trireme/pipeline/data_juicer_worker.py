"""Data-Juicer worker: runs Data-Juicer's operators on rows, in the interpreter that has it.

Started by data_juicer.py as a file; it needs nothing but Data-Juicer. A line of JSON is a request,
`{"process": [...], "np": 4, "rows": [...]}`; a line of JSON answers it, `{"rows": [...]}` or
`{"error": "..."}`. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer until the input ends. What operators print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # it has a data_juicer.py
    for line in sys.stdin:
        try:
            answer = {"rows": processed(**json.loads(line))}
        except Exception as error:  # foreign code: who asked is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()


def processed(process: list[Any], np: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that the operators leave, with what they have measured."""
    from data_juicer.core.data import NestedDataset  # pyright: ignore[reportMissingImports]
    from data_juicer.ops import load_ops  # pyright: ignore[reportMissingImports]
    from datasets import Dataset

    dataset = NestedDataset(Dataset.from_list(rows))
    for step in load_ops(process):
        if len(dataset) == 0:  # some operators fail on nothing
            break
        step.num_proc = min(np, len(dataset))
        dataset = dataset.process(step)
    return dataset.to_list()


if __name__ == "__main__":
    main()
