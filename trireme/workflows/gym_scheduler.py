"""Gym scheduler: an environment leads the conversation, and gives its reward.

- The environment's first observation replaces the row's messages.
- It is closed on every way out, also by `max_turns`, a cut reply, an error or a time-out.
- Its methods are plain (they run in a thread of the trajectory's own) or coroutines.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from trireme.envs.env import OpenEnv
from trireme.registry import CONTEXT_MANAGERS, ENVS, MULTI_TURNS
from trireme.workflows.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
)

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


class Env:
    """Base of environments that see the whole conversation. Give `reset` and `step`."""

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        """`env_config`: that of `workflow_args`, and over it the row's."""
        self.env_config = env_config

    def reset(self, config: RolloutInferRequest) -> Any:
        """`(observation, info, system)` for a row's request; `system` may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must define `reset(self, config)`")

    def step(self, action: Messages) -> Any:
        """`(observation, reward, done, info)` after a conversation whose last message is the
        model's.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step(self, action)`")

    def close(self) -> Any:
        """Free what it holds."""


class ContextManager:
    """Base of what shortens a conversation before each turn. Give `manage_context`."""

    def __init__(self, ctx_config: Mapping[str, Any]) -> None:
        self.ctx_config = ctx_config

    def manage_context(self, history: Messages, trajectory_id: str) -> Any:
        """The messages that the next turn is sampled from."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `manage_context(self, history, trajectory_id)`"
        )


@MULTI_TURNS.register("gym_scheduler")
class GymScheduler(MultiTurnScheduler):
    """Plays an environment until it is done.

    `env`: a name of `gym_envs` or a path, which the row's `env_config.name` goes over; `env_config`
    likewise. `context_manager` (and `ctx_config`) may shorten the conversation before each turn.
    """

    drops_retries = False

    def __init__(
        self,
        max_turns: int | None = None,
        env: Any = None,
        env_config: Mapping[str, Any] | None = None,
        context_manager: Any = None,
        ctx_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(max_turns)
        self._env_name, self._env_config = env, dict(env_config or {})
        make: Any = context_manager
        if isinstance(context_manager, str):
            make = CONTEXT_MANAGERS.get(context_manager)
        self._context = None if make is None else make(dict(ctx_config or {}))
        if isinstance(env, str):
            ENVS.get(env)  # an unknown one is an error before the run
        self._opened = OpenEnv(f"gym-{id(self)}")
        self._observation = ""
        self._rewards: list[float] = []

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Make and reset the environment; its observation is the conversation's beginning."""
        [request] = requests
        config = {**self._env_config, **(request.data_dict.get("env_config") or {})}
        name = config.get("name") or self._env_name
        if name is None:
            raise ValueError(
                "gym_scheduler has no environment: give workflow_args.env, or the row's "
                f"env_config.name. Known: {', '.join(ENVS.names()) or 'none yet'}"
            )
        make: Any = ENVS.get(name) if isinstance(name, str) else name
        await self._opened.make(make, config)
        env = self._opened.env
        beginning = await self._opened.call(env.reset, request)
        if not isinstance(beginning, tuple) or len(beginning) != 3:
            raise TypeError(
                f"{type(env).__name__}.reset returned {beginning!r:.80}: expected (observation, "
                "info, system)"
            )
        observation, _, system = beginning
        messages = [{"role": "system", "content": system}] if system else []
        request.messages = [*messages, {"role": "user", "content": str(observation)}]
        await self._shorten(request)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Act by the reply. One that had no room is none."""
        done = False
        if result.finish_reason != "length" or result.token_ids:
            action = copy.deepcopy(infer_request.messages)
            env = self._opened.env
            transition = await self._opened.call(env.step, action)
            if not isinstance(transition, tuple) or len(transition) != 4:
                raise TypeError(
                    f"{type(env).__name__}.step returned {transition!r:.80}: expected "
                    "(observation, reward, done, info)"
                )
            observation, reward, done, _ = transition
            self._observation = str(observation)
            self._rewards.append(float(reward or 0.0))
        infos = {
            "total_reward": sum(self._rewards),
            "step_rewards": list(self._rewards),
            "gym_done": bool(done),
        }
        return {"rollout_infos": infos, **({"done": True} if done else {})}

    async def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        """What the environment showed is the user's next message."""
        infer_request.messages.append({"role": "user", "content": self._observation})
        await self._shorten(infer_request)
        return infer_request

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Close the environment. What fails in that is logged: the trajectory was lived through."""
        try:
            await self._opened.close()
        except Exception:
            logger.warning("%s.close failed", type(self._opened.env).__name__, exc_info=True)

    async def _shorten(self, request: RolloutInferRequest) -> None:
        if self._context is not None:
            history = copy.deepcopy(request.messages)
            shorten = self._context.manage_context
            request.messages = await self._opened.call(shorten, history, request.uuid or "")
