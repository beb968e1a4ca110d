"""What the documents show is right: blocks parse, files exist, examples load."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median

import pytest
import yaml
from packaging.requirements import Requirement

from trireme import __version__
from trireme.extensions import extensions
from trireme.registry import ALGORITHMS

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(*match, id=f"{document.relative_to(ROOT)}-{i}-{match[0]}")
    for document in DOCUMENTS
    for i, match in enumerate(BLOCK.findall(document.read_text(encoding="utf-8")))
]


def blocks_of(page: str) -> str:
    """A page's Python blocks as one file."""
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return "\n\n".join(code for language, code in blocks if language == "python")


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_a_block_parses(language: str, text: str, tmp_path: Path) -> None:
    if language == "python":
        compile(text, "block", "exec")
    elif language == "yaml":
        from trireme.config import load_config

        (tmp_path / "block.yaml").write_text(text)
        content = yaml.safe_load(text)
        assert isinstance(content, dict)
        for name in content.get("plugins", []):
            (tmp_path / name).touch()
        load_config(tmp_path / "block.yaml")
    elif language == "bash":
        commands = re.sub(r"<[\w ]+>", "placeholder", text)
        subprocess.run(["bash", "-n", "-c", commands], check=True)
    elif language == "toml":
        assert tomllib.loads(text)
    else:
        assert language == "text", f"a block needs a language; this one has '{language}'"


def is_gone(name: str) -> bool:
    """Whether a file is one of an extension of this release that is not here."""
    text = (ROOT / "trireme" / "extensions.toml").read_text(encoding="utf-8")
    owners = {owner for names in tomllib.loads(text).values() for owner in names.values()}
    _, is_ext, owner, *_ = [*name.split("/"), "", ""]
    return is_ext == "ext" and owner in owners and owner not in extensions()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:trireme|trinity|tests|examples|docs|benchmarks)/[\w./]+\.\w+)`", text)
    linked = re.findall(r"\]\(([\w./]+\.md)\)", text)
    missing = [name for name in named if not (ROOT / name).exists() and not is_gone(name)]
    missing += [name for name in linked if not (document.parent / name).exists()]
    assert not missing


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.whole
@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_counts_the_algorithms_that_there_are(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = {name: ALGORITHMS.get(name) for name in ALGORITHMS.built_in()}
    count = len(set(map(id, names.values())))  # another name of one is none of its own
    assert re.findall(r"\*\*Trainer\*\*\D*(\d+)", text) == [str(count)]
    table = text[text.index("| `algorithm_type` |") :].split("\n\n")[0].splitlines()[2:]
    listed = [name for row in table for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    [more] = re.findall(r"(\d+) (?:more|种) \|", "\n".join(table))
    assert set(listed) <= names.keys() and len(listed) + int(more) == count


@pytest.mark.whole
def test_the_changelog_has_a_section_of_this_version_with_the_algorithms_that_there_are() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = text[text.index(f"\n## {__version__}\n") :]
    names = {id(ALGORITHMS.get(name)) for name in ALGORITHMS.built_in()}
    assert re.findall(r"(\d+) algorithms", section) == [str(len(names))]


@pytest.mark.whole
@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readmes_comparison_has_the_measured_figures(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    measured = json.loads((ROOT / "docs/performance.json").read_text())["against_peers"]["demo"]
    seconds = [f"{median(measured['row'][who]['values']):.2f}" for who in ("Trireme", "TRL")]
    [row] = [
        line for line in text.splitlines() if line.startswith("|") and "performance.md" in line
    ]
    assert re.findall(r"(\d+\.\d+) (?:s|秒) \|", row) == seconds
    table = text[: text.index("performance.md")].rsplit("\n\n", 1)[1]
    assert table.splitlines()[0].count("|") == 7  # Trireme and four others


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(e.relative_to(ROOT)))
def test_an_example_loads(example: Path) -> None:
    from trireme.config import load_config

    load_config(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: str(e.relative_to(ROOT)))
def test_what_an_example_makes_is_looked_for_by_its_seed_in_the_checkpoints_folder(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trireme.config import load_config

    for name in ("MODEL_PATH", "TASKSET_PATH"):
        for prefix in ("TRIREME_", "TRINITY_"):
            monkeypatch.delenv(prefix + name, raising=False)
    monkeypatch.setenv("TRIREME_CHECKPOINT_ROOT_DIR", "/elsewhere")
    made = re.findall(
        r"[^\s'\"]*_(?:assets|data)/[^\s'\"]*", repr(load_config(example, ["seed=7"]))
    )
    assert [path for path in made if not path.startswith("/elsewhere/")] == []
    assert [path for path in made if "_assets/" in path and "/seed_7" not in path] == []


def test_the_served_example_has_a_folder_for_each_seed() -> None:
    from trireme.config import load_config

    folder = ROOT / "examples/serve_online"
    warm_up = load_config(folder / "warm_up.yaml", ["seed=7"])
    online = load_config(folder / "online.yaml", ["seed=7"])
    assert f"/{warm_up.name}/" in online.model.model_path
    assert "7" in warm_up.name and "7" in online.name


def test_what_an_example_makes_is_put_into_the_checkpoints_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in (ROOT / "examples").rglob("*.py"):
        assert 'Path(f"checkpoints' not in script.read_text(encoding="utf-8"), script
    script = ROOT / "examples/multi_turn_scheduler/make_retries.py"
    monkeypatch.setenv("TRIREME_CHECKPOINT_ROOT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("trireme.demo.tiny_model.make_tiny_model", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", [script.name, "--seed", "7"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "elsewhere/retry_assets/seed_7/train.jsonl").exists()


def test_the_constraints_pin_every_dependency() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for path in ROOT.glob("constraints*.txt")
        for line in path.read_text().splitlines()
        if "==" in line
    }
    wanted = re.findall(r'^    "([\w-]+)[\[\w\]]*>=', (ROOT / "pyproject.toml").read_text(), re.M)
    assert len(wanted) > 15
    assert {name.lower() for name in wanted} <= pinned


def test_every_dependency_has_an_upper_bound_that_its_pin_keeps() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    kinds = ("-agents", "-trackers", "-megatron", "")
    pins: dict[str, list[str]] = {}  # a package of several environments has a version in each
    for name in (f"constraints{kind}.txt" for kind in kinds):
        for line in (ROOT / name).read_text().splitlines():
            package, _, version = line.strip().lower().replace("_", "-").partition("==")
            pins.setdefault(package, []).append(version.partition("+")[0])
    for text in [*project["dependencies"], *(each for extra in extras for each in extra)]:
        wanted = Requirement(text)
        assert any(bound.operator == "<" for bound in wanted.specifier), f"{text}: no upper bound"
        versions = pins[wanted.name.lower()]
        assert any(version in wanted.specifier for version in versions), text
