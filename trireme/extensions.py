"""Extensions: finds the kernel's extensions by manifests, which are read without importing code.

An extension is a folder with an `ext.toml`:

    about = "A shop to search and buy in."
    needs = ["rapidfuzz"]        # packages to be installed
    uses = ["environments"]      # other extensions
    files = ["tests/ext/shop"]  # what else is its own, from the repository's root

    [formerly]                   # modules by an older name, which still works: their name here
    "trireme.workflows.shop" = "workflow"
    "trireme.data.rows:Shelf" = "rows:Shelf"  # a name that left a module which is still there

    [refused]                    # names of other systems: what to name instead
    "workflow:image_workflow" = "shows images, which are not supported: expected simple_workflow"

    [workflow]                   # a kind of name: names, each with its `module:attribute`
    shop_workflow = "workflow:ShopWorkflow"

Ours are in `trireme/ext/<name>/`. Another package declares its extensions as entry points of the
group `trireme.ext` (`shop = "my_package"`: the folder of that package). The kernel's names are in
`builtin.toml`, which has the same form. `extensions.toml` lists the extension that each missing
name needs.
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
    "servers",
    "forward_pass",
    "training_pass",
    "vision",
    "picture_reader",
    "push",
    "steering",
    "memory_planner",
    "public",
    "launcher",
    "mode",
    "model",
    "client",
    "gateway",
    "external_model",
    "program",
    "dialect",
    "key",
    "field",
    "flags",
)
"""The kinds of names: the tables of a manifest."""
_LISTS = ("needs", "uses", "files")
_FIELDS = ("about", *_LISTS, "formerly", "refused")


@dataclass(frozen=True)
class Extension:
    """One manifest: the names that an extension adds, and its requirements."""

    name: str
    package: str
    """The dotted name of its folder as a package."""
    about: str = ""
    needs: tuple[str, ...] = ()
    """Required packages."""
    uses: tuple[str, ...] = ()
    """Required extensions."""
    files: tuple[str, ...] = ()
    """Other files that are deleted with it: tests, examples, pages."""
    formerly: Mapping[str, str] = field(default_factory=dict)
    """Maps the older name of a module or package, or `module:attribute`, to its current name."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Maps `kind:name` of another system to the rest of the sentence that refuses it."""
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Maps kind -> name -> `package.module:attribute`."""

    @classmethod
    def read(cls, name: str, package: str, file: Path) -> Extension:
        """Read a manifest. Raises ValueError, with the file, if it is invalid."""
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
        refused = found.get("refused", {})
        kinds = {key.partition(":")[0] for key in refused} if isinstance(refused, dict) else {""}
        if not kinds <= {*KINDS} or not all(isinstance(v, str) for v in refused.values()):
            raise ValueError(f'{where}: expected lines `"kind:name" = "sentence"` in [refused]')
        return cls(
            name,
            package,
            refused=refused,
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
    """Map name -> extension, ours first. One that cannot be read is skipped with a warning."""
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
                "extension '%s' is left out: its entry point names '%s', which is not a package",
                entry.name,
                entry.value,
            )


@cache
def names_of(kind: str) -> Mapping[str, str]:
    """Map name -> `package.module:attribute` for one kind: the kernel's names, then extensions'.

    If two extensions define a name, the first one's counts, and a warning reports it.
    """
    if kind not in KINDS:
        raise ValueError(f"'{kind}' is not a kind of name: expected one of {', '.join(KINDS)}")
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


def refused_of(kind: str) -> Mapping[str, str]:
    """Map each name of one kind that an extension refuses to the rest of the sentence that does."""
    return {
        key.partition(":")[2]: sentence
        for extension in extensions().values()
        for key, sentence in extension.refused.items()
        if key.startswith(f"{kind}:")
    }


@cache
def _owners() -> Mapping[str, Mapping[str, str]]:
    """Map kind -> name -> the extension of this release that defines it."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("extensions.toml").read_text(encoding="utf-8"))


def absent(kind: str) -> Mapping[str, str]:
    """Map name -> extension, for names that this release's missing extensions define."""
    there = extensions()
    return {n: owner for n, owner in _owners().get(kind, {}).items() if owner not in there}


def needed_for(kind: str, name: str) -> str | None:
    """Return the missing extension of this release that defines a name; None if there is none."""
    owner = _owners().get(kind, {}).get(name)
    return None if owner in extensions() else owner


def missing(kind: str, name: str) -> str:
    """Return the rest of a sentence on a name that a missing extension defines; else ''."""
    owner = needed_for(kind, name)
    if owner is None:
        return ""
    return _needs(owner)


def _needs(extension: str) -> str:
    return (
        f"needs the extension '{extension}', which is not here: `trireme extensions` lists what is"
    )


def missing_module(module: str) -> str:
    """The rest of a sentence on a module of an extension of this release that is not here, by its
    name or a former one; else ''.
    """
    names = {f"trireme.ext.{one}": one for names in _owners().values() for one in names.values()}
    names |= {former: one for former, one in _owners().get("formerly", {}).items()}
    parts = module.split(".")
    above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    owner = next((names[name] for name in above if name in names), None)
    return "" if owner is None or owner in extensions() else _needs(owner)


def former_names(module: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__` (PEP 562), which finds names that moved to extensions."""

    def get(name: str) -> Any:
        if not name.startswith("__"):
            for extension in extensions().values():
                if place := extension.formerly.get(f"{module}:{name}"):
                    source, _, attribute = place.partition(":")
                    return getattr(import_module(source), attribute)
            if needs := missing("formerly", f"{module}:{name}"):
                raise AttributeError(f"module '{module}' has no attribute '{name}': it {needs}")
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return get


class _Moved(MetaPathFinder):
    """Finds modules by their former names in manifests.

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
            if needs := missing_module(fullname):
                raise ModuleNotFoundError(f"'{fullname}' {needs}", name=fullname)
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
    """Provides the module of a specification under another name, as one and the same module."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the former name's here

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code that `python -m FORMER.NAME` runs."""
        return cast(Any, self._spec.loader).get_code(self._spec.name)


sys.meta_path.append(_Moved())
