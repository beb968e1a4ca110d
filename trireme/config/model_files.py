"""Model files: what a model's folder says of itself, read without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from trireme.config.located import located


class ModelFacts(NamedTuple):
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
    positions = _json(folder / "config.json").get("max_position_embeddings")
    files = [folder / f"chat_template.{kind}" for kind in ("jinja", "json")]
    settings = folder / "tokenizer_config.json"
    return ModelFacts(
        folder,
        positions,
        has_chat_template=any(file.is_file() for file in files)
        or (settings.is_file() and bool(_json(settings).get("chat_template"))),
        size=sum(path.stat().st_size for path in weights),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"has a {path.name} that cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
