"""A scheduler's own `run`: what it returns is what is trained, each sampled token once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ext.multi_turn.test_scheduler import run, task_of, trained
from tests.model.fake import make
from tests.model.templates import THINKING
from trireme import MultiTurnScheduler, RolloutOutput


class Picks(MultiTurnScheduler):
    """Asks three times, and returns what `pick` says."""

    def __init__(self, max_turns: int | None = None, pick: Any = None) -> None:
        super().__init__(max_turns)
        self.pick = pick

    def step(self, *args: Any) -> Any: ...

    async def run(self, infer_request: Any, request_config: Any) -> Any:
        assert self.infer_engine is not None
        outputs = []
        for _ in range(3):
            response = await self.infer_engine.infer_async(infer_request)
            reply = {"role": "assistant", "content": response.choices[0].message.content}
            outputs.append(RolloutOutput(response, messages=[*infer_request.messages, reply]))
        return self.pick(outputs)


def test_a_run_that_returns_one_of_its_outputs_gives_no_other_sample() -> None:
    task = task_of(scheduler=Picks, pick=lambda outputs: outputs[1])
    [experience] = run(make(["one", "two", "three"]), task)
    assert trained(experience) == ["two<|im_end|>"]


def test_replies_with_the_same_ids_are_samples_of_their_own() -> None:
    found = run(make(["yes", "no", "yes"]), task_of(scheduler=Picks, pick=list))
    assert [trained(e) for e in found] == [["yes<|im_end|>"], ["no<|im_end|>"], ["yes<|im_end|>"]]


def test_outputs_with_a_request_id_of_their_own_have_rewards_of_their_own() -> None:
    def pick(outputs: list[RolloutOutput]) -> list[RolloutOutput]:
        for place, output in enumerate(outputs):
            output.rollout_infos["request_id"] = str(place)
        return outputs

    model = make(["<answer>4</answer>", "<answer>5</answer>", "<answer>4</answer>"])
    found = run(model, task_of(scheduler=Picks, pick=pick))
    assert [e.reward for e in found] == [1, 0, 1]


class OneDialogue(Picks):
    """Several turns as one output."""

    async def run(self, infer_request: Any, request_config: Any) -> Any:
        assert self.infer_engine is not None
        for _ in range(2):
            response = await self.infer_engine.infer_async(infer_request)
            text = response.choices[0].message.content
            infer_request.messages += [{"role": "assistant", "content": text}]
            infer_request.messages += [{"role": "user", "content": "more"}]
        return RolloutOutput(response, messages=infer_request.messages[:-1])


def test_a_run_keeps_the_turns_of_its_dialogue_that_the_template_rewrote() -> None:
    model = make(["<think>a</think>1", "<think>b</think>2"], template=THINKING)
    found = run(model, task_of(scheduler=OneDialogue))
    assert [trained(e) for e in found] == [
        ["<think>a</think>1<|im_end|>"],
        ["<think>b</think>2<|im_end|>"],
    ]


class Warmer(Picks):
    """A dialogue whose second turn has a temperature of its own, then is asked at the first's."""

    async def run(self, infer_request: Any, request_config: Any) -> Any:
        assert self.infer_engine is not None
        for temperature in (0.5, 1.5, 0.5):
            response = await self.infer_engine.infer_async(
                infer_request, {"temperature": temperature}
            )
            text = response.choices[0].message.content
            infer_request.messages += [{"role": "assistant", "content": text}]
            infer_request.messages += [{"role": "user", "content": "more"}]
        return RolloutOutput(response, messages=infer_request.messages[:-1])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("default", {0.5: ["1<|im_end|>", "3<|im_end|>"], 1.5: ["2<|im_end|>"]}),
        ("last_round", {0.5: ["3<|im_end|>"]}),
    ],
)
def test_turns_of_several_temperatures_are_trained_at_their_own(
    scale: str, expected: dict[float, list[str]]
) -> None:
    found = run(make(["1", "2", "3"]), task_of(scheduler=Warmer, loss_scale=scale))
    assert {e.temperature: trained(e) for e in found} == expected
    assert len(found) == len(expected)
    [whole] = [e for e in found if e.temperature == 0.5]
    assert whole.messages is not None and whole.messages[-1]["content"] == "3"
