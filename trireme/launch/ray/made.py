"""Made: what each Ray actor receives at its start: plan, model path, plug-ins, actor handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trireme.config import Plan


@dataclass(frozen=True)
class Made:
    """The run, as far as it stands when the parts are opened."""

    plan: Plan
    """With the addresses of its engines."""
    model_path: str
    plugins: tuple[str, ...]
    """Users' files, loaded in every process."""
    coordinator: Any
    trainer: Any = None
    """Handles of the actors."""
    rank0: str | None = None
    """HOST:PORT where the trainer's ranks meet; None where there is one."""
