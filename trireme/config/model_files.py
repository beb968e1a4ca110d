"""Model files: what a model's folder says of itself, read without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config.located import located


@dataclass(frozen=True)
class ModelFacts:
    """What is known before the model is loaded; None: not here to be looked at."""

    folder: Path | None
    max_positions: int | None = None
    has_chat_template: bool | None = None
    size: int = 0


def model_facts(model_path: str) -> ModelFacts:
    """Facts of a model's folder. Raises ValueError where it cannot be one."""
    folder = located(model_path, "models")
    if folder is None:
        return ModelFacts(None)
    if not (folder / "config.json").is_file():
        raise ValueError("holds no config.json: expected a folder in the Hugging Face layout")
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not weights:
        raise ValueError("holds no weights: expected model.safetensors (or its shards)")
    config = _json(folder / "config.json")
    return ModelFacts(
        folder,
        max_positions=config.get("max_position_embeddings"),
        has_chat_template=_has_chat_template(folder),
        size=sum(path.stat().st_size for path in weights),
    )


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_json(settings).get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"has a {path.name} that cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
