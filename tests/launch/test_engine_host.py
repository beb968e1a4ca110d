"""Engine hosts: what is said of a process that ends at once."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trireme.engines.make import EngineSpec
from trireme.launch.engine_host import EngineHost, start_all


def test_an_engine_that_ends_before_it_is_told_its_settings_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(subprocess.Popen):
        """By the time that its parent goes on."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    host = EngineHost(
        EngineSpec("model", 8), name="engine 1", log_file=tmp_path / "log", python="/bin/false"
    )
    with pytest.raises(RuntimeError, match="engine 1 has ended with exit code 1"):
        asyncio.run(start_all([host]))
