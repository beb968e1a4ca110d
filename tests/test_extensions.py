"""Extensions: what a manifest may say, who wins, and what is said of one that cannot be read."""

from __future__ import annotations

import ast
import logging
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

import trireme
from tests.config.made import problems_of
from tests.packages import install, manifests_read_anew
from trireme import extensions
from trireme.extensions import Extension, kernel, names_of
from trireme.registry import ENGINES, Registry

NAMES = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "extension_names.py"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path, and manifests that are read anew before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    with manifests_read_anew():
        yield tmp_path


def test_a_package_of_others_gives_names_and_is_imported_when_one_is_looked_up(fresh: Path) -> None:
    manifest = 'about = "A shop."\nneeds = ["torch"]\n[reward]\nfree = "things:free"\n'
    install(fresh, "shop", manifest, "def free(task, answer):\n    return 1.0\n")
    shop = extensions.extensions()["shop"]
    assert shop == Extension(
        "shop",
        "package_shop",
        about="A shop.",
        needs=("torch",),
        names={"reward": {"free": "package_shop.things:free"}},
    )
    rewards = Registry("reward", kind="reward")
    assert "free" in rewards.built_in() and "package_shop" not in sys.modules
    (fresh / "package_shop" / "__init__.py").write_text("")
    assert rewards.get("free")(None, "") == 1.0
    del sys.modules["package_shop"], sys.modules["package_shop.things"]


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ("[workflw]\na = 'b:c'", "has the unknown key 'workflw'; did you mean 'workflow'?"),
        ("[reward]\na = 'no_colon'", 'expected lines `name = "module:attribute"` in [reward]'),
        ("[reward]\na = 3", 'expected lines `name = "module:attribute"` in [reward]'),
        ("reward = 3", 'expected lines `name = "module:attribute"` in [reward]'),
        ("needs = 'torch'", "needs is 'torch': expected a list of names"),
        ("uses = [1]", "uses is [1]: expected a list of names"),
        ("formerly = 1", 'expected lines `"older.module" = "module"` in [formerly]'),
        ("refused = 1", 'expected lines `"kind:name" = "sentence"` in [refused]'),
        ("[refused]\nfun = 'no'", 'expected lines `"kind:name" = "sentence"` in [refused]'),
        ("[reward", "cannot be read: "),
        ("\udce4", "cannot be read: "),
    ],
)
def test_a_manifest_that_cannot_be_read_is_passed_by_with_its_file(
    fresh: Path, caplog: pytest.LogCaptureFixture, manifest: str, sentence: str
) -> None:
    install(fresh, "good", "[reward]\nfine = 'things:fine'\n")
    install(fresh, "shop", "")
    file = fresh / "package_shop" / "ext.toml"
    file.write_bytes(manifest.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        names = names_of("reward")
    assert names["fine"] == "package_good.things:fine" and "shop" not in extensions.extensions()
    (line,) = caplog.messages
    assert line.startswith(f"extension 'shop': {file}") and line.endswith(": it is left out")
    assert sentence in line


def test_an_entry_point_that_names_no_package_is_passed_by(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(fresh, "shop", "")
    for file in (fresh / "package_shop").iterdir():
        file.unlink()
    (fresh / "package_shop").rmdir()
    with caplog.at_level(logging.WARNING):
        assert "shop" not in extensions.extensions()
    assert "its entry point names 'package_shop', which is not a package" in caplog.text


def test_of_two_that_give_a_name_the_first_counts_and_a_line_says_so(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(fresh, "first", "[reward]\nsame = 'things:a'\nmath_reward = 'things:b'\n")
    install(fresh, "second", "[reward]\nsame = 'things:a'\n")
    with caplog.at_level(logging.WARNING):
        names = names_of("reward")
    assert names["same"] == "package_first.things:a"
    assert names["math_reward"] == kernel().names["reward"]["math_reward"]
    assert "extension 'second': its reward 'same' is left out, package_first" in caplog.text
    assert "extension 'first': its reward 'math_reward' is left out, trireme." in caplog.text


def test_of_two_extensions_of_one_name_the_first_counts_and_a_line_says_so(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(fresh, "shop", "about = 'One.'", package="a_shop")
    install(fresh, "shop", "about = 'Two.'", package="b_shop")
    with caplog.at_level(logging.WARNING):
        found = extensions.extensions()["shop"]
    assert re.search(r"extension 'shop' of [ab]_shop is left out: [ab]_shop has", caplog.text)
    assert found.package in ("a_shop", "b_shop")


def test_an_unknown_kind_of_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'workflows' is not a kind of name: expected one of algo"):
        names_of("workflows")


MOVED = '[formerly]\n"trireme.workflows.old_shop" = ""\n"trireme.data.old_things" = "things"\n'


def test_a_module_is_found_by_its_former_name_and_is_the_same_one(fresh: Path) -> None:
    install(fresh, "shop", MOVED, "price = 3\nif __name__ == '__main__':\n    print('sold')\n")
    (fresh / "package_shop" / "__init__.py").write_text("")
    code = (
        "from trireme.workflows.old_shop import things as former\n"
        "from trireme.data import old_things\n"
        "from package_shop import things\n"
        "assert former is things is old_things and things.price == 3\n"
        "assert things.__spec__.name == 'package_shop.things'\n"
        "import trireme.workflows.no_such_module\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(fresh)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stderr.endswith("No module named 'trireme.workflows.no_such_module'\n")
    program = [sys.executable, "-m", "trireme.workflows.old_shop.things"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.stdout == "sold\n", done.stderr


def test_a_name_that_an_extension_refuses_is_answered_by_its_sentence(fresh: Path) -> None:
    sentence = "is sold out: expected fine"
    install(fresh, "shop", f"[refused]\n'reward:fun' = '{sentence}'\n'workflow:fair' = 'no'\n")
    rewards = Registry("reward", kind="reward")
    assert rewards.refuses("fun") and not rewards.refuses("fair") and "fun" not in rewards
    with pytest.raises(ValueError, match=f"^reward 'fun' {sentence}$"):
        rewards.get("fun")


def test_a_name_of_an_extension_that_is_not_here_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extensions, "extensions", dict)
    names_of.cache_clear()
    try:
        for name, owner in NAMES["known"]()["workflow"].items():
            sentence = f"^workflow '{name}' needs the extension '{owner}', which is not here: "
            with pytest.raises(ValueError, match=sentence):
                Registry("workflow", kind="workflow").get(name)
    finally:
        names_of.cache_clear()


def test_a_module_of_an_extension_that_is_not_here_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name and by a former one; in a dotted path of the YAML, and in a user's file."""
    monkeypatch.setattr(extensions, "extensions", dict)
    monkeypatch.setattr(
        extensions,
        "_owners",
        lambda: {
            "formerly": {"trireme.workflows.old_shop": "shop", "trireme.task:Shelf": "shop"},
            "workflow": {"buy": "shop"},
        },
    )
    names_of.cache_clear()
    try:
        for module in ("trireme.workflows.old_shop", "trireme.ext.shop"):
            sentence = f"'{module}(:Buy)?' needs the extension 'shop', which is not here: "
            with pytest.raises(ModuleNotFoundError, match=sentence):
                import_module(module)
            with pytest.raises(ValueError, match=f"^workflow {sentence}"):
                Registry("workflow").get(f"{module}:Buy")
        with pytest.raises(AttributeError, match="'Shelf': it needs the extension 'shop', which"):
            extensions.former_names("trireme.task")("Shelf")
        with pytest.raises(ValueError, match=r"there is no module 'trireme\.workflows\.new_shop'"):
            Registry("workflow").get("trireme.workflows.new_shop:Buy")
    finally:
        names_of.cache_clear()


def test_an_engine_of_an_extension_that_is_not_here_is_a_problem_that_says_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extensions, "extensions", dict)
    monkeypatch.setattr(ENGINES, "_registered", {})
    names_of.cache_clear()
    try:
        (said,) = problems_of(tmp_path, "explorer.rollout_model.engine_type=vllm")
    finally:
        names_of.cache_clear()
    assert said.startswith(
        "explorer.rollout_model.engine_type is 'vllm': engine 'vllm' needs the extension 'vllm', "
        "which is not here"
    )


def test_the_users_servers_of_an_extension_that_is_not_here_are_a_problem_that_says_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extensions, "extensions", dict)
    names_of.cache_clear()
    keys = ["engine_type=remote", "base_urls=[http://localhost:1]"]
    try:
        (said,) = problems_of(tmp_path, *(f"explorer.rollout_model.{key}" for key in keys))
    finally:
        names_of.cache_clear()
    assert said.startswith(
        "explorer.rollout_model.engine_type is 'remote', which needs the extension 'remote', "
        "which is not here"
    )


PUBLIC = '[public]\nprice = "things:cost"\nTask = "things:cost"\n'


def test_an_extension_adds_names_to_those_of_trireme(fresh: Path) -> None:
    install(fresh, "shop", PUBLIC, "cost = 3\n")
    (fresh / "package_shop" / "__init__.py").write_text("")
    code = (
        "import sys, trireme\n"
        "from trireme import Task, config, experience\n"
        "from trireme.extensions import extensions\n"
        "assert Task.__name__ == 'Task'\n"
        "assert not hasattr(trireme, '__hidden__') and extensions.cache_info().misses == 0\n"
        "assert 'price' in trireme.__all__ and 'price' in dir(trireme)\n"
        "assert 'package_shop' not in sys.modules\n"
        "from trireme import *\n"
        "assert price == trireme.price == 3\n"
        "assert not hasattr(trireme, 'nothing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(fresh)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_public_name_of_an_extension_that_is_not_here_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trireme, "needed_for", lambda kind, name: kind == "public" and "shop")
    sentence = r"trireme\.price needs the extension 'shop', which is not here: `trireme extensions`"
    with pytest.raises(ImportError, match=sentence):
        exec("from trireme import price")


def test_type_checkers_see_the_public_names_of_an_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Extension(
        "shop", "trireme.ext.shop", names={"public": {"price": "trireme.ext.shop.things:cost"}}
    )
    monkeypatch.setitem(NAMES["stub"].__globals__, "ours", lambda: {"shop": shop})
    mall = "from trireme.ext.mall.things import floor as floor\n"
    sold = "from trireme.ext.shop.things import sold as sold\n"
    lines = NAMES["stub"](mall + sold).removeprefix(NAMES["STUB_HEAD"])
    assert lines == f"\n{mall}from trireme.ext.shop.things import cost as price\n"


def test_the_list_of_the_extensions_names_is_up_to_date() -> None:
    written = NAMES["FILE"].read_text(encoding="utf-8")
    assert written == NAMES["document"](), "run: python scripts/extension_names.py"
    stub = NAMES["STUB"].read_text(encoding="utf-8")
    assert stub == NAMES["stub"](stub), "run: python scripts/extension_names.py"


ROOT = Path(__file__).parents[1]
FILES = [*(ROOT / "trireme").rglob("*.py")]
OURS = {name: e for name, e in extensions.extensions().items() if e.package.startswith("trireme.")}


@pytest.mark.parametrize("name", OURS)
def test_what_a_manifest_names_is_there(name: str) -> None:
    extension = OURS[name]
    assert extension.about.endswith("."), "a sentence"
    for file in extension.files:
        assert (ROOT / file).exists(), file
    for old, new in extension.formerly.items():
        assert find_spec(new.partition(":")[0]) is not None, new
        if ":" in old:
            assert pkgutil.resolve_name(old) is pkgutil.resolve_name(new), old
    for kind, names in extension.names.items():
        for one, place in names.items():
            assert pkgutil.resolve_name(place) is not None, (kind, one)


@cache
def imported(file: Path) -> list[tuple[int, str]]:
    """Every module that a file imports, also late and for types alone."""
    modules: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return modules


distributions = cache(packages_distributions)
"""The distributions that bring each top-level module of this environment."""


def test_the_kernel_imports_no_extension() -> None:
    former = tuple(old for e in OURS.values() for old in e.formerly)
    for file in (ROOT / "trireme").rglob("*.py"):
        if "ext" in file.relative_to(ROOT / "trireme").parts[:-1]:
            continue
        for line, module in imported(file):
            if (file.name, module) == ("__init__.py", "trireme.ext.*"):
                assert file.parent.name == "trireme"  # for type checkers alone: test_trinity.py
                continue
            within = f"{module}."
            assert not within.startswith("trireme.ext."), f"{file}:{line} imports {module}"
            assert not within.startswith(tuple(f"{old}." for old in former)), f"{file}:{line}"


@pytest.mark.parametrize("name", OURS)
def test_an_extension_imports_the_kernel_and_what_its_manifest_names(name: str) -> None:
    allowed = tuple(f"trireme.ext.{one}." for one in (name, *OURS[name].uses))
    for file in (ROOT / "trireme" / "ext" / name).rglob("*.py"):
        for line, module in imported(file):
            if f"{module}.".startswith("trireme.ext."):
                assert f"{module}.".startswith(allowed), (
                    f"{file}:{line} imports {module}: its extension is not in `uses` of ext.toml"
                )


def others(files: Iterable[Path]) -> set[str]:
    """Top-level modules of other packages that files import, anywhere in them."""
    found = {module.partition(".")[0] for file in files for _, module in imported(file)}
    return found - {*sys.stdlib_module_names, "trireme", "trinity", "__future__"}


@pytest.mark.parametrize("name", OURS)
def test_a_manifest_names_the_packages_that_the_kernel_does_not_import(name: str) -> None:
    kernel_files = (f for f in FILES if "ext" not in f.relative_to(ROOT).parts)
    own = others((ROOT / "trireme" / "ext" / name).rglob("*.py")) - others(kernel_files)
    extension = extensions.extensions()[name]
    used = [extensions.extensions()[one] for one in extension.uses]
    needs = {need.lower() for one in (extension, *used) for need in one.needs}
    installed = distributions()
    for module in own:
        names = {one.lower() for one in installed.get(module, [f"py-{module}".replace("_", "-")])}
        assert names & needs, f"{name} imports {module}: `needs` lists {sorted(needs)}"
