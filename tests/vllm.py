"""Engine processes for tests: vLLM's where TRIREME_VLLM_PYTHON names its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trireme.engines.make import EngineSpec
from trireme.launch.engine_host import EngineHost

PYTHON = os.environ.get("TRIREME_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="TRIREME_VLLM_PYTHON names no environment")
START_S = 600


def vllm_host(folder: Path, *, max_model_len: int = 64, **options: Any) -> EngineHost:
    """On a model's folder; its log lies beside it."""
    spec = EngineSpec(str(folder), max_model_len, kind="vllm", options=options)
    return EngineHost(
        spec, name="vllm engine", log_file=folder.parent / "engine.log", python=PYTHON, threads=1
    )
