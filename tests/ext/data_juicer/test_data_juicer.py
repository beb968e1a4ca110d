"""Data-Juicer as an operator: against the package itself where its Python is named, and against a
package of the same shape for what goes wrong.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.config.made import config_of, values, write_rows
from tests.limits import HANG_S
from trireme.config.schema import ServiceConfig
from trireme.experience import EID, Experience
from trireme.ext.data_juicer import operators as data_juicer
from trireme.ext.data_juicer.operators import VARIABLE
from trireme.launch.check import draft, make_plans
from trireme.launch.tasksets import make_training_taskset
from trireme.pipeline.operators import Operator, OperatorFailed, make_operator
from trireme.pipeline.tasks import task_operators
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
        if self.name == "hangs": time.sleep(3600)
        if self.name == "forks":
            told = open(self.options["told"], "a", buffering=1)
            if os.fork(): told.write("forked\\n")
            time.sleep(3600)
        if self.name == "raises": raise KeyError("text_key")
        if self.name == "rewrites": return [{**row, "text": text.upper()}]
        if self.name == "doubles": return [row, row]
        if self.name == "drops": return []
        return [{**row, "__dj__stats__": {"text_len": len(text)}}]
class OPERATORS: modules = "measures keeps dies hangs forks raises rewrites doubles drops".split()
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
        ("rewrites", "a rewritten reply"),
        ("doubles", "a row that is not an experience, or the same one twice"),
    ],
)
def test_what_goes_wrong_is_said(step: str, says: str) -> None:
    timeout = 1 if step == "hangs" else HANG_S
    with pytest.raises(OperatorFailed, match=says):
        apply([{step: {}}], timeout=timeout)


STARTS = """
import sys
from trireme.ext.data_juicer.operators import DataJuicerRows
operators = [{"forks": {"told": sys.argv[1]}}]
DataJuicerRows(operators=operators).process([{"response_text": "a"}])
"""


@pytest.mark.usefixtures("fake")
def test_processes_that_an_operator_forks_end_with_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(OperatorFailed, match="gave no answer within 3 s"):
        apply([{"forks": {"told": str(tmp_path / "told")}}], timeout=3)
    assert (tmp_path / "told").read_text() == "forked\n"


@pytest.mark.usefixtures("fake")
def test_processes_of_operators_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "told")
    with (
        subprocess.Popen(
            [sys.executable, "-c", STARTS, str(tmp_path / "told")], cwd=Path(__file__).parents[2]
        ) as run,
        (tmp_path / "told").open() as told,
    ):
        assert told.readline() == "forked\n"
        run.kill()
        assert told.read() == ""  # the end is there when no process holds it open


@pytest.mark.usefixtures("fake")
def test_scores_of_rows_become_columns() -> None:
    with made(TASK_OPERATORS, operators=[{"measures": {}}]) as operator:
        rows = operator.function([{"response_text": "abc", "question": "?"}])
    assert rows == [{"response_text": "abc", "question": "?", "text_len": 3}]


ARROW = """
import pyarrow
class Dataset(list):
    from_list = staticmethod(lambda rows: Dataset(pyarrow.Table.from_pylist(rows).to_pylist()))
