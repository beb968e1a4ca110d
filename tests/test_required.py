"""What was installed for a run may not be skipped in it: TRIREME_REQUIRE makes such a skip fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SKIPS = """
import pytest

def test_skips():
    pytest.skip("PostgreSQL is not installed here")
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("required", "code"), [("", 0), ("vllm", 0), ("vllm,postgres", 1)])
@pytest.mark.parametrize("module", [False, True], ids=["test", "module"])
def test_a_skip_of_what_is_required_fails(
    required: str, code: int, module: bool, tmp_path: Path
) -> None:
    text = (
        SKIPS if not module else SKIPS + '\npytest.importorskip("nonesuch", reason="no postgres")'
    )
    (tmp_path / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.conftest", tmp_path],
        cwd=ROOT,
        env={**os.environ, "TRIREME_REQUIRE": required},
        capture_output=True,
        text=True,
    )
    # of skips alone pytest says 0 for a test and 5 for a module: nothing was collected
    assert done.returncode == (code * (2 if module else 1) or (5 if module else 0)), done.stdout
    assert ("may not be left out" in done.stdout) == bool(code)
