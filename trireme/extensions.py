"""Extensions: finds what extends the kernel, by manifests that are read without importing code.

An extension is a folder with an `ext.toml`:

    about = "A shop to search and buy in (arXiv:2207.01206)."
    needs = ["rapidfuzz"]        # packages to be installed
    uses = ["environments"]      # other extensions

    [workflow]                   # a kind of name: names, each with its `module:attribute`
    webshop_workflow = "workflow:WebShopWorkflow"

Ours lie in `trireme/ext/<name>/`. A package of others names its own in the entry points of the
group `trireme.ext` (`shop = "my_package"`: the folder of that package). The kernel's names stand in
`builtin.toml`, which has the same form.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

ENTRY_POINTS = "trireme.ext"
MANIFEST = "ext.toml"
KINDS = (
    "algorithm",
    "advantage",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "sample_strategy",
    "workflow",
    "multi_turn",
    "environment",
    "context_manager",
    "reward",
    "reward_function",
    "reward_model_plugin",
    "callback",
    "operator",
    "task_operator",
    "data_selector",
    "source",
    "store",
    "reader",
    "tracker",
    "tool_call_parser",
    "tool",
    "loss_scale",
    "engine",
)
"""The kinds of names: a manifest's tables."""
_FIELDS = ("about", "needs", "uses")


@dataclass(frozen=True)
class Extension:
    """One manifest: what it adds, and what it takes."""

    name: str
    package: str
    """Its folder, as a package's dotted name."""
    about: str = ""
    needs: tuple[str, ...] = ()
    """Packages to be installed."""
    uses: tuple[str, ...] = ()
    """Other extensions."""
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Kind -> name -> `package.module:attribute`."""

    @classmethod
    def read(cls, name: str, package: str, file: Path) -> Extension:
        """Read a manifest. Raises ValueError, with the file, for what it cannot be."""
        import tomllib  # as much as `import trireme` does without

        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"extension '{name}': {file} cannot be read: {error}") from error
        where = f"extension '{name}': {file}"
        names: dict[str, dict[str, str]] = {}
        for key, value in found.items():
            if key in _FIELDS:
                continue
            if key not in KINDS:
                near = get_close_matches(key, [*KINDS, *_FIELDS], n=1)
                hint = (
                    f"; did you mean '{near[0]}'?" if near else f". It may have: {', '.join(KINDS)}"
                )
                raise ValueError(f"{where} has the unknown key '{key}'{hint}")
            if not isinstance(value, dict) or not all(_is_place(place) for place in value.values()):
                raise ValueError(f'{where}: expected lines `name = "module:attribute"` in [{key}]')
            names[key] = {one: f"{package}.{place}" for one, place in value.items()}
        for key in ("needs", "uses"):
            value = found.get(key, [])
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ValueError(f"{where}: {key} is {value!r}: expected a list of names")
        return cls(
            name,
            package,
            about=str(found.get("about", "")),
            needs=tuple(found.get("needs", ())),
            uses=tuple(found.get("uses", ())),
            names=names,
        )


def _is_place(place: Any) -> bool:
    return isinstance(place, str) and place.count(":") == 1 and all(place.split(":"))


@cache
def kernel() -> Extension:
    """What is built in and belongs to no extension."""
    return Extension.read("trireme", "trireme", Path(__file__).with_name("builtin.toml"))


@cache
def extensions() -> Mapping[str, Extension]:
    """Name -> extension, ours first. One that cannot be read is passed by with a warning."""
    found: dict[str, Extension] = {}
    for name, package, folder in (*_ours(), *_installed()):
        if name in found:
            logger.warning(
                "extension '%s' of %s is left out: %s has that name too",
                name,
                package,
                found[name].package,
            )
            continue
        try:
            found[name] = Extension.read(name, package, folder / MANIFEST)
        except ValueError as error:
            logger.warning("%s: it is left out", error)
    return MappingProxyType(found)


def _ours() -> Iterable[tuple[str, str, Path]]:
    for manifest in sorted(Path(__file__).parent.glob(f"ext/*/{MANIFEST}")):
        folder = manifest.parent
        yield folder.name, f"{__package__}.ext.{folder.name}", folder


def _installed() -> Iterable[tuple[str, str, Path]]:
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            spec = find_spec(entry.value)
        except (ImportError, ValueError):
            spec = None
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        if places:
            yield entry.name, entry.value, Path(places[0])
        else:
            logger.warning(
                "extension '%s' is left out: its entry point names '%s', which is no package here",
                entry.name,
                entry.value,
            )


@cache
def names_of(kind: str) -> Mapping[str, str]:
    """Name -> `package.module:attribute` of everything of one kind: the kernel's, then extensions'.

    Of a name that two extensions give, the first one's counts, and a warning says so.
    """
    if kind not in KINDS:
        raise ValueError(f"'{kind}' is no kind of name: expected one of {', '.join(KINDS)}")
    names: dict[str, str] = {}
    for extension in (kernel(), *extensions().values()):
        for name, place in extension.names.get(kind, {}).items():
            if name in names:
                logger.warning(
                    "extension '%s': its %s '%s' is left out, %s gives that name too",
                    extension.name,
                    kind,
                    name,
                    names[name],
                )
            else:
                names[name] = place
    return MappingProxyType(names)
