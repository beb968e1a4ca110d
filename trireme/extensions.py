"""Extensions: finds what extends the kernel, by manifests that are read without importing code.

An extension is a folder with an `ext.toml`:

    about = "A shop to search and buy in (arXiv:2207.01206)."
    needs = ["rapidfuzz"]        # packages to be installed
    uses = ["environments"]      # other extensions
    files = ["tests/ext/shop"]  # what else is its own, from the repository's root

    [formerly]                   # modules by an older name, which still works: their name here
    "trireme.workflows.webshop" = "workflow"
    "trireme.data.rows:Shelf" = "rows:Shelf"  # a name that left a module which is still there

    [workflow]                   # a kind of name: names, each with its `module:attribute`
    webshop_workflow = "workflow:WebShopWorkflow"

Ours lie in `trireme/ext/<name>/`. A package of others names its own in the entry points of the
group `trireme.ext` (`shop = "my_package"`: the folder of that package). The kernel's names stand in
`builtin.toml`, which has the same form. `extensions.toml` says which extension a name needs that is
not here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # these bases would cost a fifth of `import trireme`
    Loader = MetaPathFinder = object

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
    "listener",
    "tracker",
    "tool_call_parser",
    "tool",
    "loss_scale",
    "command",
    "route",
    "engine",
    "push",
    "steering",
    "memory_planner",
    "public",
    "launcher",
    "mode",
    "model",
    "gateway",
    "program",
    "dialect",
    "key",
    "flags",
)
"""The kinds of names: a manifest's tables."""
_LISTS = ("needs", "uses", "files")
_FIELDS = ("about", *_LISTS, "formerly")


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
    files: tuple[str, ...] = ()
    """What else is deleted with it: tests, examples, pages."""
    formerly: Mapping[str, str] = field(default_factory=dict)
    """Older name of a module or package, or `module:attribute`, -> its name."""
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
        for key in _LISTS:
            value = found.get(key, [])
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ValueError(f"{where}: {key} is {value!r}: expected a list of names")
        formerly = found.get("formerly", {})
        if not isinstance(formerly, dict) or not all(isinstance(v, str) for v in formerly.values()):
            raise ValueError(f'{where}: expected lines `"older.module" = "module"` in [formerly]')
        return cls(
            name,
            package,
            about=str(found.get("about", "")),
            **{key: tuple(found.get(key, ())) for key in _LISTS},
            formerly={old: f"{package}.{new}".rstrip(".") for old, new in formerly.items()},
            names=names,
        )


def _is_place(place: Any) -> bool:
    return isinstance(place, str) and place.count(":") == 1 and all(place.split(":"))


@cache
def kernel() -> Extension:
    """Return everything that is built in and belongs to no extension."""
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


@cache
def _owners() -> Mapping[str, Mapping[str, str]]:
    """Kind -> name -> the extension of this release that gives it."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("extensions.toml").read_text(encoding="utf-8"))


def absent(kind: str) -> Mapping[str, str]:
    """Name -> extension, of the names that extensions of this release give which are not here."""
    there = extensions()
    return {n: owner for n, owner in _owners().get(kind, {}).items() if owner not in there}


def needed_for(kind: str, name: str) -> str | None:
    """The extension of this release that gives a name and is not here; None where there is none."""
    owner = _owners().get(kind, {}).get(name)
    return None if owner in extensions() else owner


def missing(kind: str, name: str) -> str:
    """The rest of a sentence on a name that an extension gives which is not here; else ''."""
    owner = needed_for(kind, name)
    if owner is None:
        return ""
    return f"needs the extension '{owner}', which is not here: `trireme extensions` lists what is"


def former_names(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562): finds names that extensions have taken from it."""

    def get(name: str) -> Any:
        if not name.startswith("__"):
            for extension in extensions().values():
                if place := extension.formerly.get(f"{module}:{name}"):
                    source, _, attribute = place.partition(":")
                    return getattr(import_module(source), attribute)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return get


class _Moved(MetaPathFinder):
    """Finds modules by the names that manifests list as former ones.

    It is the last finder: manifests are read only for a module that is found nowhere else.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("trireme."):
            return None
        moved = [
            (old, new)
            for extension in extensions().values()
            for old, new in extension.formerly.items()
            if fullname == old or fullname.startswith(f"{old}.")
        ]
        if not moved:
            return None
        old, new = max(moved, key=lambda pair: len(pair[0]))  # of a package, a module may be apart
        return _spec_of(fullname, new + fullname.removeprefix(old))


def _spec_of(former: str, name: str) -> ModuleSpec | None:
    spec = find_spec(name)
    if spec is None:
        return None
    is_package = spec.submodule_search_locations is not None
    return ModuleSpec(former, _Same(spec), origin=spec.origin, is_package=is_package)


class _Same(Loader):
    """Gives the module of a specification under another name, as one and the same module."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the former name's there

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m FORMER.NAME` runs."""
        return cast(Any, self._spec.loader).get_code(self._spec.name)


sys.meta_path.append(_Moved())
