"""Gym scheduler: lets an environment (ours, or OpenEnv's) lead the conversation and set its reward.

- The environment's first observation replaces the row's messages.
- It is closed however the conversation ends, also by `max_turns`, a cut reply, an error or a
  time-out.
- Its methods are plain (they run in the trajectory's own thread) or coroutines.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trireme.aio import OwnThread
from trireme.envs.env import OpenEnv, after_step, as_text, extra
from trireme.ext.multi_turn.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
)
from trireme.registry import CONTEXT_MANAGERS, ENVS
from trireme.text import as_json

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
LARGEST_ARRAY = 1_000
"""Larger arrays of an environment's info are text, which numpy and torch shorten."""
LARGEST_INFO, LARGEST_VALUE = 10_000, 1_000
"""The most characters of an info as JSON, and of each value of a larger one: every sample of the
trajectory has the infos of all its steps, in the store and in its copies."""


class Env:
    """The base of environments that see the whole conversation. Define `reset` and `step`."""

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        """`env_config`: that of `workflow_args`, overridden by the row's."""
        self.env_config = env_config

    def reset(self, config: RolloutInferRequest) -> Any:
        """Return `(observation, info, system)` for a row's request; `system` may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must define `reset(self, config)`")

    def step(self, action: Messages) -> Any:
        """Return `(observation, reward, done, info)`, or gymnasium's five with `truncated`, after a
        conversation that ends with the model's message.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step(self, action)`")

    def close(self) -> Any:
        """Release its resources."""


class ContextManager:
    """The base of classes that shorten a conversation before each turn. Define `manage_context`."""

    def __init__(self, ctx_config: Mapping[str, Any]) -> None:
        self.ctx_config = ctx_config

    def manage_context(self, history: Messages, trajectory_id: str) -> Any:
        """Return the messages from which the next turn is sampled."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `manage_context(self, history, trajectory_id)`"
        )


class GymScheduler(MultiTurnScheduler):
    """Plays an environment until it is done.

    `env`: a name of `gym_envs` or a path, which the row's `env_config.name` overrides; `env_config`
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
            try:
                ENVS.get(env)  # an unknown one is an error before the run
            except ValueError as error:
                raise ValueError(f"workflow_args.env: {error}") from error
        self._opened = OpenEnv(f"gym-{id(self)}")
        self._observation: Any = ""
        self._rewards: list[float] = []
        self._facts: list[Any] = []

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
        observation, info, system = beginning
        self._facts.append(_plain(info))
        messages = [{"role": "system", "content": system}] if system else []
        shown = as_text(observation, f"{type(env).__name__}.reset", env.reset)
        request.messages = [*messages, {"role": "user", "content": shown}]
        await self._shorten(request)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Act on the reply, unless it is empty because the context was full."""
        done = False
        if result.finish_reason != "length" or result.token_ids:
            action = copy.deepcopy(infer_request.messages)
            env = self._opened.env
            transition = await self._opened.call(env.step, action)
            seen = after_step(transition, f"{type(env).__name__}.step", env.step)
            self._observation, done = seen.observation, seen.done
            self._rewards.append(seen.reward)
            self._facts.append(_plain(seen.info))
        infos = _infos(self._rewards, done, self._facts)
        return {"rollout_infos": infos, **({"done": True} if done else {})}

    async def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        """Add the environment's observation as the user's next message."""
        env = self._opened.env
        shown = as_text(self._observation, f"{type(env).__name__}.step", env.step)
        infer_request.messages.append({"role": "user", "content": shown})
        await self._shorten(infer_request)
        return infer_request

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Close the environment. An error in that is logged: the trajectory is complete."""
        await self._opened.close()

    async def _shorten(self, request: RolloutInferRequest) -> None:
        if self._context is not None:
            history = copy.deepcopy(request.messages)
            shorten = self._context.manage_context
            request.messages = await self._opened.call(shorten, history, request.uuid or "")


def _infos(rewards: Sequence[float], done: bool, facts: Sequence[Any]) -> dict[str, Any]:
    """Return what rewards see of an episode. `facts`: the environment's info of the reset and of
    each step.
    """
    infos = {"total_reward": sum(rewards), "step_rewards": list(rewards), "gym_done": done}
    return infos | ({"trajectory_info": list(facts)} if any(facts) else {})


def _plain(info: Any) -> Any:
    """Return an environment's info as plain JSON, in which it is stored: of at most `LARGEST_INFO`
    characters, else with its long values as the beginnings of their texts.
    """
    try:
        whole = as_json(info, default=_listed, skipkeys=True)
        plain = json.loads(whole)
    except (ValueError, RecursionError):  # it contains itself, for example
        return _begin(_text(info), LARGEST_INFO)
    if len(whole) <= LARGEST_INFO:
        return plain
    if isinstance(plain, dict):
        plain = {key: _shortened(value) for key, value in plain.items()}
        if len(as_json(plain)) <= LARGEST_INFO:
            return plain
    return _begin(whole, LARGEST_INFO)


def _shortened(value: Any) -> Any:
    whole = value if isinstance(value, str) else as_json(value)
    return value if len(whole) <= LARGEST_VALUE else _begin(whole, LARGEST_VALUE)


def _begin(text: str, most: int) -> str:
    more = len(text) - most
    return f"{text[:most]} … ({more:,} more characters)" if more > 0 else text


