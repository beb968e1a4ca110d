"""vLLM for tests: its environment is that whose Python TRIREME_VLLM_PYTHON names."""

from __future__ import annotations

import os

import pytest

PYTHON = os.environ.get("TRIREME_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="TRIREME_VLLM_PYTHON names no environment")
START_S = 600
