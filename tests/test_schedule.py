"""A worker of the suite that dies: one test fails with its name, and all others run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

CONFTEST = "from tests.conftest import pytest_xdist_make_scheduler\n"
PASSES = "def test_{}(): pass\n"
DIES = "def test_dies():\n    import os\n    os._exit(1)\n"
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "files",
    [
        [PASSES.format(1), PASSES.format(1), PASSES.format(1) + DIES + PASSES.format(2)],
        [DIES, PASSES.format(1)],
        [PASSES.format(1), PASSES.format(1) + DIES, *[PASSES.format(1)] * 5],
        [DIES, DIES, PASSES.format(1)],
    ],
    ids=["last", "first", "middle", "two"],
)
def test_a_worker_that_dies_costs_one_test(files: list[str], workers: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number, text in enumerate(files):
        (tmp_path / f"test_{number}.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", str(workers)]
    words += ["--dist", "loadfile", "--no-loadscope-reorder", "--rootdir", str(tmp_path), "."]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, **own}, timeout=HANG_S, capture_output=True,
        text=True,
    )  # fmt: skip
    dying, passing = "".join(files).count("_exit"), "".join(files).count("pass\n")
    summary = ended.stdout.splitlines()[-1]
    assert re.match(rf"{dying} failed, {passing} passed in ", summary), ended.stdout + ended.stderr
    assert ended.stdout.count("crashed while running 'test_") >= dying
