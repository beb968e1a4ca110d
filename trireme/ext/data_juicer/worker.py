"""Data-Juicer worker: runs Data-Juicer's operators on rows, in the interpreter that has it.

Started by data_juicer.py as a file; it needs nothing but Data-Juicer. A line of JSON is a request,
`{"process": [...], "np": 4, "rows": [...]}`; a line of JSON answers it, `{"rows": [...]}` or
`{"error": "..."}`. A row of the answer has `row`, the index of the row that it was (None: none of
them), `changed`, the columns that operators have made or changed, and `removed`. The worker leads a
process group, which ends with its input: operators' processes too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

INDEX = "trireme_row"


def main() -> None:
    """Answer until the input ends. Operators' output goes to stderr."""
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # not sys.stdin: its lock, which the thread holds, would block processes that operators fork
    threading.Thread(target=read, args=(os.dup(0), requests), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # it has a data_juicer.py
    while True:
        try:
            answer = {"rows": processed(**json.loads(requests.get()))}
        except Exception as error:  # foreign code: reported to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()


def read(requests_fd: int, requests: queue.SimpleQueue[bytes]) -> None:
    """Pass requests on; when they end, end this process and those that operators started."""
    with open(requests_fd, "rb") as lines:
        for line in lines:
            requests.put(line)
    os.killpg(os.getpid(), signal.SIGKILL)


def processed(process: list[Any], np: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that the operators leave, as they changed them."""
    from data_juicer.core.data import NestedDataset  # pyright: ignore[reportMissingImports]
    from data_juicer.ops import load_ops  # pyright: ignore[reportMissingImports]

    dataset = NestedDataset(table([row | {INDEX: i} for i, row in enumerate(rows)]))
    before = dataset.to_list()
    for step in load_ops(process):
        if len(dataset) == 0:  # some operators fail on nothing
            break
        step.num_proc = min(np, len(dataset))
        dataset = dataset.process(step)
    return [difference(row, before) for row in dataset.to_list()]


def table(rows: list[dict[str, Any]]) -> Any:
    """Return the rows as a Dataset, with every column of any row. A column of several types, which
    Arrow refuses, becomes text.
    """
    from datasets import Dataset

    columns = {
        key: [row.get(key) for row in rows] for key in dict.fromkeys(k for r in rows for k in r)
    }
    for key, values in columns.items():
        try:
            Dataset.from_list([{key: value} for value in values])
        except (ValueError, TypeError, NotImplementedError, OverflowError):  # Arrow's errors
            columns[key] = [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
    return Dataset.from_list(
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    )


def difference(after: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an operators' result as changes of the original row. Both have been through Arrow,
    which gives every dict of a column the same keys: the caller's own values have only theirs.
    """
    index = after.pop(INDEX, None)
    index = index if index in range(len(rows)) else None
    before = {} if index is None else rows[index]
    changed = {k: v for k, v in after.items() if k not in before or before[k] != v}
    removed = [key for key in before if key not in after and key != INDEX]
    return {"row": index, "changed": changed, "removed": removed}


if __name__ == "__main__":
    main()
