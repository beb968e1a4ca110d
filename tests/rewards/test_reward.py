from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.data.made import taskset_of
from trireme.data.rows import load_rows
from trireme.registry import REWARDS
from trireme.rewards.reward import RewardFn, examine_columns, resolve, score
from trireme.task import Task
from trireme.usercode import fault_of
from trireme.workflows.single_turn import MathWorkflow, SimpleWorkflow

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
exec(next(block for block in BLOCKS if "@reward" in block))


class Lengths(RewardFn):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, response: str, truth: str) -> dict[str, float]:
        return {"length": self.scale * abs(len(response) - len(truth))}


def of_three(prompt: str, response: str, target: str) -> float:
    return float(response == target)


TASK = Task(raw_task={"prompt": "?", "response": "42"})


def judge(reward: Any, answer: str, **args: Any) -> dict[str, float]:
    found = resolve(reward, args)
    assert found is not None
    return asyncio.run(score(TASK, answer, found))


def test_a_function_by_name_with_options() -> None:
    assert judge("boxed_and_brief", "\\boxed{42}") == {"correct": 1.0, "brief": 0.1}
    assert judge("boxed_and_brief", "\\boxed{42}", max_chars=3) == {"correct": 1.0, "brief": 0.0}


FORMAT = {"prompt_key": "question", "response_key": "answer"}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "reply"),
    [
        ([42, 7], "42"),
        ([0.5, 2.25], "0.5"),
        ([42.0, None], "42"),  # a table makes floats of whole numbers where one is missing
        ([True, False], "True"),
        (["so 6 * 7 = 42\n#### 42", "#### 7"], "42"),
    ],
)
def test_the_readmes_reward_earns_what_the_row_says(
    tmp_path: Path, kind: str, column: list[Any], reply: str
) -> None:
    path = tmp_path / f"rows.{kind}"
    frame = pandas.DataFrame({"question": ["6 * 7?", "3 + 4?"], "answer": column})
    write = {"csv": frame.to_csv, "parquet": frame.to_parquet}.get(kind)
    if write is None:
        frame.to_json(path, orient="records", lines=True)
    else:
        write(path, index=False)
    rows = load_rows(path)
    [task, _] = taskset_of(rows, name="t", batch_size=2, format_args=FORMAT, workflow="w").next()
    assert task.raw_task["answer"] == column[0]  # the row itself stays as it is
    given = resolve("boxed_and_brief")
    assert given is not None
    parts = asyncio.run(score(task, f"\\boxed{{{reply}}}", given))
    assert parts == {"correct": 1.0, "brief": 0.1}


def test_what_is_no_scalar_stays_what_it_is() -> None:
    for truth in ("x", None, {"target": 3}, [1, 2]):
        assert Task(raw_task={"response": truth}).truth == truth


def test_a_class_with_options() -> None:
    assert judge(Lengths, "abc", scale=2.0) == {"length": 2.0}
    assert judge(Lengths(3.0), "abc") == {"length": 3.0}


def test_a_class_that_takes_everything() -> None:
    class All(RewardFn):
        def __call__(self, **kwargs: Any) -> dict[str, float]:
            return {name: 1.0 for name in kwargs}

    assert set(judge(All, "a")) == {"response", "truth", "prompt", "task"}


def test_a_coroutine_function_and_a_plain_number() -> None:
    async def judged(task: Task, answer: str) -> float:
        await asyncio.sleep(0)
        return len(answer)

    assert judge(judged, "abc") == {"judged": 3.0}


class Brief:
    def __init__(self, most: int = 3) -> None:
        self.most = most

    def __call__(self, task: Task, answer: str, *, weight: float = 1.0) -> float:
        return weight * (len(answer) <= self.most)


class BriefLater(Brief):
    async def __call__(self, task: Task, answer: str, *, weight: float = 1.0) -> float:
        return super().__call__(task, answer, weight=weight)


@pytest.mark.parametrize("form", [Brief, BriefLater])
def test_an_object_may_be_called_with_task_and_answer(form: type) -> None:
    assert judge(form, "abcd") == {form.__name__: 0.0}
    assert judge(form, "abcd", most=4) == {form.__name__: 1.0}
    assert judge(form(4), "abcd") == {form.__name__: 1.0}
    assert judge(form(4), "abcd", weight=2) == {form.__name__: 2.0}
    with pytest.raises(ValueError, match="has no option 'wieght'"):
        resolve(form(4), {"wieght": 2})


def test_an_object_that_cannot_be_hashed_has_options_too() -> None:
    @dataclass
    class Longest:
        most: int = 3

        def __call__(self, task: Task, answer: str, *, weight: float = 1.0) -> float:
            return weight * (len(answer) <= self.most)

    assert judge(Longest(), "abc", weight="0.5") == {"Longest": 0.5}  # converted, as in a YAML


