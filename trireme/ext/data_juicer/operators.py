"""Data-Juicer: its filters and scores as an operator, on experiences or on a taskset's rows.

Its packages conflict with ours, so it has a separate environment, whose Python the option `python`
or the variable TRIREME_DATA_JUICER_PYTHON names; nothing is installed automatically. A process of
that Python receives the rows and returns those that stay.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any

import yaml
from annotated_types import Ge, Gt

from trireme.experience import Experience
from trireme.pipeline.operators import Operated
from trireme.registry import did_you_mean
from trireme.usercode import Refused

VARIABLE = "TRIREME_DATA_JUICER_PYTHON"
STATS = "__dj__stats__"
_WORKER = Path(__file__).with_name("worker.py")
_NO_INSTALLING = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "UV_OFFLINE": "1",
    "UV_NO_INDEX": "1",
    "UV_NO_CACHE": "1",
}
"""Settings that stop Data-Juicer from installing an operator's requirements, even from a cache or a
folder."""
_KNOWN = (
    "from data_juicer.ops import OPERATORS as o; import json; print(json.dumps(list(o.modules)))"
)
_IMPORT_S = 300.0
"""For a first import, from a slow disk."""
_HERE = "import importlib.util as u, sys; sys.exit(u.find_spec('data_juicer') is None)"


class _DataJuicer(ABC):  # noqa: B024 (what differs is `process`)
    """The process, and its requests."""

    def __init__(
        self,
        *,
        operators: Sequence[Mapping[str, Any]] | None = None,
        config_path: str | None = None,
        np: Annotated[int, Ge(1)] = 4,
        python: str | None = None,
        timeout: Annotated[float, Gt(0)] = 600.0,
    ) -> None:
        """`operators`: each a name with its options; or `config_path`, a recipe with `process`.
        `np` processes work concurrently. `timeout`: seconds for the rows of one step.
        """
        if (operators is None) == (config_path is None):
            raise Refused("data_juicer needs either operators or config_path")
        recipe: dict[str, Any] = (
            {"process": operators} if config_path is None else _recipe(config_path)
        )
        self._request = {"process": recipe["process"], "np": recipe.get("np", np)}
        whose = "operators" if config_path is None else f"config_path ({config_path})"
        names = _names(f"data_juicer: {whose}", recipe["process"])
        self._python = _interpreter(python or os.environ.get(VARIABLE))
        _refuse_unknown(f"data_juicer: {whose}", names, self._python)
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None

    def close(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process.communicate()
            self._process = None

    def _ask(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the remaining rows, in the worker's form: `row`, `changed`, `removed`. Raises
        RuntimeError or TimeoutError, naming the interpreter.
        """
        if not rows:
            return []
        if self._process is None:
            self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
            self._process = subprocess.Popen(
                [self._python, str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                env=os.environ | _NO_INSTALLING,
                start_new_session=True,
            )
        process, late = self._process, threading.Event()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._timeout, lambda: (late.set(), _kill(process)))
        timer.start()
        try:
            process.stdin.write(json.dumps(self._request | {"rows": rows}, default=str) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
            raise self._ended(late.is_set())
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"Data-Juicer ({self._python}) failed: {answer['error']}")
        return answer["rows"]

    def _ended(self, late: bool) -> Exception:
        """Return the reason why there is no answer."""
        if late:
            text = f"gave no answer within {self._timeout:g} s (option timeout)"
            return TimeoutError(f"Data-Juicer ({self._python}) {text}")
        assert self._said is not None
        self._said.seek(0)
        last = (self._said.read().strip().splitlines() or ["it said nothing"])[-1]
        return RuntimeError(f"the process of Data-Juicer ({self._python}) ended: {last}")


