"""Callbacks of ms-swift's form get its constructor's arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ext.callbacks.test_callbacks import ARGS
from trireme.ext.callbacks.callbacks import Callbacks, examine_callbacks
from trireme.ext.swift.callback import TrainerCallback
from trireme.registry import CALLBACKS

SEEN: list[str] = []


class HandsOn(TrainerCallback):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_init_end(args, state, control, **kwargs)  # transformers' own, which is empty
        SEEN.append(f"{self.args.output_dir}, {self.trainer.model}")


class Defaults(HandsOn):
    def __init__(self, args: Any = None, trainer: Any = None) -> None:
        super().__init__(args, trainer)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SEEN.clear()
    for name, kind in {"hands_on": HandsOn, "defaults": Defaults}.items():
        monkeypatch.setitem(CALLBACKS._registered, name, kind)
    yield


@pytest.mark.parametrize("name", ["hands_on", "defaults"])
def test_constructors_of_ms_swifts_callbacks_get_arguments_and_trainer(name: str) -> None:
    examine_callbacks([name])
    asyncio.run(Callbacks([name], ARGS, "the model").notify("on_init_end", 0))
    assert SEEN == ["jobs/a, the model"]
