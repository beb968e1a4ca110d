"""A plug-in: best of branches. A reply is cut in its middle, and several go on from there.

    workflow_args: {scheduler: "tree_search:TreeSearch", branches: 4, keep: all}

Run it with this file's folder on the path, or name the file in `plugins`. The row's `solution` says
what is right. `keep: best` trains the best branch, `all` trains each as a sample with a reward of
its own; what they have in common is trained once.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from trireme import MultiTurnScheduler, RolloutInferRequest, RolloutOutput, multi_turns
from trireme.rewards.answers import final_answer, final_truth, same


class TreeSearch(MultiTurnScheduler):
    """One reply, and `branches` others that share its first half."""

    def __init__(
        self, max_turns: int | None = None, branches: int = 4, keep: str = "all", share: float = 0.5
    ) -> None:
        super().__init__(max_turns)
        self.branches, self.keep, self.share = branches, keep, share

    async def run(self, infer_request: RolloutInferRequest, request_config: Any) -> Any:
        """The outputs: that of the first reply, and those of the branches."""
        messages = list(infer_request.messages)
        first = await self._ask(infer_request, messages, 0, "")
        reply = first.messages[-1]["content"] if first.messages else ""
        begun = reply[: int(self.share * len(reply))]
        numbers = range(1, self.branches + 1)
        asked = [self._ask(infer_request, messages, number, begun) for number in numbers]
        outputs = [first, *await asyncio.gather(*asked)]
        if self.keep == "all":
            return outputs
        return max(outputs, key=lambda output: output.rollout_infos["score"])

    async def _ask(
        self, request: RolloutInferRequest, messages: list[dict[str, Any]], number: int, begun: str
    ) -> RolloutOutput:
        """A reply that begins with `begun`, scored."""
        assert self.infer_engine is not None
        start = [{"role": "assistant", "content": begun}] if begun else []
        response = await self.infer_engine.infer_async(
            replace(request, messages=[*messages, *start])
        )
        text = begun + response.choices[0].message.content
        right = same(final_answer(text), final_truth(request.data_dict["solution"]))
        dialogue = [*messages, {"role": "assistant", "content": text}]
        name = f"{request.uuid}/{number}"
        infos = {"score": float(right), "num_turns": 1, "request_id": name}
        return RolloutOutput(response, messages=dialogue, rollout_infos=infos)


multi_turns["tree_search"] = TreeSearch
