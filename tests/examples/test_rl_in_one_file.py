"""The one-file example runs from a shell, start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_in_one_file.py"


def test_it_runs_and_reports_each_phase() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for phase in ("before", "after warm-up", "step    2", "(right:"):
        assert phase in done.stdout
