"""Multi-turn schedulers: the loop, its two styles of insertion, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.explorer.made import make_runner
from tests.explorer.made import task as explored
from tests.limits import HANG_S
from tests.model.fake import TOKENIZER, Say, make
from tests.model.templates import THINKING
from tests.model.test_turn import spans
from trireme import (
    Experience,
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
    Task,
    multi_turns,
)
from trireme.explorer.runner import Outcome
from trireme.ext.multi_turn import loss_scale
from trireme.ext.multi_turn.scheduled import (
    multi_turn_scheduler,
)
from trireme.ext.multi_turn.turns import _warn_of_no_message
from trireme.model.model import Model
from trireme.rewards.orm import ORM
from trireme.serialize import experience_of_wire, experience_to_wire
from trireme.workflows.workflow import resolve

ROW = {"messages": [{"role": "user", "content": "2+2?"}], "solution": "4", "level": 3}


def task_of(row: dict[str, Any] | None = None, **args: Any) -> Task:
    return Task(raw_task=row or ROW, workflow_args=args, reward_fn_args={"funcs": ["accuracy"]})


def run(model: Model, task: Task) -> list[Experience]:
    async def both() -> list[Experience]:
        found = await multi_turn_scheduler(task, model)
        await multi_turn_scheduler.judge(task, found)
        return found

    return asyncio.run(both())


def trained(experience: Experience) -> list[str]:
    return [text for on, text in spans(experience) if on]


@pytest.mark.parametrize(("shows", "warned"), [(False, 1), (True, 0)])
def test_a_step_that_adds_no_message_is_told_once(caplog: Any, shows: bool, warned: int) -> None:
    class Shows(MultiTurnScheduler):
        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            if shows:
                infer_request.messages.append({"role": "user", "content": "No."})
            return infer_request

    _warn_of_no_message.cache_clear()
    run(make(["1", "2", "3"]), task_of(scheduler=Shows, max_turns=3))
    assert caplog.text.count("Shows.step returned the conversation as it was") == warned


def test_a_plain_step_that_hangs_ends_with_its_rollout_and_is_told_by_its_line() -> None:
    hold = threading.Event()

    class Hangs(MultiTurnScheduler):
        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            hold.wait(HANG_S)

        def on_trajectory_end(self, infer_request: Any) -> None:
            """In the thread that hangs."""

    async def main() -> Outcome:
        task = replace(explored("multi_turn_scheduler"), workflow_args={"scheduler": Hangs})
        return await make_runner(max_timeout=0.2).run(task, resolve(task.workflow), [0])

    begun = time.monotonic()
    [failure] = asyncio.run(main()).failures
    hold.set()
    assert failure.kind == "timeout" and time.monotonic() - begun < HANG_S / 2
    assert failure.fault.what == "workflow 'multi_turn_scheduler'"
    assert failure.fault.place.endswith(": hold.wait(HANG_S)")


def test_the_tip_of_a_new_turn_carries_no_loss_and_both_replies_do() -> None:
    model = make(["<answer>5</answer>", "<answer>4</answer>"])
    task = task_of(scheduler="math_tip_trick_multi_turn", max_turns=3)
    [experience] = run(model, task)
    assert trained(experience) == ["<answer>5</answer><|im_end|>", "<answer>4</answer><|im_end|>"]
    assert experience.messages is not None
    assert [m["role"] for m in experience.messages] == ["user", "assistant", "user", "assistant"]
    assert "need to recheck very carefully" in experience.messages[2]["content"]
    assert experience.reward == 1.0
    assert experience.metrics["num_turns"] == 2
    assert experience.metrics["rewards/accuracy"] == 1


def test_the_doubt_inside_a_reply_carries_no_loss_and_what_it_replaces_is_gone() -> None:
    model = make(["<think>2+2=5</think><answer>5</answer>", " it is 4</think><answer>4</answer>"])
    [experience] = run(model, task_of(scheduler="math_tip_trick", max_turns=2))
    assert spans(experience)[1:] == [
        (True, "<think>2+2=5"),
        (False, "But wait... It seems I made a mistake,"),
        (True, " it is 4</think><answer>4</answer><|im_end|>"),
    ]
    assert experience.messages is not None
    assert len(experience.messages) == 2
    assert experience.reward == 1.0


class Again(MultiTurnScheduler):
    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> Any:
        infer_request.messages.append({"role": "user", "content": "again"})
        return infer_request


def test_what_a_scheduler_returns_may_be_numbers_of_numpy_and_torch() -> None:
    class Numpy(Again):
        def check_finished(self, *_: Any) -> Any:
            return np.float64(0.1) > 0.5

        def on_turn_end(self, request: Any, result: Any, turn: int) -> Any:
            infos = {"score": np.float32(0.5), "tool_calls": torch.tensor([turn])}
            return {"rollout_infos": infos, "done": np.bool_(True) if turn == 2 else None}

    [experience] = run(make(["5", "4"]), task_of(scheduler=Numpy, max_turns=3))
    infos = experience.info["rollout_infos"]
    assert infos["score"] == 0.5 and infos["tool_calls"] == 2 and infos["num_turns"] == 2
    assert json.dumps(infos) and experience.metrics["tool_calls"] == 2.0


def test_a_verdict_that_is_none_names_its_method() -> None:
    class Finished(Again):
        def check_finished(self, *_: Any) -> Any:
            return "yes"

    class Done(Again):
        def on_turn_end(self, *_: Any) -> Any:
            return {"done": "yes"}

    with pytest.raises(TypeError, match=r"Finished.check_finished returned str: expected True"):
        run(make(["5"]), task_of(scheduler=Finished, max_turns=3))
    with pytest.raises(TypeError, match=r"Done.on_turn_end returned str as 'done': expected"):
        run(make(["5"]), task_of(scheduler=Done, max_turns=3))


@pytest.mark.parametrize("name", ["math_tip_trick", "math_tip_trick_multi_turn"])
def test_a_right_answer_ends_it_and_a_wrong_one_is_told_once(name: str) -> None:
    [once] = run(make(["<answer>4</answer>"]), task_of(scheduler=name, max_turns=9))
    assert once.metrics["num_turns"] == 1
    [twice] = run(make(["<answer>5</answer>"] * 2), task_of(scheduler=name, max_turns=9))
    assert twice.metrics["num_turns"] == 2
    assert twice.reward == 0


def test_a_reply_that_was_cut_ends_it() -> None:
    model = make([Say("<answer>5", stop_reason="length")])
    [experience] = run(model, task_of(scheduler="math_tip_trick_multi_turn"))
    assert experience.metrics["num_turns"] == 1
    assert experience.truncate_status == "response_truncated"


def test_thinking_tips_give_one_sample_a_turn_with_the_same_reward() -> None:
    model = make(
        ["<think>a</think><answer>5</answer>", "<think>b</think><answer>4</answer>"],
        template=THINKING,
    )
    first, second = run(model, task_of(scheduler="thinking_tips_scheduler", max_turns=2))
    assert trained(first) == ["<think>a</think><answer>5</answer><|im_end|>"]
    assert trained(second) == ["<think>b</think><answer>4</answer><|im_end|>"]
    assert first.reward == second.reward == 1.0
    assert "<think>a" not in TOKENIZER.decode(second.tokens.tolist())


class LastOfTrajectory(ORM):
    """Judges a trajectory by its last sample alone, from what its row holds."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__()
        from trireme.rewards.orm import MathAccuracy

        self.accurate = MathAccuracy()

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        found = []
        for name in kwargs["request_id"]:
            samples = kwargs["trajectory_inputs"][name]
            assert [s["level"] for s in samples] == [3, 3]
            assert all(s["request_id"] == name for s in samples)
            assert len(samples[0]["messages"]) == 2 and len(samples[1]["messages"]) == 4
            texts, truths = [samples[-1]["messages"][-1]["content"]], [samples[-1]["solution"]]
            found.append(self.accurate(texts, truths)[0])
        return found


