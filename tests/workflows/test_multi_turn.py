from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.workflows.test_workflow import call
from trireme import Experience, MultiTurnWorkflow


class Game(MultiTurnWorkflow):
    """Two turns; the third message of the memory is the environment's."""

    def turns(self) -> list[str]:
        return ["look", "go"]

    def run(self) -> list[Experience]:
        memory: list[dict[str, Any]] = [{"role": "system", "content": "Play."}]
        for text in self.turns():
            memory.append({"role": "user", "content": text})
            reply = self.get_model_response_text(memory)
            memory.append({"role": "assistant", "content": reply})
        info = {"env_rounds": 1, "env_done": True, "place": "kitchen"}
        return [self.process_messages_to_experience(memory, 0.5, info)]


class AsyncGame(MultiTurnWorkflow):
    async def run(self) -> list[Experience]:
        memory: list[dict[str, Any]] = [{"role": "user", "content": "look"}]
        memory.append(
            {"role": "assistant", "content": await self.get_model_response_text_async(memory)}
        )
        return [await self.process_messages_to_experience_async(memory, 1.0)]


def test_a_conversation_is_one_experience_with_the_sampled_ids() -> None:
    (e,) = call(Game, ["ab", "c"])
    assert e.reward == 0.5
    assert e.metrics["env_rounds"] == 1.0 and e.metrics["env_done"] == 1.0
    assert e.info["place"] == "kitchen"
    assert e.metrics["conversation/unmatched"] == 0.0
    sampled = e.tokens[e.mask]
    assert len(sampled) == len("ab") + len("c") + 2  # and two end tokens
    assert e.logprobs is not None and (e.logprobs[e.mask] != 0).all()
    assert (e.versions[e.mask] >= 0).all() and (e.versions[~e.mask] == -1).all()  # type: ignore[index]


def test_async_methods() -> None:
    (e,) = call(AsyncGame, ["x"])
    assert e.reward == 1.0 and int(e.mask.sum()) == 2


def test_numbers_of_numpy_and_torch_are_metrics_too() -> None:
    class Numpy(Game):
        def process_messages_to_experience(self, messages: Any, *args: Any) -> Experience:
            info = {"env_done": np.bool_(True), "score": torch.tensor([0.5]), "place": "kitchen"}
            half: Any = np.float32(0.5)
            return super().process_messages_to_experience(messages, half, info)

    (e,) = call(Numpy, ["ab", "c"])
    assert e.reward == 0.5 and e.info["place"] == "kitchen"
    assert e.metrics["env_done"] == 1.0 and e.metrics["score"] == 0.5


def test_an_episodes_length_comes_from_the_workflow_args() -> None:
    class Asks(Game):
        def run(self) -> list[Experience]:
            assert self.max_env_steps == 30
            return super().run()

    call(Asks, ["a", "b"])


def test_a_conversation_without_room_has_reward_0_and_is_counted() -> None:
    class Long(Game):
        def turns(self) -> list[str]:
            return ["look", "x" * 300]

    (e,) = call(Long, ["a", "b"], max_model_len=120)
    assert e.reward == 0.0 and e.metrics["conversation/no_room"] == 1.0
    assert int(e.mask.sum()) == 2  # what was sampled is still there
    assert not math.isnan(float(e.logprobs.sum()))  # type: ignore[union-attr]


def test_what_is_edited_is_not_trained_and_is_counted() -> None:
    class Edits(Game):
        def run(self) -> list[Experience]:
            memory: list[dict[str, Any]] = [{"role": "user", "content": "look"}]
            self.get_model_response(memory)
            memory.append({"role": "assistant", "content": "something else"})
            return [self.process_messages_to_experience(memory, 1.0)]

    (e,) = call(Edits, ["a"])
    assert e.metrics["conversation/unmatched"] == 1.0 and not e.mask.any()
