"""Swift: provides the names that plug-ins for ms-swift import, if ms-swift is not installed.

`from swift.plugin import ORM, orms` then imports Trireme's own. Modules are those of its versions 3
and 4; names moved between them often, so each has all names. Names without a counterpart in Trireme
(engines, templates, classes of reward model plug-ins) can be imported and subclassed, and raise an
error on use. Python finds a clone of ms-swift in the current folder like an installed package:
without its requirements it is skipped.
"""

from __future__ import annotations

import logging
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from trireme import log
from trireme.registry import RM_PLUGINS, Registry, lazy_names
from trireme.rewards.orm import ORM as _ORM

_SCHEDULER = "trireme.ext.multi_turn.scheduler"
_GYM = "trireme.ext.multi_turn.gym_scheduler"
_TIPS = "trireme.ext.multi_turn.math_tips"
_SCALE = "trireme.ext.multi_turn.loss_scale"
_GROUP = "trireme.rewards.orm"
_REWARDS = "trireme.ext.swift.rewards"
_HERE = "trireme.ext.swift.imports"
_REQUIRED = "modelscope"
"""A package that every module of ms-swift imports, and Trireme does not need."""
_logger = log.get_logger("plugin")
_ABSENT = (
    *("DefaultRMPlugin", "GenRMPlugin", "PRM", "InferEngine", "PtEngine", "VllmEngine"),
    *("GRPOVllmEngine", "TransformersEngine", "InferClient", "Template", "to_device"),
)
NAMES = {
    "MultiTurnScheduler": _SCHEDULER,
    "RolloutScheduler": f"{_SCHEDULER}:MultiTurnScheduler",
    "ThinkingModelTipsScheduler": f"{_TIPS}:ThinkingTips",
    "MathTipsScheduler": f"{_TIPS}:MathTips",
    "MathTipsMultiTurnScheduler": f"{_TIPS}:MathTipsMultiTurn",
    "GYMScheduler": f"{_GYM}:GymScheduler",
    "OpenEnvScheduler": _GYM,
    "OpenEnvWrapper": f"{_GYM}:OpenEnvSession",
    "multi_turns": "trireme.registry:MULTI_TURNS",
    "RolloutInferRequest": _SCHEDULER,
    "InferRequest": f"{_SCHEDULER}:RolloutInferRequest",
    "RolloutOutput": _SCHEDULER,
    "RolloutResponseChoice": _SCHEDULER,
    "ChatCompletionResponse": _SCHEDULER,
    "ChatCompletionResponseChoice": f"{_SCHEDULER}:RolloutResponseChoice",
    "ChatMessage": _SCHEDULER,
    "RequestConfig": _HERE,
    "Messages": _GYM,
    "Env": _GYM,
    "envs": "trireme.registry:ENVS",
    "ContextManager": _GYM,
    "context_managers": "trireme.registry:CONTEXT_MANAGERS",
    "ORM": f"{_HERE}:SwiftORM",
    "AsyncORM": f"{_HERE}:SwiftORM",
    "orms": "trireme.registry:ORMS",
    "MathAccuracy": _GROUP,
    "MathORM": _REWARDS,
    "ReactORM": _REWARDS,
    "Format": _GROUP,
    "ReActFormat": f"{_REWARDS}:ReactFormat",
    "CosineReward": f"{_GROUP}:Cosine",
    "RepetitionPenalty": f"{_GROUP}:Repetition",
    "SoftOverlong": _GROUP,
    "rm_plugins": _HERE,
    "TrainerCallback": "trireme.ext.swift.callback",
    "callbacks_map": "trireme.registry:CALLBACKS",
    "prms": _HERE,
    "LossScale": _SCALE,
    "ContextType": _SCALE,
    "loss_scale_map": f"{_SCALE}:SCALES",
    "get_logger": _HERE,
}
MODULES = frozenset(
    {
        "swift",
        *(f"swift.{name}" for name in ("llm", "plugin", "utils", "rollout", "rewards", "template")),
        *(f"swift.{name}" for name in ("loss_scale", "infer_engine", "infer_engine.protocol")),
        *(f"swift.llm.{name}" for name in ("infer", "infer.protocol", "template")),
        *(f"swift.llm.template.{name}" for name in ("base", "utils")),
        *(f"swift.plugin.{name}" for name in ("orm", "prm", "rm_plugin", "multi_turn", "env")),
        *(f"swift.plugin.{name}" for name in ("context_manager", "loss_scale")),
        "swift.plugin.loss_scale.loss_scale",
        *(f"swift.rollout.{name}" for name in ("multi_turn", "gym_env", "openenv_wrapper")),
        *(f"swift.rewards.{name}" for name in ("orm", "prm", "rm_plugin")),
        *(f"swift.loss_scale.{name}" for name in ("base", "mapping")),
        "swift.template.utils",
        *(f"swift.callbacks{name}" for name in ("", ".base", ".mapping")),
    }
)

rm_plugins = RM_PLUGINS
prms = Registry("process reward model")


class SwiftORM(_ORM):
    """ORM, whose constructor takes ms-swift's arguments."""

    def __init__(self, args: Any = None) -> None:
        self.args = args


class RequestConfig(SimpleNamespace):
    """Options of a request: `max_tokens`, `temperature`, `stop` and the like."""


def get_logger(*args: Any, **options: Any) -> logging.Logger:
    """Return a logger that writes to the run's log."""
    return log.get_logger("plugin")


class Absent:
    """The base of names that have no counterpart here; it can be subclassed."""

    stands_for = ""
    """The name that it replaces, for sentences."""

    def __init_subclass__(cls) -> None:
        if Absent in cls.__bases__:
            cls.stands_for = f"ms-swift's {cls.__name__}"

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{self.stands_for} has no counterpart in Trireme: for reward models and judges "
            "see docs/rewards.md, for engines docs/engines.md"
        )


class _Finder(MetaPathFinder):
    """Finds modules of `MODULES` before other finders, if these find no working ms-swift."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        ours = _is_stand_in() if "swift" in sys.modules else not self._another_works()
        return ModuleSpec(name, _Loader(), is_package=True) if ours else None

    def _another_works(self) -> bool:
        """Return whether another package `swift` can be imported."""
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec("swift", None) for finder in finders)
        origin = next((spec.origin for spec in specs if spec is not None), None)
        if origin is None:  # none, or a folder of that name that is not a package
            return False
        is_ms_swift = (Path(origin).parent / "cli" / "rlhf.py").is_file()
        if not is_ms_swift or find_spec(_REQUIRED) is not None:
            return True
        _logger.info("%s needs %s, which is not installed: it is not used", origin, _REQUIRED)
        return False


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Put all names into every module: see above."""
        vars(module).update({name: type(name, (Absent,), {}) for name in _ABSENT})
        vars(module)["__getattr__"] = lazy_names(module.__name__, NAMES)

    def explain(self, error: ImportError) -> str:
        """Return the addition to the error of importing a name that is not here."""
        return (
            " (ms-swift is not installed here, and Trireme has these of its names: "
            f"{', '.join(sorted({*NAMES, *_ABSENT}))})"
        )


def stand_in() -> None:
    """Make `import swift` find this package, unless an ms-swift is installed that can
    be imported.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_stand_in() -> bool:
    return isinstance(getattr(sys.modules.get("swift"), "__loader__", None), _Loader)
