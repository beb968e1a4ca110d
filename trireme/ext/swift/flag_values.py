"""Flag values: reads numbers, switches and prompts out of the text that flags have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
import yaml

from trireme.cli.arguments import Given


def number_of(name: str, text: str) -> float:
    """Return the number in a flag's text. Raises BadParameter for other text."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"--{name} {text}: expected a number") from error


def scalar(name: str, text: str) -> Any:
    """Return the number or switch in a flag's text; `None`: none. Raises BadParameter for other
    text.
    """
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if text.isdigit() else number_of(name, text)


def system_of(text: str) -> str:
    """Return a system prompt, given as text or as a .txt file. Raises BadParameter if there is no
    such file.
    """
    if not text.endswith(".txt"):
        return text.replace("\\n", "\n")
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--system {text}: expected a text file: {error}") from error


def needs(flags: Given, name: str, beside: str, value: str, key: str) -> None:
    """Raise BadParameter for a flag that has no meaning without `--beside value`."""
    if name in flags and beside not in flags:
        raise typer.BadParameter(
            f"--{name} {flags[name][0]} has no effect by itself: expected --{beside} {value} "
            f"with it, or {key} in its place"
        )


def text_of(value: object) -> str:
    """Format a value as the right side of KEY=VALUE."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).strip().removesuffix("...")