def test_a_function_behind_a_wrapper_is_a_function() -> None:
    class Counted:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)
            self.calls = 0

        def __call__(self, *args: Any, **named: Any) -> Any:
            self.calls += 1
            return self.__wrapped__(*args, **named)  # type: ignore[attr-defined]

    @Counted
    def counted(task: Task, answer: str) -> float:
        return len(answer)

    assert judge(counted, "ab") == {"counted": 2.0} and counted.calls == 1


def test_a_cached_reward_of_a_task_is_refused_before_the_run_and_one_of_texts_runs() -> None:
    @functools.cache
    def of_texts(response: str, truth: str) -> float:
        return float(response == truth)

    @functools.cache
    def of_task(task: Task, answer: str) -> float:
        return 1.0

    @functools.lru_cache(8)
    def named(response: str, task: Task) -> float:
        return 1.0

    class Method:
        @functools.cache  # noqa: B019
        def __call__(self, task: Task, answer: str) -> float:
            return 1.0

    assert judge(of_texts, "3") == {"of_texts": 0.0} and of_texts.cache_info().currsize == 1
    said = "is cached by functools and has an argument 'task', which cannot be hashed"
    for wrong in (of_task, named, Method, Method(), functools.partial(of_task)):
        with pytest.raises(ValueError, match=said):
            resolve(wrong)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("math_rewrd", {}, "unknown reward 'math_rewrd'; did you mean 'math_reward'"),
        (
            "boxed_and_brief",
            {"max_char": 3},
            r"'boxed_and_brief' has no option 'max_char' \(did you mean 'max_chars'\?\). It has:",
        ),
        ("accuracy_reward", {"a": 1}, "has no option 'a'. It has no options"),
        (Lengths, {"scal": 1}, r"'Lengths' has no option 'scal' \(did you mean 'scale'\?\)"),
        (3, {}, "is int: expected a function or class"),
        (type("Empty", (), {}), {}, r"reward 'Empty' \(Empty\) has no method `__call__`"),
        (of_three, {}, r"has an argument 'target': expected \(task, answer\), or names among res"),
        (None, {"a": 1}, "no reward is named"),
    ],
)
def test_wrong_names_and_options_are_said(name: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name, args)


def test_a_reward_with_a_third_argument_is_told_where_it_comes_from() -> None:
    def right(task: Task, answer: str, level: int) -> float:
        return float(level)

    with pytest.raises(ValueError, match="'right' needs the option 'level'") as caught:
        resolve(right)
    fault = fault_of(caught.value.with_traceback(None))  # of a run, where ours is the caller
    assert fault is not None and "def right(" in fault.place
    said = "reward_fn_args.level, or `*` before 'level' in its signature, for a column of that"
    assert said in fault.text and fault.text.startswith("needs the option 'level': expected")
    assert resolve(right, {"level": 2}) is not None


def test_an_error_about_a_missing_truth_names_the_columns() -> None:
    def right(task: Task, answer: str) -> float:
        return float(answer in task.truth.strip())

    task = Task(raw_task={"question": "1 + 1?", "solution": "2"})
    with pytest.raises(AttributeError) as caught:
        asyncio.run(score(task, "2", resolve(right) or right))
    assert (
        "'NoneType' object has no attribute 'strip'; task.truth is None, since no column of the "
        "row is 'response' (format.response_key): expected one of question, solution"
    ) in str(fault_of(caught.value))


def test_a_reward_without_a_part_is_no_reward_of_0() -> None:
    def judged(task: Task, answer: str) -> dict[str, float]:
        return {}

    with pytest.raises(ValueError, match=r"reward 'judged' gave \{\}: expected a number"):
        judge(judged, "a")


@pytest.mark.parametrize("value", ["much", None, float("nan"), {"a": float("inf")}])
def test_what_is_no_number_is_an_error(value: Any) -> None:
    def broken(task: Task, answer: str) -> Any:
        return value

    with pytest.raises(ValueError, match="reward 'broken' gave"):
        judge(broken, "a")


def test_no_reward_is_none() -> None:
    assert resolve(None) is None


def test_all_built_in_rewards_can_be_loaded() -> None:
    for name in ("math_reward", "math_boxed_reward", "format_reward", "countdown_reward"):
        assert callable(REWARDS.get(name))


def graded(task: Task, answer: str, *, level: int, bonus: float = 0.0, scale: float = 1.0) -> float:
    return level * scale + bonus


def test_a_reward_takes_columns_by_name_and_an_option_goes_before() -> None:
    task = Task({"prompt": "?", "level": 3, "bonus": 0.5})

    def scored(**options: Any) -> float:
        found = resolve(graded, options)
        assert found is not None
        return asyncio.run(score(task, "", found))["graded"]

    assert scored() == 3.5
    assert scored(scale=2.0, bonus=0.0) == 6.0
    assert scored(level=1) == 1.5


