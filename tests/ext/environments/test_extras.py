"""What is not installed is named, with the way to install it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from trireme.ext.environments.generated import Problems
from trireme.ext.environments.gyms import ArenaGame, TextGym


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("gymnasium", lambda: TextGym("FrozenLake-v1", seed=0)),
        ("reasoning_gym", lambda: Problems("reasoning_gym:leg_counting")),
        ("textarena", lambda: ArenaGame("GuessTheNumber-v0", seed=0)),
    ],
)
def test_a_missing_package_is_named(
    module: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError, match=r"not installed: pip install 'trireme-rl\[envs\]'"
    ):
        make()
