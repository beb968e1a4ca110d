"""Data-Juicer as an operator: against the package itself where its Python is named, and against a
package of the same shape for what goes wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trireme.experience import EID, Experience
from trireme.pipeline.data_juicer import VARIABLE
from trireme.pipeline.operators import Operator, OperatorFailed, make_operator
from trireme.registry import OPERATORS, TASK_OPERATORS

REAL = os.environ.get(VARIABLE)
SHORT = {"min_len": 1, "text_key": "q"}
REPLIES = ["seven times six", "!!! ???", "42", "seven times six"]
FAKE = """
import os, sys, time
class Step:
    def __init__(self, name, options): self.name, self.options = name, options
    def run(self, row):
        text = row["response_text"]
        print("a line that is no answer")
        if self.name == "dies": sys.exit("out of memory")
        if self.name == "hangs": time.sleep(60)
        if self.name == "raises": raise KeyError("text_key")
        if self.name == "rewrites": return [{**row, "text": text.upper()}]
        if self.name == "doubles": return [row, row]
        if self.name == "drops": return []
        return [{**row, "__dj__stats__": {"text_len": len(text)}}]
def load_ops(process): return [Step(*item) for step in process for item in step.items()]
"""
DATA = """
class NestedDataset:
    def __init__(self, rows): self.rows = list(rows)
    def __len__(self): return len(self.rows)
    def process(self, step): return NestedDataset([o for row in self.rows for o in step.run(row)])
    def to_list(self): return self.rows
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter has a package of Data-Juicer's shape."""
    core = tmp_path / "data_juicer" / "core"
    core.mkdir(parents=True)
    for file, text in ((core / "__init__.py", ""), (core.parent / "__init__.py", "")):
        file.write_text(text)
    (core.parent / "ops.py").write_text(FAKE)
    (core / "data.py").write_text(DATA)
    (tmp_path / "datasets.py").write_text("class Dataset:\n    from_list = staticmethod(list)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(VARIABLE, sys.executable)


def experiences() -> list[Experience]:
    made = []
    for run, text in enumerate(REPLIES):
        made.append(Experience(range(4), prompt_length=1, reward=1.0, eid=EID(1, 0, run, 0)))
        made[-1].prompt_text, made[-1].response_text = "6 * 7?", text
    return made


@contextmanager
def made(registry: Any, **args: Any) -> Iterator[Operator]:
    operator = make_operator(registry, "data_juicer", args, "operators[0]")
    try:
        yield operator
    finally:
        asyncio.run(operator.close())


def apply(steps: list[Any], **args: Any) -> tuple[list[Experience], dict[str, float]]:
    with made(OPERATORS, operators=steps, **args) as operator:
        return asyncio.run(operator(experiences()))


@pytest.mark.usefixtures("fake")
def test_what_is_measured_goes_into_info_and_to_the_next_operator() -> None:
    kept, metrics = apply([{"measures": {}}])
    assert [e.info["text_len"] for e in kept] == list(map(len, REPLIES))
    assert metrics == {"dropped": 0.0}
    shape = [{"stats_key": "text_len", "op_type": "ADD", "weight": 0.5}]
    mapper = make_operator(
        OPERATORS, "reward_shaping_mapper", {"reward_shaping_configs": shape}, "operators[1]"
    )
    shaped, _ = asyncio.run(mapper(kept))
    assert [e.reward for e in shaped] == [1 + len(text) / 2 for text in REPLIES]


@pytest.mark.usefixtures("fake")
def test_nothing_may_stay() -> None:
    assert apply([{"drops": {}}, {"raises": {}}]) == ([], {"dropped": 4.0})


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("dies", r"the process of Data-Juicer \(.*\) ended: out of memory"),
        ("hangs", r"gave no answer within 1 s \(option timeout\)"),
        ("raises", r"failed: KeyError: 'text_key'"),
        ("rewrites", "a reply that has been rewritten"),
        ("doubles", "a row that is no experience, or one twice"),
    ],
)
def test_what_goes_wrong_is_said(step: str, says: str) -> None:
    timeout = 1 if step == "hangs" else 60
    with pytest.raises(OperatorFailed, match=says):
        apply([{step: {}}], timeout=timeout)


@pytest.mark.usefixtures("fake")
def test_scores_of_rows_become_columns() -> None:
    with made(TASK_OPERATORS, operators=[{"measures": {}}]) as operator:
        rows = operator.function([{"response_text": "abc", "question": "?"}])
    assert rows == [{"response_text": "abc", "question": "?", "text_len": 3}]


def test_what_cannot_work_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, **args: Any) -> None:
        with pytest.raises(ValueError, match=says):
            make_operator(OPERATORS, "data_juicer", args, "operators[0]")

    monkeypatch.delenv(VARIABLE, raising=False)
    steps = [{"text_length_filter": {}}]
    refused("operators or config_path, one of the two")
    refused("operators or config_path, one of the two", operators=steps, config_path="a.yaml")
    refused(r"config_path \(none.yaml\) is no file", config_path="none.yaml")
    (tmp_path / "r.yaml").write_text("np: 2\n")
    refused("has no list `process`", config_path=str(tmp_path / "r.yaml"))
    refused(f"as option `python` or in {VARIABLE}", operators=steps)
    refused("/nowhere/python cannot be run", operators=steps, python="/nowhere/python")
    refused("has no Data-Juicer", operators=steps, python=sys.executable)
    refused("has no option 'operator'", operator=steps)


@pytest.mark.skipif(REAL is None, reason="data-juicer: no Python of it is named")
def test_the_package_itself_filters_and_scores(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    scored = {"alphanumeric_filter": {"tokenization": False, "min_ratio": 0.5}}
    sized = {"text_length_filter": {"min_len": 3, "text_key": "response_text"}}
    recipe.write_text(json.dumps({"project_name": "test", "np": 1, "process": [scored, sized]}))
    with made(OPERATORS, config_path=str(recipe)) as operator:
        for _ in range(2):  # the process stays
            kept, metrics = asyncio.run(operator(experiences()))
            assert [e.response_text for e in kept] == [REPLIES[0], REPLIES[3]]
            assert metrics == {"dropped": 2.0}
            assert kept[0].info["text_len"] == 15
            assert kept[0].info["alnum_ratio"] == pytest.approx(13 / 15)
    with made(TASK_OPERATORS, operators=[{"text_length_filter": SHORT}]) as operator:
        assert operator.function([{"q": "how?", "n": 1}]) == [{"q": "how?", "n": 1, "text_len": 4}]