"""


@pytest.mark.usefixtures("fake")
def test_columns_that_no_operator_changes_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text(ARROW)
    messages = [{"role": "user", "content": "?"}]
    rows = [
        {"response_text": "a", "args": {"a": 1}, "answer": 1, "messages": messages},
        {"response_text": "b", "args": {"b": 2}, "answer": "two", "messages": []},
        {"response_text": "c", "day": datetime.date(2024, 5, 1), "raw": b"x"},
        {"response_text": "d", "messages": [{**messages[0], "tool": "t"}]},
    ]
    with made(TASK_OPERATORS, operators=[{"measures": {}}]) as operator:
        assert operator.function(rows) == [{"text_len": 1, **row} for row in rows]
    with made(TASK_OPERATORS, operators=[{"rewrites": {}}]) as operator:
        changed = [{**row, "text": str(row["response_text"]).upper()} for row in rows]
        assert operator.function(rows) == changed


def test_what_cannot_work_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, **args: Any) -> None:
        with pytest.raises(ValueError, match=says):
            make_operator(OPERATORS, "data_juicer", args, "operators[0]")

    monkeypatch.delenv(VARIABLE, raising=False)
    steps = [{"text_length_filter": {}}]
    refused("either operators or config_path")
    refused("either operators or config_path", operators=steps, config_path="a.yaml")
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


@pytest.mark.usefixtures("fake")
def test_steps_that_cannot_work_are_refused_before_the_run(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for steps, says in (
        ([], "operators is empty: expected at least one operator"),
        ([{"measure": {}}], r"has no operator 'measure' \(did you mean 'measures'\?\)"),
        ([{"measures": {}, "drops": {}}], "expected one name with its options"),
    ):
        with pytest.raises(ValueError, match=says):
            make_operator(OPERATORS, "data_juicer", {"operators": steps}, "operators[0]")
    for text, says in (
        ("process:\n- a: [\n", r"config_path \(.*r.yaml\) is not YAML: while parsing"),
        ("np: four\nprocess:\n- drops: {}\n", r"config_path \(.*r.yaml\): np is 'four'"),
        ("process: []\n", r"config_path \(.*r.yaml\) is empty"),
    ):
        recipe.write_text(text)
        with pytest.raises(ValueError, match=says):
            make_operator(OPERATORS, "data_juicer", {"config_path": str(recipe)}, "operators[0]")


@pytest.mark.usefixtures("fake")
def test_its_operators_are_asked_for_once_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = tmp_path / "data_juicer" / "ops.py"
    ops.write_text(f"open({str(tmp_path / 'asked')!r}, 'a').write('.')\n{FAKE}")
    for _ in range(2):
        with made(OPERATORS, operators=[{"keeps": {}}]):
            pass
    assert (tmp_path / "asked").read_text() == "."
    data_juicer._known.cache_clear()
    monkeypatch.setattr(data_juicer, "_IMPORT_S", 0.5)
    ops.write_text("import time\ntime.sleep(3600)")
    with pytest.raises(ValueError, match=r"was not imported within 0\.5 s"):
        make_operator(OPERATORS, "data_juicer", {"operators": [{"keeps": {}}]}, "operators[0]")


def pipeline_of(tmp_path: Path, names: list[str], **tasks: Any) -> dict[str, Any]:
    """A YAML with operators on rows by these names, whose taskset's path is not there."""
    tree = values(tmp_path)
    tree["buffer"]["explorer_input"]["taskset"]["path"] = str(tmp_path / "their_output")
    steps = [{"name": name, "args": {"at": i}} for i, name in enumerate(names)]
    inputs = {"inputs": [str(tmp_path / "tasks.jsonl")]}
    tree["data_processor"] = {"task_pipeline": {"operators": steps, "num_process": 2} | inputs}
    tree["data_processor"]["task_pipeline"] |= tasks
    tree["service"] = {"data_juicer": {"auto_start": True}}
    return tree


@pytest.mark.usefixtures("fake")
def test_operators_by_their_own_names_get_the_rows_of_inputs(tmp_path: Path) -> None:
    tree = pipeline_of(tmp_path, ["measures", "keeps"])
    write_rows(tmp_path / "tasks.jsonl", 32, question="1?", answer="1", response_text="one")
    [plan] = make_plans(config_of(tmp_path, tree))
    assert any("read in place of the taskset's path" in note for note in plan.notes)
    taskset = make_training_taskset(plan)
    assert taskset is not None and len(taskset) == 32
    [file] = (plan.job_dir / "buffer").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["text_len"] for row in rows] == [3] * 32 and rows[0]["answer"] == "1"
    assert not (tmp_path / "their_output").exists()


def test_names_in_a_row_are_one_process(tmp_path: Path) -> None:
    names = ["a_filter", "b_mapper", "json:loads", "c_filter"]
    config = config_of(tmp_path, pipeline_of(tmp_path, names))
    made = {key[-3:]: (item.name, item.args) for key, item in task_operators(config).items()}
    first = [{"a_filter": {"at": 0}}, {"b_mapper": {"at": 1}}]
    assert made == {
        "[0]": ("data_juicer", {"operators": first, "np": 2}),
        "[2]": ("json:loads", {"at": 2}),
        "[3]": ("data_juicer", {"operators": [{"c_filter": {"at": 3}}], "np": 2}),
    }
    without = config.model_copy(update={"service": ServiceConfig()})
    assert [item.name for item in task_operators(without).values()] == names


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data_processor.task_pipeline.inputs=[a, b]", "inputs is given: expected one of them"),
        ("mode=train", "task_pipeline is given in mode train, which has no tasks: expected rows"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(
    override: str, sentence: str, tmp_path: Path
) -> None:
    tree = pipeline_of(tmp_path, [])
    told = [str(one) for one in draft(config_of(tmp_path, tree, override)).problems]
    assert any(sentence in one for one in told), told
