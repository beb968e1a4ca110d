"""Registry: keeps the names that a YAML may use, and what each stands for.

A name is looked up in this order: registered by the user, built in, dotted path
(`package.module.Name` or `my_file:name`). A user's name overrides a built-in and one line says so;
two users' names collide loudly. What is built in stands in manifests (extensions.py) and is
imported when it is looked up: importing all of it takes seconds. Users register by the decorators
below.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

from trireme.extensions import missing, names_of

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")


_RAISE: Any = object()


class UnknownName(ValueError, KeyError):
    """A name that a registry does not have. A KeyError too, as of any mapping."""

    __str__ = Exception.__str__  # a KeyError prints its sentence in quotes


class Registry(MutableMapping[str, Any]):
    """One kind of thing by name: workflows, rewards, algorithms and their parts.

    A mapping as ms-swift's are (`update`, `items`, `in`, `del`), of built-in names and users'. Only
    `get` without a default is another: an unknown name is an error there, as in Trinity-RFT.
    """

    __eq__ = object.__eq__  # comparing the items would import them all

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __init__(
        self,
        name: str,
        default_mapping: Mapping[str, str] | None = None,
        *,
        kind: str | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """`kind`: the table of the manifests whose names are built in. `refused`: names of other
        systems, each with the sentence that tells the user what to name instead.

        `default_mapping`: name -> dotted path, imported on first use.
        """
        self.name = name
        self._kind = kind
        self._refused = dict(refused or {})
        self._paths: dict[str, str] = dict(default_mapping or {})
        self._registered: dict[str, Any] = {}
        self._of_paths: dict[str, Any] = {}
        self._removed: set[str] = set()

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted(self)

    def built_in(self) -> list[str]:
        """Names that no user registered, in the order of the manifests."""
        names = dict.fromkeys([*self._provided, *self._paths])
        return [name for name in names if name not in self._removed]

    def get(self, key: str | None, default: Any = _RAISE, *, kind: str = "") -> Any:
        """Look `key` up; None for None. For an unknown name return the default, if one is given.

        Raises UnknownName, a ValueError, or ImportError where the name's module is broken. `kind`:
        the word for it in messages, where several keys of the YAML share this registry.
        """
        kind = kind or self.name
        if key is None:
            return None
        if default is not _RAISE and key not in self:
            return default
        if key in self._removed:
            raise UnknownName(f"{kind} '{key}' was removed by a plug-in")
        if key in self._registered:
            return self._registered[key]
        path = self._paths.get(key) or self._provided.get(key)
        if path is not None:
            thing = self._registered[key] = _import_path(path, kind=kind)
            return thing
        if key in self._refused:
            raise UnknownName(f"{kind} '{key}' {self._refused[key]}")
        if need := self._kind and missing(self._kind, key):
            raise UnknownName(f"{kind} '{key}' {need}")
        if not is_path(key):
            known = ", ".join(self.names()) or "none"
            hint = did_you_mean(key, self.names()) or "."
            raise UnknownName(f"unknown {kind} '{key}'{hint} Known: {known}")
        if key not in self._of_paths:  # a path is no name
            self._of_paths[key] = _import_path(key, kind=kind)
        return self._of_paths[key]

    def register_module(
        self,
        module_name: str,
        module_cls: Any = None,
        force: bool = False,
        lazy: bool = False,
    ) -> Any:
        """Register `module_cls` under a name, or use as a decorator.

        `lazy` takes a dotted path that is imported on first use. `force` allows to replace another
        user's entry. Raises ValueError for a name that is taken by another user's entry.
        """
        if module_cls is None:
            return lambda cls: self.register_module(module_name, cls, force, lazy)
        taken, replaces = self._registered.get(module_name), module_name in self.built_in()
        self._removed.discard(module_name)
        if taken is not None and not replaces and not force:
            if _where(taken) == _where(module_cls):  # of a module that was loaded twice
                return module_cls
            raise ValueError(
                f"{self.name}: the name '{module_name}' is registered twice, "
                f"by {_where(taken)} and by {_where(module_cls)}: rename one"
            )
        if replaces:
            logger.warning(
                "%s: '%s' of %s replaces the built-in one",
                self.name,
                module_name,
                _where(module_cls),
            )
        if lazy and isinstance(module_cls, str):
            self._paths[module_name] = module_cls
        else:
            self._registered[module_name] = module_cls
        return module_cls

    def register(self, name: str) -> Callable[[Thing], Thing]:
        """Decorator: a function or class by this name."""
        return self.register_module(name)

    def adopt(self, other: Registry) -> None:
        """Take over what another registry of the same kind knows."""
        self._paths.update(other._paths)
        for name, thing in other._registered.items():
            self.register_module(name, thing)

    def refuses(self, name: str) -> bool:
        """Return whether `get` refuses this name and suggests another."""
        return name in self._refused

    def __setitem__(self, name: str, thing: Any) -> None:
        """`registry["name"] = thing`, the way in which some plug-ins register: the last one counts,
        and a line says so.
        """
        there = self._registered.get(name)
        if there is not None and name not in self.built_in() and _where(there) != _where(thing):
            logger.warning(
                "%s: '%s' of %s replaces that of %s", self.name, name, _where(thing), _where(there)
            )
        self.register_module(name, thing, force=True)

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise UnknownName(f"{self.name} '{name}' is not there to be removed")
        self._registered.pop(name, None)
        if name in self.built_in():
            self._removed.add(name)

    def __contains__(self, name: object) -> bool:
        known = (self._registered, self._provided, self._paths)
        return name not in self._removed and any(name in names for names in known)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.built_in(), *self._registered]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Registry({self.name}: {', '.join(self) or 'none'})"

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ior__(self, other: Mapping[str, Any]) -> Registry:
        self.update(other)
        return self

    @property
    def _provided(self) -> Mapping[str, str]:
        return names_of(self._kind) if self._kind else {}


def is_path(key: str) -> bool:
    """Return whether a key is `package.module.Name` or `module:name`; a hub id with a dot is
    neither.
    """
    return ":" in key or ("." in key and "/" not in key)


def did_you_mean(name: str, known: Iterable[str], form: str = "; did you mean '{}'?") -> str:
    """`form` with the nearest of the known names; nothing where none is near."""
    near = get_close_matches(name, list(known), n=1)
    return form.format(near[0]) if near else ""


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, remembered for plain functions: it takes as long as a small reward."""
    return _signature(function) if inspect.isfunction(function) else inspect.signature(function)


