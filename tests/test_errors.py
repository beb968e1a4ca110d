"""Errors: what another process raised is here what it was there."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import trireme
from trireme.config import Problem

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "trireme.config:ConfigError": ([Problem("buffer.batch_size", "is 0")], "run.yaml"),
    "trireme.data.rows:NoRows": ("rows.jsonl", "is empty"),
    "trireme.explorer.explorer:RolloutsFailed": ("3 of 4 rollouts failed", "Traceback"),
    "trireme.ext.evaluation.trial:TrialFailed": ("the workflow failed", "Traceback"),
    "trireme.registry:UnknownOption": ("reward 'math' has no option 'wieght'", "wieght"),
    "trireme.sync.probe:BrokenWeights": ("layers.0", " since train step 3"),
    "trireme.trainer.trainer:Stopped": (7,),
}
"""Error with a constructor of its own -> what it is made of; also those of extensions."""
ROOT = Path(trireme.__file__).parents[1]
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)


def is_here(path: str) -> bool:
    """Whether the extension of an error has not been deleted."""
    module = ROOT / path.partition(":")[0].replace(".", "/")
    return module.is_dir() or module.with_suffix(".py").is_file()


HERE = [path for path in ARGUMENTS if is_here(path)]


@pytest.mark.parametrize("path", HERE)
def test_an_error_from_another_process_says_what_it_said_there(path: str) -> None:
    """As Ray brings it: an exception is made anew of its `args`."""
    module, _, name = path.partition(":")
    error = getattr(importlib.import_module(module), name)(*ARGUMENTS[path])
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error)
    assert vars(back) == vars(error)


def test_every_error_with_a_constructor_of_its_own_is_tried() -> None:
    root = Path(trireme.__file__).parent
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    bases = {name: of for text in texts.values() for name, of in _CLASS.findall(text)}
    errors = {name for name, of in bases.items() if re.search(r"(Error|Exception)\b", of)}
    errors |= {name for name, of in bases.items() if errors & set(re.findall(r"\w+", of))}
    found = set()
    for path, text in texts.items():
        if not errors & {name for name, _ in _CLASS.findall(text)}:
            continue
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name in errors:
                functions = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                if "__init__" in functions:
                    found.add(f"{module.removesuffix('.__init__')}:{node.name}")
    assert found == set(HERE)
