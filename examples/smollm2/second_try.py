"""A scheduler: a description of the wrong length gets a second try."""

from __future__ import annotations

from typing import Any

from rewards import WORD

from trireme import MultiTurnScheduler, multi_turns


class SecondTry(MultiTurnScheduler):
    """Says how many words the first try had."""

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        """End if the number of words is right, or no turns are left."""
        right = len(WORD.findall(result.message.content)) == infer_request.data_dict["count"]
        return right or super().check_finished(infer_request, result, current_turn)

    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        """Ask again."""
        had, count = len(WORD.findall(result.message.content)), infer_request.data_dict["count"]
        text = f"That was {had} words. Use exactly {count}."
        infer_request.messages.append({"role": "user", "content": text})
        return infer_request


multi_turns["second_try"] = SecondTry