_signature = lru_cache(maxsize=256)(inspect.signature)


def refuse_unknown_options(whose: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first option that `whose` (`reward 'math'`, say) does not have."""
    known = list(known)
    for option in options:
        if option not in known:
            form = " (did you mean '{}'?)"
            longer = next((form.format(k) for k in known if k.startswith(f"{option}_")), "")
            hint = did_you_mean(option, known, form) or longer
            has = f"It has: {', '.join(known)}" if known else "It has no options"
            raise ValueError(f"{whose} has no option '{option}'{hint}. {has}")


def lazy_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562): each name is imported from its module when it is used.

    `names`: name -> `package.module`, or `package.module:other_name`.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        source, _, other = names[name].partition(":")
        return getattr(importlib.import_module(source), other or name)

    return get


def _import_path(path: str, *, kind: str) -> Any:
    """The object at `package.module.Name` or `module:name`."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module of the folder that the run is started in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"{kind} '{path}': there is no module '{module_name}' (is its folder on the path, "
                f"or its file in `plugins`?)"
            ) from error
        raise
    if not hasattr(module, attribute):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(attribute, names)
        raise ValueError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{hint}")
    return getattr(module, attribute)


def _where(thing: Any) -> str:
    code = getattr(thing, "__code__", None)
    name = getattr(thing, "__qualname__", repr(thing))
    return f"{code.co_filename if code else getattr(thing, '__module__', '?')}:{name}"


ALGORITHMS = Registry("algorithm.algorithm_type", kind="algorithm")
ADVANTAGES = Registry("algorithm.advantage_fn", kind="advantage")
POLICY_LOSSES = Registry("algorithm.policy_loss_fn", kind="policy_loss")
KLS = Registry("algorithm.kl_loss_fn", kind="kl_loss")
ENTROPIES = Registry("algorithm.entropy_loss_fn", kind="entropy_loss")
SAMPLES = Registry("algorithm.sample_strategy", kind="sample_strategy")

advantage = ADVANTAGES.register
"""Decorator: an advantage `(rewards [N], groups [N], *, options) -> [N]` by this name."""
policy_loss = POLICY_LOSSES.register
"""Decorator: a loss `(logprobs, old_logprobs, advantages, *, options) -> [M]` by this name."""
kl_loss = KLS.register
"""Decorator: a divergence `(logprobs, ref_logprobs, *, options) -> [M]` by this name."""

WORKFLOWS = Registry(
    "workflow",
    kind="workflow",
    refused={
        **dict.fromkeys(
            ("simple_mm_workflow", "async_simple_mm_workflow"),
            "shows images to the model, and prompts are text only here: simple_workflow is the "
            "same for text",
        ),
    },
)
MULTI_TURNS = Registry("multi-turn scheduler", kind="multi_turn")
"""Schedulers of conversations: see ext/multi_turn/scheduler.py. `multi_turns` for plug-ins."""
ENVS = Registry("environment", kind="environment")
"""Those of the gym scheduler. `gym_envs` for plug-ins."""
CONTEXT_MANAGERS = Registry("context manager", kind="context_manager")

workflow = WORKFLOWS.register
"""Decorator: an async function `(task, model)`, or a Workflow class, by this name."""

REWARDS = Registry(
    "reward",
    kind="reward",
    refused={
        "rm_gallery_reward": "asks the package rm-gallery, which is not used here: judge asks "
        "a model of explorer.auxiliary_models"
    },
)
ORMS = Registry("reward function", kind="reward_function")
"""Rewards that see a task's rollouts together: see rewards/orm.py. `orms` for plug-ins."""
RM_PLUGINS = Registry(
    "reward model plug-in",
    kind="reward_model_plugin",
    refused={"genrm": "asks a language model for a score: the rewards judge and rubric do that"},
)
"""Functions `(scores, task) -> scores`: see ext/judges/reward_model.py. ms-swift's `rm_plugins`."""
CALLBACKS = Registry(
    "trainer.callbacks",
    kind="callback",
    refused=dict.fromkeys(
        ("early_stop", "lisa", "adalora", "perf_log", "graceful_exit", "deepspeed_elastic"),
        "is one of ms-swift's own, which is not here: expected a class of a plug-in",
    ),
)
"""Classes that a training calls at its events. ms-swift's `callbacks_map`."""
STEERINGS = Registry("steering", kind="steering")
"""Who may end a training: see trainer/steering.py."""

reward = REWARDS.register
"""Decorator: a function `(task, answer, *, options)` or a RewardFn class by this name."""

OPERATORS = Registry("experience operator", kind="operator")
TASK_OPERATORS = Registry("task operator", kind="task_operator")

operator = OPERATORS.register
"""Decorator: a function `(experiences, *, options)` or an ExperienceOperator, by this name."""
task_operator = TASK_OPERATORS.register
"""Decorator: a function `(rows, *, options) -> rows` by this name."""

SELECTORS = Registry("data_selector", kind="data_selector")
"""Orders of a taskset's rows: see data/selectors.py."""
SOURCES = Registry("source of rows", kind="source")
"""Places of rows other than data files: see RowSource in data/rows.py."""
STORES = Registry("store", kind="store")
"""What carries experiences from the explorer to the trainer: see buffer/store.py."""
READERS = Registry("reader of checkpoints", kind="reader")
"""Weights of other trainers' checkpoints: see checkpoint/reader.py."""

LISTENERS = Registry("listener", kind="listener")
"""Who follows a run: see launch/listeners.py."""
TRACKERS = Registry("monitor.monitor_type", kind="tracker")

tracker = TRACKERS.register
"""Decorator: a Tracker class, or a function `(metrics, step, part)`, by this name."""

FORMATS = Registry("tool_call_parser", kind="tool_call_parser")
"""How models write tool calls: see model/tool_calls.py."""
TOOLS = Registry("tool", kind="tool")
"""Functions that a model may call: see ext/multi_turn/tool_calls.py."""
SCALES = Registry("loss scale", kind="loss_scale")
"""Weights of a reply's pieces in the loss: see ext/multi_turn/loss_scale.py."""

ROUTES = Registry("route", kind="route")
"""Functions `(rollouts) -> APIRouter`, whose HTTP routes an engine's server has."""

COMMANDS = Registry("command", kind="command")
"""Commands of `trireme`: functions with typer's annotations, or typer apps (cli/main.py)."""

ENGINES = Registry("explorer.rollout_model.engine_type", kind="engine")
"""Kinds of engines: see config/engine_kind.py."""

engine = ENGINES.register
"""Decorator: an EngineKind class by this name."""

PUSHES = Registry("weight push", kind="push")
"""Ways of weights to an engine, which names its own: see sync/push.py."""
LAUNCHERS = Registry("cluster.launcher", kind="launcher")
"""What starts the parts of a stage in processes of their own: see config/launcher.py."""
MODES = Registry("mode", kind="mode")
"""Modes that extensions run: functions `(stage, engine, stop)`, see `run_plan` in launch/run.py."""

MODELS = Registry("model of an engine", kind="model")
"""Classes of what workflows hold of an engine, which names its own: see model/model.py."""
PROGRAMS = Registry("program", kind="program")
"""The `main` of modules that are run in processes of their own: see launch/engine_host.py."""
GATEWAYS = Registry("gateway", kind="gateway")
"""What gives rollouts addresses of their own: see launch/explorer_side.py."""

DIALECTS = Registry("dialect", kind="dialect")
"""What other systems' keys, options and classes mean: see config/dialect.py."""
DIALECT_KEYS = Registry("key of a dialect", kind="key")
"""Keys of files that only a dialect reads, each with that one."""
FLAGS = Registry("flags", kind="flags")
"""What other systems' flags mean: see cli/arguments.py."""

MEMORY_PLANNERS = Registry("memory planner", kind="memory_planner")
"""Estimates of what a trainer's rank needs of its device: see config/memory.py."""
