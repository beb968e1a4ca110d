"""Small data sets, model folders and configurations, written so that no test loads torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from trireme.config import Config, Plan, load_config
from trireme.launch.check import draft, make_plans

SEEDS = Path(__file__).parent / "seeds"


def write_rows(path: Path, rows: int, **columns: str) -> Path:
    """A JSONL file of rows with a question and an answer, or with other columns."""
    row = columns or {"question": "1 + 1?", "answer": "#### 2"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(rows)))
    return path


def write_model(
    folder: Path, *, template: bool = True, max_positions: int = 4096, **facts: Any
) -> Path:
    """A folder that looks like a model from outside; its configuration has these `facts` too."""
    folder.mkdir(parents=True)
    config = {"max_position_embeddings": max_positions, "num_attention_heads": 4, **facts}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    settings = {"chat_template": "{{ messages }}"} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def values(folder: Path, rows: int = 32) -> dict[str, Any]:
    """A GRPO configuration that has no problem, as plain values, with its model and data."""
    if not (folder / "model").exists():
        write_model(folder / "model")
    data = write_rows(folder / "tasks.jsonl", rows)
    return {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(folder / "out"),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {
            "model_path": str(folder / "model"),
            "max_response_tokens": 64,
            "max_model_len": 256,
        },
        "buffer": {
            "batch_size": 8,
            "explorer_input": {
                "taskset": {
                    "path": str(data),
                    "format": {"prompt_key": "question", "response_key": "answer"},
                    "default_workflow_type": "math_workflow",
                }
            },
        },
    }


def values_with(folder: Path, **facts: Any) -> dict[str, Any]:
    """`values` whose model's config.json has these facts."""
    out = values(folder)
    file = Path(out["model"]["model_path"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    return out


def plan_of(folder: Path, *overrides: str, **facts: Any) -> Plan:
    """The plan of `values_with`, overridden."""
    return make_plans(config_of(folder, values_with(folder, **facts), *overrides))[0]


def problems_of(folder: Path, *overrides: str, **facts: Any) -> list[str]:
    """The problems of `values_with`, overridden, as lines."""
    found = draft(config_of(folder, values_with(folder, **facts), *overrides)).problems
    return [str(problem) for problem in found]


def config_of(folder: Path, tree: dict[str, Any], *overrides: str) -> Config:
    """The plain values as a loaded file."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path, overrides)
