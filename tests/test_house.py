"""The house: its few laws hold, and `scripts/house.py` counts right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts import layout_page, models_page
from scripts.house import (
    KERNEL_LIMITS,
    LIMITS,
    LISTS,
    circles,
    forwarders,
    measure,
    repeated_defaults,
    sources,
    used_once,
)

SOURCE = '''"""A file.

Two lines of it.
"""

from __future__ import annotations

LIMIT = 3  # said once


class Part:
    """A class."""

    capacity: int = 10_000

    def take(self, count: int) -> list[int]:
        """Forwards."""
        return self._take(count)

    def _take(self, count: int) -> list[int]:
        # why
        return [count]
'''


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name, text in {
        "trireme/part.py": SOURCE,
        "trireme/config/schema.py": "class Keys:\n    capacity: int = 10_000\n    seed: int = 7\n",
        "trireme/a.py": "def late() -> None:\n    from trireme.b import other\n",
        "trireme/b.py": "from trireme import a\n",
        "trinity/x.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[int, int]]:
    return measure()


@pytest.mark.parametrize("what", sorted(LIMITS))
def test_the_laws_of_the_house_hold(what: str, figures: dict[str, tuple[int, int]]) -> None:
    assert sum(figures[what]) <= LIMITS[what], f"python scripts/house.py --list '{what}' names them"


@pytest.mark.parametrize("what", sorted(KERNEL_LIMITS))
def test_the_laws_of_the_kernel_hold(what: str, figures: dict[str, tuple[int, int]]) -> None:
    hint = f"python scripts/house.py --list '{what}' names them"
    assert figures[what][0] <= KERNEL_LIMITS[what], hint


def test_lines_of_code_leave_out_comments_docstrings_and_blank_lines(house: Path) -> None:
    part = next(file for file in sources(root=house) if file.module == "trireme.part")
    assert (part.lines, part.code_lines) == (22, 8)


def test_what_says_nothing_new_is_listed(house: Path) -> None:
    files = sources(root=house)
    assert [line.split()[-1] for line in forwarders(files)] == ["take"]
    assert [line.split()[-1] for line in used_once(files)] == ["_take"]
    assert circles(files) == ["trireme.a trireme.b"]
    assert repeated_defaults(files) == [
        "capacity=10000: trireme/config/schema.py:2 trireme/part.py:14"
    ]


ODD = '''
from trireme.part import Part
from trireme.trainer import a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t


class Shop:
    """Whose goods these are."""

    def make(self, a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0):
        """Price of a thing at vLLM's."""
        return a
'''


def test_what_is_hard_to_read_is_listed_and_counted_for_kernel_and_extensions_apart(
    house: Path,
) -> None:
    for file in ("trireme/odd.py", "trireme/ext/shop/odd.py"):
        (house / file).parent.mkdir(parents=True, exist_ok=True)
        (house / file).write_text(ODD)
    found = measure(house)
    assert (found["files"], found["lines"][1]) == ((5, 1), ODD.count("\n"))
    for row in ("hubs", "long signatures", "docstrings that begin with a relative word"):
        assert found[row] == (1, 1), row
    assert found["lines that name another system"] == (1, 0)
    (hub,) = (line for line in LISTS["hubs"](sources(root=house)) if "ext" in line)
    assert hub == "trireme/ext/shop/odd.py 21"


@pytest.mark.whole
def test_the_page_of_the_code_layout_names_every_file() -> None:
    page = layout_page.PAGE.read_text(encoding="utf-8")
    assert page == layout_page.document(), "run: python scripts/layout_page.py"


@pytest.mark.whole
def test_the_page_of_models_has_the_table_that_tests_are_parametrized_by() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert page == models_page.document(), "run: python scripts/models_page.py"


def test_the_tables_of_the_code_layout_name_files_that_there_are() -> None:
    """A name without a folder is one of the folder that its row named before."""
    written = layout_page.PAGE.read_text(encoding="utf-8").partition(layout_page.BEGIN)[0]
    package = layout_page.ROOT / "trireme"
    for row in written.splitlines():
        folder, deleted = package, False
        for name in re.findall(r"`([\w/.]+\.(?:py|csv))`", row):
            extension = re.match(r"ext/\w+/", name)
            # by scripts/without.py; the names after it may be in its folder
            deleted = deleted or (extension is not None and not (package / extension[0]).is_dir())
            places = [package / name, folder / name, layout_page.ROOT / name]
            file = next((place for place in places if place.is_file()), None)
            assert file is not None or deleted, f"{name}: {row}"
            folder = folder if file is None else file.parent


def test_no_tensor_has_the_default_dtype() -> None:
    """It is the whole process's, and transformers sets it while it loads a model in any thread:
    numbers would be rounded in silence, and compiled code would write past the end of memory.
    """
    makers = {"zeros", "ones", "empty", "full", "rand", "randn", "linspace", "eye"}
    found = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted(Path("trireme").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).removeprefix("torch.") in makers
        and ast.unparse(call.func).startswith("torch.")
        and "dtype" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not found
