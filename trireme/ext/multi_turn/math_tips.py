"""Math tips: schedulers that tell the model about a wrong answer, and let it think again.

There are three ways: a new turn, continuing the thinking part of the same reply, and a new turn for
models whose chat template drops earlier thinking. Texts are those of ms-swift's plug-ins. The row's
`solution` is the right answer.
"""

from __future__ import annotations

import itertools
from typing import Any

from trireme.ext.multi_turn.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
)
from trireme.rewards.answers import final_answer, final_truth, same

DOUBT = "But wait... It seems I made a mistake,"
RECHECK = (
    "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
)


def is_right(text: str, request: RolloutInferRequest) -> bool:
    """Return whether a reply's result equals the row's `solution`."""
    solution = request.data_dict.get("solution")
    if solution is None:
        raise ValueError(
            "the math tips need the right answer: the row has no column 'solution' (or set "
            f"format.response_key). It has: {', '.join(request.data_dict)}"
        )
    return same(final_answer(text), final_truth(solution))


class MathTips(MultiTurnScheduler):
    """Cuts the reply back to its thinking part, adds a doubt, and lets it continue; once.

    `tips_prompt` is the doubt.
    """

    def __init__(self, max_turns: int | None = None, tips_prompt: str = DOUBT, **_: Any) -> None:
        super().__init__(max_turns)
        self.tips_prompt = tips_prompt

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        """End the conversation if the reply is right or already has the tip."""
        reply = infer_request.messages[-1]["content"]
        if self.tips_prompt in reply or is_right(reply, infer_request):
            return True
        return super().check_finished(infer_request, result, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        """Return the reply up to its answer or the end of its thinking, followed by the doubt."""
        reply = infer_request.messages[-1]["content"]
        for tag in ("<answer>", "</think>"):
            reply = reply.partition(tag)[0]
        infer_request.messages[-1]["content"] = reply + self.tips_prompt
        return infer_request


class MathTipsMultiTurn(MultiTurnScheduler):
    """Tells the model in a new turn that the answer is wrong; once. `tips_prompt` is the text."""

    def __init__(self, max_turns: int | None = None, tips_prompt: str = RECHECK, **_: Any) -> None:
        super().__init__(max_turns)
        self.tips_prompt = tips_prompt

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        """End the conversation if the reply is right or the tip was already given."""
        has_tip = len(infer_request.messages) > 1 and (
            self.tips_prompt in infer_request.messages[-2]["content"]
        )
        if has_tip or is_right(result.message.content, infer_request):
            return True
        return super().check_finished(infer_request, result, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        """Return the same conversation, followed by the tip as the user's message."""
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return infer_request


class ThinkingTips(MathTipsMultiTurn):
    """The same for models that see no earlier thinking: each turn is a separate sample, all with
    one reward. Earlier replies enter the history without their thinking.
    """

    async def run(self, infer_request: RolloutInferRequest, request_config: Any) -> Any:
        """Run all turns; returns one output for each."""
        assert self.infer_engine is not None
        messages = list(infer_request.messages)
        outputs: list[RolloutOutput] = []
        for turn in itertools.count(1):
            infer_request.messages = messages
            response = await self.infer_engine.infer_async(infer_request, request_config)
            [choice] = response.choices
            text = choice.message.content
            dialogue = [*messages, {"role": "assistant", "content": text}]
            outputs.append(RolloutOutput(response, messages=dialogue))
            infer_request.messages = dialogue
            if self.check_finished(infer_request, choice, turn):
                break
            said = text.rpartition("</think>")[2].lstrip()
            messages = [*messages, {"role": "assistant", "content": said}]
            messages.append({"role": "user", "content": self.tips_prompt})
        return outputs
