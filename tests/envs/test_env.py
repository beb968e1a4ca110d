"""What an environment gives a thread, and how a package that is not installed is named."""

from __future__ import annotations

import sys

import pytest

from trireme.envs.env import extra, for_thread


def test_a_missing_package_names_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'trireme-rl\[mcp\]'"):
        extra("mcp", "the MCP client", "mcp")


class Lent:
    """Coroutines, and the same for a thread."""

    async def reset(self) -> str:
        return "awaited"

    def blocking(self) -> str:
        return "for a thread"


class Wall:
    """Plain, and `blocking` is a name of its own."""

    blocking = True

    def reset(self) -> str:
        return "plain"


def test_an_environment_of_coroutines_gives_one_for_a_thread() -> None:
    assert for_thread(Lent()) == "for a thread"
    for other in (Wall(), None):
        assert for_thread(other) is other
