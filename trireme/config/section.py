"""Section: the base class of the YAML's sections, with marks for keys refused or without effect.

A key is declared once: its type, its range (`Ge`, `Gt`, `Le`), how this version treats it if it
does not simply work (`Refused`, `Mapped`, `Moved`, `NoEffect`), its default, and below it its
sentence. An extension declares the keys that only it reads in a Section of its own, and lists them
in the table `field` of its manifest: they join the section of the schema that their names begin
with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from trireme.config.options import without_none
from trireme.registry import FIELDS

logger = logging.getLogger(__name__)

Count = Annotated[int, Ge(1)]


class Section(BaseModel):
    """A group of keys. Values have their types already: the loader converts text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    place: ClassVar[str | None] = None
    """The section's name in a file, `explorer.rollout_model`; None: no extension's keys join it."""
    joined: ClassVar[Mapping[str, type[Section]]] = {}
    """Maps the keys that extensions added to the sections that declare them."""

    def __init_subclass__(cls, place: str | None = None, **options: Any) -> None:
        """Add the keys of extensions, before pydantic reads the annotations."""
        super().__init_subclass__(**options)
        if place is None:
            return
        own, joined = dict(cls.__annotations__), dict[str, type[Section]]()
        for name, declared in _joining(place, own):
            kind = _kinds(declared)[name]
            after = next((m.key for m in get_args(kind) if isinstance(m, After)), None)
            names = [*own]
            names.insert(names.index(after) + 1 if after in own else len(names), name)
            own = {one: kind if one == name else own[one] for one in names}
            setattr(cls, name, declared.model_fields[name].default)
            joined[name] = declared
        cls.__annotations__ = own
        cls.place, cls.joined = place, joined


def _joining(place: str, own: Mapping[str, Any]) -> Iterator[tuple[str, type[Section]]]:
    """Yield the keys that join a section, each with the section that declares it. One that cannot
    join is left out with a warning.
    """
    for key in FIELDS.built_in():
        section, _, name = key.rpartition(".")
        if section != place:
            continue
        try:
            declared = FIELDS[key]
            if name in own:
                raise ValueError("Trireme has that key itself")
            if name not in declared.model_fields or declared.model_fields[name].is_required():
                raise ValueError(f"{declared.__qualname__} declares no {name} with a default")
        except Exception as error:
            logger.warning("field '%s' is left out: %s", key, error)
            continue
        yield name, declared


@cache
def _kinds(declared: type[Section]) -> dict[str, Any]:
    """Return the annotations of a section's keys, with their marks."""
    return get_type_hints(declared, include_extras=True)


_S = TypeVar("_S", bound=Section)


def of(section: Section, declared: type[_S]) -> _S:
    """Return the keys that an extension added to a section, as the type that declares them."""
    return declared.model_construct(
        section.model_fields_set & declared.model_fields.keys(),
        **{name: getattr(section, name) for name in declared.model_fields},
    )


@dataclass(frozen=True)
class After:
    """The place of an extension's key in a section: after this key, not at the end."""

    key: str


@dataclass(frozen=True, eq=False)
class Fate:
    """The effect of a key whose value is not its default."""

    text: str = "is not supported yet"
    """The sentence that describes it, after the key."""
    on: Literal["", "spread", "engine", "auxiliary"] = ""
    """The condition under which the key works: a launcher starts the parts, the engine takes the
    key, or the model is an auxiliary one."""


@dataclass(frozen=True, eq=False)
class Refused(Fate):
    """A key without which the run would not be what the user wants, so it does not start."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Single values that are refused, each with its sentence; the others work. `{engines}` in it
    stands for the kinds of engines."""


@dataclass(frozen=True, eq=False)
class Mapped(Fate):
    """A key that this machine serves in another way with the same result; one line says how."""

    among_ranks: Mapping[str, str] = field(default_factory=dict)
    """Single values that several ranks serve in another way, each with its sentence."""


@dataclass(frozen=True, eq=False)
class Moved(Mapped):
    """A key that is read as another one, unless the file sets that one itself."""

    to: str = ""
    """The other key: from the stage's root, or in the same section if it begins with a dot."""
    gives_way: bool = False
    """Whether both may be set to different values: the other key's value wins."""

    def target(self, key: str, root: str = "") -> str:
        """Return the other key's full name, for this one's; `root` is the stage's, `stages[0].`."""
        is_sibling = self.to.startswith(".")
        return f"{key.rpartition('.')[0]}{self.to}" if is_sibling else f"{root}{self.to}"


class NoEffect(Fate):
    """A key that changes nothing; one line lists all such keys."""


@dataclass(frozen=True, eq=False)
class Instead:
    """The way to have what 0, -1 or false means elsewhere (never, no limit), where a key does not
    take it: the error for such a value ends in it.
    """

    text: str


def fate_of(item: FieldInfo) -> Fate | None:
    """Return the effect of a key; None: it works."""
    return next((mark for mark in item.metadata if isinstance(mark, Fate)), None)


def section_in(kind: Any) -> type[Section] | None:
    """Return the section that a type holds, itself or as list items or dictionary values."""
    kind = without_none(kind)
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return section_in(get_args(kind)[-1]) if get_origin(kind) in (list, dict) else None
