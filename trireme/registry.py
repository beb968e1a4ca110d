"""Registry: maps the names that a YAML may use to functions and classes.

A name is looked up in this order: registered by the user, built in, dotted path
(`package.module.Name` or `my_file:name`). A user's name overrides a built-in, which is logged; two
users' equal names are an error. Built-in names are listed in manifests (extensions.py) and imported
on use: importing all of them takes seconds. Users register with the decorators below.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

from trireme.extensions import missing, missing_module, names_of, refused_of

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")


_RAISE: Any = object()
_OURS = f"{__name__.partition('.')[0]}."
_LIBRARIES = (sys.prefix, sys.base_prefix)
"""Folders whose files are no user's."""


class UnknownName(ValueError, KeyError):
    """A name that a registry does not have. Also a KeyError, as for any mapping."""

    __str__ = Exception.__str__  # a KeyError prints its sentence in quotes


class Registry(MutableMapping[str, Any]):
    """One kind of thing by name: workflows, rewards, algorithms and their parts.

    A mapping (`update`, `items`, `in`, `del`) of built-in names and users'. Only `get` without a
    default differs: an unknown name is an error.
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
    ) -> None:
        """`kind`: the table of the manifests whose names are built in.

        `default_mapping` maps name -> dotted path, imported on first use.
        """
        self.name = name
        self._kind = kind
        self._paths: dict[str, str] = dict(default_mapping or {})
        self._registered: dict[str, Any] = {}
        self._of_paths: dict[str, Any] = {}
        self._removed: set[str] = set()
        self._made: dict[str, Any] = {}
        self._left_out: set[str] = set()

    def names(self) -> list[str]:
        """Return all known names, sorted."""
        return sorted(self)

    def built_in(self) -> list[str]:
        """Return the names that no user registered, in the order of the manifests."""
        names = dict.fromkeys([*self._provided, *self._paths])
        return [name for name in names if name not in self._removed]

    def get(self, key: str | None, default: Any = _RAISE, *, kind: str = "") -> Any:
        """Look `key` up; None for None. For an unknown name return the default, if one is given.

        Raises UnknownName, a ValueError, or ImportError if the name's module is broken. `kind`: the
        word for it in messages, where several keys of the YAML share this registry.
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
        if self.refuses(key):
            raise UnknownName(f"{kind} '{key}' {self._refused[key]}")
        if need := self._kind and missing(self._kind, key):
            raise UnknownName(f"{kind} '{key}' {need}")
        if not is_path(key):
            raise UnknownName(unknown_name(kind, key, self.names()))
        if key not in self._of_paths:  # a path is not a name
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
        if not isinstance(module_name, str):
            hint = ', in parentheses: ("my_name")' if callable(module_name) else ""
            raise ValueError(f"{self.name}: a name is {module_name!r:.60}: expected text{hint}")
        if module_cls is None:
            return lambda cls: self.register_module(module_name, cls, force, lazy)
        taken, replaces = self._registered.get(module_name), module_name in self.built_in()
        self._removed.discard(module_name)
        self._forget(module_name)
        if taken is not None and not replaces and not force:
            if _where(taken) == _where(module_cls):  # from a module that was loaded twice
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
        """Decorate a function or class to register it by this name."""
        return self.register_module(name)

    def make_all(self, *, anew: bool = False) -> dict[str, Any]:
        """Call each thing without arguments; returns the instances by name, in order.

        They are the same ones each time, unless `anew`. A thing that cannot be imported or made is
        left out with one warning: an installed package that is broken ends no command.
        """
        made: dict[str, Any] = {}
        for name in self.names():
            if name in self._left_out:
                continue
            try:
                made[name] = (
                    self.get(name)() if anew or name not in self._made else self._made[name]
                )
            except Exception as error:
                self._left_out.add(name)
                logger.warning("%s '%s' is left out: it cannot be used: %s", self.name, name, error)
        if not anew:
            self._made.update(made)
        return made

    def _forget(self, name: str) -> None:
        """Drop what `make_all` remembers of a name."""
        self._made.pop(name, None)
        self._left_out.discard(name)

    def adopt(self, other: Registry) -> None:
        """Take over the entries of another registry of the same kind."""
        self._paths.update(other._paths)
        for name, thing in other._registered.items():
            self.register_module(name, thing)

    def refuses(self, name: str) -> bool:
        """Return whether `get` refuses this name and suggests another."""
        return name in self._refused

    @property
    def _refused(self) -> Mapping[str, str]:
        return refused_of(self._kind) if self._kind else {}

    def __setitem__(self, name: str, thing: Any) -> None:
        """Register by `registry["name"] = thing`, as some plug-ins do: the last one counts, which
        is logged.
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
        self._forget(name)
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
    """Return whether a key is `package.module.Name`, `module:name` or a file of Python; a hub id
    with a dot, and a number, are none of them.
    """
    if ":" in key or key.endswith(".py"):
        return True
    return "." in key and "/" not in key and not key[0].isdecimal()


def did_you_mean(name: str, known: Iterable[str], form: str = "; did you mean '{}'?") -> str:
    """Return `form` with the nearest of the known names; empty if none is near."""
    names = list(known)
    if not (near := get_close_matches(name, names, n=1)):
        alike = {one.lower(): one for one in names}
        near = [alike[one] for one in get_close_matches(name.lower(), alike, n=1)]
    return form.format(near[0]) if near else ""


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """Return the sentence on a name that is none of the known ones, with what may be meant."""
    hint = _unregistered(name) or did_you_mean(name, known) or "."
    return f"unknown {kind} '{name}'{hint} Known: {', '.join(known) or 'none'}"


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return `inspect.signature`, cached for plain functions: it takes as long as a small
    reward.
    """
    return _signature(function) if inspect.isfunction(function) else inspect.signature(function)


