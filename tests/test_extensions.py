"""Extensions: what a manifest may say, who wins, and what is said of one that cannot be read."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme import extensions
from trireme.extensions import Extension, kernel, names_of
from trireme.registry import Registry


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path, and manifests that are read anew before and after."""
    cached = (extensions.extensions, names_of)
    for function in cached:
        function.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for function in cached:
        function.cache_clear()


def install(folder: Path, name: str, manifest: str, code: str = "", package: str = "") -> None:
    """What pip leaves of a package with one entry point."""
    package = package or f"package_{name}"
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / package / "ext.toml").write_text(manifest)
    (folder / package / "things.py").write_text(code)
    info = folder / f"{package}_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trireme.ext]\n{name} = {package}\n")


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
    assert "its entry point names 'package_shop', which is no package here" in caplog.text


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
    with pytest.raises(ValueError, match="'workflows' is no kind of name: expected one of algo"):
        names_of("workflows")
