import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.limits import HANG_S
from trireme.config import load_config
from trireme.config.schema import Config
from trireme.config.section import Section, fate_of, section_in

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "configuration_page.py"))


def sections() -> dict[str, type[Section]]:
    found: dict[str, type[Section]] = {}

    def walk(section: type[Section]) -> None:
        found[section.__name__] = section
        for item in section.model_fields.values():
            inner = section_in(item.annotation)
            if inner is not None and inner.__name__ not in found:
                walk(inner)

    walk(Config)
    return found


@pytest.mark.parametrize("section", sections().values(), ids=lambda s: s.__name__)
def test_every_field_has_a_default_and_a_sentence(section):
    names = set(section.model_fields)
    described = {name for name, text in PAGE["sentences"](section).items() if text.endswith(".")}
    assert described == names
    made = section()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, names.pop(), None)


NOT_BY_NAME = {
    f"AlgorithmConfig.{kind}_fn_args": "get_recipe makes these names of the parts' kinds"
    for kind in ("kl_penalty", "teacher_kl", "entropy_loss")
}
"""Keys that no line outside of the schema names, and why that is right."""
OF_EXTENSIONS = {
    *("ClusterConfig.heartbeat_timeout", "ClusterConfig.start_timeout"),
    *(f"AlgorithmConfig.{kind}_args" for kind in ("kl_loss_fn", "advantage_fn", "sample_strategy")),
}
"""Keys that only extensions name, which may not be here."""


@pytest.mark.whole
def test_every_key_is_read_or_said_to_have_no_effect():
    """By name: that a key called `name` is read, the read of another `name` would hide."""
    read: set[str] = set()
    for path in (ROOT / "trireme").rglob("*.py"):
        if not path.name.startswith("schema"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value)
    unread = {
        f"{name}.{key}"
        for name, section in sections().items()
        for key, item in section.model_fields.items()
        if key not in read and fate_of(item) is None
    }
    assert unread - OF_EXTENSIONS == set(NOT_BY_NAME)


@pytest.mark.whole
def test_the_documentation_pages_are_up_to_date():
    written = {page: page.read_text(encoding="utf-8") for page in PAGE["documents"]()}
    assert written == PAGE["documents"](), "run: python scripts/configuration_page.py"


def test_each_key_stands_on_one_page_and_forty_come_first():
    pages = {page.name: text for page, text in PAGE["documents"]().items()}
    assert "`buffer.batch_size`" in pages["first_keys.md"]
    assert len(PAGE["FIRST_KEYS"]) == len(set(PAGE["FIRST_KEYS"])) == 40
    counted = sum(len(section.model_fields) for section in sections().values())
    rows = [
        line
        for name in ("configuration.md", "compatibility_keys.md")
        for line in pages[name].splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) == counted


@pytest.mark.parametrize("name", ["gsm8k.yaml", "gsm8k_sft_warmup.yaml"])
def test_the_gsm8k_examples_load(name):
    config = load_config(ROOT / "examples" / "grpo_gsm8k" / name)
    assert config.algorithm.repeat_times == 8
    assert len(config.stages) == (2 if "warmup" in name else 0)


def test_a_file_is_read_and_validated_by_itself_without_loading_what_is_slow():
    code = (
        "import sys; from trireme.config.load import read_config\n"
        "import trireme.cli.check, trireme.cli.run\n"
        "from trireme.config.check import check_tasksets, job_folder\n"
        "from trireme.config.stages import stages_of\n"
        "config, _ = read_config('examples/grpo_gsm8k/gsm8k.yaml')\n"
        "job_folder(config), [check_tasksets(stage) for stage in stages_of(config)]\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
    )
    assert done.stdout.strip() == "[]", done.stderr
