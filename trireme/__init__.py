"""Trireme: reinforcement fine-tuning of language models. The names below are imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trireme.lazy import lazy_names

if TYPE_CHECKING:
    from trireme.algorithms.advantage import by_group
    from trireme.algorithms.names import advantage, kl_loss, policy_loss
    from trireme.algorithms.recipes import algorithm
    from trireme.config import Config, ConfigError, Plan, load_config, make_plans
    from trireme.engines.engine import Completion, Engine, Sampling
    from trireme.engines.scripted import ScriptedEngine
    from trireme.experience import EID, Experience, group_by
    from trireme.model.chat_tokens import ChatTokens
    from trireme.model.model import Model, Reply
    from trireme.registry import Registry
    from trireme.rewards.group import MathAccuracy
    from trireme.rewards.names import ORMS as orms
    from trireme.rewards.names import REWARDS, reward
    from trireme.rewards.orm import ORM, AsyncORM
    from trireme.rewards.reward import RewardFn
    from trireme.task import Task
    from trireme.workflows.gym_scheduler import ContextManager, Env
    from trireme.workflows.multi_turn import MultiTurnWorkflow
    from trireme.workflows.names import CONTEXT_MANAGERS as context_managers
    from trireme.workflows.names import ENVS as gym_envs
    from trireme.workflows.names import MULTI_TURNS as multi_turns
    from trireme.workflows.names import WORKFLOWS, workflow
    from trireme.workflows.scheduler import (
        ChatMessage,
        MultiTurnScheduler,
        RolloutInferRequest,
        RolloutOutput,
        RolloutResponseChoice,
    )
    from trireme.workflows.step_wise import RewardPropagationWorkflow, StepWiseRewardWorkflow
    from trireme.workflows.workflow import Workflow

__all__ = [
    "EID",
    "ORM",
    "REWARDS",
    "WORKFLOWS",
    "AsyncORM",
    "ChatMessage",
    "ChatTokens",
    "Completion",
    "Config",
    "ConfigError",
    "ContextManager",
    "Engine",
    "Env",
    "Experience",
    "MathAccuracy",
    "Model",
    "MultiTurnScheduler",
    "MultiTurnWorkflow",
    "Plan",
    "Registry",
    "Reply",
    "RewardFn",
    "RewardPropagationWorkflow",
    "RolloutInferRequest",
    "RolloutOutput",
    "RolloutResponseChoice",
    "Sampling",
    "ScriptedEngine",
    "StepWiseRewardWorkflow",
    "Task",
    "Workflow",
    "advantage",
    "algorithm",
    "by_group",
    "context_managers",
    "group_by",
    "gym_envs",
    "kl_loss",
    "load_config",
    "make_plans",
    "multi_turns",
    "orms",
    "policy_loss",
    "reward",
    "workflow",
]

_NAMES = {
    "EID": "trireme.experience",
    "ORM": "trireme.rewards.orm",
    "REWARDS": "trireme.rewards.names",
    "WORKFLOWS": "trireme.workflows.names",
    "AsyncORM": "trireme.rewards.orm",
    "ChatMessage": "trireme.workflows.scheduler",
    "ChatTokens": "trireme.model.chat_tokens",
    "Completion": "trireme.engines.engine",
    "Config": "trireme.config",
    "ConfigError": "trireme.config",
    "ContextManager": "trireme.workflows.gym_scheduler",
    "Engine": "trireme.engines.engine",
    "Env": "trireme.workflows.gym_scheduler",
    "Experience": "trireme.experience",
    "MathAccuracy": "trireme.rewards.group",
    "Model": "trireme.model.model",
    "MultiTurnScheduler": "trireme.workflows.scheduler",
    "MultiTurnWorkflow": "trireme.workflows.multi_turn",
    "Plan": "trireme.config",
    "Registry": "trireme.registry",
    "Reply": "trireme.model.model",
    "RewardFn": "trireme.rewards.reward",
    "RewardPropagationWorkflow": "trireme.workflows.step_wise",
    "RolloutInferRequest": "trireme.workflows.scheduler",
    "RolloutOutput": "trireme.workflows.scheduler",
    "RolloutResponseChoice": "trireme.workflows.scheduler",
    "Sampling": "trireme.engines.engine",
    "ScriptedEngine": "trireme.engines.scripted",
    "StepWiseRewardWorkflow": "trireme.workflows.step_wise",
    "Task": "trireme.task",
    "Workflow": "trireme.workflows.workflow",
    "advantage": "trireme.algorithms.names",
    "algorithm": "trireme.algorithms.recipes",
    "by_group": "trireme.algorithms.advantage",
    "context_managers": "trireme.workflows.names:CONTEXT_MANAGERS",
    "group_by": "trireme.experience",
    "gym_envs": "trireme.workflows.names:ENVS",
    "kl_loss": "trireme.algorithms.names",
    "load_config": "trireme.config",
    "make_plans": "trireme.config",
    "multi_turns": "trireme.workflows.names:MULTI_TURNS",
    "orms": "trireme.rewards.names:ORMS",
    "policy_loss": "trireme.algorithms.names",
    "reward": "trireme.rewards.names",
    "workflow": "trireme.workflows.names",
}


__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