_signature = lru_cache(maxsize=256)(inspect.signature)


class UnknownOption(ValueError):
    """An option that something configurable does not have."""

    def __init__(self, sentence: str, option: str) -> None:
        super().__init__(sentence, option)
        self.option = option

    def __str__(self) -> str:
        return self.args[0]


def refuse_unknown_options(whose: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownOption for the first option that `whose` (such as `reward 'math'`) does not
    have.
    """
    known = list(known)
    for option in options:
        if option not in known:
            form = " (did you mean '{}'?)"
            longer = next((form.format(k) for k in known if k.startswith(f"{option}_")), "")
            hint = did_you_mean(option, known, form) or longer
            has = f"It has: {', '.join(known)}" if known else "It has no options"
            raise UnknownOption(f"{whose} has no option '{option}'{hint}. {has}", option)


def lazy_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's `__getattr__` (PEP 562), which imports each name from its module on use.

    `names`: name -> `package.module`, or `package.module:other_name`.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        source, _, other = names[name].partition(":")
        return getattr(importlib.import_module(source), other or name)

    return get


def _import_path(path: str, *, kind: str) -> Any:
    """Import the object at `package.module.Name` or `module:name`."""
    whole = ":" in path or path.endswith(".py")  # a file of which no function is named
    module_name, _, attribute = path.partition(":") if whole else path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module in the folder from which the run is started
    nowhere = f"{kind} '{path}': there is no module '{module_name}'"
    if _is_file(module_name):
        raise ValueError(f"{nowhere}{_of_file(module_name, attribute or 'NAME')}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError):
            if needs := missing_module(module_name):
                raise ValueError(f"{kind} '{path}' {needs}") from error
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                raise ValueError(f"{nowhere}{_near_module(module_name, attribute)}") from error
        if module_name.startswith(_OURS):
            raise
        raise _load_error(f"{kind} '{path}'", module_name, error) from error
    if not hasattr(module, attribute):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = did_you_mean(attribute, names)
        raise ValueError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{hint}")
    return getattr(module, attribute)


def _load_error(what: str, module: str, error: BaseException) -> ValueError:
    """Return the sentence on a user's module that fails to load, with the line that raised."""
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)[1:]]
    theirs = [frame for frame in frames if not frame[0].startswith(("<", *_LIBRARIES))]
    file, line = next(reversed(theirs), ("", 0))
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        file, line, text = error.filename or file, error.lineno, f"SyntaxError: {error.msg}"
    place = f" ({file}, line {line})" if file else ""
    return ValueError(f"{what}: module '{module}' fails to load: {text}{place}")


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _of_file(name: str, attribute: str) -> str:
    """Return what to write for a file: its module, and where it lies elsewhere a plug-in."""
    name = os.path.expanduser(name)
    file = os.path.relpath(name.removesuffix(".py"))
    if file.startswith(os.pardir):
        module = f"{os.path.basename(file)}:{attribute}"
        return f"; for a file elsewhere, expected '{module}', and plugins: [{name}]"
    return f"; did you mean '{file.replace(os.sep, '.')}:{attribute}'?"


def _unregistered(name: str) -> str:
    """Say which of the user's modules has a function or class of this name, which it did not
    register.
    """
    ours = os.path.dirname(__file__)
    for module_name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if module_name == "__main__" or file is None or file.startswith((ours, *_LIBRARIES)):
            continue
        if getattr(vars(module).get(name), "__module__", None) == module_name:
            return f", which {file} has but does not register; write '{module_name}:{name}'."
    return ""


def _near_module(name: str, attribute: str) -> str:
    """Suggest a file of Python in a user's folder, or a look at the path if none is similar."""
    folders = [folder for folder in sys.path if not folder.startswith(_LIBRARIES)]
    names = [file for folder in folders if os.path.isdir(folder) for file in os.listdir(folder)]
    files = [file.removesuffix(".py") for file in names if file.endswith(".py")]
    where = " (is its folder on the path, or its file in `plugins`?)"
    return did_you_mean(name, files, f"; did you mean '{{}}:{attribute}'?") or where


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

