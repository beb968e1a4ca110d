"""Trinity dialect: files that Trinity-RFT saved, plug-ins' classes, and files that users edit."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.config.dialect import Dialect
from trireme.config.section import NoEffect
from trireme.ext.trinity.saved import drop_computed
from trireme.registry import Registry

if TYPE_CHECKING:
    from trireme.config.section import Fate

_LAYOUT = frozenset(
    (
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    )
)
"""Options of the `mix` losses about how a batch is cut. Averages here are of the whole batch,
however it is cut."""
_DEFAULT_NAMES = {"project": "Trinity-RFT", "name": "rft"}
_EDITED = {
    "trinity.common.workflows": ("WORKFLOWS", "trireme.registry:WORKFLOWS"),
    "trinity.common.rewards": ("REWARD_FUNCTIONS", "trireme.registry:REWARDS"),
    "trinity.buffer.operators": ("EXPERIENCE_OPERATORS", "trireme.registry:OPERATORS"),
}
"""Files in which Trinity's users register: their registry, and ours."""


class Trinity(Dialect):
    """Trinity-RFT's dialect, as far as its keys are not the schema's own."""

    prefix = "TRINITY_"

    def keys(self, values: dict[str, Any]) -> Sequence[str]:
        """Drop the values that Trinity-RFT has computed in a file that it saved. A note names a
        run in the folder of Trinity-RFT's default names, which the file does not continue.
        """
        return [*drop_computed(values), *_under_default_names(values)]

    def options(self, key: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any, Fate]]:
        """Yield options of losses about how a batch is cut."""
        if not key.endswith("policy_loss_fn_args"):
            return ()
        return ((name, values[name], NoEffect()) for name in sorted(_LAYOUT.intersection(values)))

    def adapt(self, kind: str, name: str, thing: Any) -> Any:
        """Convert a class of a plug-in to a function or a recipe."""
        if not inspect.isclass(thing):
            return None
        from trireme.ext.trinity.classes import AlgorithmType, as_function, recipe_of

        if kind != "algorithm_type":
            return as_function(kind, name, thing)
        return recipe_of(name, thing) if issubclass(thing, AlgorithmType) else None

    def stand_in(self) -> None:
        """Import the files that users edit, so that the names that they import, register, or list
        in `default_mapping` are known. Another package called trinity is left alone.
        """
        from trireme.workflows.plugins import guarded

        spec = find_spec("trinity")
        beside = Path(__file__).parents[3]
        if spec is None or spec.origin is None or Path(spec.origin).parents[1] != beside:
            return
        for name, (attribute, ours) in _EDITED.items():
            guarded(f"{name} ({beside / name.replace('.', '/')})", partial(import_module, name))
            module = sys.modules[name]
            registry = pkgutil.resolve_name(ours)
            registry.adopt(Registry(name, getattr(module, "default_mapping", None)))
            registered = vars(module).get(attribute, registry)
            if registered is not registry:  # made anew, as the documents show it
                registry.adopt(registered)
                setattr(module, attribute, registry)


def _under_default_names(values: Mapping[str, Any]) -> list[str]:
    given = {key: values[key] for key in ("project", "group", "name") if key in values}
    lacking = {key: name for key, name in _DEFAULT_NAMES.items() if key not in given}
    names = _DEFAULT_NAMES | given
    root = Path(str(values.get("checkpoint_root_dir") or "./checkpoints")).expanduser()
    folder = root.joinpath(*(str(names.get(key) or "") for key in ("project", "group", "name")))
    if not lacking or not (folder / "monitor").is_dir():
        return []
    words = " ".join(f"{key}={name}" for key, name in lacking.items())
    return [f"{folder} holds a run with Trinity-RFT's default names: {words} resumes it"]
