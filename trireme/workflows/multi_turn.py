"""Multi-turn: a conversation with an environment or a user, trained as one experience.

A subclass's `run` holds the conversation as messages. What the model said in it keeps the ids and
log-probabilities that were sampled; everything else is encoded and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from trireme.experience import Experience
from trireme.model.message import Message
from trireme.task import Task
from trireme.workflows.classes import Workflow


class MultiTurnWorkflow(Workflow):
    """Base of workflows with one experience a conversation. Give `run`, plain or `async def`."""

    max_env_steps: int = 30
    """Most turns of an episode; `workflow_args.max_env_steps` goes over it."""

    def bind(self, task: Task) -> None:
        """Take the names that users' methods read from the task."""
        super().bind(task)
        self.max_env_steps = int(task.workflow_args.get("max_env_steps", type(self).max_env_steps))

    def get_model_response(self, messages: Sequence[Message]) -> list[Experience]:
        """The model's reply to a conversation, as a list of one experience."""
        return self.model.chat(messages, n=1)

    def get_model_response_text(self, messages: Sequence[Message]) -> str:
        """The text of the model's reply to a conversation."""
        return self.get_model_response(messages)[0].response_text or ""

    async def get_model_response_async(self, messages: Sequence[Message]) -> list[Experience]:
        """`get_model_response`, to be awaited."""
        return await self.model.chat_async(messages, n=1)

    async def get_model_response_text_async(self, messages: Sequence[Message]) -> str:
        """`get_model_response_text`, to be awaited."""
        return (await self.get_model_response_async(messages))[0].response_text or ""

    def process_messages_to_experience(
        self,
        messages: Sequence[Message],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """The experience of a whole conversation, all of its sampled replies trained.

        Numbers of `info` become metrics, the rest stays in the experience's `info`. A conversation
        that did not fit into the model has reward 0.
        """
        experience = self.model.convert_messages_to_experience(messages)
        if truncate_status is not None:
            experience.truncate_status = truncate_status
        no_room = experience.truncate_status == "prompt_truncated" or (
            len(experience.tokens) >= self.model.max_model_len - 1
        )
        experience.reward = 0.0 if no_room else float(reward)
        experience.metrics["conversation/no_room"] = float(no_room)
        for name, value in (info or {}).items():
            if isinstance(value, Real):
                experience.metrics[name] = float(value)
            else:
                experience.info[name] = value
        return experience

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Message],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """`process_messages_to_experience`; it waits for nothing."""
        return self.process_messages_to_experience(messages, reward, info, truncate_status)
