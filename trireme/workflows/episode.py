"""Episode: an agent in an environment, turn by turn: observe, reply, act, until the end.

A subclass names its environment and how observations become messages and replies become actions.
An episode is one experience (the whole conversation), or with `per_step` one for every turn. What
does not fit into the model any more ends the episode, and is counted (`env_no_room`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from trireme.envs.env import Seen, after_reset, after_step
from trireme.envs.pool import LentEnv
from trireme.experience import Experience
from trireme.task import Task
from trireme.threads import OwnThread
from trireme.usercode import UserCode
from trireme.workflows.classes import settled
from trireme.workflows.multi_turn import MultiTurnWorkflow

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class EpisodeWorkflow(MultiTurnWorkflow):
    """Base of workflows over an `Env`. Give `make_env`; all else has a default.

    A subclass may instead play the episode itself: `generate_env_inference_samples(self, env,
    rollout_num)`, a plain method; `rollout_num` is 1, for each rollout is an object of its own.
    """

    is_async = True
    calls = ("generate_env_inference_samples",)
    per_step: bool = False
    """One experience a turn in place of one a conversation."""
    unfinished_reward: float = -0.1
    """Reward of an episode that did not come to its end."""
    default_system_prompt: str | None = None
    """Where the YAML gives none."""
    blocking_env: bool = True
    """`reset` and `step` take time: they run in a thread, and hold up no other episode."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that plays by itself does so in a thread, like any plain `run`."""
        super().__init_subclass__(**options)
        if "generate_env_inference_samples" in vars(cls) and "run" not in vars(cls):
            cls.is_async = False
            cls.run = cls._play_by_itself  # type: ignore[method-assign, assignment]

    def _play_by_itself(self) -> list[Experience]:
        env = self.make_env()
        env = env.blocking() if isinstance(env, LentEnv) else env
        try:
            return self.generate_env_inference_samples(env, self.repeat_times)
        finally:
            getattr(env, "close", lambda: None)()

    def generate_env_inference_samples(self, env: Any, rollout_num: int) -> list[Experience]:
        """Experiences of an episode; by default `run` plays it."""
        raise NotImplementedError(f"{type(self).__name__} plays its episodes in `run`")

    def make_env(self) -> Any:
        """The environment of `self.task`; may be a coroutine."""
        raise NotImplementedError(f"{type(self).__name__} must define `make_env(self)`")

    def format_observation(self, seen: Seen) -> str:
        """The user's message that shows what the environment did."""
        return str(seen.observation)

    def parse_action(self, reply: str) -> str:
        """The action that a reply asks for."""
        return reply.strip()

    def final_reward(self, seen: Seen, total: float) -> float:
        """The episode's reward: the last step's if it ended, by default. `total` is their sum."""
        return seen.reward if seen.done else self.unfinished_reward

    def bind(self, task: Task) -> None:
        """Take the names that users' methods read from the task."""
        super().bind(task)
        self.system_prompt = self.system_prompt or self.default_system_prompt

    async def run(self) -> list[Experience]:
        """One episode. However it ends, the environment is closed."""
        thread = OwnThread(f"env-{self.task.task_id}") if self.blocking_env else None
        env: Any = None

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            with UserCode(f"the environment of {type(self).__name__}", function) as _:
                if thread is not None and not inspect.iscoroutinefunction(function):
                    return await thread.run(lambda: function(*args))
                return await settled(function(*args))

        try:
            env = await call(self.make_env)
            return await self._play(env, call)
        finally:
            close = getattr(env, "close", None)
            if thread is not None:
                # not waited for: what hangs in the thread is left there
                thread.close(None if inspect.iscoroutinefunction(close) else close)
            if close is not None and (thread is None or inspect.iscoroutinefunction(close)):
                await settled(close())

    async def _play(self, env: Any, call: Callable[..., Any]) -> list[Experience]:
        seen = after_reset(await call(env.reset))
        memory: list[dict[str, Any]] = []
        if self.system_prompt:
            memory.append({"role": "system", "content": self.system_prompt})
        total, no_room = 0.0, False
        lived: list[dict[str, Any]] = []
        for _ in range(self.max_env_steps):
            memory.append({"role": "user", "content": self.format_observation(seen)})
            (reply,) = await self.model.chat_async(memory)
            if no_room := reply.truncate_status == "prompt_truncated":
                break
            text = reply.response_text or ""
            memory.append({"role": "assistant", "content": text})
            before = seen.info.get("env_state_hash")
            seen = after_step(await call(env.step, self.parse_action(text)))
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


def parse_action(reply: str) -> str:
    """The text of the first <action>; empty where there is none."""
    found = _ACTION.search(reply)
    return found[1].strip() if found else ""


def _known(**facts: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in facts.items() if value is not None}
