"""Trireme: reinforcement fine-tuning of language models.

The names below are imported when used, and so are those that extensions add to them.
"""

from __future__ import annotations

import warnings
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from trireme.extensions import names_of, needed_for
from trireme.registry import lazy_names

__version__ = "0.1.0"  # the only place: the build and `trireme --version` read it here

# tqdm, which transformers imports, asks for ipywidgets in notebooks; Trireme shows none of its bars
warnings.filterwarnings("ignore", "IProgress not found")

_MODULES = {
    "trireme.algorithms.advantage": "by_group",
    "trireme.algorithms.recipes": "algorithm",
    "trireme.config": "Config ConfigError Plan load_config",
    "trireme.engines.engine": "Completion Engine Sampling",
    "trireme.engines.scripted": "ScriptedEngine",
    "trireme.experience": "EID Experience group_by",
    "trireme.launch.check": "make_plans",
    "trireme.model.chat_tokens": "ChatTokens",
    "trireme.model.model": "Model Reply",
    "trireme.registry": "Registry REWARDS WORKFLOWS CONTEXT_MANAGERS=context_managers "
    "ENVS=gym_envs MULTI_TURNS=multi_turns ORMS=orms "
    "advantage kl_loss policy_loss reward workflow",
    "trireme.rewards.orm": "AsyncORM MathAccuracy ORM",
    "trireme.rewards.reward": "RewardFn",
    "trireme.task": "Task",
    "trireme.workflows.classes": "Workflow",
    "trireme.workflows.episode": "MultiTurnWorkflow",
    "trireme.workflows.step_wise": "RewardPropagationWorkflow StepWiseRewardWorkflow",
}
"""Maps a module to its public names, `there=here` if another name stands for one."""
_NAMES = {
    here or there: f"{module}:{there}"
    for module, words in _MODULES.items()
    for there, _, here in (word.partition("=") for word in words.split())
}

_of_kernel = lazy_names(__name__, _NAMES)


def _public_names() -> list[str]:
    return sorted({*_NAMES, *names_of("public")})


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _public_names()
    if name in _NAMES or name.startswith("__") or _is_module(name):
        return _of_kernel(name)
    names = names_of("public")
    if name not in names and (owner := needed_for("public", name)):
        # not AttributeError: `from trireme import NAME` would drop its sentence
        raise ImportError(
            f"trireme.{name} needs the extension '{owner}', which is not here: "
            "`trireme extensions` lists what is"
        )
    return lazy_names(__name__, names)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})


def _is_module(name: str) -> bool:
    """Return whether `from trireme import NAME` means a module; Python tries attributes first."""
    return PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None  # noqa: F405


# For type checkers and editors; no run imports it. Tests compare it with the table above. The names
# of extensions are in a file of theirs, and this is the only import of them.
if TYPE_CHECKING:
    from trireme.algorithms.advantage import by_group
    from trireme.algorithms.recipes import algorithm
    from trireme.config import Config, ConfigError, Plan, load_config
    from trireme.engines.engine import Completion, Engine, Sampling
    from trireme.engines.scripted import ScriptedEngine
    from trireme.experience import EID, Experience, group_by
    from trireme.ext import *  # noqa: F403
    from trireme.launch.check import make_plans
    from trireme.model.chat_tokens import ChatTokens
    from trireme.model.model import Model, Reply
    from trireme.registry import CONTEXT_MANAGERS as context_managers
    from trireme.registry import ENVS as gym_envs
    from trireme.registry import MULTI_TURNS as multi_turns
    from trireme.registry import ORMS as orms
    from trireme.registry import (
        REWARDS,
        WORKFLOWS,
        Registry,
        advantage,
        kl_loss,
        policy_loss,
        reward,
        workflow,
    )
    from trireme.rewards.orm import ORM, AsyncORM, MathAccuracy
    from trireme.rewards.reward import RewardFn
    from trireme.task import Task
    from trireme.workflows.classes import Workflow
    from trireme.workflows.episode import MultiTurnWorkflow
    from trireme.workflows.step_wise import RewardPropagationWorkflow, StepWiseRewardWorkflow