def _listed(value: Any) -> Any:
    """Return numbers and small arrays of numpy and torch as Python's; anything else as text."""
    shape = getattr(value, "shape", None) if hasattr(value, "tolist") else None
    return _text(value) if shape is None or math.prod(shape) > LARGEST_ARRAY else value.tolist()


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # too deep, a number with too many digits, or the user's own code
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


class OpenEnvSession:
    """An episode on a server of OpenEnv: `base_url` and `reset_kwargs` of a row's `env_config`.
    Its methods block, as plug-ins for ms-swift expect.
    """

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        client = extra("openenv.core.generic_client", "OpenEnv", "openenv").GenericEnvClient
        url = env_config.get("base_url", "http://localhost:8000")
        self._client = client(base_url=url).sync()
        self._reset_kwargs = dict(env_config.get("reset_kwargs") or {})

    def reset(self) -> tuple[Any, Any]:
        """Return `(observation, metadata)` of a new episode."""
        begun = self._client.reset(**self._reset_kwargs)
        return begun.observation, getattr(begun, "metadata", None)

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool, Any]:
        """Return `(observation, reward, done, metadata)` after an action."""
        seen = self._client.step(action)
        metadata = getattr(seen, "metadata", None)
        return seen.observation, float(seen.reward or 0.0), bool(seen.done), metadata

    def close(self) -> None:
        """End the connection."""
        self._client.close()


_FENCED = re.compile(r"\A```[^\n]*\n(.*)\n[ \t]*```\Z", re.DOTALL)


class OpenEnvScheduler(MultiTurnScheduler):
    """Plays an episode on the server of OpenEnv that the row's `env_config` names.

    Subclasses define how a reply becomes an action (`parse_action`) and an observation a message
    (`format_observation`). Those of ms-swift also use the attributes that begin with `_`.
    """

    drops_retries = False
    env_config_defaults: Mapping[str, Any] = {}
    """Defaults, which `workflow_args.env_config` and then a row's `env_config` override."""

    def __init__(
        self, max_turns: int | None = None, env_config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(max_turns)
        if type(self)._create_env is OpenEnvScheduler._create_env:
            extra("openenv.core.generic_client", "OpenEnv", "openenv")  # an error before the run
        self._env_config = dict(env_config or {})
        self._envs: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._facts: dict[str, list[Any]] = {}
        self._pending_obs: dict[str, str | None] = {}
        self._thread = OwnThread(f"openenv-{id(self)}")

    def parse_action(self, text: str) -> Any:
        """Return the action of a reply: its JSON object, else its text as `message`."""
        text = text.strip()
        if fenced := _FENCED.match(text):
            text = fenced[1].strip()
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return {"message": text}
        return parsed if isinstance(parsed, dict) else {"message": str(parsed)}

    def format_observation(self, observation: Any) -> Any:
        """Format an observation for the model, as JSON."""
        return as_json(observation, default=str)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Begin an episode; its first observation replaces the row's messages."""
        for request in requests:
            row = request.data_dict.get("env_config") or {}
            config = {**self.env_config_defaults, **self._env_config, **row}
            session, uuid = self._create_env(config), request.uuid or ""
            self._envs[uuid] = session
            observation, metadata = await self._thread.run(session.reset)
            self._facts[uuid] = [_plain(metadata)]
            system = config.get("system_message")
            request.messages = [{"role": "system", "content": system}] if system else []
            shown = self.format_observation(observation)
            request.messages.append({"role": "user", "content": shown})
            self._total_rewards[uuid], self._step_rewards[uuid] = 0.0, []

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Act on the reply, unless it is empty because the context was full."""
        uuid, done = infer_request.uuid or "", False
        session = self._envs.get(uuid)
        if session is not None and (result.finish_reason != "length" or result.token_ids):
            action = self.parse_action(result.message.content)
            step = await self._thread.run(lambda: session.step(action))
            observation, reward, done, metadata = step
            self._facts.setdefault(uuid, []).append(_plain(metadata))
            self._total_rewards[uuid] += float(reward)
            self._step_rewards[uuid].append(float(reward))
            self._pending_obs[uuid] = None if done else self.format_observation(observation)
        infos = _infos(self._step_rewards.get(uuid, ()), done, self._facts.get(uuid, ()))
        infos["total_reward"] = self._total_rewards.get(uuid, 0.0)
        return {"rollout_infos": infos, **({"done": True} if done else {})}

    async def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Add the environment's observation as the user's next message."""
        shown = self._pending_obs.pop(infer_request.uuid or "", None)
        if shown is not None:
            infer_request.messages.append({"role": "user", "content": shown})
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Close the open sessions."""
        for uuid in list(self._envs):
            await self._close_and_remove(uuid)
        self._thread.close()

    def _create_env(self, env_config: Mapping[str, Any]) -> Any:
        """Make the session of an `env_config`."""
        return OpenEnvSession(env_config)

    async def _close_and_remove(self, uuid: str) -> None:
        """Remove a trajectory, and close its session in its thread, which may hang there. An error
        in that is logged: the trajectory is complete.
        """
        session = self._envs.pop(uuid, None)
        for kept in (self._total_rewards, self._step_rewards, self._pending_obs, self._facts):
            kept.pop(uuid, None)

        def close() -> None:
            try:
                session.close()
            except Exception:
                logger.warning("%s.close failed", type(session).__name__, exc_info=True)

        if session is not None:
            self._thread.put(close)
