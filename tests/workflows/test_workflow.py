from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.fake import make, user
from trireme import EID, Experience, Model, Task, Workflow, workflow
from trireme.workflows.workflow import NoExperience, WrongExperience, resolve


@workflow("guess_the_number")
async def guess_the_number(task: Task, model: Model) -> list[Experience]:
    """Multi-turn: the model guesses until right; an early hit earns more."""
    chat = [{"role": "user", "content": task.prompt}]
    turn = 0
    for turn in range(1, task.args["max_turns"] + 1):
        reply = await model.chat(chat)
        if reply.text.strip() == task.truth:
            return model.experiences(reward=1 / turn, turns=turn)
        chat += [reply.message, {"role": "user", "content": "No. Guess again."}]
    return model.experiences(reward=0.0, turns=turn)


TASK = Task(
    raw_task={"prompt": "Guess.", "response": "7"},
    workflow_args={"max_turns": 3},
    repeat_times=4,
)


def call(thing: Any, replies: Any, n: int = 1, base: int = 0, **options: Any) -> list[Experience]:
    """As the Runner calls it: in a thread with a blocking model where it blocks."""
    spec = resolve(thing)

    async def run() -> list[Experience]:
        model = make(replies, **options)
        if spec.blocking:
            return await asyncio.to_thread(spec.call, TASK, model.blocking(), n, base)
        return await spec.call(TASK, model, n, base)

    return asyncio.run(run())


def test_the_example_of_a_workflow_runs() -> None:
    (experience,) = call("guess_the_number", ["5", " 7"])
    assert experience.reward == 0.5 and experience.metrics["turns"] == 2.0
    (experience,) = call("guess_the_number", ["1", "2", "3"])
    assert experience.reward == 0.0 and int((experience.versions >= 0).sum()) == 6  # type: ignore


def test_a_plain_function_gets_a_blocking_model() -> None:
    def plain(task: Task, model: Any) -> list[Experience]:
        return model.chat([user(task.prompt)])

    assert resolve(plain).blocking
    assert call(plain, ["a"])[0].response_text == "a"


class Steps(Workflow):
    """A class in the old form: it loops over repeat_times itself, and cannot repeat."""

    def run(self) -> list[Experience]:
        assert self.task.repeat_times == self.repeat_times
        return [self.model.chat([user(self.task_desc)])[0] for _ in range(self.repeat_times)]


def test_a_class_that_loops_over_repeat_times_gets_one() -> None:
    assert resolve(Steps).blocking and not resolve(Steps).can_repeat
    assert len(call(Steps, ["a", "b"], n=1)) == 1


class Repeats(Workflow):
    can_repeat = True

    def run(self) -> list[Experience]:
        return self.model.chat([user(self.task_desc)], n=self.repeat_times)


class RepeatsBadly(Repeats):
    def run(self) -> list[Experience]:
        found = super().run()
        for experience in found:
            experience.eid = EID(run=1)
        return found


def test_a_class_that_can_repeat_gives_all_runs() -> None:
    spec = resolve(Repeats)
    assert spec.can_repeat and spec.blocking
    found = call(Repeats, ["a", "b", "c"], n=3, base=2, key=(0, 0, 2))
    assert [e.eid.run for e in found] == [2, 3, 4]


class RepeatsByArguments(Repeats):
    def run(self) -> list[Experience]:
        return self.model.chat([user(self.task_desc)], **self.rollout_args)


def test_rollout_args_of_a_class_that_can_repeat_ask_for_all_runs() -> None:
    found = call(RepeatsByArguments, ["a", "b"], n=2, key=(0, 0, 0))
    assert [e.eid.run for e in found] == [0, 1]
    assert "n" not in TASK.rollout_args


class RepeatsWithoutIds(Repeats):
    def run(self) -> list[Experience]:
        replies = super().run()
        return [Experience(r.tokens, prompt_length=r.prompt_length) for r in replies]


def test_experiences_that_name_no_run_are_the_runs_in_their_order() -> None:
    found = call(RepeatsWithoutIds, ["a", "b", "c"], n=3, base=2, key=(0, 0, 2))
    assert [e.eid.run for e in found] == [2, 3, 4]


def test_a_class_that_can_repeat_and_gives_other_runs_is_told() -> None:
    with pytest.raises(WrongExperience, match=r"returned the runs \[1\]: expected \[0, 1\]"):
        call(RepeatsBadly, ["a", "b"], n=2)


class Async(Workflow):
    async def run(self) -> list[Experience]:
        return await self.model.chat_async([user("1")])


