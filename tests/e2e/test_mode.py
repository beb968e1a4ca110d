"""A mode and a gateway are what the registry has by their names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.job import run, small_config
from trireme.model.address import Addresses
from trireme.registry import GATEWAYS

MODE = """
from trireme.registry import MODES


@MODES.register("serve")
async def serve(stage, engine, stop):
    (stage.folder.root / "noted").write_text(f"{stage.plan.mode} with {engine}")
    return stage.result()
"""


def test_a_stage_of_a_registered_mode_is_run_by_it(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(MODE)
    config = {**small_config(tmp_path), "mode": "serve", "plugins": [str(tmp_path / "plugin.py")]}
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "checkpoints/tests/job/noted").read_text() == "serve with None"


def test_a_gateway_is_made_when_the_first_address_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []

    class Made:
        def __init__(self, *parts: Any) -> None:
            made.append(parts)

        def address(self, model: Any) -> Any:
            return f"address of {model}"

        async def close(self) -> None:
            made.append(("closed",))

    monkeypatch.setitem(GATEWAYS, "http", Made)
    parts: Any = ("engine", "chat", "path", 8)
    addresses = Addresses(*parts)
    asyncio.run(addresses.close())
    assert made == []
    models: list[Any] = ["a", "b"]
    asked: list[Any] = [addresses.address(model) for model in models]
    asyncio.run(addresses.close())
    assert asked == ["address of a", "address of b"] and made == [parts, ("closed",)]
