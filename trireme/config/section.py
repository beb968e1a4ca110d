"""Section: the base class of the YAML's sections, with marks for keys refused or without effect.

A key is declared once: its type, its range (`Ge`, `Gt`, `Le`), how this version treats it if it
does not simply work (`Refused`, `Mapped`, `Moved`, `NoEffect`), its default, and below it its
sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from trireme.config.options import without_none

Count = Annotated[int, Ge(1)]


class Section(BaseModel):
    """A group of keys. Values have their types already: the loader converts text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


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
    """Single values that are refused, each with its sentence; the others work."""


class Mapped(Fate):
    """A key that this machine serves in another way with the same result; one line says how."""


@dataclass(frozen=True, eq=False)
class Moved(Mapped):
    """A key that is read as another one, unless the file sets that one itself."""

    to: str = ""
    """The other key: from the stage's root, or in the same section if it begins with a dot."""
    gives_way: bool = False
    """Whether both may be set to different values: the other key's value wins."""

    def target(self, key: str, root: str = "") -> str:
        """Return the other key's full name, for this one's; `root` is the stage's, `stages[0].`."""
        beside = self.to.startswith(".")
        return f"{key.rpartition('.')[0]}{self.to}" if beside else f"{root}{self.to}"


class NoEffect(Fate):
    """A key that changes nothing; one line lists all such keys."""


def fate_of(item: FieldInfo) -> Fate | None:
    """Return the effect of a key; None: it works."""
    return next((mark for mark in item.metadata if isinstance(mark, Fate)), None)


def section_in(kind: Any) -> type[Section] | None:
    """Return the section that a type holds, itself or as list items or dictionary values."""
    kind = without_none(kind)
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return section_in(get_args(kind)[-1]) if get_origin(kind) in (list, dict) else None
