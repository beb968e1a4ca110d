"""The one limit of what tests wait for: it ends a hang, and says nothing of a machine's speed."""

from __future__ import annotations

HANG_S = 1200.0
"""Seconds: ten times of what the slowest wait takes beside a load of eight. Every `timeout=`, every
loop that waits and every `asyncio.wait_for` of a test has it; `timeout` in pyproject.toml, which
ends a test as a whole, is twice as long. Only a limit that a test sees expire is shorter."""