def test_a_reward_without_its_column_is_refused_before_the_run() -> None:
    task = Task({"prompt": "?"}, workflow="simple_workflow", reward_fn=graded)
    with pytest.raises(ValueError, match="reward 'graded' needs 'level': expected a column"):
        SimpleWorkflow.examine(task)


def test_a_reward_in_a_list_without_its_column_is_refused_before_the_run() -> None:
    def examine(*rewards: Any) -> None:
        task = Task({"prompt": "?"}, workflow="simple_workflow", reward_fn=[*rewards])
        SimpleWorkflow.examine(task)

    with pytest.raises(ValueError, match="reward 'graded' needs 'level': expected a column"):
        examine("format_reward", graded)
    with pytest.raises(ValueError, match="reward 'accuracy_reward' needs the right answer"):
        examine("format_reward", {"name": "accuracy_reward", "weight": 0.5})
    examine("format_reward", "repetition")


@pytest.mark.parametrize(
    "name", [None, "math_reward", "math_boxed_reward", "accuracy_reward", "math_dapo_reward"]
)
def test_data_without_the_right_answer_are_refused_before_the_run(name: str | None) -> None:
    def examine(row: dict[str, Any], **format_args: str) -> None:
        task = Task(row, workflow="math_workflow", reward_fn=name, format_args=format_args)
        MathWorkflow.examine(task)

    expected = (
        r"needs the right answer, and the data set has no column 'response' "
        r"\(format.response_key\): expected one of prompt, solution"
    )
    with pytest.raises(ValueError, match=expected):
        examine({"prompt": "?", "solution": "2"})
    examine({"prompt": "?", "solution": "2"}, response_key="solution")
    examine({"prompt": "?", "response": None})  # of one row alone: its rollouts say so
    examine({"prompt": "?", "judge": {"truth": "2"}}, response_key="judge.truth")


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("countdown_reward", {"prompt": "?"}, "needs a target and its numbers.* has: prompt"),
        ("countdown_reward", {"target": 3}, "needs a target and its numbers"),
        ("countdown_reward", {"response": '{"target": 3'}, "column 'response' is .* not JSON"),
        (
            "countdown_reward",
            {"response": '{"target": 3, "target": 4}'},
            "'response' is .* not JSON: an object has the name 'target' more than once: with 3 and",
        ),
        ("countdown_reward", {"target": "x", "nums": [1]}, "the target is 'x' and its numbers"),
        ("countdown_reward", {"target": 3, "nums": 12}, r"its numbers are 12: expected a number"),
        ("tool_call_reward", {"prompt": "?"}, "the row's column 'answer' is None"),
        ("tool_call_reward", {"answer": '[{"name": "f"}]'}, "expected a JSON list of calls"),
        (
            "tool_call_reward",
            {"answer": '[{"name": "f", "name": "g", "arguments": {}}]'},
            "expected a JSON list of calls .*an object has the name 'name' more than once: with",
        ),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_a_row_that_a_reward_cannot_read_is_refused_before_the_run(
    name: str, row: dict[str, Any], expected: str, several: bool
) -> None:
    task = Task({"prompt": "?", **row}, reward_fn=[name, "format_reward"] if several else name)
    with pytest.raises(ValueError, match=expected):
        SimpleWorkflow.examine(task)


def test_rows_that_a_reward_can_read_are_examined() -> None:
    for row in ({"target": "3", "nums": [1, 2]}, {"response": '{"target": 3, "numbers": [3]}'}):
        SimpleWorkflow.examine(Task({"prompt": "?", **row}, reward_fn="countdown_reward"))
    calls = [{"name": "f", "arguments": {}}]
    SimpleWorkflow.examine(Task({"prompt": "?", "answer": calls}, reward_fn="tool_call_reward"))


def test_a_column_is_an_attribute_of_its_task() -> None:
    task = Task({"prompt": "?", "level": 3, "index": "the row's"})
    assert task.level == 3 and task.index == {} and task.raw_task["index"] == "the row's"
    assert copy.deepcopy(task).level == 3 and pickle.loads(pickle.dumps(task)).level == 3
    with pytest.raises(AttributeError, match="has no 'lever'; the columns of its row: prompt, lev"):
        _ = task.lever


def test_an_option_that_has_its_default_and_the_name_of_a_column_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def by_place(task: Task, answer: str, level: int = 7, other: int = 1) -> float:
        return level

    def by_name(task: Task, answer: str, *, level: int = 7) -> float:
        return level

    task = Task(raw_task={"question": "q", "level": 3})
    for reward, args in ((by_name, {}), (by_place, {"level": 5})):
        examine_columns(task, _made(reward, args))
    assert not caplog.text
    for _ in range(2):  # once for all rows
        examine_columns(task, _made(by_place, {}))
    assert caplog.text.count("gets level=7, the default of an option, and not the column") == 1


def _made(reward: Any, args: dict[str, Any]) -> Any:
    made = resolve(reward, args)
    assert made is not None
    return made
