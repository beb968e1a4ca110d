"""What is left when extensions are deleted: see scripts/without.py."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from trireme.extensions import Extension

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[1]
WITHOUT = runpy.run_path(str(ROOT / "scripts" / "without.py"))
ALL_MODULES = """
import importlib, pkgutil, sys, trireme
deleted = sys.argv[1].split(",")
there = {n for n, e in trireme.extensions.extensions().items() if e.package == f"trireme.ext.{n}"}
assert not there & {*deleted}, there
for module in pkgutil.walk_packages(trireme.__path__, "trireme."):
    if module.name.rpartition(".")[2] == "__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        package = (error.name or "trireme").partition(".")[0]
        assert package in sys.argv[2].split(","), (module.name, error)
from trireme.registry import ALGORITHMS, REWARDS, WORKFLOWS
for registry in (ALGORITHMS, REWARDS, WORKFLOWS):
    for name in registry.names():
        assert registry.get(name) is not None
print(len(WORKFLOWS), "workflows of", trireme.__file__)
"""


RUN = """
from trireme.cli.main import main
sys.argv = ["trireme", "run", "stages.0.buffer.total_steps=2", "stages.0.buffer.train_batch_size=2",
      "buffer.total_steps=1", "buffer.batch_size=2", "buffer.explorer_input.eval_tasksets=[]"]
main()
"""


def what_is_left_works(*names: str) -> None:
    """In a copy without these extensions every module and name can be imported, and the demo runs,
    shortened; packages that are not installed here may be missing.
    """
    deleted = WITHOUT["with_users"](names)
    needed = {need.partition("[")[0] for e in WITHOUT["ours"]().values() for need in e.needs}
    modules = ",".join({"vllm", "agentscope", *needed})
    command = [sys.executable, "-c", ALL_MODULES + RUN, ",".join(deleted), modules]
    done = subprocess.run(
        [sys.executable, WITHOUT["__file__"], *names, "--", *command],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if re.match(r"\d+ workflows of ", line)]
    assert str(ROOT) not in line
    assert (ended := done.stdout.splitlines()[-1]).startswith(("next", "model")), ended


def test_without_any_extension_the_kernel_can_be_imported_and_runs_the_demo() -> None:
    what_is_left_works(*WITHOUT["ours"]())


@pytest.mark.large
@pytest.mark.parametrize("name", sorted(WITHOUT["ours"]()))
def test_without_one_extension_the_others_can_be_imported_and_the_demo_runs(name: str) -> None:
    what_is_left_works(name)


def test_what_uses_a_deleted_extension_is_deleted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {"a": (), "b": ("a",), "c": ("b",), "d": ()}
    made = {n: Extension(n, f"trireme.ext.{n}", uses=uses) for n, uses in users.items()}
    monkeypatch.setitem(WITHOUT["with_users"].__globals__, "ours", lambda: made)
    assert WITHOUT["with_users"](["a"]) == ["a", "b", "c"]
    assert WITHOUT["with_users"](["c", "d"]) == ["c", "d"]
    with pytest.raises(SystemExit, match=r"there is no extension 'e'\. There are: a, b, c, d"):
        WITHOUT["with_users"](["e"])


def test_a_test_file_that_imports_what_is_deleted_goes_too(tmp_path: Path) -> None:
    files = {
        "trireme/ext/here/__init__.py": "",
        "trireme/ext/here/things.py": "",
        "tests/__init__.py": "",
        "tests/stays.py": "import trireme.ext.here.things\nfrom tests import __doc__\n",
        "tests/names.py": "PLACE = 'trireme.ext.away.things:thing'\n",
        "tests/goes.py": "def test():\n    from trireme.ext.away.things import thing\n",
        "tests/goes_too.py": "from tests.goes import test\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert WITHOUT["drop_broken_tests"](tmp_path) == ["tests/goes.py", "tests/goes_too.py"]
    assert sorted(file.name for file in (tmp_path / "tests").iterdir()) == [
        "__init__.py",
        "names.py",
        "stays.py",
    ]