WORKFLOWS = Registry("workflow", kind="workflow")
"""Workflows, by the names that `default_workflow_type` may have."""
MULTI_TURNS = Registry("multi-turn scheduler", kind="multi_turn")
"""Schedulers of conversations: see ext/multi_turn/scheduler.py. `multi_turns` for plug-ins."""
ENVS = Registry("environment", kind="environment")
"""Environments of the gym scheduler. `gym_envs` for plug-ins."""
CONTEXT_MANAGERS = Registry("context manager", kind="context_manager")
"""Classes that shorten conversations. `context_managers` for plug-ins."""

workflow = WORKFLOWS.register
"""Decorator: an async function `(task, model)`, or a Workflow class, by this name."""

REWARDS = Registry("reward", kind="reward")
"""Rewards, by the names that `default_reward_fn_type` may have."""
ORMS = Registry("reward function", kind="reward_function")
"""Rewards that see a task's rollouts together: see rewards/orm.py. `orms` for plug-ins."""
RM_PLUGINS = Registry("reward model plug-in", kind="reward_model_plugin")
"""Functions `(scores, task) -> scores`: see ext/judges/reward_model.py. Plug-ins: `rm_plugins`."""
CALLBACKS = Registry("trainer.callbacks", kind="callback")
"""Classes that a training calls at its events. `callbacks_map` for plug-ins."""
STEERINGS = Registry("steering", kind="steering")
"""Code that may end a training: see trainer/steering.py."""

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
"""Stores that carry experiences from the explorer to the trainer: see buffer/store.py."""
READERS = Registry("reader of checkpoints", kind="reader")
"""Readers of the weights in other trainers' checkpoints: read by `trireme convert`."""

LISTENERS = Registry("listener", kind="listener")
"""Followers of a run: see launch/listeners.py."""
TRACKERS = Registry("monitor.monitor_type", kind="tracker")

tracker = TRACKERS.register
"""Decorator: a Tracker class, or a function `(metrics, step, part)`, by this name."""

FORMATS = Registry("tool_call_parser", kind="tool_call_parser")
"""Formats in which models write tool calls: see model/tool_calls.py."""
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

SERVERS = Registry("servers of engines", kind="servers")
"""Connections to engines of other processes: see launch/servers.py."""

FORWARD_PASSES = Registry("forward pass", kind="forward_pass")
"""Functions that make a faster pass for the embedded engine: see engines/torch/forward.py."""

TRAINING_PASSES = Registry("training pass", kind="training_pass")
"""Functions that make a faster pass for the trainer: see trainer/passes.py."""

VISIONS = Registry("vision", kind="vision")
"""Functions that make a model see pictures: see engines/torch/vision.py."""
PICTURE_READERS = Registry("picture reader", kind="picture_reader")
"""Functions `(model_path, config)` that make a PictureReader, or return None for a model that takes
no pictures: see pictures.py."""

PUSHES = Registry("weight push", kind="push")
"""Methods of sending weights to an engine, which names its own: see sync/push.py."""
LAUNCHERS = Registry("cluster.launcher", kind="launcher")
"""Launchers that start the parts of a stage in separate processes: see config/launcher.py."""
MODES = Registry("mode", kind="mode")
"""Modes that extensions run: functions `(stage, engine, stop)`, see `run_plan` in launch/run.py."""

MODELS = Registry("model of an engine", kind="model")
"""Classes through which workflows use an engine, which names its own: see model/model.py."""
EXTERNAL_MODELS = Registry("external model", kind="external_model")
"""Models on other servers, which bench measures or workflows ask: see config/external.py."""
PROGRAMS = Registry("program", kind="program")
"""The `main` of modules that are run in separate processes: see ext/remote/engine_host.py."""
CLIENTS = Registry("client", kind="client")
"""Functions `(model)`: clients of other APIs whose requests reach a rollout's Model."""
GATEWAYS = Registry("gateway", kind="gateway")
"""Gateways that give rollouts addresses: see launch/explorer_side.py."""

DIALECTS = Registry("dialect", kind="dialect")
"""Translators of other systems' keys, options and classes: see config/dialect.py."""
DIALECT_KEYS = Registry("key of a dialect", kind="key")
"""Keys of files that only one dialect reads, each with that dialect."""
FIELDS = Registry("field", kind="field")
"""Keys that extensions add to the schema, each with the Section that declares it: see
config/section.py."""
FLAGS = Registry("dialect of flags", kind="flags")
"""What other systems' flags mean: see cli/arguments.py."""

MEMORY_PLANNERS = Registry("memory planner", kind="memory_planner")
"""Estimates of the device memory of a trainer's rank: see config/memory.py."""