def test_a_reward_gets_each_sample_of_a_trajectory_as_a_whole_row() -> None:
    model = make(
        ["<think>a</think><answer>5</answer>", "<think>b</think><answer>4</answer>"],
        template=THINKING,
    )
    task = task_of(scheduler="thinking_tips_scheduler", max_turns=2)
    task.reward_fn_args = {"funcs": [LastOfTrajectory]}
    assert [experience.reward for experience in run(model, task)] == [1.0, 1.0]


def test_a_template_that_drops_thinking_gives_the_earlier_turn_as_a_sample_too() -> None:
    model = make(
        ["<think>a</think><answer>5</answer>", "<think>b</think><answer>4</answer>"],
        template=THINKING,
    )
    first, second = run(model, task_of(scheduler="math_tip_trick_multi_turn", max_turns=2))
    assert trained(first) == ["<think>a</think><answer>5</answer><|im_end|>"]
    assert trained(second) == ["<think>b</think><answer>4</answer><|im_end|>"]


class Counts(MultiTurnScheduler):
    """A plug-in as a user writes it: plain methods, state on self, infos."""

    def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        self.seen = [requests[0].data_dict["level"]]

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self.seen.append(current_turn)
        infer_request.messages.append({"role": "user", "content": "more"})
        return {"infer_request": infer_request, "rollout_infos": {"seen": list(self.seen)}}


