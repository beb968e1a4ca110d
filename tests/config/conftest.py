"""Fixtures of the configuration's tests."""

from __future__ import annotations

from typing import Any

import pytest

from trireme.config.gpus import Gpus
from trireme.config.launcher import AUTO, LauncherChoice
from trireme.registry import LAUNCHERS


class Spread:
    """See Launcher: it starts what asks for it, and with `auto` what asks for several GPUs."""

    def examine(self, config: Any, gpus: int) -> LauncherChoice:
        cluster = config.cluster
        asked = max(cluster.node_num, 1) * cluster.gpu_per_node
        several = cluster.launcher == AUTO and min(gpus, asked) > 1
        return LauncherChoice(cluster.launcher == "ray" or several)

    def gpus_of(self, cluster: Any) -> Gpus | None:
        return None


@pytest.fixture
def spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher `ray` that starts nothing, so that places are planned without Ray's."""
    monkeypatch.setitem(LAUNCHERS, "ray", Spread)
