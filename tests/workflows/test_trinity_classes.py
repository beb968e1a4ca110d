"""Workflow classes as Trinity-RFT's users have them: they read sections by attribute, have
properties of their own, call a base class that awaits, and bring rewards with arguments of theirs.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.made import taskset_of
from tests.model.fake import make
from trireme.data.rows import Rows
from trireme.data.tasksets import Taskset
from trireme.experience import Experience
from trireme.registry import WORKFLOWS
from trireme.rewards.grouped import of_groups
from trireme.rewards.reward import RewardFn
from trireme.task import Task
from trireme.usercode import UserCode, fault_of
from trireme.workflows.classes import Workflow
from trireme.workflows.single_turn import (
    MathBoxedWorkflow,
    MathEvalWorkflow,
    OnPolicyDistillWorkflow,
)
from trireme.workflows.workflow import resolve

THOUGHT = "<think>6 * 7</think>It is \\boxed{42}."


class Exact(RewardFn):
    """1 for the truth in a box; `fine` where no <think> is missing."""

    def __init__(self, **options: Any) -> None: ...

    def __call__(
        self, response: str, truth: str, with_think: bool = False, format_score_coef: float = 0.1,
        **others: Any,
    ) -> dict[str, float]:  # fmt: skip
        missing = with_think and "<think>" not in response
        right = float(f"boxed{{{truth}}}" in response)
        return {"right": right, "missing": -format_score_coef * missing}


class Nested(MathBoxedWorkflow):
    """Finds prompt and truth by itself, and adds to what the base class returns."""

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.reward_fn = Exact(**self.reward_fn_args)
        self.truth = self.raw_task["info"]["truth"]

    def run(self) -> list[Experience]:
        experiences = super().run()
        for experience in experiences:
            experience.info["seen"] = [e.reward for e in experiences]
        return experiences


class Attributes(Workflow):
    """Sampling by attribute; `rollout_args` is a property without a setter."""

    @property
    def rollout_args(self) -> dict[str, Any]:
        return {"temperature": self.task.rollout_args.temperature, "n": self.task.rollout_args.n}

    def run(self) -> list[Experience]:
        self.task.rollout_args.n = 1
        experiences = self.model.chat([{"role": "user", "content": "?"}], **self.rollout_args)
        experiences[0].reward = float(self.format_args.prompt_key == "asked")
        return experiences


def run(workflow: type, reply: str, **fields: Any) -> Experience:
    spec = resolve(workflow)
    assert spec.blocking

    async def call() -> list[Experience]:
        model = make([reply])
        return await asyncio.to_thread(spec.call, Task(**fields), model.blocking(), 1, 0)

    (experience,) = asyncio.run(call())
    return experience


@pytest.mark.parametrize(
    ("reply", "reward"),
    [(THOUGHT, 1.0), ("It is \\boxed{42}.", 0.75), ("It is \\boxed{41}.", -0.25)],
)
def test_a_base_class_that_awaits_is_called_by_a_plain_method(reply: str, reward: float) -> None:
    experience = run(
        Nested,
        reply,
        raw_task={"prompt": "6 * 7?", "info": {"truth": "42"}},
        workflow_args={"with_think": True, "format_score_coef": 0.25},
    )
    assert experience.reward == reward and experience.info["seen"] == [reward]


@pytest.mark.parametrize(
    "base",
    [MathEvalWorkflow, OnPolicyDistillWorkflow],
)
def test_each_single_turn_workflow_has_a_run_that_a_plain_one_may_call(base: type) -> None:
    def plain(self: Any) -> list[Experience]:
        experiences = base.run(self)
        experiences[0].reward = 0.5
        return experiences

    row = {"prompt": "6 * 7?", "response": "42"}
    mine = type("Mine", (base,), {"run": plain})
    assert run(mine, THOUGHT, raw_task=row, reward_fn="math_reward", is_eval=True).reward == 0.5


def test_sections_are_read_and_written_by_attribute() -> None:
    sampling, form = {"temperature": 0.5, "n": 3}, {"prompt_key": "asked"}
    experience = run(Attributes, "yes", raw_task={}, rollout_args=sampling, format_args=form)
    assert experience.reward == 1.0 and experience.temperature == 0.5
    assert sampling["n"] == 3  # a task's sections are its own
    args = Task(rollout_args=sampling).rollout_args
    assert yaml.safe_dump(args) == yaml.dump(args) == "n: 3\ntemperature: 0.5\n"
    with pytest.raises(AttributeError, match="no 'colour': it has temperature, n"):
        Task(rollout_args=sampling).rollout_args.colour  # noqa: B018


def test_a_missing_key_is_said_with_those_that_there_are() -> None:
    task = Task({"prompt": "?"}, workflow_args={"max_turn": 3})
    near = re.escape("workflow_args has no 'max_turns' (did you mean 'max_turn'?): it has max_turn")
    for copied in (task, copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        with pytest.raises(KeyError, match=f"^{near}$"):
            copied.args["max_turns"]
        with pytest.raises(KeyError, match=r"^the row has no 'answer': it has prompt$"):
            copied.raw_task["answer"]
    assert task.args == {"max_turn": 3} and task.args.get("max_turns") is None
    with pytest.raises(KeyError) as caught, UserCode("workflow 'guess'"):
        task.reward_fn_args["x"]
    told = str(fault_of(caught.value))
    assert told.startswith("workflow 'guess' failed: reward_fn_args has no 'x': it has no keys")


def test_the_answer_may_be_an_entry_of_a_column() -> None:
    row = {"prompt": "6 * 7?", "reward_model": {"ground_truth": 42}}
    nested = {"response_key": "reward_model.ground_truth"}
    assert Task(raw_task=row, format_args=nested).truth == "42"
    plain = Task(raw_task={"a.b": "x", "a": {"b": "y"}}, format_args={"response_key": "a.b"})
    assert plain.truth == "x"
    taskset(row, response_key="reward_model.ground_truth")
    with pytest.raises(ValueError, match=r"has no column 'reward\.truth'"):
        taskset(row, response_key="reward.truth")
    near = r"column 'reward_model' holds dictionaries without 'ground_trut'; did you mean 'ground_t"
    with pytest.raises(ValueError, match=near):
        taskset(row, response_key="reward_model.ground_trut")
    with pytest.raises(ValueError, match=r"'prompt\.x' .*, and its column 'prompt' holds no dict"):
        taskset(row, response_key="prompt.x")
    with pytest.raises(ValueError, match=r"no column 'response\.x'"):
        taskset(row, response_key="response.x")
    taskset(row, response_key="response")  # the default: answers need not be there


def taskset(row: dict[str, Any], reads_prompt: bool = True, **columns: str) -> Taskset:
    rows = Rows("rows", [row], list(row))
    return taskset_of(rows, name="t", batch_size=1, format_args=columns, reads_prompt=reads_prompt)


def test_a_users_class_may_have_rows_without_prompt_and_answer() -> None:
    assert not resolve(Attributes).reads_prompt and not resolve(Nested).reads_prompt
    assert resolve("math_workflow").reads_prompt and not resolve("toolcall_workflow").reads_prompt
    taskset({"seed": 1}, reads_prompt=False, response_key="answer")
    with pytest.raises(ValueError, match="has no column 'prompt'"):
        taskset({"seed": 1})
    with pytest.raises(ValueError, match="has no column 'asked'"):
        taskset({"seed": 1}, reads_prompt=False, prompt_key="asked")


def test_a_module_of_the_folder_a_run_starts_in_is_found_by_its_dotted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_project" / "mine"
    package.mkdir(parents=True)
    (package / "bases.py").write_text("from trireme.workflows.classes import Workflow\n")
    (package / "flow.py").write_text(
        "from a_project.mine.bases import Workflow\n"
        "class Flow(Workflow):\n    def run(self): return []\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    assert WORKFLOWS.get("a_project.mine.flow.Flow").__name__ == "Flow"


@pytest.mark.extension("trinity")
def test_what_is_not_here_says_what_to_name_instead() -> None:
    with pytest.raises(ValueError, match="reward 'rm_gallery_reward' asks the package rm-gallery"):
        of_groups("rm_gallery_reward")