class AsyncByName(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        return await self.model.chat_async([user("1")])


class SyncAgain(Async):
    def run(self) -> list[Experience]:
        return self.model.chat([user("1")])


class Forgotten(Async):
    def run(self) -> list[Experience]:
        return super().run()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("cls", "blocks"), [(Async, False), (AsyncByName, False), (SyncAgain, True)]
)
def test_run_may_be_async_and_a_subclass_decides(cls: type, blocks: bool) -> None:
    assert resolve(cls).blocking == blocks
    assert call(cls, ["a"])[0].response_text == "a"


def test_a_forgotten_await_is_explained() -> None:
    with pytest.raises(WrongExperience, match="make it `async def` too"):
        call(Forgotten, ["a"])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([], NoExperience, "workflow 'bad' returned no experience"),
        (None, WrongExperience, "'bad' returned None: expected a list of Experience"),
        ([1], WrongExperience, "a list with int at place 0: expected Experience"),
    ],
)
def test_what_a_workflow_returns_is_checked(value: Any, error: type, message: str) -> None:
    async def bad(task: Task, model: Model) -> Any:
        return value

    with pytest.raises(error, match=message):
        call(bad, [])


DEEP: Any = []
for _ in range(200):  # Python writes it here, and not where more calls are under way
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("info", {"a": 1, "page": {1}}, r"info\['page'\] is not plain JSON: Object of type set"),
        ("info", {"a": {(1, 2): 3}}, r"info\['a'\] is not plain JSON: keys must be str"),
        ("info", {"grid": np.zeros(2)}, r"info\['grid'\] is not plain JSON: .* ndarray"),
        ("messages", [{}, {"content": b"x"}], r"messages\[1\] is not plain JSON: .* bytes"),
        (
            "info",
            {"a": 1, "page": DEEP},
            r"info\['page'\] is not plain JSON: it is nested too deeply",
        ),
        (
            "messages",
            [{"content": {"a": DEEP}}],
            r"messages\[0\] is not plain JSON: it is nested too",
        ),
        ("tools", [print], r"tools\[0\] is not plain JSON: .* builtin_function"),
        ("response_text", ["a"], "response_text is list: expected text"),
    ],
)
def test_what_no_store_holds_fails_the_rollout_by_its_key(
    field: str, value: Any, message: str
) -> None:
    async def bad(task: Task, model: Model) -> Any:
        experience = Experience([1, 2], prompt_length=1)
        setattr(experience, field, value)
        return [experience]

    with pytest.raises(WrongExperience, match=rf"\(place 0\) whose {message}"):
        call(bad, [])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_a_number_of_a_token_is_finite_in_every_type(kind: torch.dtype) -> None:
    largest = torch.finfo(kind).max

    def made(*values: float) -> Any:
        async def own(task: Task, model: Model) -> Any:
            experience = Experience([1, 2, 3], prompt_length=1)
            experience.logprobs = torch.tensor([0.0, *values], dtype=kind)
            return [experience]

        return own

    (e,) = call(made(largest, largest), [])  # though their sum is infinite
    assert e.logprobs is not None and e.logprobs[2] == largest
    with pytest.raises(WrongExperience, match=r"whose logprobs\[2\] is nan: expected a finite"):
        call(made(-1.0, float("nan")), [])


def test_numbers_of_numpy_and_torch_in_info_become_pythons() -> None:
    async def scored(task: Task, model: Model) -> Any:
        experience = Experience([1, 2], prompt_length=1)
        experience.info = {"a": "b", "scores": [np.float32(0.5), {"won": np.bool_(True)}]}
        experience.info["turns"] = torch.tensor(3)
        return [experience]

    (e,) = call(scored, [])
    assert e.info == {"a": "b", "scores": [0.5, {"won": True}], "turns": 3}
    assert e.info["scores"][1]["won"] is True and type(e.info["turns"]) is int


def no_arguments() -> None: ...


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ("guess_the_numbr", "unknown workflow 'guess_the_numbr'; did you mean 'guess_the_number'"),
        (None, "names no workflow: set default_workflow_type"),
        (3, "workflow '3' is int: expected a function or a class"),
        (no_arguments, r"'no_arguments' takes \(\) -> 'None': expected \(task, model\)"),
        (Workflow, "has no method `run`"),
        ("no_such_file:it", "there is no module 'no_such_file'"),
    ],
)
def test_what_is_no_workflow_is_said(thing: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(thing)


def test_a_path_names_a_workflow() -> None:
    assert not resolve("tests.workflows.test_workflow:guess_the_number").blocking


def test_an_experience_that_is_returned_twice_is_refused() -> None:
    def twice(task: Task, model: Any) -> list[Experience]:
        model.chat([user(task.prompt)])
        return model.experiences(reward=1.0) * 2

    with pytest.raises(
        WrongExperience, match=r"same experience twice \(places 0 and 1\): expected"
    ):
        call(twice, ["a"])
