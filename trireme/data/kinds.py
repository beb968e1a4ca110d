"""Kinds: the format of the rows that each algorithm on a data set reads."""

from __future__ import annotations

from trireme.data.formats import SftFormat
from trireme.data.pairs import DpoFormat
from trireme.data.text import CptFormat

FORMATS: dict[str, type[SftFormat]] = {"sft": SftFormat, "dpo": DpoFormat, "cpt": CptFormat}
