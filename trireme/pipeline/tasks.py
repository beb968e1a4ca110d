"""Tasks: what operators make of a taskset's rows, once, before the run.

An operator is a function `(rows, *, options) -> rows`, or a class with `process(rows)`, of
dictionaries. What is left lies in the job's folder: a run that goes on from a checkpoint has the
same rows, and people can look at them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.data.rows import Rows, load_rows
from trireme.log import get_logger
from trireme.pipeline.names import TASK_OPERATORS
from trireme.pipeline.operator import Operator, OperatorFailed, make_operator
from trireme.usercode import UserCode, fault_of

logger = get_logger("explorer_experience_pipeline")

KEY = "data_processor.task_pipeline.operators"


def make_task_operators(given: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Operator]:
    """Operators by name with their options. Raises ValueError naming the key of a wrong one."""
    return [
        make_operator(TASK_OPERATORS, name, args, f"{KEY}[{place}]")
        for place, (name, args) in enumerate(given)
    ]


def prepared(
    rows: Rows, given: Sequence[tuple[str, Mapping[str, Any]]], folder: Path, name: str
) -> Rows:
    """The rows after all operators: made now, or by an earlier start of this run with the same.

    Raises ValueError where none is left, OperatorFailed where an operator fails.
    """
    told = json.dumps([rows.source, len(rows), *map(list, given)], sort_keys=True, default=str)
    path = folder / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.jsonl"
    if not path.exists():
        found = [dict(row) for row in rows]
        for operator in make_task_operators(given):
            found = _apply(operator, found)
            logger.info("task operator '%s' left %d rows", operator.name, len(found))
        if not found:
            raise ValueError(f"{rows.source}: {KEY} left none of its {len(rows)} rows")
        _write(path, found)
    return load_rows(path)


def _apply(operator: Operator, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        with UserCode(f"task operator '{operator.name}'", operator.function):
            found = operator.function(rows)
    except Exception as error:
        raise OperatorFailed(str(fault_of(error))) from error
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise OperatorFailed(
            f"task operator '{operator.name}' returned {type(found).__name__}: expected a list of "
            f"rows, each a dictionary"
        )
    return found


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)
