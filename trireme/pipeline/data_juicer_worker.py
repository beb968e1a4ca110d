"""Data-Juicer worker: runs Data-Juicer's operators on rows, in the interpreter that has it.

Started by data_juicer.py as a file; it needs nothing but Data-Juicer. A line of JSON is a request,
`{"process": [...], "np": 4, "rows": [...]}`; a line of JSON answers it, `{"rows": [...]}` or
`{"error": "..."}`. It leads a process group, which ends with its input: operators' processes too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Answer until the input ends. What operators print goes to stderr."""
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # no sys.stdin: its lock, held by the thread, would stop the processes that operators fork
    threading.Thread(target=read, args=(os.dup(0), requests), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # it has a data_juicer.py
    while True:
        try:
            answer = {"rows": processed(**json.loads(requests.get()))}
        except Exception as error:  # foreign code: who asked is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()


def read(requests_fd: int, requests: queue.SimpleQueue[bytes]) -> None:
    """Pass requests on; where they end, so do this process and those that operators started."""
    with open(requests_fd, "rb") as lines:
        for line in lines:
            requests.put(line)
    os.killpg(os.getpid(), signal.SIGKILL)


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