def test_turns_count_from_one_and_infos_reach_the_rewards() -> None:
    model = make(["a", "b", "c"])
    [experience] = run(model, task_of(scheduler=Counts, max_turns=3))
    assert experience.info["rollout_infos"] == {"seen": [3, 1, 2], "num_turns": 3}


class Pasted(ABC):
    """The base as ms-swift's documents print it, pasted into a user's file."""

    def __init__(self, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        self.max_turns = max_turns

    @abstractmethod
    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any: ...

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        return bool(self.max_turns and current_turn >= self.max_turns)


class OnPasted(Pasted):
    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        infer_request.messages.append({"role": "user", "content": "more"})
        return infer_request


class StepAlone:
    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        return OnPasted.step(self, infer_request, result, current_turn)  # type: ignore[arg-type]


class AsyncStep:
    def __init__(self) -> None:
        """Takes no `max_turns`, and reads it."""

    async def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        assert self.max_turns == 3  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return {"infer_request": StepAlone().step(infer_request, result, current_turn)}


@pytest.mark.parametrize("scheduler", [OnPasted, StepAlone, AsyncStep])
def test_a_class_without_our_base_plays_with_its_defaults(scheduler: type) -> None:
    model = make(["a", "b", "c"])
    task = task_of(scheduler=scheduler, max_turns=3)
    multi_turn_scheduler.examine(task)
    [experience] = run(model, task)
    assert trained(experience) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


def test_a_class_that_gives_no_next_turn_is_refused_before_the_run() -> None:
    class Ends(MultiTurnScheduler):
        def check_finished(self, *args: Any) -> bool:
            return True

    class EndsWithoutBase:
        check_finished = Ends.check_finished

    for scheduler in (Ends, EndsWithoutBase, Pasted):
        with pytest.raises(ValueError, match=r"has no step: expected a class with `step\(self"):
            multi_turn_scheduler.examine(task_of(scheduler=scheduler))


class Forgets(Counts):
    def check_finished(self, *args: Any) -> bool:
        return False


def test_max_turns_holds_where_the_scheduler_forgets() -> None:
    [experience] = run(make(["a"] * 9), task_of(scheduler=Forgets, max_turns=2))
    assert experience.metrics["num_turns"] == 2


class Tool(MultiTurnScheduler):
    """Today's form: the reply's ids with the tool's result behind them, and a mask."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn == 2

    async def step(self, infer_request: Any, result: Any, current_turn: int) -> dict[str, Any]:
        added = TOKENIZER.encode("[4]", add_special_tokens=False)
        kept = result.token_ids[:-1]
        infer_request.messages[-1]["content"] += "[4]"
        return {
            "infer_request": infer_request,
            "response_token_ids": [*kept, *added],
            "response_loss_mask": [1] * len(kept) + [0] * len(added),
        }


def test_ids_and_mask_of_a_step_are_kept_in_the_same_turn() -> None:
    [experience] = run(make(["calc", "so 4"]), task_of(scheduler=Tool))
    assert spans(experience)[1:] == [(True, "calc"), (False, "[4]"), (True, "so 4<|im_end|>")]


class ToolThenTurn(Tool):
    """The same, followed by a new turn."""

    async def step(self, infer_request: Any, result: Any, current_turn: int) -> dict[str, Any]:
        told = await super().step(infer_request, result, current_turn)
        infer_request.messages.append({"role": "user", "content": "and?"})
        return told


def test_no_turn_loses_its_ids_where_a_step_gives_them_and_begins_a_new_turn() -> None:
    """Upstream put the first turn's ids in the place of the last turn's text."""
    [experience] = run(make(["calc", "four"]), task_of(scheduler=ToolThenTurn))
    assert trained(experience) == ["calc", "four<|im_end|>"]
    text = TOKENIZER.decode(experience.tokens.tolist())
    assert text.index("calc[4]<|im_end|>") < text.index("and?") < text.index("four<|im_end|>")


class Continues(MultiTurnScheduler):
    """Goes on in the same turn and gives no ids."""

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        return current_turn == 3

    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        infer_request.messages[-1]["content"] += "|tip|"
        return infer_request


def test_a_continued_reply_without_ids_keeps_its_earlier_parts() -> None:
    """Upstream trained the last part only, and dropped the rest from the sequence."""
    [experience] = run(make(["r1", "r2", "r3"]), task_of(scheduler=Continues))
    assert spans(experience)[1:] == [
        (True, "r1"),
        (False, "|tip|"),
        (True, "r2"),
        (False, "|tip|"),
        (True, "r3<|im_end|>"),
    ]


def wrong(returned: Any) -> type[MultiTurnScheduler]:
    class Wrong(MultiTurnScheduler):
        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            return returned(infer_request) if callable(returned) else returned

    return Wrong


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "Wrong.step returned NoneType: expected a RolloutInferRequest or a dict"),
        ({}, "Wrong.step returned NoneType: expected a RolloutInferRequest, or a dict with one"),
        (
            lambda r: {"infer_request": r, "loss_mask": [1]},
            "Wrong.step returned a dict with 'loss_mask': expected some of infer_request",
        ),
        (
            lambda r: {
                "infer_request": r,
                "response_token_ids": [1],
                "response_loss_mask": [1, 0],
            },
            "Wrong.step returned a response_loss_mask of 2 entries for 1 response_token_ids",
        ),
        (
            lambda r: {
                "infer_request": r,
                "response_token_ids": [1, 2],
                "response_loss_mask": [1, 0],
                "rollout_logprobs": [0.1, 0.2],
            },
            "Wrong.step returned 2 rollout_logprobs: expected 1",
        ),
        (
            lambda r: replace(r, messages=[*r.messages, "more"]),
            "Wrong.step returned a request whose message 2 is 'more': expected a dict with 'role'",
        ),
    ],
)
def test_what_a_step_may_not_return(returned: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence.replace("(", r"\(")):
        run(make(["a", "b"]), task_of(scheduler=wrong(returned), max_turns=2))


def test_an_unknown_scheduler_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown multi-turn scheduler 'math_tip'.*did you mean"):
        multi_turn_scheduler.examine(task_of(scheduler="math_tip"))


def test_an_option_that_a_scheduler_does_not_take_is_named() -> None:
    class Strict(Counts):
        def __init__(self, max_turns: int | None = None, depth: int = 1) -> None:
            super().__init__(max_turns)

    multi_turn_scheduler.examine(task_of(scheduler=Strict, depth=2))
    with pytest.raises(ValueError, match=r"does not take workflow_args .*'width'"):
        multi_turn_scheduler.examine(task_of(scheduler=Strict, width=2))
    with pytest.raises(ValueError, match=r"'max_turn'; did you mean 'max_turns'\?"):
        multi_turn_scheduler.examine(task_of(scheduler=Strict, max_turn=2))


def test_a_plug_in_registers_by_item_as_ms_swift_has_it() -> None:
    multi_turns["counts_of_this_test"] = Counts
    assert multi_turns["counts_of_this_test"] is Counts
    assert "counts_of_this_test" in multi_turns


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("default", [" one<|im_end|>", " two<|im_end|>"]),
        ("last_round", [" two<|im_end|>"]),
        ("all", [" one<|im_end|>", " two<|im_end|>"]),
        ("last_round+ignore_think", [" two<|im_end|>"]),
        ("react+default", [" one<|im_end|>", " two<|im_end|>"]),
    ],
)
def test_loss_scale_says_which_turns_are_trained(scale: str, expected: list[str]) -> None:
    model = make([" one", " two"])
    [experience] = run(model, task_of(scheduler=Counts, max_turns=2, loss_scale=scale))
    assert trained(experience) == expected


def test_loss_scale_splits_a_reply_by_patterns_across_segments() -> None:
    model = make(["Action: add\nAction Input: 2+2\n", "\nThought: ok\nFinal Answer: 4"])

    class Observes(Tool):
        async def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            infer_request.messages[-1]["content"] += "Observation: 4"
            return infer_request

    [experience] = run(model, task_of(scheduler=Observes, loss_scale="react"))
    assert experience.loss_weight is not None
    weighted = list(zip(experience.tokens.tolist(), experience.loss_weight.tolist(), strict=True))
    twice = TOKENIZER.decode([token for token, weight in weighted if weight == 2])
    once = TOKENIZER.decode([token for token, weight in weighted if weight == 1])
    assert twice == "Action: add\nAction Input: 2+2\n"
    assert once == "Thought: ok\nFinal Answer: 4<|im_end|>"


def test_react_weighs_each_section_by_its_keyword() -> None:
    reply = "a Action: b\nAction Input: c\nObservation: d\nThought: e\nFinal Answer: f"
    weights: dict[float, str] = {}
    for text, weight in loss_scale.react(reply):
        weights[weight] = weights.get(weight, "") + text
    assert weights == {
        1.0: "a Thought: e\nFinal Answer: f",
        2.0: "Action: b\nAction Input: c\nObservation:",
        0.0: " d\n",
    }


@pytest.mark.parametrize("name", ["last_round+default", "react+hermse"])
def test_a_combination_that_cannot_be_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of them|did you mean 'hermes'"):
        loss_scale.resolve(name)


@pytest.mark.parametrize("name", [False, 1.0, None])
def test_a_loss_scale_that_is_no_name_is_an_error(name: object) -> None:
    with pytest.raises(ValueError, match=f"loss_scale is {name}: expected a function, or a name: "):
        loss_scale.resolve(name)


def test_a_loss_scale_whose_pieces_do_not_add_up_is_an_error() -> None:
    with pytest.raises(ValueError, match="pieces that do not add up to the reply"):
        run(make(["abc"]), task_of(loss_scale=lambda reply: [("ab", 1.0)]))


def test_without_a_scheduler_there_is_one_turn_and_the_data_sets_answer_is_dropped() -> None:
    row = {**ROW, "messages": [*ROW["messages"], {"role": "assistant", "content": "4"}]}
    [experience] = run(make(["5"]), task_of(row))
    assert experience.messages == [*ROW["messages"], {"role": "assistant", "content": "5"}]


def test_the_end_of_a_trajectory_is_told_also_after_an_error() -> None:
    told: list[str] = []

    class Fails(MultiTurnScheduler):
        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            raise RuntimeError("tool broke")

        def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
            told.append(infer_request.messages[-1]["content"])

    with pytest.raises(RuntimeError, match="tool broke"):
        run(make(["a"]), task_of(scheduler=Fails))
    assert told == ["a"]


def test_videos_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'videos' is not empty: only text"):
        run(make(["a"]), task_of({**ROW, "videos": ["x.mp4"]}))


def test_the_workflow_is_known_by_its_name() -> None:
    spec = resolve("multi_turn_scheduler")
    assert not spec.blocking and spec.judge is not None and spec.examine is not None


def test_an_experience_comes_off_the_wire_as_it_went_on() -> None:
    experience = Experience(
        [1, 2, 3, 4],
        mask=[False, False, False, True],
        prompt_length=2,
        logprobs=[0.0, 0.0, -0.5, -0.25],
        versions=[-1, -1, 3, 3],
        loss_weight=[0.0, 0.0, 0.0, 0.5],
        temperature=0.7,
        stop_reason="stop",
        reward=0.5,
        prompt_text="ask",
        response_text="reply",
        metrics={"num_turns": 1.0},
        info={"completion": "reply"},
    )
    wire = json.loads(json.dumps(experience_to_wire(experience)))
    copy = experience_of_wire(wire)
    assert experience_to_wire(copy) == wire
    assert copy.tokens.tolist() == [1, 2, 3, 4] and copy.mask.tolist() == [0, 0, 0, 1]
    assert copy.versions is not None and copy.versions.tolist() == [-1, -1, 3, 3]
    assert (copy.temperature, copy.reward, copy.sampler_logprobs) == (0.7, 0.5, None)
