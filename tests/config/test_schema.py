import ast
import runpy
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from trireme.config import load_config
from trireme.config.schema import Config
from trireme.config.support import HINTS, PLACED, REFUSED, REFUSED_VALUES
from trireme.config.typed import hints, section_in

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "configuration_page.py"))


def sections() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(section: type) -> None:
        found[section.__name__] = section
        for kind in hints(section).values():
            inner = section_in(kind)
            if inner is not None and inner.__name__ not in found:
                walk(inner)

    walk(Config)
    return found


@pytest.mark.parametrize("section", sections().values(), ids=lambda s: s.__name__)
def test_every_field_has_a_default_and_a_sentence(section):
    names = {item.name for item in fields(section)}
    described = {name for name, text in PAGE["sentences"](section).items() if text.endswith(".")}
    assert described == names
    made = section()
    with pytest.raises(FrozenInstanceError):
        setattr(made, names.pop(), None)


def test_every_key_of_the_support_tables_exists_and_is_in_one_table_only():
    known = {f"{name}.{item.name}" for name, s in sections().items() for item in fields(s)}
    tables = [set(REFUSED), set(PLACED), set(HINTS)]
    assert set().union(*tables, REFUSED_VALUES) <= known
    assert sum(map(len, tables)) == len(set().union(*tables))


NOT_BY_NAME = {
    "Config.service": "its one key is refused",
    **{
        f"AlgorithmConfig.{kind}_fn_args": "get_recipe makes these names of the parts' kinds"
        for kind in ("advantage", "policy_loss", "kl_penalty", "kl_loss", "entropy_loss")
    },
    "DataJuicerConfig.server_url": "its section is refused",
    "DataJuicerConfig.auto_start": "its section is refused",
}
"""Keys that no line outside of the schema names, and why that is right."""


def test_every_key_is_read_or_said_to_have_no_effect():
    """By name: that a key called `name` is read, the read of another `name` would hide."""
    read: set[str] = set()
    for path in (ROOT / "trireme").rglob("*.py"):
        if "schema" not in path.parts and path.name != "support.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value)
    unread = {
        f"{name}.{item.name}"
        for name, section in sections().items()
        for item in fields(section)
        if item.name not in read
    }
    assert unread - {*REFUSED, *REFUSED_VALUES, *PLACED, *HINTS} == set(NOT_BY_NAME)


def test_the_documentation_page_is_up_to_date():
    page = PAGE["PAGE"].read_text(encoding="utf-8")
    assert page == PAGE["document"](), "run: python scripts/configuration_page.py"


@pytest.mark.parametrize("name", ["gsm8k.yaml", "gsm8k_sft_warmup.yaml"])
def test_the_gsm8k_examples_load(name):
    config = load_config(ROOT / "examples" / "grpo_gsm8k" / name)
    assert config.algorithm.repeat_times == 8
    assert len(config.stages) == (2 if "warmup" in name else 0)


def test_a_plan_is_made_without_loading_what_is_slow():
    code = (
        "import sys; from trireme.config import examine\n"
        "import trireme.cli.check\n"
        "examine('examples/grpo_gsm8k/gsm8k.yaml')\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
