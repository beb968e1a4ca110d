"""Tasks: runs the task operators on a taskset's rows, once.

A task operator is a function `(rows, *, options) -> rows`, or a class with `process(rows)`, on
dictionaries. The resulting rows are stored in the job's folder: a run that resumes from a
checkpoint has the same rows, and people can look at them. They are made again if the rows of the
data set have changed, or an operator's options or code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trireme.config.schema import Config
from trireme.config.schema_rollout import OperatorConfig
from trireme.data.rows import Rows, load_rows
from trireme.files import in_turn, write_text
from trireme.log import get_logger
from trireme.pipeline.operators import Operator, OperatorFailed, make_operator
from trireme.registry import TASK_OPERATORS, is_path
from trireme.syntax import source_of
from trireme.text import as_json
from trireme.usercode import UserCode, fault_of

logger = get_logger("explorer_experience_pipeline")

KEY = "data_processor.task_pipeline.operators"


def task_operators(config: Config) -> dict[str, OperatorConfig]:
    """Map key -> operator of `task_pipeline`. Names that only Data-Juicer may know become its
    operators, adjacent ones together.
    """
    tasks, service = config.data_processor.task_pipeline, config.service.data_juicer
    out: dict[str, OperatorConfig] = {}
    theirs: list[dict[str, Any]] = []
    for index, item in enumerate(tasks.operators if tasks else ()):
        known = not item.name or is_path(item.name) or item.name in TASK_OPERATORS
        if known or not (service.auto_start or service.server_url):
            theirs = []
            out[f"{KEY}[{index}]"] = item
            continue
        if not theirs:
            assert tasks is not None
            args = {"operators": theirs, "np": tasks.num_process or 4}
            out[f"{KEY}[{index}]"] = OperatorConfig.model_construct(name="data_juicer", args=args)
        theirs.append({item.name: item.args})
    return out


def prepared(
    rows: Rows, operators: Sequence[tuple[str, Mapping[str, Any]]], folder: Path, name: str
) -> Rows:
    """Return the rows after all operators: made now, or by an earlier attempt of this run of the
    same rows with the same ones.

    Raises ValueError if none is left, OperatorFailed if an operator fails.
    """
    made = [
        make_operator(TASK_OPERATORS, operator, args, f"{KEY}[{index}]")
        for index, (operator, args) in enumerate(operators)
    ]
    about = [rows.source, len(rows), *map(list, operators), *map(_code, made)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for row in rows:
        digest.update(as_json(row, default=str).encode())
    path = folder / f"{name}-{digest.hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    waits = partial(logger.warning, "waiting for another explorer, which makes the tasks %s", path)
    with in_turn(lock, waits):  # several explorers may begin together
        if not path.exists():
            changed = _changed(rows, made)
            write_text(path, "".join(as_json(row, default=str) + "\n" for row in changed))
    return load_rows(path)


def _code(operator: Operator) -> str:
    """Return the source of an operator; nothing if it has none."""
    function = getattr(operator.function, "func", operator.function)  # without its options
    try:
        return source_of(function if operator.made is None else type(operator.made))
    except (OSError, TypeError):  # of an interactive session, or compiled
        return ""


def _changed(rows: Rows, operators: Sequence[Operator]) -> list[dict[str, Any]]:
    changed = [dict(row) for row in rows]
    for operator in operators:
        changed = _apply(operator, changed)
        logger.info("task operator '%s' left %d rows", operator.name, len(changed))
    if not changed:
        raise ValueError(f"{rows.source}: {KEY} left none of its {len(rows)} rows")
    return changed


def _apply(operator: Operator, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        with UserCode(f"task operator '{operator.name}'", operator.function):
            changed = operator.function(rows)
    except Exception as error:
        raise OperatorFailed(str(fault_of(error))) from error
    if not isinstance(changed, list) or not all(isinstance(row, dict) for row in changed):
        raise OperatorFailed(
            f"task operator '{operator.name}' returned {type(changed).__name__}: expected a list "
            "of rows, each a dictionary"
        )
    return changed
