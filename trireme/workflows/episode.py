"""Episode: a conversation with an environment or a user, turn by turn, and its training data.

A `MultiTurnWorkflow` builds the conversation as messages, in its own `run`; it is trained as one
experience. The model's replies keep the sampled ids and log-probabilities; everything else is
encoded and not trained.

An `EpisodeWorkflow` observes, replies and acts until the end: a subclass names its environment and
how observations become messages and replies become actions. An episode is one experience (the whole
conversation), or with `per_step` one for every turn. A conversation that no longer fits into the
model ends the episode, and is counted (`env_no_room`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Annotated, Any

from annotated_types import Ge

from trireme.envs.env import (
    OpenEnv,
    Seen,
    after_reset,
    after_step,
    as_text,
    errors_of_close_logged,
    for_thread,
)
from trireme.experience import Experience, python_number
from trireme.model.chat_tokens import Message
from trireme.task import Task
from trireme.usercode import UserCode
from trireme.workflows.classes import Workflow

Steps = Annotated[int, Ge(1)]
"""The type of `workflow_args.max_env_steps` and the like."""
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class MultiTurnWorkflow(Workflow):
    """The base of workflows with one experience per conversation. Define `run`, plain or `async
    def`.
    """

    max_env_steps: int = 30
    """Most turns of an episode; `workflow_args.max_env_steps` overrides it."""

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        self.max_env_steps = int(task.workflow_args.get("max_env_steps", type(self).max_env_steps))

    def get_model_response(self, messages: Sequence[Message]) -> list[Experience]:
        """Return the model's reply to a conversation, as a list of one experience."""
        return self.model.chat(messages, n=1)

    def get_model_response_text(self, messages: Sequence[Message]) -> str:
        """Return the text of the model's reply to a conversation."""
        return self.get_model_response(messages)[0].response_text or ""

    async def get_model_response_async(self, messages: Sequence[Message]) -> list[Experience]:
        """Await `get_model_response`."""
        return await self.model.chat_async(messages, n=1)

    async def get_model_response_text_async(self, messages: Sequence[Message]) -> str:
        """Await `get_model_response_text`."""
        return (await self.get_model_response_async(messages))[0].response_text or ""

    def process_messages_to_experience(
        self,
        messages: Sequence[Message],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return the experience of a whole conversation, with all of its sampled replies trained.

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
            if isinstance(plain := python_number(value), Real):
                experience.metrics[name] = float(plain)
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
        """Run `process_messages_to_experience`, which needs no waiting."""
        return self.process_messages_to_experience(messages, reward, info, truncate_status)


class EpisodeWorkflow(MultiTurnWorkflow):
    """The base of workflows over an `Env`. Define `make_env`; all else has a default.

    A subclass may instead play the episode itself: `generate_env_inference_samples(self, env,
    rollout_num)`, a plain method; `rollout_num` is 1, since each rollout is a separate object.
    """

    is_async = True
    rewards_itself = True
    calls = ("generate_env_inference_samples",)
    loop_options: Mapping[str, Any] = {"max_env_steps": Steps}
    per_step: bool = False
    """Whether each turn is an experience, instead of the conversation."""
    unfinished_reward: float = -0.1
    """Reward of an episode that did not reach its end."""
    default_system_prompt: str | None = None
    """The prompt if the YAML sets none."""
    tagged_actions: bool = False
    """Whether a reply's action is in <action>; otherwise the whole reply is the action."""
    blocking_env: bool = True
    """Whether `reset` and `step` take time: they run in a thread, and block no other episode."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Run a class that plays by itself in a thread, like any plain `run`."""
        super().__init_subclass__(**options)
        if "generate_env_inference_samples" in vars(cls) and "run" not in vars(cls):
            cls.is_async = False
            cls.run = cls._play_by_itself  # type: ignore[method-assign, assignment]

    def _play_by_itself(self) -> list[Experience]:
        env = for_thread(self.make_env())
        try:
            return self.generate_env_inference_samples(env, self.repeat_times)
        finally:
            with errors_of_close_logged(env):  # also if the method above has closed it already
                getattr(env, "close", lambda: None)()

    def generate_env_inference_samples(self, env: Any, rollout_num: int) -> list[Experience]:
        """Return the experiences of an episode; by default `run` plays it."""
        raise NotImplementedError(f"{type(self).__name__} plays its episodes in `run`")

    def make_env(self) -> Any:
        """Return the environment of `self.task`; may be a coroutine."""
        raise NotImplementedError(f"{type(self).__name__} must define `make_env(self)`")

    def format_observation(self, seen: Seen) -> str:
        """Return the user's message that describes the environment's response."""
        return as_text(seen.observation, self._whose, type(self))

    def parse_action(self, reply: str) -> str:
        """Return the action in a reply."""
        return parse_action(reply) if self.tagged_actions else reply.strip()

    def final_reward(self, seen: Seen, total: float) -> float:
        """Return the episode's reward: by default the last step's if it ended. `total` is their
        sum.
        """
        return seen.reward if seen.done else self.unfinished_reward

    def bind(self, task: Task) -> None:
        """Set the attributes that users' methods read from the task."""
        super().bind(task)
        self.system_prompt = self.system_prompt or self.default_system_prompt

    async def run(self) -> list[Experience]:
        """Play one episode. However it ends, the environment is closed."""
        opened = OpenEnv(f"env-{self.task.task_id}", thread=self.blocking_env)

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            with UserCode(self._whose, function) as _:
                return await opened.call(function, *args)

        try:
            with UserCode(self._whose, self.make_env) as _:
                await opened.make(self.make_env)
            return await self._play(opened.env, call)
        finally:
            await opened.close()

    @property
    def _whose(self) -> str:
        """Return what errors call its environment."""
        return f"the environment of {type(self).__name__}"

    async def _play(self, env: Any, call: Callable[..., Any], prefix: str = "") -> list[Experience]:
        """Play one episode from its beginning; `prefix` precedes the first observation."""
        seen = after_reset(await call(env.reset), f"reset of {self._whose}", env.reset)
        memory: list[dict[str, Any]] = []
        if self.system_prompt:
            memory.append({"role": "system", "content": self.system_prompt})
        total, no_room = 0.0, False
        lived: list[dict[str, Any]] = []
        for _ in range(self.max_env_steps):
            memory.append({"role": "user", "content": prefix + self.format_observation(seen)})
            prefix = ""
            (reply,) = await self.model.chat_async(memory)
            if no_room := reply.truncate_status == "prompt_truncated":
                break
            text = reply.response_text or ""
            memory.append({"role": "assistant", "content": text})
            before = seen.info.get("env_state_hash")
            transition = await call(env.step, self.parse_action(text))
            seen = after_step(transition, f"step of {self._whose}", env.step)
            lived.append({"step_reward": seen.reward} | _known(env_state_hash=before))
            total += seen.reward
            if seen.done:
                break
        experiences = self.model.model.experiences(
            self.final_reward(seen, total),
            per_call=self.per_step,
            env_rounds=len(lived) - 1,
            env_done=float(seen.done),
            env_no_room=float(no_room),
            actual_env_steps=len(lived),
        )
        if self.per_step:
            for experience, facts in zip(experiences, lived, strict=False):
                experience.info |= facts
        return experiences


def row_number(task: Task) -> int:
    """Return the number in the prompt column, by which an environment knows the episode. Raises
    ValueError for anything else.
    """
    try:
        return int(task.prompt)
    except (TypeError, ValueError):
        raise ValueError(
            f"the row's column '{task.prompt_key}' (format.prompt_key) is {task.prompt!r:.60}: "
            "expected the number of an episode"
        ) from None


def parse_action(reply: str) -> str:
    """Return the text of the first <action>; empty without one."""
    match = _ACTION.search(reply)
    return match[1].strip() if match else ""


def _known(**facts: Any) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