class DataJuicerOperator(_DataJuicer):
    """Data-Juicer's operators on experiences, as rows with `prompt_text`, `response_text`, `text`
    (the reply) and `reward`. Their measurements go into `info`, for `reward_shaping_mapper`.
    """

    def process(self, experiences: list[Experience]) -> Operated:
        """Return the experiences that stay, and how many do not. Raises Refused if a text was
        rewritten.
        """
        rows = [
            {
                "prompt_text": e.prompt_text or "",
                "response_text": e.response_text or "",
                "text": e.response_text or "",
                "reward": e.reward,
            }
            for e in experiences
        ]
        kept: dict[int, Experience] = {}
        for answer in self._ask(rows):
            index, changed = answer["row"], answer["changed"]
            if index is None or index in kept:
                raise Refused(
                    "data_juicer got back a row that is not an experience, or the same one "
                    "twice: expected operators that drop rows or measure them"
                )
            if {"text", "response_text"} & {*changed, *answer["removed"]}:
                raise Refused(
                    "data_juicer got back a rewritten reply, but the original tokens are "
                    "trained: expected operators that drop rows or measure them"
                )
            kept[index] = experiences[index]
            kept[index].info.update(changed.get(STATS) or {})
        return [kept[i] for i in sorted(kept)], {"dropped": float(len(rows) - len(kept))}


class DataJuicerRows(_DataJuicer):
    """Runs Data-Juicer's operators on a taskset's rows. Their measurements become columns, for
    `data_selector.feature_keys`.
    """

    def process(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the remaining rows, as changed by the operators."""
        try:
            answers = self._ask(rows)
        finally:
            self.close()
        left = []
        for answer in answers:
            changed, row = answer["changed"], {} if answer["row"] is None else rows[answer["row"]]
            scores = changed.pop(STATS, None) or {}
            stays = {key: value for key, value in row.items() if key not in answer["removed"]}
            left.append({**scores, **stays, **changed})
        return left


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children: each of them has the answers' pipe open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _recipe(path: str) -> dict[str, Any]:
    file = Path(path)
    whose = f"data_juicer: config_path ({path})"
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except yaml.YAMLError as error:
        raise Refused(f"{whose} is not YAML: {error}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("process"), list):
        why = "has no list `process`" if file.is_file() else "is no file"
        raise Refused(f"{whose} {why}: expected a Data-Juicer recipe")
    np = recipe.get("np", 1)
    if not isinstance(np, int) or np < 1:
        raise Refused(f"{whose}: np is {np!r}: expected a number of processes, at least 1")
    return recipe


def _names(whose: str, steps: Sequence[Any]) -> list[str]:
    if not steps:
        raise Refused(f"{whose} is empty: expected at least one operator of Data-Juicer")
    for step in steps:
        if not isinstance(step, Mapping) or len(step) != 1:
            raise Refused(
                f"{whose} has {step!r}: expected one name with its options, {{name: {{}}}}"
            )
    return [str(name) for step in steps for name in step]


def _refuse_unknown(whose: str, names: Sequence[str], python: str) -> None:
    known = _known(python, os.environ.get("PYTHONPATH"))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, " (did you mean '{}'?)")
            raise Refused(f"{whose}: Data-Juicer of {python} has no operator '{name}'{hint}")


@lru_cache(maxsize=8)
def _known(python: str, path: str | None) -> tuple[str, ...]:
    """Return the names of its operators, read once: the import takes seconds. `path` decides what
    is imported. Raises Refused if it fails, or takes too long.
    """
    command, whose = [python, "-c", _KNOWN], f"data_juicer: Data-Juicer of {python}"
    environment = os.environ | _NO_INSTALLING
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{whose} was not imported within {_IMPORT_S:g} s") from None
    if said.returncode:
        last = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Refused(f"{whose} cannot be imported: {last}")
    return tuple(json.loads(said.stdout.splitlines()[-1]))


def _interpreter(python: str | None) -> str:
    """Find a Python that has Data-Juicer. Raises Refused with a way to get one."""
    how = "make an environment for it (pip install py-data-juicer aiohttp ray torch)"
    if python is None:
        raise Refused(
            f"data_juicer needs a Python that has Data-Juicer: {how}, and name its Python as "
            f"option `python` or in {VARIABLE}"
        )
    try:
        there = subprocess.run([python, "-c", _HERE], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(
            f"data_juicer: {python} cannot be run ({error}): expected a Python"
        ) from error
    if there.returncode:
        raise Refused(f"data_juicer: {python} has no Data-Juicer: {how}")
    return python
